"""Tokens of containers: what a container may serve, and a code by which the server knows that it
said so itself.

A model is other people's code, so its process gets no secret of the server, only a token for the
model that it runs. Of the operator's secret (`server.token`), which is valid for any model, a
process never gets more. There are three kinds:

- of a replica that this server has started: for its model, version and number;
- of a copy that an instance of the mesh holds: for its model;
- of a container that is started by hand (`clipper key create NAME --container MODEL`).

The first two are made with a key of this server's life, so they end with it.
"""

import base64
import hmac
import secrets
from typing import Final

import msgspec

from clipper.errors import NotAllowed
from clipper.types import VersionedModel

TOKEN_CHARS_MAX: Final = 1024
_START: Final = "ct_"
_KEY_BYTES: Final = 32
_HINT: Final = (
    "Start the container with the server's token in CLIPPER_TOKEN, or with one that"
    " `clipper key create NAME --container MODEL` prints."
)


class TokenHolder(msgspec.Struct, frozen=True, array_like=True):
    """The part of a token that says whose it is.

    name: who has it; empty: the operator, whose secret is valid for any number of containers. model
    and version: what it may serve; empty and 0: any. replica: its number; -1: any.
    """

    name: str = ""
    model: str = ""
    version: int = 0
    replica: int = -1

    @property
    def is_replica(self) -> bool:
        """Return whether a server has started it, so that the server knows whether it may run."""
        return self.replica >= 0

    def permits(self, model: VersionedModel, replica: int) -> bool:
        """Return whether it may serve as a replica of a version."""
        return (
            self.model in ("", model.name)
            and self.version in (0, model.version)
            and self.replica in (-1, replica)
        )


_OPERATOR: Final = TokenHolder()


class ContainerTokens:
    """Makes and checks the tokens of a server's containers. Threads: any.

    secret: of the operator; empty: any container is let in.
    """

    def __init__(self, secret: str) -> None:
        self._secret = secret.encode()
        self._own_key = secrets.token_bytes(_KEY_BYTES)

    def of_replica(self, model: VersionedModel, replica: int) -> str:
        """Return the token of a replica that this server starts."""
        holder = TokenHolder(f"replica {replica}", model.name, model.version or 0, replica)
        return _signed(self._own_key, holder)

    def of_copy(self, model: str, instance: str) -> str:
        """Return the token of the copy of a model that an instance of the mesh holds."""
        return _signed(self._own_key, TokenHolder(f"copy {instance}", model))

    def check(self, token: str) -> TokenHolder:
        """Return whose token it is. Raises: NotAllowed for a token that this server does not know.

        The time tells a caller nothing about tokens that are valid.
        """
        if not self._secret or hmac.compare_digest(token.encode(), self._secret):
            return _OPERATOR
        if len(token) <= TOKEN_CHARS_MAX and token.startswith(_START):
            for key in (self._own_key, self._secret):
                holder = _holder_of(key, token)
                if holder is not None:
                    return holder
        raise NotAllowed("the token is missing or wrong.", hint=_HINT)


def made_by_hand(secret: str, name: str, model: str, version: int = 0) -> str:
    """Return a token for a container that is started by hand.

    secret: of the servers that it connects to (`server.token`). version: 0: any.
    """
    return _signed(secret.encode(), TokenHolder(f"by hand {name}", model, version))


def _signed(key: bytes, holder: TokenHolder) -> str:
    said = _text(msgspec.json.encode(holder))
    return f"{_START}{said}.{_text(_code(key, said))}"


def _holder_of(key: bytes, token: str) -> TokenHolder | None:
    """Return what a token says, if it was made with this key."""
    said, _, code = token.removeprefix(_START).rpartition(".")
    if not hmac.compare_digest(code.encode(), _text(_code(key, said)).encode()):
        return None
    return msgspec.json.decode(base64.urlsafe_b64decode(said), type=TokenHolder)


def _code(key: bytes, said: str) -> bytes:
    return hmac.digest(key, said.encode(), "sha256")


def _text(data: bytes) -> str:
    """Return bytes in base64; a token is never taken apart without its code, so `=` may stay."""
    return base64.urlsafe_b64encode(data).decode()
