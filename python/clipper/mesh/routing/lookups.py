"""Names that the mirrors do not know, looked up in the store itself, on a thread of its own.

A query for such a name may be the first after a registration at another node, of which this node
has not heard yet. The store may hang, so an event loop waits for it only briefly, and not again
until the store has answered: there the name is unknown until it has been looked up. Another thread
waits for a moment.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Final

LOOKUPS_MAX: Final = 64  # names that are being looked up, or wait to be; others are unknown
WAIT_S: Final = 0.25  # of a thread that asks, for the store
# of an event loop, which serves others meanwhile; not at all after a look-up that took longer
LOOP_WAIT_S: Final = 0.05


class Lookups:
    """find: looks a name up in the store, and makes it known where names are looked up in memory.
    Threads: any."""

    def __init__(self, find: Callable[[str], None]) -> None:
        self._find = find
        self._pool = ThreadPoolExecutor(1, "clipper-mesh-lookup")
        self._guard = threading.Lock()
        self._pending: dict[str, Future[None]] = {}
        self._closed = False
        self._hangs = False  # the last look-up that was waited for did not end in time

    def start(self) -> None:
        """Have the thread there before the first name is asked."""
        self._pool.submit(lambda: None)

    def look_up(self, name: str) -> None:
        """Have the name looked up, once at a time. Waits at most WAIT_S, in a thread with an event
        loop at most LOOP_WAIT_S."""
        with self._guard:
            pending = self._pending.get(name)
            if pending is None:
                if self._closed or len(self._pending) >= LOOKUPS_MAX:
                    return
                pending = self._pending[name] = self._pool.submit(self._find, name)
                pending.add_done_callback(lambda _: self._ended(name))
        wait_s = WAIT_S if not _has_event_loop() else 0.0 if self._hangs else LOOP_WAIT_S
        if wait_s:
            self._hangs = not wait((pending,), wait_s).done

    def _ended(self, name: str) -> None:
        self._pending.pop(name, None)
        self._hangs = False

    def close(self) -> None:
        """Look up nothing more. A call of the store that hangs is not waited for."""
        with self._guard:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
