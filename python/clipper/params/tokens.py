"""Tokens of worker groups and their roles: `params.tokens_file`, `params.grpc_keys_file`."""

import hashlib
import hmac
from typing import Final

from clipper.credentials.credential_file import CredentialFile
from clipper.errors import Forbidden

ROLES: Final = ("read", "train", "manage")  # each may do what those before it may
_READ = {"pull_variable", "pull_embedding_vector"}  # of gRPC
_READ |= {"tables", "pull_replica", "pull_variables", "walk", "watch", "stats", "whereabouts"}
_TRAIN = {"create", "push_model", "push_gradient", "push_gradients", "push_rows", "begin_anew"}


class TokenFile:
    """The tokens of one file. Threads: any.

    token: of the whole set, with the role manage. path: empty for no other tokens. setting: that
    names the file. role: of lines that have none; empty: each must have one. Raises ConfigError for
    a file that cannot be read, or has a line of another form.
    """

    def __init__(
        self, token: str, path: str = "", setting: str = "params.tokens_file", role: str = ""
    ) -> None:
        self._token = digest_of(token)
        self._file = CredentialFile(path, setting, ROLES, role) if path else None

    def refresh(self) -> bool:
        """Reload the file if it has changed; return whether other tokens are in use."""
        return self._file is not None and self._file.refresh()

    def role(self, digest: bytes) -> str:
        """Return the role of the token with this digest; empty if nobody has it."""
        if hmac.compare_digest(digest, self._token):
            return "manage"
        found = self._file.find_digest(digest) if self._file is not None else None
        return found.role if found is not None else ""


def digest_of(token: object) -> bytes:
    """Return the SHA-256 of a token; empty if it is no text."""
    return hashlib.sha256(token.encode()).digest() if isinstance(token, str) else b""


def check_role(role: str, call: str) -> None:
    """Raise Forbidden if a role does not include a call of the shards' protocol."""
    needed = "read" if call in _READ else "train" if call in _TRAIN else "manage"
    if ROLES.index(role) < ROLES.index(needed):
        raise Forbidden(
            f"{call} needs a token with the role {needed!r}, and this one has {role!r}.",
            hint=f"clipper key NAME --role {needed} --file FILE, of params.tokens_file, makes one.",
        )
