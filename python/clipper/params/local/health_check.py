"""Health check of a set: finds shards that run and do not answer, which their supervisor cannot
see."""

import time
from collections.abc import Callable, Sequence

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import ClipperError
from clipper_container.params.connection import ShardConnection, call_once

EVERY_S = 1.0
AGAIN_S_MAX = 5.0  # after an unexpected error
ANSWER_S_MAX = 2.0
TRIES_MIN = 2  # so that a pause of this process is not blamed on a shard


class HealthCheck:
    """Checks each shard periodically. Threads: its own.

    patience_s: a shard that has not answered for this time is hung; 0: none is checked. hung:
    called with its number, once each time.
    """

    def __init__(
        self, addresses: Sequence[str], token: str, patience_s: float, hung: Callable[[int], None]
    ) -> None:
        self._patience_s, self._hung = patience_s, hung
        answer_s = min(ANSWER_S_MAX, patience_s / TRIES_MIN)
        self._connections = [
            ShardConnection(number, addresses.__getitem__, token, None, answer_s)
            for number in range(len(addresses))
        ]
        self._silent: dict[int, tuple[float, int]] = {}  # number -> (since, failed tries)
        self._worker = Worker(
            "clipper-params-prober", self._run, again=Backoff(EVERY_S, AGAIN_S_MAX)
        )

    def start(self) -> None:
        """Start the thread, if shards are to be checked. Raises NotStarted."""
        if self._patience_s:
            self._worker.start()

    def stop(self) -> None:
        """End the thread, at the latest when a shard's time to answer is over. Idempotent."""
        if self._worker.end():
            for connection in self._connections:
                connection.close()

    def health(self) -> list[Health]:
        """Return the state of the thread, if there is one."""
        return [self._worker.health()] if self._worker.is_started else []

    def _run(self, stop: Stop) -> None:
        while not stop.wait(min(EVERY_S, self._patience_s / TRIES_MIN)):
            for connection in self._connections:
                if not stop.requested:
                    self._probe(connection)

    def _probe(self, connection: ShardConnection) -> None:
        began_s = time.monotonic()
        try:
            call_once(connection, "stats")
        # BlockingIOError: the backlog of a unix socket is full
        except (TimeoutError, BlockingIOError):
            connection.close()
            since_s, tries = self._silent.get(connection.number, (began_s, 0))
            self._silent[connection.number] = since_s, tries + 1
            if tries + 1 >= TRIES_MIN and time.monotonic() - since_s >= self._patience_s:
                del self._silent[connection.number]
                self._hung(connection.number)
        except (OSError, ClipperError):  # not running; the supervisor handles it
            connection.close()
            self._silent.pop(connection.number, None)
        else:
            self._silent.pop(connection.number, None)
