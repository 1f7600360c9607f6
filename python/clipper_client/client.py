"""A client whose calls block."""

import math
import ssl
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple, Self, TypeVar, overload

from clipper_client import calls
from clipper_client.address import Address
from clipper_client.answers import Answer, Answers, FeedbackCounts, UserValue
from clipper_client.attempts import Attempts, ConnectionEnded
from clipper_client.connections import BlockingConnection, ConnectionPool, PoolClosed
from clipper_client.errors import ClipperError, InvalidInput
from clipper_client.http_wire import Response, ResponseReader
from clipper_client.parts import AnswerParts, PartReader

CONNECTIONS_MAX = 32
TIMEOUT_S = 30.0
TRIES_MAX = 3
_T = TypeVar("_T")


class Client:
    """Queries to the applications of one server. Threads: any; up to connections_max calls at once,
    and further ones wait for a connection. Close it, or use it in a `with` statement.

    client = clipper.Client("http://127.0.0.1:8000")
    client.predict("digits", [0.0, 1.0], slo_ms=20).output
    """

    def __init__(
        self,
        url: str,
        key: str | None = None,
        *,
        ca: str | None = None,
        cert: tuple[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
        tries_max: int = TRIES_MAX,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        """Make a client of the server that takes queries at `url`. Nothing is sent yet.

        key: an API key of the server. For https: ca: a PEM file of the CA of the server's
        certificate (None: those of this host); cert: PEM files of a client certificate and its key.
        timeout_s: how long a call may take beyond its slo_ms. tries_max: how often a query is sent
        at most where that does nothing twice. Raises InvalidInput.
        """
        check_limits(timeout_s, tries_max, connections_max)
        self._address = Address(url, key, ca, cert)
        self.url = self._address.url
        self._timeout_s, self._tries_max = timeout_s, tries_max
        self._pool = ConnectionPool(self._address, connections_max)

    @overload
    def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: Literal[False] = False,
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> Answer: ...

    @overload
    def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: Literal[True],
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> AnswerParts: ...

    def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
        stream: bool = False,
        part_slo_ms: float | None = None,
        slo_total_ms: float | None = None,
    ) -> Answer | AnswerParts:
        """Make one query, and return its answer by its deadline.

        input: one input of the application's type; of named tensors an object. user: whose
        selection state applies. slo_ms: instead of the application's. salt: another cache entry.
        priority: 1, the highest, to 3, instead of that of the key or the application; a query in
        parts has none. context: numbers for a contextual policy. id: your own name for the query,
        for Answer.request_id and logs. outputs: of named outputs only these. stream: return the
        parts of the answer as they come, once the first one is there; then slo_ms is the time until
        the first part, part_slo_ms from a part to the next one, and slo_total_ms until the end.

        Raises InvalidInput (type, shape, SLO, context, id, priority), UnknownApplication,
        NotAllowed, Forbidden (for a priority above that of the key); what became of the query if no
        model answered and the application has no default, such as Overloaded, DeadlineExceeded,
        NoReplica or ModelFailed; DeadlineExceeded, NoServer for the connection.
        """
        settings = calls.Settings(user, slo_ms, salt, context, id, tuple(outputs), priority)
        limits = {"part_slo_ms": part_slo_ms, "slo_total_ms": slo_total_ms}
        if stream:
            return self._stream(calls.PartsCall(application, input, settings, limits))
        calls.check_no_limits(limits)
        return self._run(calls.predict(application, input, settings))

    def predict_many(
        self,
        application: str,
        inputs: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        priority: int | None = None,
        outputs: Sequence[str] = (),
    ) -> Answers:
        """Query an application for every row of an array, and return the answers.

        inputs: an array of shape (n, *shape), or a sequence of inputs; of named tensors an object
        of these, a sequence of objects, or a table of pandas, polars or Arrow. slo_ms: by when all
        rows are answered; 60 s if not given. priority: of all rows. Raises what predict raises.
        """
        settings = calls.Settings(user, slo_ms, salt, None, "", tuple(outputs), priority)
        return self._run(calls.predict_many(application, inputs, settings))

    def feedback(
        self,
        application: str,
        prediction: str | Answer | None = None,
        *,
        label: UserValue = None,
        correct: bool | None = None,
        score: float | None = None,
        input: UserValue = None,
        user: str | None = None,
        weight: float = 1.0,
        context: UserValue = None,
    ) -> bool:
        """Tell what was right about a query. The server has written it down when this returns.

        prediction: an `Answer` or its id; or `input` instead (and `user`, `context`). label: the
        right output; or `correct`: whether the answer was; or `score`: how good it was, 0 to 1.
        weight: as so many feedbacks. Returns False when this prediction had feedback before. It is
        sent once: after NoServer and DeadlineExceeded it may have been counted. Raises
        InvalidInput, UnknownApplication, UnknownPrediction, StoreError.
        """
        truth = {
            "label": label,
            "correct": correct,
            "score": score,
            "input": input,
            "user": user,
            "context": context,
        }
        return self._run(calls.feedback(application, prediction, truth, weight))

    def feedback_many(
        self, application: str, predictions: Answers | Sequence[str | Answer], labels: UserValue
    ) -> FeedbackCounts:
        """Tell the right outputs of many predictions: a list of answers or ids, or the answers of
        predict_many to up to 32 rows. It is sent once, as feedback. Raises InvalidInput."""
        return self._run(calls.feedback_many(application, predictions, labels))

    def applications(self) -> list[dict[str, UserValue]]:
        """Return a description of each application: name, input, models, slo_ms, default, policy,
        confidence_min."""
        return self._run(calls.ApplicationsCall())

    def close(self) -> None:
        """Close the connections; calls that are under way end first. A closed client raises
        ClipperError."""
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<clipper client of {self.url}>"

    def _run(self, call: calls.Call[_T]) -> _T:
        attempts = Attempts(call, self._address, self._timeout_s, self._tries_max)
        return attempts.result(self._tried(attempts, streams=False).response)

    def _stream(self, call: calls.PartsCall) -> AnswerParts:
        """Return the parts of an answer, the first of which has come."""
        attempts = Attempts(call, self._address, self._timeout_s, self._tries_max)
        found = self._tried(attempts, streams=True)
        if found.connection is None:
            attempts.result(found.response)
            raise AssertionError("a response without events is an error")
        reader = PartReader(call, self._address, found.reader)
        return AnswerParts(reader, found.connection, self._pool.give, self._timeout_s)

    def _tried(self, attempts: Attempts[_T], streams: bool) -> "_Exchanged":
        """Return the last response of a call. Raises NoServer, DeadlineExceeded."""
        while True:
            try:
                found = self._exchanged(attempts, ResponseReader(streams))
            except ConnectionEnded as lost:
                attempts.after_loss(lost)
                continue
            except TimeoutError:
                attempts.late()
            pause_s = attempts.pause_s(found.response)
            if pause_s is None:
                return found
            time.sleep(pause_s)

    def _exchanged(self, attempts: Attempts[_T], reader: ResponseReader) -> "_Exchanged":
        """Return the response to the next request. Raises ConnectionEnded, TimeoutError,
        NoServer."""
        request = attempts.request()
        try:
            connection = self._pool.take(attempts.until_s)
        except TimeoutError:
            raise
        except ssl.SSLError as error:
            raise self._address.untrusted(error) from None
        except (OSError, UnicodeError) as error:
            why = getattr(error, "strerror", "") or str(error)
            raise self._address.lost(why, may_be_done=False) from None
        except PoolClosed:
            raise closed_error(self.url) from None
        is_whole = False
        is_open = False
        try:
            response = connection.exchange(request, reader, attempts.until_s)
            is_open = reader.has_events
            is_whole = not response.closes
        finally:
            if not is_open:
                self._pool.give(connection, keep=is_whole)
        return _Exchanged(response, connection if is_open else None, reader)


class _Exchanged(NamedTuple):
    """A response. connection: on which more of its events come; None if it is whole."""

    response: Response
    connection: BlockingConnection | None
    reader: ResponseReader


def closed_error(url: str) -> ClipperError:
    """Return the error of a call of a closed client."""
    return ClipperError(f"the client of {url} is closed.", hint="Make another one.")


def check_limits(timeout_s: object, tries_max: object, connections_max: object) -> None:
    """Raise InvalidInput for a limit that cannot be."""
    is_number = isinstance(timeout_s, int | float) and not isinstance(timeout_s, bool)
    if not is_number or not 0 < timeout_s < math.inf:  # type: ignore[operator]
        raise InvalidInput(f"timeout_s={timeout_s!r:.60}: it is a number of seconds above 0.")
    for name, value in (("tries_max", tries_max), ("connections_max", connections_max)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InvalidInput(f"{name}={value!r:.60}: it is a whole number from 1.")
