"""A host's connections to servers: thousands, most of them idle, on one epoll and a few threads
(crew.py).

Whoever gets a connection (EPOLLONESHOT: nobody else gets it meanwhile) reads its frame, evaluates,
answers and arms it again. So no batch is handed from thread to thread, and buffers belong to
threads, not to connections. A model that takes its time is evaluated while another thread waits for
the rest. A batch of a model that has its hands full is left unread: its connection is parked, and
armed when there is a place.

Only the thread that got a connection closes it; others ask by `shutdown`, which wakes it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from clipper_container.answers import Answers
from clipper_container.crew import Crew
from clipper_container.evaluate import Evaluator
from clipper_container.line import Gate, Inbox, Line, State, begin_connecting, relay
from clipper_container.serve import (
    ATTEMPT_S,
    SILENCE_HEARTBEATS,
    Options,
    Refused,
    Welcome,
    welcome_of,
)
from clipper_container.timers import Timers
from clipper_container.transport import Backoff, Disconnected, parse_address, set_timeouts
from clipper_container.wire import (
    CONTROL_BYTES_MAX,
    HEADER_BYTES,
    BadFrame,
    Kind,
    control_frame,
    decode_header,
    open_rows,
    pack_map,
)

EVENTS_MAX = 64  # taken from the epoll at once
LEAVE_S = 30.0  # from our GOODBYE until the connection is ended without the server
_ONESHOT = int(select.EPOLLIN | select.EPOLLONESHOT | getattr(select, "EPOLLRDHUP", 0))
_CONNECTED = int(select.EPOLLOUT | select.EPOLLONESHOT)


class Lines:
    """Threads: any. left(model, address, why) is called when a connection that was let in is gone
    unasked."""

    def __init__(self, timers: Timers, left: Callable[[str, str, str], None]) -> None:
        self._timers, self._left = timers, left
        self._lock = threading.Lock()
        self._lines: dict[tuple[str, str], Line] = {}
        self._by_fd: dict[int, Line] = {}
        self._loud: set[Line] = set()  # that need heartbeats
        self._epoll = select.epoll()
        self._stop = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._stop, select.EPOLLIN)
        self._stopping = False
        self._errands = ThreadPoolExecutor(4, "clipper-host-dial")
        self._crew = Crew(self._wait, self._handle_told, timers)

    # -- asked by the node

    def serve(
        self, evaluator: Evaluator, gate: Gate, address: str, options: Options, timeout_s: float
    ) -> Future[None]:
        """Dial a server as a replica; done once it has let the model in. Fails with Refused,
        Disconnected; ValueError."""
        parse_address(address)
        line = Line(
            evaluator, gate, address, replace(options, quiet=True), time.monotonic() + timeout_s
        )
        with self._lock:
            there = self._lines.get(line.key)
            if there is not None and not there.asked:
                return there.welcomed
            if there is None:
                self._lines[line.key] = line
        if there is not None:  # it is on its way out: after it
            there.gone.add_done_callback(
                lambda _: relay(
                    self.serve(evaluator, gate, address, options, timeout_s), line.welcomed
                )
            )
            return line.welcomed
        self._errand(lambda: self._dial(line))
        return line.welcomed

    def leave(self, model: str, address: str) -> Future[str]:
        """Done once the connection is closed; at once if there is none."""
        with self._lock:
            line = self._lines.get((model, address))
        if line is None:
            nothing: Future[str] = Future()
            nothing.set_result("")
            return nothing
        self._ask_to_leave(line)
        return line.gone

    def leave_all(self, model: str | None = None) -> list[Future[str]]:
        """The same for all connections of a model, or of all models."""
        with self._lock:
            lines = [
                line for line in self._lines.values() if model is None or line.options.name == model
            ]
        for line in lines:
            self._ask_to_leave(line)
        return [line.gone for line in lines]

    def count(self) -> int:
        return len(self._lines)

    def _ask_to_leave(self, line: Line) -> None:
        with line.lock:
            if line.asked:
                return
            line.asked = True
            state, busy = line.state, line.busy
        if state is State.WAITING:
            self._finish(line, "asked to leave")
        elif state is State.SERVING and not busy:
            self._errand(lambda: self._say_goodbye(line))
        elif state is not State.SERVING:
            line.shutdown()
        self._timers.after(LEAVE_S, line.shutdown)

    def _say_goodbye(self, line: Line) -> None:
        with line.lock:
            if line.said:
                return
            line.said = True
        with contextlib.suppress(OSError):
            line.send(control_frame(Kind.GOODBYE))

    def close(self) -> None:
        """End the threads and what is still connected. After leave_all, if batches are to be
        answered."""
        self._stopping = True
        os.eventfd_write(self._stop, 1)
        self._crew.stop()
        self._crew.join(1.0)
        self._errands.shutdown(wait=False, cancel_futures=True)
        for line in tuple(self._by_fd.values()):
            line.shutdown()

    # -- dialling

    def _errand(self, job: Callable[[], None]) -> None:
        with contextlib.suppress(RuntimeError):  # closed already
            self._errands.submit(_told(job))

    def _dial(self, line: Line) -> None:
        with line.lock:
            if line.state is not State.WAITING:
                return
            line.state = State.CONNECTING
        try:
            sock, error = begin_connecting(line.address)
        except OSError as trouble:
            self._again(line, str(trouble))
            return
        if error not in (0, errno.EINPROGRESS):
            sock.close()
            self._again(line, os.strerror(error))
            return
        line.sock, line.fd = sock, sock.fileno()
        self._timers.after(ATTEMPT_S, lambda: self._give_up(line, sock))
        with self._lock:
            self._by_fd[line.fd] = line
        self._epoll.register(line.fd, _CONNECTED)

    def _give_up(self, line: Line, sock: socket.socket) -> None:
        if line.sock is sock and line.state in (State.CONNECTING, State.GREETING):
            line.shutdown()

    def _again(self, line: Line, why: str) -> None:
        """An attempt failed; dial again while there is time."""
        with line.lock:
            line.backoff = line.backoff or Backoff(0.01, 1.0)
            pause = line.backoff.next_s()
            over = line.asked or self._stopping or time.monotonic() + pause > line.until
            if not over:
                line.state = State.WAITING
        if over:
            self._finish(line, why)
        else:
            self._timers.after(pause, lambda: self._errand(lambda: self._dial(line)))

    # -- the threads

    def _wait(self) -> Iterator[Line]:
        for fd, _ in self._epoll.poll(-1, EVENTS_MAX):
            line = self._by_fd.get(fd)
            if line is not None:
                yield line

    def _handle_told(self, line: Line, inbox: Inbox) -> None:
        try:
            self._handle(line, inbox)
        except Exception:
            traceback.print_exc(file=sys.stderr)

    def _handle(self, line: Line, inbox: Inbox) -> None:
        """Do what a connection has, and arm it again."""
        if line.state is State.SERVING and not line.gate.enter(line):
            return
        entered = line.state is State.SERVING
        if entered and not line.gate.quick:
            self._crew.hand_over()
        try:
            over = self._serve(line, inbox) if entered else self._advance(line, inbox)
        except (Disconnected, BadFrame, OSError) as error:
            over = str(error)
        except Refused as refusal:
            over = str(refusal)
            line.until = 0.0
            _fail(line.welcomed, refusal)
        except BaseException:
            over = "an error of the host itself"
            raise
        finally:
            parked = line.gate.leave() if entered else None
            if parked is not None:
                self._arm(parked)
            if over:
                self._end(line, over)
            else:
                self._arm(line)

    def _arm(self, line: Line) -> None:
        self._epoll.modify(line.fd, _ONESHOT)

    def _advance(self, line: Line, inbox: Inbox) -> str:
        """From the dial to WELCOME."""
        sock = line.sock
        assert sock is not None
        if line.state is State.CONNECTING:
            if error := sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                return os.strerror(error)
            if line.asked:
                return "asked to leave"
            sock.setblocking(True)
            set_timeouts(sock, ATTEMPT_S)
            with line.lock:
                line.state = State.GREETING
            line.send(control_frame(Kind.HELLO, pack_map(line.options.hello(line.address))))
            return ""
        if not inbox.open(
            sock, CONTROL_BYTES_MAX, HEADER_BYTES
        ):  # a batch behind it must wait for its turn
            return ""
        header = decode_header(inbox.take(HEADER_BYTES), CONTROL_BYTES_MAX)
        welcome = welcome_of(header, inbox.take(header.payload_bytes))
        assert line.answers is not None
        line.answers = Answers(
            line.answers.evaluator, welcome.payload_bytes_max, welcome.crc, welcome.qualifiers
        )
        with line.lock:
            line.welcome, line.state, line.heard = welcome, State.SERVING, time.monotonic()
            line.backoff, asked = None, line.asked
        if not welcome.quiet:
            self._beat_for(line, welcome)
        if line.welcomed.set_running_or_notify_cancel():
            line.welcomed.set_result(None)
        if asked:
            self._say_goodbye(line)
        return ""

    def _serve(self, line: Line, inbox: Inbox) -> str:
        """Answer all that has come. -> why it is over; "" to go on."""
        assert line.sock is not None
        assert line.welcome is not None
        with line.lock:
            line.busy = True
        try:
            if not inbox.open(line.sock, line.welcome.payload_bytes_max):
                return ""
            line.heard, over = time.monotonic(), ""
            while not over and inbox.begin():
                over = self._one(line, inbox, line.welcome.payload_bytes_max)
            line.gate.took(line.spoke - line.heard)
            return over
        finally:
            with line.lock:
                line.busy = False
                asked = line.asked
            if asked:
                self._say_goodbye(line)

    def _one(self, line: Line, inbox: Inbox, limit: int) -> str:
        """One frame. Nothing here may outlive it that is a view of the buffer."""
        header = decode_header(inbox.take(HEADER_BYTES), limit)
        payload = inbox.take(header.payload_bytes)
        if header.kind == Kind.PREDICT:
            assert line.answers is not None
            line.send(line.answers.to(header, open_rows(header, payload, limit)))
        elif header.kind == Kind.GOODBYE:
            self._say_goodbye(line)
            return "the server said goodbye"
        elif header.kind != Kind.HEARTBEAT:
            raise BadFrame(f"unexpected {Kind(header.kind).name}")
        return ""

    # -- the end of one

    def _end(self, line: Line, why: str) -> None:
        """Close it. Only the thread that has it."""
        served = line.state is State.SERVING
        with self._lock:
            self._by_fd.pop(line.fd, None)
            self._loud.discard(line)
        with contextlib.suppress(OSError, ValueError):
            self._epoll.unregister(line.fd)
        line.close()
        if served:
            self._finish(line, why)
            if not line.asked:
                self._left(line.options.name, line.address, why)
        else:
            self._again(line, why)

    def _finish(self, line: Line, why: str) -> None:
        with line.lock:
            if line.state is State.CLOSED:
                return
            line.state = State.CLOSED
            line.answers = None  # timers may keep the line a while, but not the model
        with self._lock:
            self._lines.pop(line.key, None)
        _fail(line.welcomed, Disconnected(f"{line.address}: {why}"))
        line.gone.set_result(why)

    # -- heartbeats, where the server wants them

    def _beat_for(self, line: Line, welcome: Welcome) -> None:
        with self._lock:
            self._loud.add(line)
        self._timers.after(welcome.heartbeat_s, lambda: self._beat(line, welcome.heartbeat_s))

    def _beat(self, line: Line, every_s: float) -> None:
        now = time.monotonic()
        if line not in self._loud:
            return
        if now - line.heard > SILENCE_HEARTBEATS * every_s and not line.busy:
            line.shutdown()
            return
        if now - line.spoke >= every_s:
            with contextlib.suppress(OSError):
                line.send(control_frame(Kind.HEARTBEAT))
        self._timers.after(
            max(every_s / 4, line.spoke + every_s - now), lambda: self._beat(line, every_s)
        )


def _fail(future: Future[None], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _told(job: Callable[[], None]) -> Callable[[], None]:
    """What no job may raise is told, and its thread lives on."""

    def run() -> None:
        try:
            job()
        except Exception:
            traceback.print_exc(file=sys.stderr)

    return run
