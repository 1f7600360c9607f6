"""Tokens of worker groups, and what each may do: `params.tokens_file`."""

import hashlib
import hmac
from typing import Final

from clipper.credential_file import CredentialFile
from clipper.errors import Forbidden

ROLES: Final = ("read", "train", "manage")  # each may do what those before it may
_READ = {"tables", "pull_replica", "pull_variables", "walk", "watch", "stats"}
_TRAIN = {"create", "push_model", "push_gradients", "push_rows", "begin_anew"}


class TokenFile:
    """The tokens of one file, read again when it has changed. Threads: one at a time.

    token: of the whole set, with the role manage. path: empty for no other tokens. Raises
    ConfigError for a file that cannot be read, or has a line of another form.
    """

    def __init__(self, token: str, path: str = "") -> None:
        self._token = hashlib.sha256(token.encode()).digest()
        self._file = CredentialFile(path, "params.tokens_file", ROLES) if path else None

    def role(self, token: object) -> str:
        """Return the role of a token; empty if nobody has it."""
        if self._file is not None:
            self._file.refresh()
        if not isinstance(token, str):
            return ""
        if hmac.compare_digest(hashlib.sha256(token.encode()).digest(), self._token):
            return "manage"
        found = self._file.find(token.encode()) if self._file is not None else None
        return found.role if found is not None else ""


def check_role(role: str, call: str) -> None:
    """Raise Forbidden if a role does not include a call of the shards' protocol."""
    needed = "read" if call in _READ else "train" if call in _TRAIN else "manage"
    if ROLES.index(role) < ROLES.index(needed):
        raise Forbidden(
            f"{call} needs a token with the role {needed!r}, and this one has {role!r}.",
            hint=f"clipper key NAME --role {needed} --file FILE, of params.tokens_file, makes one.",
        )
