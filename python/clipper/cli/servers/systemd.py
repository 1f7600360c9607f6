"""Messages to systemd about a server that a command runs (sd_notify): that it is ready, applies its
file again, ends, and lives.

To a service of `Type=notify` systemd names a datagram socket in NOTIFY_SOCKET, and in WATCHDOG_USEC
how long it may be silent. A message is one datagram of lines NAME=VALUE. Other managers of
processes read the same messages.
"""

import contextlib
import enum
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Final, Self

from clipper.component import Backoff, Stop, Worker
from clipper.foreign_text import printable

if TYPE_CHECKING:
    from clipper.server import ClipperServer

STATUS_CHARS_MAX: Final = 300
SEND_S: Final = 1.0  # for one message, if systemd reads none
_LOOK_S: Final = 1.0  # between looks at a server that is not ready yet
_CALM_LOOK_S: Final = 10.0  # between looks at one that is, without a watchdog
_MORE_S: Final = 60.0  # of a start after each look at it, and of an end after drain_s
_log = logging.getLogger(__name__)


class NotifySocket:
    """The socket that NOTIFY_SOCKET names, if it names one. Threads: any.

    watchdog_s: seconds that systemd waits for a message from this process; 0: it does not watch it.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        address = environment.get("NOTIFY_SOCKET", "")
        # an @ stands for the zero byte of an abstract name
        self._address = f"\0{address[1:]}" if address.startswith("@") else address
        is_watched = environment.get("WATCHDOG_PID") in (None, str(os.getpid()))
        limit_us = environment.get("WATCHDOG_USEC", "") if is_watched else ""
        self.watchdog_s = int(limit_us) / 1e6 if limit_us.isdecimal() else 0.0

    def __bool__(self) -> bool:
        return bool(self._address)

    def tell(self, **values: object) -> None:
        """Send a message; `ready=1` is READY=1. One that cannot be sent is logged."""
        text = "\n".join(f"{name.upper()}={value}" for name, value in values.items())
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
                line.settimeout(SEND_S)
                line.connect(self._address)
                line.send(text.encode())
        except OSError as error:
            _log.warning("systemd cannot be told %r: %s", text, error)


class ServiceState(enum.Enum):
    """The state of the server that systemd has been told."""

    STARTING = "starting"
    READY = "ready"
    RELOADING = "reloading"
    STOPPING = "stopping"


TRANSITIONS: Final[Mapping[ServiceState, frozenset[ServiceState]]] = {
    ServiceState.STARTING: frozenset({ServiceState.READY, ServiceState.STOPPING}),
    ServiceState.READY: frozenset({ServiceState.RELOADING, ServiceState.STOPPING}),
    ServiceState.RELOADING: frozenset({ServiceState.READY, ServiceState.STOPPING}),
    ServiceState.STOPPING: frozenset(),
}


class SystemdService:
    """Tells systemd the state of a server; a context manager that begins after the server's start
    and ends after its close. Does nothing where no manager has asked.

    A thread looks at the server. READY=1 follows once `/v2/health/ready` is 200. Until then each
    look extends the time that systemd gives the start, which may take as long as models load.
    WATCHDOG=1 is sent at each look while `/v2/health/live` is 200. Threads: any.
    """

    def __init__(self, server: "ClipperServer", line: NotifySocket) -> None:
        self._server, self._line = server, line
        self._lock = threading.Lock()
        self._state = ServiceState.STARTING
        self._worker = Worker("clipper-systemd", self._run, again=Backoff())

    def __enter__(self) -> Self:
        if self._line:
            self._worker.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._worker.end()

    @contextlib.contextmanager
    def reloading(self) -> Iterator[None]:
        """Tell that the server reads its file again while the `with` block lasts."""
        now_us = time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000
        is_told = self._move(ServiceState.RELOADING, reloading=1, monotonic_usec=now_us)
        try:
            yield
        finally:
            if is_told:
                self._move(ServiceState.READY, ready=1)

    def stopping(self, drain_s: float) -> None:
        """Tell that the server ends. drain_s: seconds that queries under way have."""
        limit_us = int((drain_s + _MORE_S) * 1e6)
        self._move(
            ServiceState.STOPPING, stopping=1, extend_timeout_usec=limit_us, status="closing"
        )

    def _move(self, to: ServiceState, **values: object) -> bool:
        """Change the state and send its message, if the table allows it; return whether it did."""
        with self._lock:
            if not self._line or to not in TRANSITIONS[self._state]:
                return False
            self._state = to
            self._line.tell(**values)
            return True

    def _run(self, stop: Stop) -> None:
        while not stop.wait(self._look()):
            pass

    def _look(self) -> float:
        """Look at the server and tell what there is; return the seconds until the next look."""
        pause_s = self._line.watchdog_s / 2 or _CALM_LOOK_S
        if dead := self._server.dead():
            self._line.tell(status=_status("failed", dead))
        elif self._state is ServiceState.STOPPING:
            self._line.tell(watchdog=1)
        elif waiting := self._server.unready():
            self._line.tell(watchdog=1, status=_status("waiting for", waiting))
        else:
            if self._state is ServiceState.STARTING:
                self._move(ServiceState.READY, ready=1)
            self._line.tell(watchdog=1, status="ready")
        if self._state is not ServiceState.STARTING:
            return pause_s
        self._line.tell(extend_timeout_usec=int(_MORE_S * 1e6))
        return min(_LOOK_S, pause_s)


def _status(what: str, reasons: list[str]) -> str:
    """Return one line of text for `systemctl status`."""
    line = " ".join(printable(f"{what}: {', '.join(reasons)}").split())
    return line[:STATUS_CHARS_MAX]
