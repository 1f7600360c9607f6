"""A starter and a collector instead of one controller: queries begin on some threads, their answers
are taken on others, and nothing waits in between.

It is a bounded queue of futures that are done, and nothing else: queries take the same way as those
of `app.predict`, and the same decider decides them, so both arrangements give the same answers.
What has been started is given out once, to one of the collecting threads, in the order in which it
was decided. Source: the speculative serving document, "Distributed Speculative controller".
"""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Self

import msgspec

from clipper.errors import InvalidInput, Overloaded, ShuttingDown
from clipper.options import refusing_unknown_keywords
from clipper.types import Answer, PredictionRequest
from clipper_core.results.future import Future

CAPACITY_MAX = 1 << 20
_RETRY_AFTER_S = 0.01


class Reply(msgspec.Struct, frozen=True, eq=False):
    """An answer or an error. id: as `start` was given it, or returned it."""

    id: str
    application: str
    answer: Answer


@refusing_unknown_keywords
class Collector:
    """Queries on their way between those who start them and those who collect their answers;
    `server.collector()` makes one. Threads: any; `start` and `get` from as many as you like.

    capacity: of queries that were started and not collected; beyond it `start` refuses.
    """

    def __init__(self, schedule: Callable[[PredictionRequest], Future], capacity: int) -> None:
        if (
            isinstance(capacity, bool)
            or not isinstance(capacity, int)
            or not 1 <= capacity <= CAPACITY_MAX
        ):
            raise InvalidInput(
                f"capacity={capacity!r} of a collector: a whole number from 1 to {CAPACITY_MAX}."
            )
        self.capacity = capacity
        self._schedule = schedule
        self._changed = threading.Condition(threading.Lock())
        self._done: deque[tuple[str, str, Future]] = deque()
        self._between = 0  # started and not collected
        self._closed = False

    def start(
        self,
        application: str,
        x: object,
        *,
        id: str = "",
        user: str | None = None,
        slo_ms: float | None = None,
        salt: int = 0,
        context: object = None,
        priority: int | None = None,
    ) -> str:
        """Start one query and return its id at once: `id`, or a generated one. The other arguments
        are those of `app.predict`.

        Raises Overloaded (`capacity` of them wait to be collected; nothing was started),
        ShuttingDown (closed), and what `app.predict` raises.
        """
        request = PredictionRequest(
            x, application, (), user, slo_ms, salt, context, id, priority=priority
        )
        self._enter()
        try:
            future = self._schedule(request)
        except BaseException:
            self._leave()
            raise
        id = id or f"{future.extra.resolved.node}-{future.id:x}"
        future.add_done_callback(lambda done: self._put(id, application, done))
        return id

    def get(self, timeout: float | None = None) -> Reply:
        """Return the next answer. Raises TimeoutError after `timeout` seconds without one,
        ShuttingDown when the collector is closed and everything has been collected."""
        reply = self._take(timeout)
        if reply is None:
            raise ShuttingDown(
                "this collector is closed, and all that was started has been collected."
            )
        return reply

    def __iter__(self) -> Iterator[Reply]:
        """Yield answers as they arrive, until the collector is closed and everything has been
        collected."""
        while (reply := self._take(None)) is not None:
            yield reply

    def __len__(self) -> int:
        """Return how many queries were started and not collected."""
        return self._between

    def close(self) -> None:
        """Start no more; what was started can still be collected. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- inside

    def _enter(self) -> None:
        with self._changed:
            if self._closed:
                raise ShuttingDown(
                    "this collector is closed.", hint="Make another with server.collector()."
                )
            if self._between >= self.capacity:
                hint = "Collect faster, by more threads, or make it with a larger capacity."
                message = (
                    f"{self.capacity} queries of this collector wait for their answers or to be"
                    " collected."
                )
                raise Overloaded(message, hint=hint, retry_after_s=_RETRY_AFTER_S)
            self._between += 1

    def _leave(self) -> None:
        with self._changed:
            self._left()

    def _left(self) -> None:
        """Count one less between, and notify waiters that have nothing to wait for. Under the
        lock."""
        self._between -= 1
        if self._closed and not self._between:
            self._changed.notify_all()

    def _put(self, id: str, application: str, future: Future) -> None:
        with self._changed:
            self._done.append((id, application, future))
            self._changed.notify()

    def _take(self, timeout: float | None) -> Reply | None:
        """Return the next reply; None if there will be no more. The answer is made on this thread,
        outside the lock."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._done or (self._closed and not self._between), timeout
            ):
                raise TimeoutError(
                    f"no answer within {timeout} s; {self._between} queries are on their way"
                )
            if not self._done:
                return None
            id, application, future = self._done.popleft()
            self._left()
        return Reply(id, application, future.result(0))
