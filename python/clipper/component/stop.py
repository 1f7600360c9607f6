"""Requests to a thread: to stop, and to work. Neither can be lost.

With a `threading.Event` they could: a thread that reads a closing flag and then clears the event
erases the wake-up of a close that came between the two. Here both are fields under one condition,
and a wait has them as its predicate.
"""

from clipper.component.threads import SYSTEM_THREADS, Threads


class Stop:
    """A request to end, which stays. Threads: any.

    requested: whether there is one.  changed: also of the flags that belong to it.
    """

    def __init__(self, threads: Threads = SYSTEM_THREADS) -> None:
        self.changed = threads.condition()
        self.requested = False

    def request(self) -> None:
        """Request the end, and wake everything that waits."""
        with self.changed:
            self.requested = True
            self.changed.notify_all()

    def wait(self, seconds: float) -> bool:
        """Wait so many seconds, or until the end is requested; return whether it is."""
        with self.changed:
            self.changed.wait_for(lambda: self.requested, max(0.0, seconds))
            return self.requested


class WakeFlag:
    """A flag that work is waiting: any thread sets it, one thread takes it.

    It stays set until it is taken, however often it is set meanwhile.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop, self._set = stop, False

    def set(self) -> None:
        """Set the flag, and wake the thread that waits for it."""
        with self._stop.changed:
            self._set = True
            self._stop.changed.notify_all()

    def take(self, timeout_s: float | None = None) -> bool:
        """Wait until the flag is set, the stop is requested or the time is over; clear it.

        Returns whether it was set. timeout_s: seconds; None: without a limit, since a stop ends the
        wait too.
        """
        with self._stop.changed:
            self._stop.changed.wait_for(self._is_over, timeout_s)
            was, self._set = self._set, False
            return was

    def _is_over(self) -> bool:
        return self._set or self._stop.requested
