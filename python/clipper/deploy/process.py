"""Replicas as processes on this machine, under one supervising thread.

The thread polls each child's pidfd (readable when it ends; unlike a pid it is never reused), the
pipe of its output, and an eventfd through which other threads submit work. This thread also starts
the children, because they ask for SIGKILL when their parent ends (PR_SET_PDEATHSIG), and to Linux
the parent is the thread that forked. So a killed server leaves no model processes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from clipper.deploy.deployer import (
    ContainerSpec,
    EventKind,
    OnEvent,
    ReplicaState,
    ReplicaStatus,
    options,
)
from clipper.deploy.replica_table import LOG_LINE_BYTES_MAX, ReplicaRecord, ReplicaTable
from clipper.deploy.restarts import RestartPolicy, Spacing

TOKEN_ENV = "CLIPPER_TOKEN"
_READ_BYTES = 64 << 10

log = logging.getLogger("clipper.deploy")


@dataclass(slots=True)
class _Child:
    """The child process of a replica."""

    process: subprocess.Popen[bytes] | None = None
    pid_fd: int = -1
    log_fd: int = -1
    due_s: float | None = None  # of the next start (BACKOFF) or of SIGKILL (stopping)
    stopping: bool = False
    partial_line: bytes = b""

    @property
    def pid(self) -> int:
        """Return the process id, 0 for none."""
        return self.process.pid if self.process is not None else 0


_Replica = ReplicaRecord[_Child]


def command(spec: ContainerSpec, replica: int) -> Sequence[str]:
    """Return the command line of a container. It contains no secret."""
    words = [spec.python, "-X", "faulthandler", "-m", "clipper_container", "serve", spec.target]
    words += [*options(spec), "--connect", spec.connect, "--replica", str(replica)]
    words += [
        "--threads",
        str(spec.threads),
        "--token-env",
        TOKEN_ENV,
        "--die-with-parent",
        str(os.getpid()),
    ]
    for directory in spec.code:
        words += ["--code", directory]
    return words


def environment(spec: ContainerSpec) -> dict[str, str]:
    """Return the environment of a container: ours, the spec's, and the token."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", **spec.env, TOKEN_ENV: spec.token}


def describe_exit(code: int) -> str:
    """Describe an exit code: "exit 3", "killed (SIGKILL)"."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed (signal {-code})"


def _start_process(spec: ContainerSpec, replica: int) -> tuple[subprocess.Popen[bytes], int, int]:
    """Start a process; return it, its pidfd, and the pipe of its output.

    Raises: OSError; ValueError for a NUL in an argument.
    """
    with contextlib.ExitStack() as undo:
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        undo.callback(os.close, read_fd)
        os.set_blocking(read_fd, False)
        try:
            process = subprocess.Popen(
                command(spec, replica),
                env=environment(spec),
                stdin=subprocess.DEVNULL,
                stdout=write_fd,
                stderr=write_fd,
            )
        finally:
            os.close(write_fd)
        undo.callback(process.wait)
        undo.callback(process.kill)
        pid_fd = os.pidfd_open(process.pid)
        undo.pop_all()
        return process, pid_fd, read_fd


class ProcessDeployer:
    """Runs each replica as a child process and restarts it when it ends, unless it ends too often.

    on_event: called for each `ReplicaEvent` in the supervising thread; must not block; may call any
    method except close().

    Threads: any. A fork of this process must not use it.
    """

    def __init__(
        self, on_event: OnEvent | None = None, policy: RestartPolicy | None = None
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._table = ReplicaTable[_Child](lambda replica: replica.handle.pid, on_event)
        self._work: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._handlers: dict[int, Callable[[], object]] = {self._wake_fd: self._clear_wake}
        self._spacing = Spacing()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="clipper-deployer", daemon=True)
        self._thread.start()

    # -- called by anyone

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Start a replica and keep it running; returns before it serves.

        Raises: ValueError if it runs already; RuntimeError after close().
        """
        new = _Replica(spec, replica, _Child())
        with self._table.changed:
            self._table.add(new, lambda old: old.settled)
        self._hand_in(partial(self._spawn, new))

    def stop(
        self,
        name: str,
        version: int | None = None,
        replica: int | None = None,
        grace_s: float | None = None,
    ) -> None:
        """Stop one replica, all of a version, or of a model: SIGTERM, SIGKILL after `grace_s`; wait
        for their end.

        Called from `on_event` it does not wait. Replicas that do not run are ignored.
        """
        self._stop(self._table.select(name, version, replica), grace_s)

    def restart(self, name: str, version: int, replica: int, pid: int) -> bool:
        """Kill process `pid` of a replica, which then restarts. Returns False if it does not run
        here.
        """
        found = self._table.get(name, version, replica)
        if found is None or found.handle.pid != pid:
            return False
        self._hand_in(partial(self._kill, found, pid))
        return True

    def list(self) -> Sequence[ReplicaStatus]:
        """Return every replica ever started, including stopped ones, by name, version and
        number.
        """
        return self._table.statuses()

    def logs(self, name: str, version: int, replica: int) -> Sequence[str]:
        """Return the last lines of a replica's output, oldest first. Raises: KeyError for an
        unknown replica.
        """
        return self._table.logs(name, version, replica)

    def close(self, grace_s: float | None = None) -> None:
        """Stop all replicas at once, and the supervising thread."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("close() was called in on_event")
        if not self._table.close():
            return
        self._stop(self._table.all(), grace_s)
        self._hand_in(self._finish)
        self._thread.join()
        os.close(self._wake_fd)

    def __enter__(self) -> ProcessDeployer:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _stop(self, replicas: Sequence[_Replica], grace_s: float | None) -> None:
        grace = self._policy.grace_s if grace_s is None else grace_s
        for replica in replicas:
            self._hand_in(partial(self._ask_to_end, replica, grace))
        if threading.current_thread() is self._thread:
            return
        with self._table.changed:
            self._table.changed.wait_for(lambda: all(replica.at_rest for replica in replicas))

    def _hand_in(self, work: Callable[[], None]) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this deployer belongs to the process that forked this one")
        self._work.append(work)
        os.eventfd_write(self._wake_fd, 1)

    # -- the supervising thread

    def _run(self) -> None:
        while self._handlers:
            for fd, _ in self._poll.poll(self._pause_ms()):
                handler = self._handlers.get(
                    fd
                )  # an earlier handler of this round may have removed it
                if handler is not None:
                    self._do(handler)
            while self._work:
                self._do(self._work.popleft())
            self._do_what_is_due()

    def _do(self, work: Callable[[], object]) -> None:
        """Run a job and log its failure, so that this thread and its children live on."""
        try:
            work()
        except Exception:
            log.exception("the deployer failed at %r", work)

    def _pause_ms(self) -> float | None:
        dues = [r.handle.due_s for r in self._table.all() if r.handle.due_s is not None]
        return max(0.0, min(dues) - time.monotonic()) * 1000 + 1 if dues else None

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _finish(self) -> None:
        self._handlers.clear()

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for replica in self._table.all():
            if replica.handle.due_s is None or replica.handle.due_s > now:
                continue
            replica.handle.due_s = None
            if replica.handle.stopping:
                self._signal(replica, signal.SIGKILL)
            else:
                self._spawn(replica)

    def _spawn(self, replica: _Replica) -> None:
        if replica.handle.stopping or replica.settled:
            return
        replica.started_s = time.monotonic()
        replica.starts += 1
        try:
            replica.handle.process, replica.handle.pid_fd, replica.handle.log_fd = _start_process(
                replica.spec, replica.number
            )
        except (OSError, ValueError) as error:
            with self._table.changed:
                replica.lines.extend([f"cannot start {replica.spec.python}: {error}"])
            self._ended(replica, 0, f"not started: {error}")
            return
        self._watch(replica.handle.pid_fd, partial(self._reap, replica))
        self._watch(replica.handle.log_fd, partial(self._read_log, replica))
        self._become(replica, ReplicaState.RUNNING, EventKind.STARTED, replica.handle.pid)

    def _watch(self, fd: int, handler: Callable[[], object]) -> None:
        self._handlers[fd] = handler
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        if self._handlers.pop(fd, None) is not None:
            self._poll.unregister(fd)
            os.close(fd)

    def _read_log(self, replica: _Replica) -> bool:
        """Read what the pipe holds; return False when nothing is left."""
        try:
            data = os.read(replica.handle.log_fd, _READ_BYTES)
        except BlockingIOError:
            return False
        if not data:  # the child closed stdout and stderr, and may still run
            self._unwatch(replica.handle.log_fd)
            replica.handle.log_fd = -1
            return False
        *lines, rest = (replica.handle.partial_line + data).split(b"\n")
        while len(rest) > LOG_LINE_BYTES_MAX:
            lines.append(rest[:LOG_LINE_BYTES_MAX])
            rest = rest[LOG_LINE_BYTES_MAX:]
        replica.handle.partial_line = rest
        with self._table.changed:
            replica.lines.extend(
                [line[:LOG_LINE_BYTES_MAX].decode("utf-8", "replace") for line in lines]
            )
        return True

    def _reap(self, replica: _Replica) -> None:
        process = replica.handle.process
        code = process.poll() if process is not None else None
        if process is None or code is None:
            return
        for _ in range(64):  # bounded: a grandchild may hold the pipe and keep writing
            if replica.handle.log_fd not in self._handlers or not self._read_log(replica):
                break
        if replica.handle.partial_line:
            with self._table.changed:
                replica.lines.extend([replica.handle.partial_line.decode("utf-8", "replace")])
            replica.handle.partial_line = b""
        self._unwatch(replica.handle.pid_fd)
        self._unwatch(replica.handle.log_fd)
        (
            replica.handle.process,
            replica.handle.pid_fd,
            replica.handle.log_fd,
            replica.handle.due_s,
        ) = None, -1, -1, None
        self._ended(replica, process.pid, describe_exit(code))

    def _ended(self, replica: _Replica, pid: int, detail: str) -> None:
        replica.detail = detail
        if replica.handle.stopping:
            self._become(replica, ReplicaState.STOPPED, EventKind.STOPPED, pid, detail)
            return
        self._table.emit(replica, EventKind.EXITED, pid, detail, replica.tail())
        now = time.monotonic()
        pause_s = replica.restarts.pause(self._policy, replica.started_s, now)
        if pause_s is None:
            replica.detail = f"{detail}; {replica.restarts.looped}"
            self._become(
                replica, ReplicaState.FAILED, EventKind.FAILED, pid, replica.detail, replica.tail()
            )
            return
        replica.handle.due_s = self._spacing.next_s(now + pause_s, self._policy.apart_s)
        pause_s = replica.handle.due_s - now
        again = f"again in {pause_s:.1f} s"
        self._become(
            replica, ReplicaState.BACKOFF, EventKind.RESTARTING, pid, again, again_s=pause_s
        )

    def _ask_to_end(self, replica: _Replica, grace_s: float) -> None:
        if replica.settled:
            return
        replica.handle.stopping = True
        if replica.handle.process is None:
            replica.handle.due_s = None
            self._become(replica, ReplicaState.STOPPED, EventKind.STOPPED, detail=replica.detail)
            return
        self._signal(replica, signal.SIGTERM)
        replica.handle.due_s = time.monotonic() + grace_s

    def _kill(self, replica: _Replica, pid: int) -> None:
        if replica.handle.pid == pid:
            self._signal(replica, signal.SIGKILL)

    def _signal(self, replica: _Replica, number: signal.Signals) -> None:
        if replica.handle.process is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(replica.handle.pid_fd, number)

    def _become(
        self,
        replica: _Replica,
        state: ReplicaState,
        kind: EventKind,
        pid: int = 0,
        detail: str = "",
        log_tail: tuple[str, ...] = (),
        again_s: float = 0.0,
    ) -> None:
        """Change the state, deliver the event, then wake waiting threads, which so never precede
        the event.
        """
        with self._table.changed:
            replica.state = state
        self._table.emit(replica, kind, pid, detail, log_tail, again_s)
        with self._table.changed:
            replica.at_rest = replica.settled
            self._table.changed.notify_all()
