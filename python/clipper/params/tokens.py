"""Tokens of worker groups, and what each may do: `params.tokens_file`.

A line of the file is `NAME ROLE sha256:HEX`, where HEX is the hash of the token as it is sent. Only
the holder has the token itself, which is 32 random bytes, so that a plain hash does not reveal it.
"""

import hashlib
import hmac
import logging
import os
from pathlib import Path
from typing import Final

from clipper.errors import ConfigError, Forbidden

log = logging.getLogger("clipper.params")
ROLES: Final = ("read", "train", "manage")  # each may do what those before it may
_READ = {"tables", "pull_replica", "pull_variables", "walk", "watch", "stats"}
_TRAIN = {"create", "push_model", "push_gradients", "push_rows", "begin_anew"}
_MARK = "sha256:"


class TokenFile:
    """The tokens of one file, read again when it has changed. Threads: one at a time.

    token: of the whole set, with the role manage. path: empty for no other tokens. Raises
    ConfigError for a file that cannot be read, or has a line of another form.
    """

    def __init__(self, token: str, path: str = "") -> None:
        self._token, self._path = hashlib.sha256(token.encode()).digest(), path
        self._stamp = self._modified()
        self._roles = _read(path) if path else {}

    def role(self, token: object) -> str:
        """Return the role of a token; empty if nobody has it."""
        self._refresh()
        if not isinstance(token, str):
            return ""
        digest = hashlib.sha256(token.encode()).digest()
        if hmac.compare_digest(digest, self._token):
            return "manage"
        found, role = self._roles.get(digest[:8], (b"", ""))
        return role if hmac.compare_digest(found, digest) else ""

    def _refresh(self) -> None:
        modified = self._modified()
        if modified == self._stamp:
            return
        self._stamp = modified
        try:
            self._roles = _read(self._path)
        except ConfigError as error:
            log.warning("the tokens that were read before stay: %s", error)

    def _modified(self) -> tuple[int, ...]:
        try:
            stat = os.stat(self._path)
        except OSError:
            return ()
        return stat.st_mtime_ns, stat.st_size, stat.st_ino


def check_role(role: str, call: str) -> None:
    """Raise Forbidden if a role does not include a call of the shards' protocol."""
    needed = "read" if call in _READ else "train" if call in _TRAIN else "manage"
    if ROLES.index(role) < ROLES.index(needed):
        raise Forbidden(
            f"{call} needs a token with the role {needed!r}, and this one has {role!r}.",
            hint=f"clipper key NAME --role {needed} --file FILE, of params.tokens_file, makes one.",
        )


def _read(path: str) -> dict[bytes, tuple[bytes, str]]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "") or "it is not UTF-8 text"
        raise ConfigError(f"params.tokens_file = {path!r} cannot be read: {reason}.") from None
    found = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            _, role, mark = words
            digest = bytes.fromhex(mark.removeprefix(_MARK))
            if role not in ROLES or not mark.startswith(_MARK) or len(digest) != 32:
                raise ValueError
        except ValueError:
            raise ConfigError(
                f"{path}:{number}: a line is `NAME ROLE sha256:HEX`, ROLE is {', '.join(ROLES)}.",
                hint="Add a token with: clipper key NAME --role ROLE --file FILE",
            ) from None
        found[digest[:8]] = digest, role
    return found
