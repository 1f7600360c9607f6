"""Health check of a set: finds shards that run and do not answer, which their supervisor cannot
see."""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from clipper.errors import ClipperError
from clipper_container.params.connection import ShardConnection, call_once

log = logging.getLogger("clipper.params")
EVERY_S = 1.0
ANSWER_S_MAX = 2.0
TRIES_MIN = 2  # so that a pause of this process is not blamed on a shard


class HealthCheck:
    """Checks each shard periodically. Threads: its own.

    patience_s: a shard that has not answered for this time is hung. hung: called with its number,
    once each time.
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
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="clipper-params-prober", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread, at the latest when a shard's time to answer is over."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(min(EVERY_S, self._patience_s / TRIES_MIN)):
            for connection in self._connections:
                if not self._stop.is_set():
                    self._probe(connection)
        for connection in self._connections:
            connection.close()

    def _probe(self, connection: ShardConnection) -> None:
        began_s = time.monotonic()
        try:
            call_once(connection, "stats")
        except (
            TimeoutError,
            BlockingIOError,
        ):  # BlockingIOError: the backlog of a unix socket is full
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
