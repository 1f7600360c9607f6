"""API keys of queries (`http.api_keys_file`) and named tokens of management (`http.tokens_file`).

A line of the file is `NAME sha256:HEX`, where HEX is the hash of the key as it is sent. Only the
holder has the key itself. A key is 32 random bytes, so a plain hash does not reveal it, and the
time of a lookup by the hash tells an attacker nothing but what they sent.
"""

import hashlib
import hmac
import logging
import os
import secrets
from pathlib import Path

from clipper.errors import ConfigError, NotAllowed

_log = logging.getLogger(__name__)
_MARK = "sha256:"
_START = "ck_"
_SCHEME = b"bearer "


class ApiKeys:
    """The keys of one file. Threads: any.

    Raises ConfigError for a file that cannot be read, or has a line of another form.
    """

    def __init__(self, path: str, token: str = "", setting: str = "http.api_keys_file") -> None:
        self._setting = setting
        self._path, self._token = path, f"Bearer {token}".encode() if token else b""
        self._seen = self._stamp()
        self._names = _read(path, setting)

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether new keys are in use.

        Keys that were read before stay in use while the file has an error. Reads the file: do not
        call it on an event loop.
        """
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._names = _read(self._path, self._setting)
        except ConfigError as error:
            _log.warning("the keys that were read before stay: %s", error)
            return False
        _log.info("%s: %d keys from now on", self._setting, len(self._names))
        return True

    def _stamp(self) -> tuple[int, ...]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino

    def check(self, authorization: bytes) -> str:
        """Return the name of the key's owner; empty for the management token.

        authorization: the value of the header. Raises NotAllowed for an unknown or missing key.
        """
        if self._token and hmac.compare_digest(authorization, self._token):
            return ""
        if authorization[: len(_SCHEME)].lower() == _SCHEME:
            digest = hashlib.sha256(authorization[len(_SCHEME) :].strip()).digest()
            found = self._names.get(digest[:8])
            if found is not None and hmac.compare_digest(found[0], digest):
                return found[1]
        wrong = (
            "the key is none that is known here" if authorization else "who asks must show a key"
        )
        raise NotAllowed(
            f"{wrong}.", hint="Send Authorization: Bearer KEY; `clipper key NAME` makes one."
        )


def _read(path: str, setting: str) -> dict[bytes, tuple[bytes, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is not UTF-8 text"
        raise ConfigError(f"{setting} = {path!r} cannot be read: {why}.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, mark = words
            digest = bytes.fromhex(mark.removeprefix(_MARK))
            if not mark.startswith(_MARK) or len(digest) != 32:
                raise ValueError
        except ValueError:
            hint = "Add a key with: clipper key NAME --file FILE"
            raise ConfigError(f"{path}:{number}: a line is `NAME sha256:HEX`.", hint=hint) from None
        found[digest[:8]] = digest, name
    return found


def new_key() -> str:
    """Return a new random key."""
    return _START + secrets.token_urlsafe(32)


def line_of(name: str, key: str) -> str:
    """Return the line of the file that stands for a key."""
    return f"{name} {_MARK}{hashlib.sha256(key.encode()).hexdigest()}"
