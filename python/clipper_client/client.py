"""A client whose calls block."""

import math
import ssl
import time
from collections.abc import Sequence
from typing import Self, TypeVar

from clipper_client import calls
from clipper_client.address import Address
from clipper_client.answers import Answer, Answers, FeedbackCounts, UserValue
from clipper_client.attempts import Attempts, ConnectionEnded
from clipper_client.connections import ConnectionPool, PoolClosed
from clipper_client.errors import ClipperError, InvalidInput
from clipper_client.http_wire import Response

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

    def predict(
        self,
        application: str,
        input: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        context: UserValue = None,
        id: str = "",
        outputs: Sequence[str] = (),
    ) -> Answer:
        """Make one query, and return its answer by its deadline.

        input: one input of the application's type; of named tensors an object. user: whose
        selection state applies. slo_ms: instead of the application's. salt: another cache entry.
        context: numbers for a contextual policy. id: your own name for the query, for
        Answer.request_id and logs. outputs: of named outputs only these.

        Raises InvalidInput (type, shape, SLO, context, id), UnknownApplication, NotAllowed; what
        became of the query if no model answered and the application has no default, such as
        Overloaded, DeadlineExceeded, NoReplica or ModelFailed; DeadlineExceeded, NoServer for the
        connection.
        """
        settings = calls.Settings(user, slo_ms, salt, context, id, tuple(outputs))
        return self._run(calls.predict(application, input, settings))

    def predict_many(
        self,
        application: str,
        inputs: UserValue,
        *,
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        outputs: Sequence[str] = (),
    ) -> Answers:
        """Query an application for every row of an array, and return the answers.

        inputs: an array of shape (n, *shape), or a sequence of inputs; of named tensors an object
        of these, a sequence of objects, or a table of pandas, polars or Arrow. slo_ms: by when all
        rows are answered; 60 s if not given. Raises what predict raises.
        """
        settings = calls.Settings(user, slo_ms, salt, None, "", tuple(outputs))
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
        while True:
            try:
                response = self._exchanged(attempts)
            except ConnectionEnded as lost:
                attempts.after_loss(lost)
                continue
            except TimeoutError:
                attempts.late()
            pause_s = attempts.pause_s(response)
            if pause_s is None:
                return attempts.result(response)
            time.sleep(pause_s)

    def _exchanged(self, attempts: Attempts[_T]) -> Response:
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
        try:
            response = connection.exchange(request, attempts.until_s)
            is_whole = not response.closes
        finally:
            self._pool.give(connection, keep=is_whole)
        return response


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
