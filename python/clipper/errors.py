"""Tree of errors. Each has a REST and a gRPC code; each message names the thing, the cause and the
next step. The container SDK has the root and InvalidInput.
"""

import concurrent.futures

from clipper_container.errors import (
    AlreadyExists,
    ClipperError,
    DoesNotFit,
    Forbidden,
    FrameError,
    InvalidInput,
    OutOfMemory,
    Overloaded,
    QuotaExceeded,
    ShardAway,
    ShardsMoved,
    StalePush,
    StateLost,
    TooLarge,
    TypeConflict,
    Unknown,
    UnknownKeyword,
    UnknownTable,
    UnknownVariable,
    did_you_mean,
    fails_call_only,
    refuse_unknown,
)
from clipper_container.redaction import without_secrets

# those of the SDK, which are errors of the server too
__all__ = (
    "AlreadyExists",
    "ClipperError",
    "DoesNotFit",
    "Forbidden",
    "FrameError",
    "InvalidInput",
    "OutOfMemory",
    "Overloaded",
    "QuotaExceeded",
    "ShardAway",
    "ShardsMoved",
    "StalePush",
    "StateLost",
    "TooLarge",
    "TypeConflict",
    "Unknown",
    "UnknownKeyword",
    "UnknownTable",
    "UnknownVariable",
    "did_you_mean",
    "fails_call_only",
    "refuse_unknown",
    "without_secrets",
)

# -- what the caller got wrong


class ConfigError(InvalidInput):
    """A configuration that cannot be used; the message starts with where the value came from."""

    slug = "config"


class PackagingError(InvalidInput):
    """A function or model that cannot be shipped to a container."""

    slug = "packaging"


class PullFailed(PackagingError):
    """A model's files could not be pulled from their URL; the message names it and the cause."""

    slug = "pull"


class UnknownModel(Unknown):
    """No model of this name is served."""

    slug = "model-not-found"
    noun = "model"
    known_as = "Loaded"


class UnknownVersion(Unknown):
    """The model is served, but not in this version."""

    slug = "version-not-found"
    noun = "model version"
    known_as = "Versions"


class UnknownApplication(Unknown):
    """No application of this name is registered."""

    slug = "application-not-found"
    noun = "application"
    known_as = "Applications"


class UnknownStream(Unknown):
    """No stream of this name runs in the server."""

    slug = "stream-not-found"
    noun = "stream"
    known_as = "Streams"


class UnknownPrediction(Unknown):
    """Feedback for a prediction that is not remembered: never made here, too old, or another
    application's."""

    slug = "prediction-not-found"
    noun = "prediction"


class RateExceeded(Overloaded):
    """A key has made as many requests as it may; nothing was queried. `policy`: its rate, as the
    value of RateLimit-Policy."""

    slug = "rate-exceeded"

    def __init__(
        self, message: str = "", *, hint: str = "", retry_after_s: float = 1.0, policy: str = ""
    ) -> None:
        super().__init__(message, hint=hint, retry_after_s=retry_after_s)
        self.policy = policy


class StillLinked(ClipperError):
    """A model that an application still queries cannot be retired."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "still-linked"


class NotAllowed(ClipperError):
    """Management without the token, or from where it is not allowed."""

    rest_status = 401
    grpc_code = "UNAUTHENTICATED"
    slug = "not-allowed"


# -- how a query can end without a prediction


class DeadlineExceeded(ClipperError, TimeoutError):
    """The deadline passed, or could not be kept any more, and there is no default answer."""

    rest_status = 504
    grpc_code = "DEADLINE_EXCEEDED"
    slug = "deadline-exceeded"


class NoReplica(ClipperError):
    """No container runs this model now."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "no-replica"


class ReplicaLost(ClipperError, ConnectionError):
    """The container died or went silent while it had the query."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "replica-lost"


class ContainerDied(ReplicaLost):
    """The row ended the process of two containers in which it was the only one, or is refused
    because it did so before. It is sent to no container for `server.row_failure_s`."""

    slug = "container-died"


class ModelFailed(ClipperError):
    """The model raised. `traceback` is the user's own, as the container sent it (empty when it sent
    none)."""

    slug = "model-failed"

    def __init__(self, message: str = "", *, hint: str = "", traceback: str = "") -> None:
        super().__init__(message, hint=hint)
        start = message.find("Traceback (most recent call last):")
        self.traceback = traceback or (message[start:] if start >= 0 else "")


class PolicyFailed(ClipperError):
    """A policy or decider of the user's own raised, or returned what makes no sense; the traceback
    is in the log."""

    slug = "policy-failed"


class BadOutput(ClipperError):
    """The model returned too few or too many outputs, or outputs of the wrong type."""

    slug = "bad-output"


class Cancelled(ClipperError, concurrent.futures.CancelledError):
    """The caller cancelled the query."""

    rest_status = 499
    grpc_code = "CANCELLED"
    slug = "cancelled"


class UnlistedCall(ClipperError):
    """A model called what its deployment does not list in `calls`."""

    rest_status = 403
    grpc_code = "PERMISSION_DENIED"
    slug = "call-not-allowed"


class CircularCall(ClipperError):
    """A model called what would call it again, in the end."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "call-cycle"


class CallsExceeded(ClipperError):
    """A call of a model reached a limit: of the length of a chain of calls, or of its rows."""

    rest_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    slug = "call-limit"


class ShuttingDown(ClipperError):
    """The server is closing: it takes nothing new."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "shutting-down"


class ForkedProcess(ClipperError):
    """The call was made in a child of fork(), where the server's threads and connections do not
    exist."""

    grpc_code = "FAILED_PRECONDITION"
    slug = "forked-process"


# -- what failed around a query


class StoreError(ClipperError):
    """The store cannot be read or written; the message names it."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "store"


class StoreConflict(StoreError):
    """Somebody else changed the record since it was read: read again and decide again."""

    rest_status = 409
    grpc_code = "ABORTED"
    slug = "store-conflict"


class LeaseLost(StoreError):
    """The lease has run out or was revoked, and its keys were deleted: take a new one and write
    them again."""

    rest_status = 409
    grpc_code = "ABORTED"
    slug = "lease-lost"


class DeployFailed(ClipperError):
    """A container did not come up; the message ends with its last log lines."""

    grpc_code = "FAILED_PRECONDITION"
    slug = "deploy-failed"


class ModelWarning(UserWarning):
    """A model was deployed, and it failed in its warm-up."""


class NoServer(ClipperError, ConnectionError):
    """No server answers at the address; the hint has the command that starts one, or the option
    that names another."""

    slug = "no-server"
    grpc_code = "UNAVAILABLE"
    rest_status = 503


class NotStarted(ClipperError):
    """A thread, an event loop or another component of the server could not start."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "not-started"


class AddressInUse(ClipperError, OSError):
    """Another process listens at this address."""

    slug = "address-in-use"
    grpc_code = "UNAVAILABLE"
    rest_status = 503
