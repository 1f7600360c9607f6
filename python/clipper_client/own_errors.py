"""Errors of a client where `clipper` itself is not installed: the names, the roots and the words of
`clipper.errors`.

A name of `clipper_client.errors` is the class of `clipper.errors` where that can be imported, so
that one `except` catches the errors of a server in the same process and of one elsewhere.
"""

from typing import ClassVar


class ClipperError(Exception):
    """The root. `message` names the thing and the cause; `hint`, if any, is the next step, and
    str() shows both. slug: last part of the type in the answers of servers."""

    slug: ClassVar[str] = "internal"

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    @property
    def message(self) -> str:
        """Return the message without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        return f"{self.message} {self.hint}".strip()


class InvalidInput(ClipperError, ValueError):
    """A value of the wrong type, shape or range."""

    slug = "invalid-input"


class TooLarge(InvalidInput):
    """An input above a limit of the server."""

    slug = "too-large"


class DoesNotFit(InvalidInput):
    """Possible, but not of this application: feedback where nothing is learned."""

    slug = "does-not-fit"


class Unknown(ClipperError, LookupError):
    """A name nothing is registered under."""

    slug = "unknown"


class UnknownModel(Unknown):
    """No model of this name is served."""

    slug = "model-not-found"


class UnknownVersion(Unknown):
    """The model is served, but not in this version."""

    slug = "version-not-found"


class UnknownApplication(Unknown):
    """No application of this name is registered."""

    slug = "application-not-found"


class UnknownPrediction(Unknown):
    """Feedback for a prediction that the server does not remember."""

    slug = "prediction-not-found"


class Forbidden(ClipperError):
    """Permission denied: the caller's key does not allow this."""

    slug = "forbidden"


class NotAllowed(ClipperError):
    """A query without a key that the server requires, or with a wrong one."""

    slug = "not-allowed"


class TypeConflict(ClipperError, TypeError):
    """Two things that are to work together have different input types."""

    slug = "type-conflict"


class Overloaded(ClipperError):
    """The query could not have finished by its deadline, or a queue is full. `retry_after_s`:
    seconds after which another try may succeed."""

    slug = "overloaded"

    def __init__(self, message: str = "", *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class RateExceeded(Overloaded):
    """The key has made as many requests as it may; nothing was queried."""

    slug = "rate-exceeded"


class OutOfMemory(ClipperError, MemoryError):
    """The server had no memory for the request, and nothing else is touched."""

    slug = "out-of-memory"


class DeadlineExceeded(ClipperError, TimeoutError):
    """The deadline passed, or could not be kept any more, and there is no default answer; or the
    server has not answered within the time of the client."""

    slug = "deadline-exceeded"


class NoReplica(ClipperError):
    """No container runs this model now."""

    slug = "no-replica"


class ReplicaLost(ClipperError, ConnectionError):
    """The container died or went silent while it had the query."""

    slug = "replica-lost"


class ContainerDied(ReplicaLost):
    """The row ended the process of two containers in which it was the only one."""

    slug = "container-died"


class ModelFailed(ClipperError):
    """The model raised; the message has the last line of its traceback."""

    slug = "model-failed"


class PolicyFailed(ClipperError):
    """A policy or decider of the server's user raised."""

    slug = "policy-failed"


class BadOutput(ClipperError):
    """The model returned too few or too many outputs, or outputs of the wrong type."""

    slug = "bad-output"


class ShuttingDown(ClipperError):
    """The server is closing: it takes nothing new."""

    slug = "shutting-down"


class StoreError(ClipperError):
    """The server's store cannot be read or written."""

    slug = "store"


class NoServer(ClipperError, ConnectionError):
    """No server answers at the address, or the connection to it was lost."""

    slug = "no-server"
