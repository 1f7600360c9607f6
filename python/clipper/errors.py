"""Tree of errors. Each has a REST and a gRPC code; each message names the thing, the cause and the
next step. The container SDK has the root and InvalidInput.
"""

import concurrent.futures
import difflib
from collections.abc import Iterable
from typing import ClassVar, Self

from clipper_container.errors import ClipperError as ClipperError
from clipper_container.errors import InvalidInput as InvalidInput


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """` - did you mean 'svm'?` when a choice is close to `word`, else the empty string."""
    close = difflib.get_close_matches(word.lower(), sorted(choices), n=1, cutoff=0.6)
    return f" - did you mean {close[0]!r}?" if close else ""


# -- what the caller got wrong


class TooLarge(InvalidInput):
    """An input or a frame above its limit."""

    rest_status = 413
    slug = "too-large"


class ConfigError(InvalidInput):
    """A configuration that cannot be used; the message starts with where the value came from."""

    slug = "config"


class PackagingError(InvalidInput):
    """A function or model that cannot be shipped to a container."""

    slug = "packaging"


class PullFailed(PackagingError):
    """A model's files could not be pulled from their URL; the message names it and the cause."""

    slug = "pull"


class FrameError(InvalidInput):
    """Bytes that are no frame of the wire protocol."""

    slug = "frame"


class Unknown(ClipperError, LookupError):
    """A name nothing is registered under."""

    rest_status = 404
    grpc_code = "NOT_FOUND"
    slug = "unknown"
    noun: ClassVar[str] = "thing"
    known_as: ClassVar[str] = "Known"

    @classmethod
    def named(cls, name: str, known: Iterable[str]) -> Self:
        """The error for `name` when only `known` exist: `no model 'svn' - did you mean 'svm'?
        Loaded: logreg, svm.`"""
        names = sorted(known)
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        guess = did_you_mean(name, names) or "."
        return cls(f"no {cls.noun} {name!r}{guess}", hint=f"{cls.known_as}: {shown or 'none yet'}.")


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


class UnknownTable(Unknown):
    """No such embedding table on these shards."""

    noun = "table"
    slug = "unknown-table"


class UnknownVariable(Unknown):
    """No dense variable of this name has been pushed to these shards."""

    noun = "variable"
    slug = "unknown-variable"


class UnknownPrediction(Unknown):
    """Feedback for a prediction that is not remembered: never made here, too old, or another
    application's."""

    slug = "prediction-not-found"
    noun = "prediction"


class Forbidden(ClipperError):
    """Permission denied: the caller's key does not allow this."""

    rest_status = 403
    grpc_code = "PERMISSION_DENIED"
    slug = "forbidden"


class AlreadyExists(ClipperError):
    """The name, or name and version, is taken, and what is registered does not change."""

    rest_status = 409
    grpc_code = "ALREADY_EXISTS"
    slug = "already-exists"


class TypeConflict(ClipperError, TypeError):
    """Two things that are to work together have different input types."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "type-conflict"


class DoesNotFit(InvalidInput):
    """Possible, but not of this application, or beside its other settings: feedback where nothing
    is learned, a role for a model that is not linked."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "does-not-fit"


class StillLinked(ClipperError):
    """A model that an application still asks cannot be retired."""

    rest_status = 409
    grpc_code = "FAILED_PRECONDITION"
    slug = "still-linked"


class NotAllowed(ClipperError):
    """Management without the token, or from where it is not allowed."""

    rest_status = 401
    grpc_code = "UNAUTHENTICATED"
    slug = "not-allowed"


# -- how a query can end without a prediction


class QuotaExceeded(ClipperError):
    """A table or a shard would have more rows or bytes than its quota; nothing has changed."""

    rest_status = 507
    grpc_code = "RESOURCE_EXHAUSTED"
    slug = "quota-exceeded"


class Overloaded(ClipperError):
    """The query could not have finished by its deadline, or a queue or table is full.
    `retry_after_s`: seconds after which another try may succeed."""

    rest_status = 429
    grpc_code = "RESOURCE_EXHAUSTED"
    slug = "overloaded"

    def __init__(self, message: str = "", *, hint: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s


class OutOfMemory(ClipperError, MemoryError):
    """An allocation failed; the query was refused and nothing else is touched."""

    rest_status = 503
    grpc_code = "RESOURCE_EXHAUSTED"
    slug = "out-of-memory"


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
    """The lease has run out or was revoked, and its keys are gone: take a new one and write them
    again."""

    rest_status = 409
    grpc_code = "ABORTED"
    slug = "lease-lost"


class ShardAway(ClipperError, ConnectionError):
    """A shard of the parameter server does not answer, or recovers: what was asked of it may be
    asked again.

    sequence: of a push, to send the same push again; shards that have applied it do not apply it
    twice. 0: it was no push.
    """

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "shard-away"

    def __init__(self, message: str = "", *, hint: str = "", sequence: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.sequence = sequence


class StalePush(ClipperError):
    """A gradient of parameters that have changed too often since; the shard that refused it has
    applied nothing.

    sequence: of the push. Other shards may have applied it: computed anew and sent with this
    sequence, it is applied only where it was refused.
    """

    rest_status = 409
    grpc_code = "ABORTED"
    slug = "stale-push"

    def __init__(self, message: str = "", *, hint: str = "", sequence: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.sequence = sequence


class StateLost(ClipperError):
    """A shard of the parameter server came back without its rows and variables, and waits to be
    told to begin anew."""

    rest_status = 503
    grpc_code = "FAILED_PRECONDITION"
    slug = "state-lost"


class DeployFailed(ClipperError):
    """A container did not come up; the message ends with its last log lines."""

    grpc_code = "FAILED_PRECONDITION"
    slug = "deploy-failed"


class NoServer(ClipperError, ConnectionError):
    """Nobody answers where a server was looked for; the hint says how to start one, or to name
    another."""

    slug = "no-server"
    grpc_code = "UNAVAILABLE"
    rest_status = 503


class AddressInUse(ClipperError, OSError):
    """Another process listens at this address."""

    slug = "address-in-use"
    grpc_code = "UNAVAILABLE"
    rest_status = 503
