"""Look-ups of names in the store, on a thread of their own, for names that the mirrors lack.

A query of such a name may be the first one after a registration at another node that this node has
not seen yet. The store may hang, so an event loop waits for it only briefly, and not again until
the store has answered: until then the name counts as unknown there. Other threads wait longer.
"""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, wait
from typing import Final

from clipper.component import Health, Pool

LOOKUPS_MAX: Final = 64  # names looked up or queued; further ones count as unknown
WAIT_S: Final = 0.25  # a thread's wait for the store
# an event loop's wait; 0 after a look-up that took longer
LOOP_WAIT_S: Final = 0.05


class Lookups:
    """Looks names up, each once at a time. Threads: any.

    find: looks a name up in the store and adds what it finds to the router. pool: of one
    thread; None: its own.
    """

    def __init__(self, find: Callable[[str], None], pool: Executor | None = None) -> None:
        self._find = find
        own = Pool("clipper-mesh-lookup", 1)
        self._own = own if pool is None else None
        self._pool: Executor = own if pool is None else pool
        self._guard = threading.Lock()
        self._pending: dict[str, Future[None]] = {}
        self._closed = False
        self._hangs = False  # the last look-up did not end in time

    def start(self) -> None:
        """Start the thread before the first look-up. Raises NotStarted."""
        if self._own is not None:
            self._own.start()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [] if self._own is None else [self._own.health()]

    def lookup(self, name: str) -> None:
        """Start a look-up of a name, and wait for it.

        Waits at most WAIT_S; at most LOOP_WAIT_S in a thread with an event loop.
        """
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
        """Cancel pending look-ups. Does not wait for a call of the store that hangs."""
        with self._guard:
            self._closed = True
        self._pool.shutdown(wait=False, cancel_futures=True)


def _has_event_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True
