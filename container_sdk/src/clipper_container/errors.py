"""Base classes of errors. The server has a tree of them (`clipper.errors`); the few that the
container SDK raises too are its subclasses.
"""

from typing import ClassVar


class ClipperError(Exception):
    """The root. `message` names the thing and the cause; `hint`, if any, is the next step, and
    str() shows both.

    rest_status: HTTP status.  grpc_code: name of the gRPC code.  slug: last part of the problem
    type's URN.
    """

    rest_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    slug: ClassVar[str] = "internal"
    hint: str

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidInput(ClipperError, ValueError):
    """A value of the wrong type, shape or range."""

    rest_status = 400
    grpc_code = "INVALID_ARGUMENT"
    slug = "invalid-input"
