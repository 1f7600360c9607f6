"""Replicas as processes on this machine, under one supervising thread.

A replica is forked from a process that has imported its frameworks where that is possible
(`fork_servers`), and started plainly otherwise.

The thread polls each child's pidfd (readable when it ends; unlike a pid it is never reused), the
pipe of its output, and an eventfd through which other threads submit work. This thread also starts
the children and the fork servers, because they ask for SIGKILL when their parent ends
(PR_SET_PDEATHSIG), and to Linux the parent is the thread that forked. So a killed server leaves no
model processes.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from clipper.deploy.deployer import (
    ContainerSpec,
    EventKind,
    LogLines,
    OnEvent,
    ReplicaState,
    ReplicaStatus,
    options,
)
from clipper.deploy.processes.command import command_line, variables
from clipper.deploy.processes.fork_servers import ANSWER_S, ForkedStart, ForkServers, request
from clipper.deploy.processes.warmup_deaths import WarmUpDeaths
from clipper.deploy.replica_table import (
    LOG_LINE_BYTES_MAX,
    LOG_LINES_MAX,
    Key,
    ReplicaRecord,
    ReplicaTable,
)
from clipper.deploy.restarts import RestartPolicy, Restarts, Spacing, StartLimit
from clipper_container.forking.replica import REQUEST_BYTES_MAX

TOKEN_ENV = "CLIPPER_TOKEN"
_READ_BYTES = 64 << 10
_REPORT_BYTES_MAX = 1 << 18
_CODE_S = 1.0  # from the end of a forked process to its exit code
OFF = "server.fork_server is off"

log = logging.getLogger("clipper.deploy")


@dataclass(slots=True)
class _Child:
    """The child process of a replica."""

    pid: int = 0
    process: subprocess.Popen[bytes] | None = None  # None if it was forked
    pid_fd: int = -1
    log_fd: int = -1
    reports: socket.socket | None = None  # what it reports while it starts
    requested: ForkedStart | None = None  # requested from a fork server
    gone: bool = False  # a forked process that has ended; its exit code is to come
    lost: bool = False  # its fork server has ended, and so it ends
    due_s: float | None = None  # of the next start (BACKOFF), of SIGKILL (stopping), of an answer
    stopping: bool = False
    partial_line: bytes = b""
    warmup: WarmUpDeaths = field(default_factory=WarmUpDeaths)


_Replica = ReplicaRecord[_Child]


def command(spec: ContainerSpec, replica: int) -> Sequence[str]:
    """Return the command line of a container. It contains no secret."""
    if spec.command:
        return command_line(spec.command, spec.folder)
    return [*_program(spec), *arguments(spec, replica, str(os.getpid()))]


def _program(spec: ContainerSpec) -> Sequence[str]:
    return [spec.python, "-X", "faulthandler", "-m", "clipper_container"]


def arguments(spec: ContainerSpec, replica: int, parent: str) -> Sequence[str]:
    """Return the arguments of clipper_container. parent: process id of the container's parent."""
    words = ["serve", spec.target, *options(spec), "--connect", spec.connect]
    words += ["--replica", str(replica), "--threads", str(spec.threads)]
    words += ["--token-env", TOKEN_ENV, "--die-with-parent", parent]
    for directory in spec.code:
        words += ["--code", directory]
    return words


def environment(spec: ContainerSpec, replica: int = 0) -> dict[str, str]:
    """Return the environment of a container: ours, the spec's, the token, and for a command what
    it is.
    """
    own = {**os.environ, "PYTHONUNBUFFERED": "1", **spec.env, TOKEN_ENV: spec.token}
    return {**own, **variables(spec, replica)} if spec.command else own


def describe_exit(code: int) -> str:
    """Describe an exit code: "exit 3", "killed (SIGKILL)"."""
    if code >= 0:
        return f"exit {code}"
    try:
        return f"killed ({signal.Signals(-code).name})"
    except ValueError:
        return f"killed (signal {-code})"


def _start_process(
    words: Sequence[str], environment: Mapping[str, str], output: int, report_fd: int
) -> tuple[subprocess.Popen[bytes], int]:
    """Start a process; return it and its pidfd.

    output: descriptor of its stdout and stderr. report_fd: socket that it inherits.

    Raises: OSError; ValueError for a NUL in an argument.
    """
    with contextlib.ExitStack() as undo:
        process = subprocess.Popen(
            words,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            pass_fds=[report_fd],
        )
        undo.callback(process.wait)
        undo.callback(process.kill)
        pid_fd = os.pidfd_open(process.pid)
        undo.pop_all()
        return process, pid_fd


def _title(replica: _Replica) -> str:
    return f"clipper-container {replica.spec.name}:{replica.spec.version}/{replica.number}"


class ProcessDeployer:
    """Runs each replica as a child process and restarts it when it ends, unless it ends too often.
    Few start at once (`StartLimit`); restarts wait for none.

    on_event: called for each `ReplicaEvent` in the supervising thread; must not block; may call any
    method except close(). fork: whether replicas may be forked from a fork server. log_lines_max:
    lines kept of each replica's output.

    Threads: any. A fork of this process must not use it.
    """

    def __init__(
        self,
        on_event: OnEvent | None = None,
        policy: RestartPolicy | None = None,
        fork: bool = True,
        log_lines_max: int = LOG_LINES_MAX,
    ) -> None:
        self._policy = policy or RestartPolicy()
        self._fork, self._log_lines_max = fork, log_lines_max
        self._fork_servers = ForkServers(self._watch, self._unwatch)
        self._table = ReplicaTable[_Child](lambda replica: replica.handle.pid, on_event)
        self._work: deque[Callable[[], None]] = deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake_fd, select.POLLIN)
        self._handlers: dict[int, Callable[[], object]] = {self._wake_fd: self._clear_wake}
        self._spacing, self._starts = Spacing(), StartLimit[Key]()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="clipper-deployer", daemon=True)
        self._thread.start()

    # -- called by anyone

    def start(self, spec: ContainerSpec, replica: int = 0) -> None:
        """Start a replica and keep it running; returns before it serves.

        Raises: ValueError if it runs already; RuntimeError after close().
        """
        new = _Replica(spec, replica, _Child(), lines=LogLines(self._log_lines_max))
        with self._table.changed:
            self._table.add(new, lambda old: old.settled)
        self._hand_in(partial(self._first_start, new))

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
            self._hand_in(partial(self._request_end, replica, grace))
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
        idle_s = self._fork_servers.next_due_s()
        dues += [due_s for due_s in (idle_s, self._starts.due_s()) if due_s is not None]
        return max(0.0, min(dues) - time.monotonic()) * 1000 + 1 if dues else None

    def _clear_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def _finish(self) -> None:
        self._fork_servers.close()
        self._handlers.clear()

    def _do_what_is_due(self) -> None:
        now = time.monotonic()
        for replica in self._table.all():
            if replica.handle.due_s is None or replica.handle.due_s > now:
                continue
            replica.handle.due_s = None
            if replica.handle.gone:
                self._reaped(replica, None)
            elif replica.handle.stopping:
                self._signal(replica, signal.SIGKILL)
            elif replica.handle.requested is not None:
                self._fork_servers.give_up(replica.handle.requested)
                self._refused(replica, f"the fork server did not answer within {ANSWER_S:g} s")
            else:
                self._spawn(replica)
        self._fork_servers.do_due()
        self._start_waiting()

    def _first_start(self, replica: _Replica) -> None:
        """Start a replica for the first time, after those that start or wait already."""
        before = self._starts.wait(replica.key)
        self._start_waiting()
        if not replica.starts:
            detail = f"containers that start before it: {before}"
            self._table.emit(replica, EventKind.WAITING, 0, detail)

    def _start_waiting(self) -> None:
        while (key := self._starts.next(time.monotonic())) is not None:
            if (waited := self._table.get(*key)) is not None:
                self._spawn(waited)

    def _spawn(self, replica: _Replica) -> None:
        if replica.handle.stopping or replica.settled:
            return
        replica.started_s = time.monotonic()
        replica.starts += 1
        self._starts.began(replica.key, replica.started_s)
        handle = replica.handle
        try:
            handle.log_fd, output = os.pipe2(os.O_CLOEXEC)
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        except OSError as error:
            self._ended(replica, 0, f"not started: {error}")
            return
        os.set_blocking(handle.log_fd, False)
        ours.setblocking(False)
        handle.reports = ours
        self._watch(handle.log_fd, partial(self._read_log, replica))
        self._watch(ours.fileno(), partial(self._read_report, replica))
        around = environment(replica.spec)
        message = request(self._arguments(replica, "PARENT"), around, _title(replica))
        handle.requested = ForkedStart(
            output,
            theirs.detach(),
            partial(self._forked, replica, message),
            partial(self._refused, replica),
            partial(self._forked_code, replica),
        )
        handle.due_s = time.monotonic() + ANSWER_S
        why = (
            "it is a command"
            if replica.spec.command
            else OFF
            if not self._fork
            else "its arguments are too long for a fork server"
            if len(message) > REQUEST_BYTES_MAX
            else self._fork_servers.request(replica.spec, around, handle.requested)
        )
        if why:
            self._refused(replica, why)

    def _arguments(self, replica: _Replica, parent: str) -> Sequence[str]:
        rows_max = replica.handle.warmup.rows_max
        words = arguments(replica.spec, replica.number, parent)
        only = ["--only-replica"] if replica.starts > 1 and not self._others_run(replica) else []
        return [*words, *only, *([] if rows_max is None else ["--warmup-max", str(rows_max)])]

    def _others_run(self, replica: _Replica) -> bool:
        """Return whether another replica of the model's version runs."""
        return any(
            other is not replica
            and other.key[:2] == replica.key[:2]
            and other.state is ReplicaState.RUNNING
            for other in self._table.all()
        )

    def _plain_words(self, replica: _Replica, report_fd: int) -> Sequence[str]:
        if replica.spec.command:
            return command(replica.spec, replica.number)
        words = [*_program(replica.spec), *self._arguments(replica, str(self._pid))]
        return [*words, "--report-fd", str(report_fd)]

    def _forked(self, replica: _Replica, report: bytes, pid: int, pid_fd: int) -> None:
        """Note that a fork server has forked the process, which waits for what to run."""
        handle = replica.handle
        self._close_request(replica)
        if handle.reports is not None:
            with contextlib.suppress(OSError):  # it has ended; its pidfd tells
                handle.reports.send(report)
        handle.pid, handle.pid_fd = pid, pid_fd
        self._watch(pid_fd, partial(self._forked_ended, replica))
        self._started(replica, "")

    def _refused(self, replica: _Replica, why: str) -> None:
        """Start the process plainly: no fork server makes it."""
        handle, wanted = replica.handle, replica.handle.requested
        if wanted is None:
            return
        try:
            handle.process, handle.pid_fd = _start_process(
                self._plain_words(replica, wanted.control),
                environment(replica.spec, replica.number),
                wanted.output,
                wanted.control,
            )
        except (OSError, ValueError) as error:
            with self._table.changed:
                replica.lines.extend([f"cannot start {command(replica.spec, 0)[0]}: {error}"])
            self._close_request(replica)
            self._end_reports(replica)
            self._unwatch(handle.log_fd)
            handle.log_fd = -1
            self._ended(replica, 0, f"not started: {error}")
            return
        self._close_request(replica)
        handle.pid = handle.process.pid
        self._watch(handle.pid_fd, partial(self._reap, replica))
        self._started(replica, why)

    def _close_request(self, replica: _Replica) -> None:
        wanted, replica.handle.requested, replica.handle.due_s = (
            replica.handle.requested,
            None,
            None,
        )
        if wanted is not None:
            os.close(wanted.output)
            os.close(wanted.control)

    def _started(self, replica: _Replica, plain: str) -> None:
        with self._table.changed:
            replica.start = f"plain: {plain}" if plain else "forked"
        self._become(
            replica, ReplicaState.RUNNING, EventKind.STARTED, replica.handle.pid, replica.start
        )

    def _read_report(self, replica: _Replica) -> None:
        """Read what a starting container reports (`clipper_container.forking.report`)."""
        reports, warmup = replica.handle.reports, replica.handle.warmup
        if reports is None:
            return
        try:
            data = reports.recv(_REPORT_BYTES_MAX)
            report = json.loads(data) if data else None
        except BlockingIOError:
            return
        except (OSError, ValueError):
            report = None
        if not isinstance(report, dict):
            self._end_reports(replica)
        elif isinstance(rows := report.get("warming"), int):
            warmup.began(rows)
        elif "warm" in report:
            warmup.over()
            if "modules" in report:
                self._fork_servers.learn(
                    replica.spec, environment(replica.spec), report["modules"], report["packages"]
                )
        elif "plain" in report:
            self._fork_servers.start_plainly(replica.spec, str(report["plain"]))
            with self._table.changed:
                replica.start = f"plain: {report['plain']}"

    def _end_reports(self, replica: _Replica) -> None:
        self._starts.ended(replica.key)
        if replica.handle.reports is not None:
            self._unwatch(replica.handle.reports.detach())
            replica.handle.reports = None

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
        """Reap a child of this process."""
        process = replica.handle.process
        code = process.poll() if process is not None else None
        if code is not None:
            self._reaped(replica, code)

    def _forked_ended(self, replica: _Replica) -> None:
        """Note that a forked process has ended; its fork server reports the exit code."""
        handle = replica.handle
        if handle.lost:
            self._reaped(replica, None)
            return
        self._unwatch(handle.pid_fd)
        handle.pid_fd = -1
        handle.gone, handle.due_s = True, time.monotonic() + _CODE_S

    def _forked_code(self, replica: _Replica, code: int | None) -> None:
        """Return the exit code of a forked process; None if its fork server has ended before."""
        handle = replica.handle
        if code is not None or handle.gone:
            self._reaped(replica, code)
            return
        handle.lost = True
        self._signal(replica, signal.SIGKILL)  # the kernel does it too

    def _reaped(self, replica: _Replica, code: int | None) -> None:
        """Note that the process has ended. code: None if its fork server ended too, and it with
        that."""
        handle = replica.handle
        if handle.reports is not None:
            for _ in range(64):
                self._read_report(replica)
                if handle.reports is None:
                    break
        for _ in range(64):  # bounded: a grandchild may hold the pipe and keep writing
            if handle.log_fd not in self._handlers or not self._read_log(replica):
                break
        if handle.partial_line:
            with self._table.changed:
                replica.lines.extend([handle.partial_line.decode("utf-8", "replace")])
            handle.partial_line = b""
        self._unwatch(handle.pid_fd)
        self._unwatch(handle.log_fd)
        self._end_reports(replica)
        pid, lost = handle.pid, handle.lost
        handle.process, handle.pid, handle.pid_fd, handle.log_fd = None, 0, -1, -1
        handle.gone, handle.lost, handle.due_s = False, False, None
        if lost:
            replica.restarts = Restarts()  # not the replica's fault
        detail = (
            describe_exit(code)
            if code is not None
            else "ended with its fork server"
            if lost
            else "ended; its fork server does not report how"
        )
        self._ended(replica, pid, detail)

    def _ended(self, replica: _Replica, pid: int, detail: str) -> None:
        self._starts.ended(replica.key)
        replica.detail = detail
        if replica.handle.stopping:
            self._become(replica, ReplicaState.STOPPED, EventKind.STOPPED, pid, detail)
            return
        self._table.emit(replica, EventKind.EXITED, pid, detail, replica.tail())
        if remedy := replica.handle.warmup.ended():
            log.warning("container %s/%d: %s", replica.spec.name, replica.number, remedy)
            with self._table.changed:
                replica.lines.extend([remedy])
            replica.restarts = Restarts()
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

    def _request_end(self, replica: _Replica, grace_s: float) -> None:
        if replica.settled:
            return
        replica.handle.stopping = True
        self._starts.ended(replica.key)
        if replica.handle.gone:
            return
        if not replica.handle.pid:
            if replica.handle.requested is not None:
                self._fork_servers.forget(replica.handle.requested)
                self._close_request(replica)
                self._end_reports(replica)
                self._unwatch(replica.handle.log_fd)
                replica.handle.log_fd = -1
            replica.handle.due_s = None
            self._become(replica, ReplicaState.STOPPED, EventKind.STOPPED, detail=replica.detail)
            return
        self._signal(replica, signal.SIGTERM)
        replica.handle.due_s = time.monotonic() + grace_s

    def _kill(self, replica: _Replica, pid: int) -> None:
        if replica.handle.pid == pid:
            self._signal(replica, signal.SIGKILL)

    def _signal(self, replica: _Replica, number: signal.Signals) -> None:
        if replica.handle.pid_fd >= 0:
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
