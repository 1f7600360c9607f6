"""The fork servers of a supervisor: one for each environment and set of packages.

A fork server imports what its children need once; they are forked from it, start in tens of
milliseconds, and share its memory (`clipper_container.forking`). A child is started plainly where
no fork server can make it, and the reason is recorded.

Fork servers are children of the supervisor, which the kernel kills when its thread ends. Whether a
child ends with its fork server, too, is said by its program: models do, since nothing else would
end them with the server; shards do not.
"""

import contextlib
import errno
import json
import logging
import os
import resource
import socket
import sys
import time
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from clipper.processes.child import SHORT, TRIED
from clipper.processes.handle import NO_LIMITS, Notice, NoticeKind, ProcessLimits
from clipper.processes.restarts import RestartPolicy
from clipper.processes.spawned import Spawned, StartCommand
from clipper.processes.supervisor import TAIL_LINES, Supervisor
from clipper_container.forking import Message
from clipper_container.forking.fork_server import MESSAGE_BYTES_MAX
from clipper_container.forking.hints import top_level
from clipper_container.shortage import is_own

FORK_SERVERS_MAX: Final = 8
IDLE_S: Final = 60.0  # a fork server without children ends after this
PREPARE_S: Final = 2.0  # from a child's start to the import of what it was seen to import
QUICK_S: Final = 5.0  # a fork server that lives shorter has failed to start
QUICK_MAX: Final = 3  # failures of one kind of fork server, after which its children start plainly
NAMES_MAX: Final = 10_000  # modules of one child
REMEMBERED_MAX: Final = 256  # programs of which it is known what they import, or why not so
_NAMES_A_PACKET: Final = 500
# Variables that change while a server runs and that no framework reads when it is imported.
_UNIMPORTANT: Final = frozenset(
    {"PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"}
)
_POLICY: Final = RestartPolicy(again=False, last=True, grace_s=0.0)
log = logging.getLogger("clipper.processes")
_Name = TypeVar("_Name")
_Value = TypeVar("_Value")


@dataclass(frozen=True, slots=True)
class Program:
    """The description of a child for its fork server.

    id: by which it is remembered. entry: `module:function`, called in the child (`Entry`).
    environment: what the child will have; without secrets. imports: modules of installed packages.
    preload: modules from any place. session: whether the child gets a session of its own, and goes
    on when its fork server ends. urgent: whether nothing serves in its place now; then a fork
    server that is started for it imports at the usual CPU priority. limits: of a child without a
    session.
    """

    id: Hashable
    entry: str
    environment: Mapping[str, str]
    imports: Sequence[str] = ()
    preload: tuple[str, ...] = ()
    python: str = sys.executable
    session: bool = False
    urgent: bool = False
    limits: ProcessLimits = NO_LIMITS


class Requester(Protocol):
    """The part that requests a child, and follows it. Threads: the supervisor's."""

    def forked(self, pid: int, pid_fd: int) -> None:
        """Take over the child and its pidfd; it waits on its control socket."""

    def refused(self, why: str) -> None:
        """Take note that no fork server makes it."""

    def lacks(self, why: str) -> None:
        """Take note that something is lacking for it."""

    def code(self, pid: int, code: int) -> None:
        """Take the exit code of a child; it may be one before the present one."""

    def lost(self, pid: int) -> None:
        """Take note that the fork server of a child has ended."""


@dataclass(frozen=True, slots=True)
class _Key:
    """The settings that the children of one fork server share."""

    python: str
    packages: frozenset[str]
    preload: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]
    circumstances: tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Request:
    requester: Requester
    program: Program
    fds: tuple[int, int]


@dataclass(slots=True)
class _ForkServer:
    key: _Key
    name: str
    program: Program  # that it was made for
    connection: socket.socket
    began_s: float
    used_s: float
    pid: int = 0
    names: set[str] = field(default_factory=set)
    requests: dict[int, _Request] = field(default_factory=dict)
    children: dict[int, Requester] = field(default_factory=dict)
    refuses: str = ""  # why it forks no more
    short: str = ""  # what the server lacks for its start

    @property
    def is_idle(self) -> bool:
        """Return whether it has neither children nor requests."""
        return not self.children and not self.requests


class ForkServers:
    """Starts, finds and ends fork servers. Threads: the supervisor's."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor
        self._all: list[_ForkServer] = []
        self._plain: dict[Hashable, str] = {}  # programs that are started plainly, and why
        self._blamed: dict[tuple[str, str], str] = {}  # (python, package) -> why it is not imported
        self._failures: dict[_Key, int] = {}
        # modules and packages that a program was seen to import
        self._learned: dict[Hashable, tuple[tuple[str, ...], frozenset[str]]] = {}
        self._last_id = 0
        self._looks = False  # whether idle ones will be looked for

    # -- children

    def request(self, program: Program, fds: tuple[int, int], requester: Requester) -> str:
        """Request a child; return "", or why it must be started plainly.

        fds: for its output, and its end of the control socket.

        Raises: OSError if the server lacks what a fork server needs.
        """
        if why := self._plain.get(program.id):
            return why
        found = self._find(program)
        if isinstance(found, str):
            return found
        self._last_id += 1
        number = self._last_id
        message = {"id": number, "entry": program.entry, "session": program.session}
        if not _send(found, message, fds):
            return "the fork server does not read its requests"
        found.requests[number] = _Request(requester, program, fds)
        found.used_s = time.monotonic()
        return ""

    def give_up(self, requester: Requester, why: str) -> None:
        """Forget a child that was requested, and use its fork server no more."""
        for one in [*self._all]:
            for number, request in [*one.requests.items()]:
                if request.requester is requester:
                    del one.requests[number]
                    self._end(one, why)

    def forget(self, requester: Requester) -> None:
        """Forget a child that was requested and is stopped before it starts."""
        for one in [*self._all]:
            one.requests = {
                number: request
                for number, request in one.requests.items()
                if request.requester is not requester
            }
            self._close_if_empty(one)

    def start_plainly(self, program: Program, why: str) -> None:
        """Start the children of this program plainly from now on."""
        self._plain[program.id] = why
        _forget_old(self._plain)

    def learn(self, program: Program, modules: Sequence[str], packages: Sequence[str]) -> None:
        """Record what a forked child imported by itself; a fork server will have it soon.

        packages: those of which its own fork server has nothing: another one imports them.
        """
        if modules and program.id not in self._learned and len(modules) <= NAMES_MAX:
            self._learned[program.id] = tuple(modules), top_level(packages)
            _forget_old(self._learned)
            self._supervisor.later(PREPARE_S, partial(self._prepare, program))

    def _prepare(self, program: Program) -> None:
        with contextlib.suppress(OSError):  # the next child needs it, and says why
            self._find(program)

    def _find(self, program: Program) -> _ForkServer | str:
        """Return the fork server of a program, or why there is none. Raises: OSError."""
        names, packages = self._imports(program)
        environment = tuple(
            sorted(
                (name, value)
                for name, value in program.environment.items()
                if not name.startswith("CLIPPER_") and name not in _UNIMPORTANT
            )
        )
        key = _Key(program.python, packages, program.preload, environment, _circumstances())
        if self._failures.get(key, 0) >= QUICK_MAX:
            return "its fork server ends as soon as it starts"
        usable = [one for one in self._all if not one.refuses]
        found = next((one for one in usable if one.key == key), None)
        if found is not None and _is_frozen(found.pid):
            self._end(found, "it is stopped")
            found = None
        if found is None:
            if self._supervisor.is_closing:
                return "this process ends"
            if len(usable) >= FORK_SERVERS_MAX and not self._end_idle(0.0):
                return f"{FORK_SERVERS_MAX} fork servers run already"
            try:
                found = self._start(key, program)
            except OSError as error:
                if is_own(error):
                    raise
                return f"no fork server: {error}"
        fresh = [name for name in names if name not in found.names]
        for begin in range(0, len(fresh), _NAMES_A_PACKET):
            packet = fresh[begin : begin + _NAMES_A_PACKET]
            _send(found, {"imports": packet})
            found.names.update(packet)
        return found

    def _imports(self, program: Program) -> tuple[list[str], frozenset[str]]:
        """Return the modules and the packages that a program imports, without packages that make a
        fork unsafe.
        """
        modules, packages = self._learned.get(program.id, ((), frozenset()))
        blamed = {top for python, top in self._blamed if python == program.python}
        names = [
            name
            for name in dict.fromkeys([*program.imports, *modules])
            if name.partition(".")[0] not in blamed
        ]
        return names, (top_level(program.imports) | packages) - blamed

    # -- fork servers

    def _start(self, key: _Key, program: Program) -> _ForkServer:
        """Start a fork server. Raises: OSError."""
        words = [key.python, "-P", "-X", "faulthandler", "-m", "clipper_container", "fork-server"]
        words += ["--die-with-parent", str(os.getpid())]
        if program.urgent:
            words.append("--usual-priority")
        left = {k: v for k, v in program.environment.items() if not k.startswith("CLIPPER_")}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, contextlib.ExitStack() as undo:
            undo.callback(ours.close)
            ours.setblocking(False)
            now = time.monotonic()
            self._last_id += 1
            one = _ForkServer(key, f"fork-server-{self._last_id}", program, ours, now, now)
            self._supervisor.loop.add_reader(ours.fileno(), self._guarded, one)
            undo.callback(self._supervisor.loop.remove_reader, ours.fileno())
            handle = Spawned(StartCommand(words, left, stdin=theirs.fileno()))
            self._all.append(one)
            undo.callback(self._all.remove, one)
            # it runs, or has failed, when this returns, since this is the supervisor's thread
            self._supervisor.add(one.name, handle, _POLICY, self)
            undo.pop_all()
        if one.short:
            self._retire(one, one.short)
            self._supervisor.stop([one.name])
            lacking = OSError(one.short)
            lacking.errno = errno.EAGAIN
            raise lacking
        if one.refuses:
            raise OSError(one.refuses)
        self._look_later()
        if key.preload:
            try:
                _send(one, {"preload": list(key.preload)})
            except OSError as error:
                self._end(one, str(error))
                raise
        imported = ", ".join([*sorted(key.packages), *key.preload]) or "numpy"
        log.info("process %d forks replicas that import %s", one.pid, imported)
        return one

    def _guarded(self, one: _ForkServer) -> None:
        """Handle the messages of a fork server; one that sends an invalid message is killed."""
        try:
            with self._supervisor.spare_descriptors():
                self._receive(one)
        except Exception:
            log.exception("fork server %d is ended", one.pid)
            self._supervisor.restart(one.name, one.pid)

    def _receive(self, one: _ForkServer) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(
                    one.connection, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
            except BlockingIOError:
                return
            except OSError:
                data, fds = b"", []
            if not data:  # its end tells the rest
                self._supervisor.loop.remove_reader(one.connection.fileno())
                return
            self._handle(one, json.loads(data), fds)

    def _handle(self, one: _ForkServer, message: Message, fds: list[int]) -> None:
        if "unsafe" in message:
            self._unsafe(one, message["unsafe"], message["module"])
        elif "error" in message:
            self._not_forked(one, message)
        elif "code" in message:
            child, one.used_s = one.children.pop(message["pid"], None), time.monotonic()
            if child is not None:
                child.code(message["pid"], message["code"])
            self._close_if_empty(one)
        elif "pid" in message:
            self._forked(one, message, fds)

    def _forked(self, one: _ForkServer, message: Message, fds: list[int]) -> None:
        known = one.requests.pop(message["id"], None)
        one.used_s = time.monotonic()
        if known is None:  # given up; its control socket is closed, so it ends by itself
            for fd in fds:
                os.close(fd)
            self._close_if_empty(one)
        elif not fds:  # no descriptor was free for the pidfd; it ends with its control socket
            known.requester.lacks("no file descriptor is free for its process")
        else:
            one.children[message["pid"]] = known.requester
            known.requester.forked(message["pid"], fds[0])

    def _not_forked(self, one: _ForkServer, message: Message) -> None:
        """Request a child again that a fork server did not make: of a newer fork server, or as a
        plain start.
        """
        known, why = one.requests.pop(message["id"], None), message["error"]
        if message.get("own"):
            if known is not None:
                known.requester.lacks(why)
            return
        self._retire(one, why)
        if known is None:
            return
        try:
            if why.startswith("stale"):
                why = self.request(known.program, known.fds, known.requester)
        except OSError as short:
            known.requester.lacks(str(short))
            return
        if why:
            known.requester.refused(why)

    def _unsafe(self, one: _ForkServer, why: str, package: str) -> None:
        log.warning("fork server %d is used no more: %s", one.pid, why)
        if package:
            self._blamed[one.key.python, package] = why
        requests, one.requests = [*one.requests.values()], {}
        self._retire(one, why)
        for request in requests:
            if one.key.preload and not package:  # another fork server would not do better
                self.start_plainly(request.program, why)
            request.requester.refused(why)

    def _end(self, one: _ForkServer, why: str) -> None:
        """Use a fork server that does not answer no more, and kill it unless it has children."""
        self._retire(one, why)
        if not one.children:
            self._supervisor.restart(one.name, one.pid)

    def _retire(self, one: _ForkServer, why: str) -> None:
        """Let a fork server make no more children; it ends with its last one."""
        one.refuses = one.refuses or why
        self._close_if_empty(one)

    def _close_if_empty(self, one: _ForkServer) -> None:
        if one.refuses and one.is_idle:
            with contextlib.suppress(OSError):
                one.connection.shutdown(socket.SHUT_RDWR)  # it ends at the end of the stream

    def on_notice(self, name: str, notice: Notice) -> None:
        """See ChildListener."""
        (one,) = [each for each in self._all if each.name == name]
        match notice.kind:
            case NoticeKind.STARTED:
                one.pid = notice.pid
            case NoticeKind.RESTARTING:
                one.short = notice.detail.removeprefix(SHORT).removesuffix(TRIED)
            case NoticeKind.STOPPED:
                self._ended(one, notice)
            case NoticeKind.FAILED:  # with the supervising thread, and so did its children
                one.connection.close()

    def _ended(self, one: _ForkServer, notice: Notice) -> None:
        """Take note of the end of a fork server: its requests are refused, its children told."""
        if one.connection.fileno() >= 0:
            self._supervisor.loop.remove_reader(one.connection.fileno())
            try:
                self._receive(one)
            except Exception:
                log.exception("fork server %d sent what is no message", one.pid)
            one.connection.close()
        self._all.remove(one)
        unexpected = not one.refuses and not self._supervisor.is_closing
        goes_on = one.program.session and bool(one.children)
        if unexpected:
            one.refuses = notice.detail
            output = " ".join(self._supervisor.lines(one.name)[0][-TAIL_LINES:]).strip()
            log.warning("fork server %d ended (%s) %s", one.pid, notice.detail, output)
            quick = time.monotonic() - one.began_s < QUICK_S
            self._failures[one.key] = self._failures.get(one.key, 0) + 1 if quick else 0
            _forget_old(self._failures)
        requests, one.requests = [*one.requests.values()], {}
        children, one.children = one.children, {}
        with self._supervisor.spare_descriptors():
            for request in requests:
                request.requester.refused("the fork server ended")
        for pid, child in children.items():
            child.lost(pid)
        self._supervisor.post(partial(self._supervisor.forget, one.name))
        if unexpected and goes_on:  # they are forked again when they end, which must be quick
            self._supervisor.later(0.0, partial(self._prepare, one.program))

    # -- time

    def _look_later(self) -> None:
        """Look for idle fork servers after a while, and so on while there are any."""
        if self._looks or not self._all:
            return
        self._looks = True
        self._supervisor.later(IDLE_S, self._look)

    def _look(self) -> None:
        self._looks = False
        self._end_idle(IDLE_S)
        self._look_later()

    def _end_idle(self, idle_s: float) -> bool:
        """End fork servers without children that were not used for so long; return True if any."""
        now = time.monotonic()
        idle = [one for one in self._all if one.is_idle and now - one.used_s >= idle_s]
        for one in idle:
            self._retire(one, "it is idle")
        return bool(idle)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the fork servers."""
        return [one.pid for one in self._all]


def _send(one: _ForkServer, message: Mapping[str, object], fds: Sequence[int] = ()) -> bool:
    """Send a message; return whether the fork server will read it. Raises: OSError if this process
    lacks what it takes."""
    try:
        socket.send_fds(one.connection, [json.dumps(message).encode()], [*fds])
    except BlockingIOError:  # it has many already
        return False
    except OSError as error:
        _raise_own(error)
        return False
    return True


def _raise_own(error: OSError) -> None:
    """Raise an error that says that this process lacks something; others are answers."""
    if is_own(error):
        raise error


def _forget_old(known: dict[_Name, _Value]) -> None:
    """Remove the oldest entries beyond REMEMBERED_MAX."""
    while len(known) > REMEMBERED_MAX:
        del known[next(iter(known))]


def _is_frozen(pid: int) -> bool:
    """Return whether a process is stopped, as by SIGSTOP, so that it answers nothing. Raises:
    OSError if this process lacks what it takes."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0] in (b"T", b"t")
    except OSError as error:
        _raise_own(error)
    return False


def _circumstances() -> tuple[object, ...]:
    """Return what a process inherits besides its environment; a fork server is used while it is
    the same: limits, nice value, cores, cgroup and umask. Raises: OSError if this process lacks
    what it takes.
    """
    limits = tuple(
        (name, resource.getrlimit(getattr(resource, name)))
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    )
    found: list[object] = [
        limits,
        os.getpriority(os.PRIO_PROCESS, 0),
        os.sched_getscheduler(0),
        frozenset(os.sched_getaffinity(0)),
    ]
    for path, wanted in (("/proc/self/cgroup", ""), ("/proc/self/status", "Umask:")):
        try:
            with open(path, encoding="ascii", errors="replace") as file:
                found.append(tuple(line for line in file if line.startswith(wanted)))
        except OSError as error:
            _raise_own(error)
    return tuple(found)
