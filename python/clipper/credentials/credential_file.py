"""Files of credentials, such as `http.api_keys_file` and `params.tokens_file`.

A line is `NAME sha256:HEX`, or `NAME ROLE sha256:HEX` in a file with roles, where HEX is the hash
of the key as it is sent. In a file of keys for queries, limits may stand before the hash
(`KeyLimits`). Only the holder has the key itself. A key is 32 random bytes, so a plain
hash does not reveal it, and the time of a lookup by the hash reveals to an attacker only what
they sent.
"""

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from clipper.credentials.key_limits import KeyLimits
from clipper.credentials.key_shares import check_shares
from clipper.errors import ConfigError, InvalidInput, did_you_mean

_log = logging.getLogger(__name__)
_MARK = "sha256:"
_START = "ck_"
NO_LIMITS: Final = KeyLimits()


class Credential(NamedTuple):
    """A line of the file. digest: the hash of the key. role: empty in a file without roles.
    limits: none in a file without limits."""

    digest: bytes
    name: str
    role: str
    limits: KeyLimits = NO_LIMITS


class CredentialFile:
    """The credentials of one file, found by their keys. Threads: any.

    setting: the setting that names the file, for errors. roles: those that a line may have; empty:
    lines have none. role: of lines that have none; empty: each must have one. limited: whether
    lines may have limits. Raises ConfigError for a file that cannot be read, or has a line of
    another form.
    """

    def __init__(
        self,
        path: str,
        setting: str,
        roles: Sequence[str] = (),
        role: str = "",
        *,
        limited: bool = False,
    ) -> None:
        self._path, self._setting, self._roles, self._role = path, setting, roles, role
        self._limited = limited
        self._seen = stamp_of(path)
        self._credentials = self._read()

    @property
    def credentials(self) -> list[Credential]:
        """The credentials of the file as it was last read."""
        return list(self._credentials.values())

    def find_digest(self, digest: bytes) -> Credential | None:
        """Return the credential of a key by its hash; None if the file does not have it."""
        found = self._credentials.get(digest[:8])
        return found if found and hmac.compare_digest(found.digest, digest) else None

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether new credentials are in use.

        Those that were read before stay in use while the file has an error. Reads the file: do not
        call it on an event loop.
        """
        stamp = stamp_of(self._path)
        if stamp == self._seen:
            return False
        self._seen = stamp
        try:
            self._credentials = self._read()
        except ConfigError as error:
            _log.warning("the keys that were read before stay: %s", error)
            return False
        _log.info("%s: %d keys from now on", self._setting, len(self._credentials))
        return True

    def _read(self) -> dict[bytes, Credential]:
        try:
            lines = Path(self._path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            why = getattr(error, "strerror", "") or "it is not UTF-8 text"
            raise ConfigError(f"{self._setting} = {self._path!r} cannot be read: {why}.") from None
        found = {}
        for number, line in enumerate(lines, 1):
            words = line.split()
            if words and not words[0].startswith("#"):
                one = self._parse(words, number)
                found[one.digest[:8]] = one
        try:
            check_shares(shares_of(found.values()))
        except InvalidInput as error:
            raise ConfigError(f"{self._path}: {error.message}", hint=error.hint) from None
        return found

    def _parse(self, words: Sequence[str], number: int) -> Credential:
        limits = NO_LIMITS
        if self._limited and any("=" in word for word in words[1:-1]):
            limits = self._limits(words[1:-1], number)
            words = [words[0], words[-1]]
        try:
            name, *role, mark = words
            digest = bytes.fromhex(mark.removeprefix(_MARK))
            role = role or [self._role] * bool(self._role)
            is_known = role[0] in self._roles and len(role) == 1 if self._roles else not role
            if not is_known or not mark.startswith(_MARK) or len(digest) != 32:
                raise ValueError
        except (ValueError, IndexError):
            form = "NAME ROLE sha256:HEX" if self._roles else "NAME sha256:HEX"
            which = f", ROLE is {', '.join(self._roles)}" if self._roles else ""
            raise ConfigError(
                f"{self._path}:{number}: a line is `{form}`{which}.",
                hint="Add one with: clipper key NAME"
                f"{' --role ROLE' if self._roles else ''} --file FILE",
            ) from None
        return Credential(digest, name, "".join(role), limits)

    def _limits(self, words: Sequence[str], number: int) -> KeyLimits:
        try:
            return KeyLimits.parse(words)
        except InvalidInput as error:
            raise ConfigError(f"{self._path}:{number}: {error.message}", hint=error.hint) from None


def shares_of(credentials: Iterable[Credential]) -> dict[str, int]:
    """Return the shares of keys in percent, by the names of their owners; of several keys of one
    name the largest."""
    found: dict[str, int] = {}
    for one in credentials:
        if one.limits.share:
            found[one.name] = max(found.get(one.name, 0), one.limits.share)
    return found


def stamp_of(path: str | Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; nothing if there is no file."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino


def new_key() -> str:
    """Return a new random key."""
    return _START + secrets.token_urlsafe(32)


def line_of(name: str, key: str, role: str = "", limits: KeyLimits = NO_LIMITS) -> str:
    """Return the line of the file that stands for a key."""
    hashed = hashlib.sha256(key.encode()).hexdigest()
    return " ".join(filter(None, (name, role, *limits.words, f"{_MARK}{hashed}")))


class KeyLine(NamedTuple):
    """The line of a key: the name of its owner, the role and the limits as they are written, each
    empty where there is none."""

    name: str
    role: str
    limits: str


def owners_in(path: Path) -> list[KeyLine]:
    """Return the owner of each line of a file. Raises InvalidInput if it cannot be read."""
    each = [line.split() for line in _lines_of(path)]
    return [_line_in(words) for words in each if _is_credential(words)]


def _line_in(words: Sequence[str]) -> KeyLine:
    between = words[1:-1]
    limits = [word for word in between if "=" in word]
    role = next((word for word in between if "=" not in word), "")
    return KeyLine(words[0], role, " ".join(limits))


def revoke_in(path: Path, name: str, *, dry: bool = False) -> int:
    """Remove the lines of a name from a file, which is replaced as a whole, and return their
    number. dry: change nothing.

    Raises InvalidInput if it has none, or cannot be read or written.
    """
    lines = _lines_of(path)
    kept = [line for line in lines if line.split()[:1] != [name]]
    count = len(lines) - len(kept)
    if not count:
        known = sorted({owner.name for owner in owners_in(path)})
        raise InvalidInput(
            f"{path} has no key of {name!r}{did_you_mean(name, known) or '.'}",
            hint=f"clipper key list --file {path} lists the names.",
        )
    if not dry:
        try:
            _replace(path, "".join(f"{line}\n" for line in kept))
        except OSError as error:
            raise InvalidInput(f"cannot write {path}: {error.strerror or error}.") from None
    return count


def _replace(path: Path, text: str) -> None:
    """Replace a file at once by another with the same owner and permissions, so that servers that
    read it go on to do so. Raises OSError."""
    was = path.stat()
    fresh = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(fresh, flags, 0o600), "w", encoding="utf-8") as file:
        with contextlib.suppress(PermissionError):
            os.fchown(file.fileno(), was.st_uid, was.st_gid)
        os.fchmod(file.fileno(), stat.S_IMODE(was.st_mode))
        file.write(text)
    fresh.replace(path)


def _lines_of(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", "") or "it is not UTF-8 text"
        raise InvalidInput(
            f"cannot read {path}: {why}.", hint="Name the file of the keys with --file FILE."
        ) from None


def _is_credential(words: Sequence[str]) -> bool:
    return len(words) > 1 and not words[0].startswith("#")
