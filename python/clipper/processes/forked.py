"""Processes that are forked from a fork server where that is possible, and spawned otherwise."""

import contextlib
import json
import signal
import socket
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Protocol

from clipper.processes.fork_servers import ForkServers, Program
from clipper.processes.handle import End, Told, describe_exit
from clipper.processes.output import Output
from clipper.processes.spawned import Process, StartCommand, spawn
from clipper_container.forking import Message
from clipper_container.forking.replica import REQUEST_BYTES_MAX
from clipper_container.start_folder import StartFolder

_REPORT_BYTES_MAX: Final = 1 << 18
_REPORTS_MAX: Final = 64  # that are read once a process has ended
_CODE_S: Final = 1.0  # from the end of a forked process to its exit code


class Work(Protocol):
    """The work of a process, either way it is started. Threads: the supervisor's."""

    def program(self, number: int) -> Program | str:
        """Return the program of start `number` for a fork server, or why it must be started
        plainly."""

    def request(self, number: int) -> Mapping[str, object]:
        """Return what a forked process is sent for start `number`, as JSON; one without a session
        of its own gets the environment of its program as well."""

    def descriptors(self) -> Sequence[int]:
        """Return the descriptors that a forked process is sent with the request."""

    def command(self, number: int, control: int) -> StartCommand:
        """Return the command of a plain start. control: the descriptor of its control socket."""

    def reported(self, report: Message, told: Told) -> bool:
        """Take what the process reports on its control socket; return False for the last one."""

    def ended(self) -> str:
        """Take note that the process has ended; return what the next start does differently."""


class ForkedChild:
    """A handle of a process with a control socket; see `Handle`.

    folder: where a plain start is; None: at the root. A forked process that ends with its fork
    server is started again.
    """

    _told: Told  # these five are of the start that is under way
    _output: Output
    _control: socket.socket
    _theirs: socket.socket
    _session: bool

    def __init__(self, servers: ForkServers, work: Work, folder: StartFolder | None = None) -> None:
        self._servers = servers
        self._work = work
        self._folder = folder
        # for the start that is under way
        self._opened = contextlib.ExitStack()
        self._number = 0
        self._message = b""
        self._process: Process | None = None
        self._gone = False  # it was forked and has ended; its exit code is to come
        self._lost = False  # its fork server has ended

    # -- Handle

    def start(self, number: int, told: Told) -> None:
        """See Handle."""
        self._number, self._told = number, told
        self._process = None
        self._gone = False
        self._lost = False
        self._opened.callback(self._servers.forget, self)
        self._output = Output(told)
        self._opened.callback(self._output.finish)
        self._connect()
        why = self._request()
        if why:
            self._spawn(why)

    def _connect(self) -> None:
        """Make the control socket. Raises: OSError."""
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._opened.callback(self._control.close)
        self._opened.callback(self._theirs.close)
        self._control.setblocking(False)
        self._told.watch(self._control.fileno(), self._read_report)

    def _request(self) -> str:
        """Request the process from a fork server; return why that cannot be."""
        program = self._work.program(self._number)
        if isinstance(program, str):
            return program
        request = {**self._work.request(self._number)}
        if not program.session:
            request["environment"] = {**program.environment, **self._told.group(program.limits)}
        self._message = json.dumps(request).encode()
        if len(self._message) > REQUEST_BYTES_MAX:
            return "its arguments are too long for a fork server"
        self._session = program.session
        fds = self._output.for_child, self._theirs.fileno()
        return self._servers.request(program, fds, self)

    def hurry(self) -> None:
        """See Handle."""
        why = "the fork server did not answer in time"
        self._servers.give_up(self, why)
        # it may answer yet, and then its child sees the end of the first control socket
        self._theirs.close()
        self._end_reports()
        self._connect()
        self._spawn(why)

    def signal(self, number: signal.Signals) -> None:
        """See Handle."""
        if self._process is not None:
            self._process.signal(number)

    def clear(self) -> None:
        """See Handle."""
        self._opened.close()
        self._process = None

    # -- Requester

    def forked(self, pid: int, pid_fd: int) -> None:
        """See Requester."""
        self._runs(Process(pid, pid_fd))
        self._told.do(partial(self._or_fails, partial(self._instruct, pid, pid_fd)))

    def refused(self, why: str) -> None:
        """See Requester."""
        self._told.do(partial(self._or_fails, partial(self._spawn, why)))

    def lacks(self, why: str) -> None:
        """See Requester."""
        self._told.do(partial(self._told.lacks, why))

    def code(self, pid: int, code: int) -> None:
        """See Requester."""
        if self._is(pid):  # not of a process before this one
            self._told.do(partial(self._over, End(code, describe_exit(code))))

    def lost(self, pid: int) -> None:
        """See Requester."""
        if self._is(pid):
            self._told.do(self._has_lost)

    # -- its life

    def _or_fails(self, start: Callable[[], None]) -> None:
        """Go on with a start; tell if it fails."""
        try:
            start()
        except (OSError, MemoryError, ValueError) as error:
            self._told.failed(error)

    def _instruct(self, pid: int, pid_fd: int) -> None:
        """Tell a forked process what it is to do. Raises: OSError."""
        self._told.watch(pid_fd, self._has_ended)
        with contextlib.suppress(ConnectionError):  # it has ended; its pidfd tells
            socket.send_fds(self._control, [self._message], [*self._work.descriptors()])
        self._told.started(pid, "forked")

    def _has_lost(self) -> None:
        """Note that the fork server of the process has ended."""
        self._lost = True
        if self._gone:
            self._over(self._end_of_lost())
        elif not self._session:
            self.signal(signal.SIGKILL)  # the kernel does it too

    def _is(self, pid: int) -> bool:
        return self._process is not None and self._process.pid == pid

    def _runs(self, process: Process) -> None:
        """Take over a process that has its ends of pipe and socket."""
        self._process = process
        self._opened.callback(process.end)
        self._output.handed_over()
        self._theirs.close()

    def _spawn(self, why: str) -> None:
        """Start the process plainly. Raises: OSError, MemoryError, ValueError."""
        command = self._work.command(self._number, self._theirs.fileno()).for_start(self._told)
        process = spawn(command, self._output.for_child, self._folder)
        self._runs(process)
        process.follow(self._told, self._over)
        self._told.started(process.pid, f"plain: {why}")

    def _end_of_lost(self) -> End:
        if self._session:
            return End(None, "ended; its fork server had ended before")
        return End(None, "ended with its fork server", own=True)

    def _has_ended(self) -> None:
        """Note that a forked process has ended; its fork server reports the exit code."""
        assert self._process is not None
        self._told.unwatch(self._process.fd)
        self._gone = True
        if self._lost:
            self._over(self._end_of_lost())
        else:
            late = End(None, "ended; its fork server does not report how")
            self._told.later(_CODE_S, partial(self._over, late))

    def _over(self, end: End) -> None:
        """Tell the end, once its last reports and lines are read."""
        changed = ""
        try:
            for _ in range(_REPORTS_MAX):
                if not self._read_report():
                    break
            self._output.finish()
            changed = self._work.ended()
            if changed:
                self._told.wrote([changed])
        finally:
            self._told.ended(End(end.code, end.detail, end.own, changed))

    def _read_report(self) -> bool:
        """Read what the process reports (`clipper_container.forking.report`); return False when
        nothing is left."""
        if self._control.fileno() < 0:
            return False
        try:
            data = self._control.recv(_REPORT_BYTES_MAX)
            report = json.loads(data) if data else None
        except BlockingIOError:
            return False
        except (OSError, ValueError):
            report = None
        if isinstance(report, dict) and self._work.reported(report, self._told):
            return True
        self._end_reports()
        return False

    def _end_reports(self) -> None:
        self._told.unwatch(self._control.fileno())
        self._control.close()
        self._told.is_up()
