"""Errors that both the server and the container SDK raise. `clipper.errors` has the others."""

import difflib
import signal
import threading
from collections.abc import Iterable
from typing import ClassVar, Self

from clipper_container.redaction import without_secrets


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """Return ` - did you mean 'svm'?` when a choice is close to `word`, else the empty string."""
    close = difflib.get_close_matches(word.lower(), sorted(choices), n=1, cutoff=0.6)
    return f" - did you mean {close[0]!r}?" if close else ""


class Interruption(BaseException):
    """Interrupts a call of user code from outside. A BaseException, so that no `except Exception`
    of that code catches it.
    """


def fails_call_only(error: BaseException) -> bool:
    """Return whether what user code raised is to fail its call and nothing else. True of all but an
    Interruption, and a Ctrl-C, which is meant for the process; so also of sys.exit().
    """
    if isinstance(error, KeyboardInterrupt):  # only the main thread receives signals
        return (
            threading.current_thread() is not threading.main_thread()
            or signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        )
    return not isinstance(error, Interruption)


class ClipperError(Exception):
    """The root. `message` names the thing and the cause; `hint`, if any, is the next step, and
    str() shows both. The passwords of URLs are hidden in both.

    rest_status: HTTP status.  grpc_code: name of the gRPC code.  slug: last part of the problem
    type's URN.
    """

    rest_status: ClassVar[int] = 500
    grpc_code: ClassVar[str] = "INTERNAL"
    slug: ClassVar[str] = "internal"
    hint: str

    def __init__(self, message: str = "", *, hint: str = "") -> None:
        super().__init__(without_secrets(message))
        self.hint = without_secrets(hint)

    @property
    def message(self) -> str:
        """Return the message without the hint."""
        return str(self.args[0]) if self.args else ""

    def __str__(self) -> str:
        # behind a traceback the hint has a line of its own
        between = "\n" if "\n" in self.message else " "
        return f"{self.message}{between}{self.hint}".strip()


class InvalidInput(ClipperError, ValueError):
    """A value of the wrong type, shape or range."""

    rest_status = 400
    grpc_code = "INVALID_ARGUMENT"
    slug = "invalid-input"


class UnknownKeyword(InvalidInput, TypeError):
    """A function was given a keyword that it does not have."""

    slug = "unknown-keyword"


def refuse_unknown(function: str, unknown: Iterable[str], known: Iterable[str]) -> None:
    """Raise UnknownKeyword for the first of some keywords, if there is one."""
    for keyword in unknown:
        choices = list(known)
        raise UnknownKeyword(
            f"{function}() has no keyword {keyword!r}{did_you_mean(keyword, choices) or '.'}",
            hint=f"Its keywords: {', '.join(choices) or 'none'}.",
        )


class TooLarge(InvalidInput):
    """An input or a frame above its limit."""

    rest_status = 413
    slug = "too-large"


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
        """Return the error for `name` when only `known` exist: `no model 'svn' - did you mean
        'svm'? Loaded: logreg, svm.`"""
        names = sorted(known)
        shown = ", ".join(names[:20]) + (f" and {len(names) - 20} more" if len(names) > 20 else "")
        guess = did_you_mean(name, names) or "."
        return cls(f"no {cls.noun} {name!r}{guess}", hint=f"{cls.known_as}: {shown or 'none yet'}.")


class UnknownTable(Unknown):
    """No such embedding table on these shards."""

    noun = "table"
    slug = "unknown-table"


class TableLost(UnknownTable):
    """A shard does not have a table that this client has used: it was restarted without it."""


class UnknownVariable(Unknown):
    """No dense variable of this name has been pushed to these shards."""

    noun = "variable"
    slug = "unknown-variable"


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


class ShardAway(ClipperError, ConnectionError):
    """A shard of the parameter server does not answer, or recovers: the request may be
    repeated.

    sequence: of a push, to send the same push again; shards that have applied it do not apply it
    twice. 0: it was no push.
    """

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "shard-away"

    def __init__(self, message: str = "", *, hint: str = "", sequence: int = 0) -> None:
        super().__init__(message, hint=hint)
        self.sequence = sequence


class ShardsMoved(ClipperError):
    """The rows of a set have moved to another number of shards; a client learns the new addresses
    from the folder, or from the old shards for a while."""

    rest_status = 503
    grpc_code = "UNAVAILABLE"
    slug = "shards-moved"


class TlsFailed(ClipperError):
    """A connection with TLS was not made: a certificate is not trusted, has expired or is missing,
    or one side speaks without TLS."""

    rest_status = 502
    grpc_code = "UNAVAILABLE"
    slug = "tls-failed"


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
    """A shard of the parameter server came back without its rows and variables, and waits for
    `begin_anew`."""

    rest_status = 503
    grpc_code = "FAILED_PRECONDITION"
    slug = "state-lost"
