"""What a set of shards said when it was last asked, for who may not wait: a page that is told of a
server once a second."""

import logging
import threading
from collections.abc import Callable, Sequence

from clipper.errors import ClipperError
from clipper.params.client.stats_reader import Stats

log = logging.getLogger("clipper.params")


class StatsCache:
    """Threads: any. read: as SetReader.read. Its thread begins with the first question, and reads
    once for each."""

    def __init__(self, read: Callable[[], Sequence[Stats]]) -> None:
        self._read = read
        self._last: Sequence[Stats] = ()
        self._asked = threading.Semaphore(0)
        self._guard = threading.Lock()
        self._ending = False
        self._thread: threading.Thread | None = None

    def latest(self) -> Sequence[Stats]:
        """Of the question before this one, if the shards have answered; nothing at first."""
        with self._guard:
            if self._thread is None and not self._ending:
                self._thread = threading.Thread(
                    target=self._run, name="clipper-params-observer", daemon=True
                )
                self._thread.start()
            self._asked.release()
            return self._last

    def stop(self) -> None:
        """Within the time that shards are given to answer. Idempotent."""
        with self._guard:
            self._ending, thread = True, self._thread
            self._asked.release()
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            while self._asked.acquire(blocking=False):
                pass  # those who asked while it read are told the same
            if self._ending:
                return
            try:
                self._last = self._read()
            except ClipperError as error:
                log.info("the shards cannot be asked: %s", error)
                self._last = ()
            except Exception:
                log.exception("the shards cannot be asked")
                self._last = ()
