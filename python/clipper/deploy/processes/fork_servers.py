"""The fork servers of a deployer: one for each environment and set of frameworks.

A fork server imports the frameworks of its models once; their replicas are forked from it, start in
tens of milliseconds, and share its memory (`clipper_container.forking`). A replica is started
plainly where no fork server can make it, and the reason is recorded.

The kernel kills a fork server when the deployer's thread ends, and its replicas when it ends, so
nothing outlives the server. Replicas that end with their fork server are started again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

from clipper.deploy.deployer import ContainerSpec
from clipper_container.forking import Message
from clipper_container.forking.fork_server import MESSAGE_BYTES_MAX
from clipper_container.forking.hints import imports_of, top_level

FORK_SERVERS_MAX = 8
IDLE_S = 60.0  # a fork server without replicas ends after this
ANSWER_S = 30.0  # for a replica, imports included; then it is started plainly
PREPARE_S = 2.0  # from a replica's warm-up to the import of what it was seen to import
QUICK_S = 5.0  # a fork server that lives shorter has failed to start
QUICK_MAX = 3  # failures of one kind of fork server, after which its replicas start plainly
LOG_BYTES_MAX = 4096
NAMES_MAX = 10_000  # modules of one replica
REMEMBERED_MAX = 256  # models of which it is known what they import, or why they start plainly
# Variables that change while a server runs and that no framework reads when it is imported.
_UNIMPORTANT: Final = frozenset(
    {"PYTEST_CURRENT_TEST", "PWD", "OLDPWD", "SHLVL", "_", "COLUMNS", "LINES"}
)

log = logging.getLogger("clipper.deploy")
_Name = TypeVar("_Name")
_Value = TypeVar("_Value")
Watch = Callable[[int, Callable[[], object]], None]


@dataclass(frozen=True, slots=True)
class ForkedStart:
    """A replica that is requested from a fork server.

    output: descriptor for its output. control: its end of the socket by which it gets what to
    run. started: called with its process id and pidfd, which the callee closes. refused: called
    with the reason instead. ended: called with the exit code, None if the fork server ended first.
    """

    output: int
    control: int
    started: Callable[[int, int], None]
    refused: Callable[[str], None]
    ended: Callable[[int | None], None]


@dataclass(frozen=True, slots=True)
class _Key:
    """The settings that the replicas of one fork server share."""

    python: str
    packages: frozenset[str]
    environment: tuple[tuple[str, str], ...]
    circumstances: tuple[object, ...]


@dataclass(slots=True)
class _ForkServer:
    key: _Key
    process: subprocess.Popen[bytes]
    connection: socket.socket
    pid_fd: int
    log_fd: int
    began_s: float
    used_s: float
    names: set[str] = field(default_factory=set)
    requests: dict[int, tuple[ForkedStart, ContainerSpec, Mapping[str, str]]] = field(
        default_factory=dict
    )
    children: dict[int, ForkedStart] = field(default_factory=dict)
    refuses: str = ""  # why it forks no more
    output: bytes = b""


class ForkServers:
    """Starts, finds and ends fork servers. watch, unwatch: of the poll loop of the thread that
    calls. Threads: the supervising one of a deployer, since the kernel ends fork servers with the
    thread that started them.
    """

    def __init__(self, watch: Watch, unwatch: Callable[[int], None]) -> None:
        self._watch, self._unwatch = watch, unwatch
        self._all: dict[_Key, _ForkServer] = {}
        self._retiring: list[_ForkServer] = []
        self._plain: dict[tuple[str, int], str] = {}  # models that are started plainly, and why
        self._blamed: dict[tuple[str, str], str] = {}  # (python, package) -> why it is not imported
        self._failures: dict[_Key, int] = {}
        # modules and packages that a model was seen to import
        self._learned: dict[tuple[str, int], tuple[tuple[str, ...], frozenset[str]]] = {}
        self._due: list[tuple[float, ContainerSpec, Mapping[str, str]]] = []
        self._last_id = 0

    # -- replicas

    def request(
        self, spec: ContainerSpec, environment: Mapping[str, str], start: ForkedStart
    ) -> str:
        """Request a replica; return "", or why it must be started plainly.

        environment: what the replica will have; without the token.
        """
        if why := self._plain.get((spec.name, spec.version)):
            return why
        found = self._find(spec, environment)
        if isinstance(found, str):
            return found
        self._last_id += 1
        number = self._last_id
        if not self._send(found, {"id": number}, [start.output, start.control]):
            return "the fork server does not read its requests"
        found.requests[number] = start, spec, environment
        found.used_s = time.monotonic()
        return ""

    def give_up(self, start: ForkedStart) -> None:
        """Forget a replica that was requested, and use its fork server no more."""
        for one in [*self._all.values(), *self._retiring]:
            for number, (requested, _, _) in [*one.requests.items()]:
                if requested is start:
                    del one.requests[number]
                    self._retire(one, f"it did not answer within {ANSWER_S:g} s")
                    if not one.children:
                        one.process.kill()

    def forget(self, start: ForkedStart) -> None:
        """Forget a replica that was requested and is stopped before it starts."""
        for one in [*self._all.values(), *self._retiring]:
            one.requests = {n: each for n, each in one.requests.items() if each[0] is not start}

    def start_plainly(self, spec: ContainerSpec, why: str) -> None:
        """Start the replicas of this model plainly from now on."""
        self._plain[spec.name, spec.version] = why
        _forget_old(self._plain)

    def learn(
        self,
        spec: ContainerSpec,
        environment: Mapping[str, str],
        modules: Sequence[str],
        packages: Sequence[str],
    ) -> None:
        """Record what a forked replica imported by itself; a fork server will have it soon.

        packages: those of which its own fork server has nothing: another one imports them.
        """
        key = spec.name, spec.version
        if modules and key not in self._learned and len(modules) <= NAMES_MAX:
            self._learned[key] = tuple(modules), top_level(packages)
            _forget_old(self._learned)
            self._due.append((time.monotonic() + PREPARE_S, spec, environment))

    def _find(self, spec: ContainerSpec, environment: Mapping[str, str]) -> _ForkServer | str:
        names, packages = self._imports(spec)
        key = _Key(
            spec.python,
            packages,
            tuple(
                sorted(
                    (name, value)
                    for name, value in environment.items()
                    if not name.startswith("CLIPPER_") and name not in _UNIMPORTANT
                )
            ),
            _circumstances(),
        )
        if self._failures.get(key, 0) >= QUICK_MAX:
            return "its fork server ends as soon as it starts"
        found = self._all.get(key)
        if found is None:
            if len(self._all) >= FORK_SERVERS_MAX and not self._end_idle(0.0):
                return f"{FORK_SERVERS_MAX} fork servers run already"
            try:
                found = self._start(key, environment)
            except OSError as error:
                return f"no fork server: {error}"
        if fresh := [name for name in names if name not in found.names]:
            found.names.update(fresh)
            for some in _packets(fresh):
                self._send(found, {"imports": some})
        return found

    def _imports(self, spec: ContainerSpec) -> tuple[list[str], frozenset[str]]:
        """Return the modules and the packages that the model imports, without packages that make
        a fork unsafe.
        """
        hints = imports_of(spec.target, spec.code)
        modules, packages = self._learned.get((spec.name, spec.version), ((), frozenset()))
        blamed = {top for python, top in self._blamed if python == spec.python}
        names = [
            name
            for name in dict.fromkeys([*hints, *modules])
            if name.partition(".")[0] not in blamed
        ]
        return names, (top_level(hints) | packages) - blamed

    # -- fork servers

    def _start(self, key: _Key, environment: Mapping[str, str]) -> _ForkServer:
        """Start a fork server. Raises: OSError."""
        words = [key.python, "-P", "-X", "faulthandler", "-m", "clipper_container", "fork-server"]
        words += ["--die-with-parent", str(os.getpid())]
        left = {k: v for k, v in environment.items() if not k.startswith("CLIPPER_")}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read_fd, write_fd = os.pipe2(os.O_CLOEXEC)
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            undo.callback(os.close, read_fd)
            try:
                process = subprocess.Popen(
                    words, env=left, stdin=theirs.fileno(), stdout=write_fd, stderr=write_fd
                )
            finally:
                os.close(write_fd)
            undo.callback(process.wait)
            undo.callback(process.kill)
            pid_fd = os.pidfd_open(process.pid)
            undo.pop_all()
        ours.setblocking(False)
        os.set_blocking(read_fd, False)
        now = time.monotonic()
        one = _ForkServer(key, process, ours, pid_fd, read_fd, now, now)
        self._all[key] = one
        self._watch(ours.fileno(), lambda: self._receive(one))
        self._watch(read_fd, lambda: self._read_log(one))
        self._watch(pid_fd, lambda: self._ended(one))
        log.info("fork server %d: %s", process.pid, ", ".join(sorted(key.packages)) or "numpy")
        return one

    def _send(
        self, one: _ForkServer, message: Mapping[str, object], fds: Sequence[int] = ()
    ) -> bool:
        try:
            socket.send_fds(one.connection, [json.dumps(message).encode()], [*fds])
        except OSError:
            return False
        return True

    def _receive(self, one: _ForkServer) -> None:
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(
                    one.connection, MESSAGE_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
                )
            except OSError:
                return
            if not data:
                return  # its pidfd tells the rest
            self._handle(one, json.loads(data), fds)

    def _handle(self, one: _ForkServer, message: Message, fds: list[int]) -> None:
        if "unsafe" in message:
            self._unsafe(one, message["unsafe"], message["module"])
        elif "error" in message:
            again = one.requests.pop(message["id"], None)
            self._retire(one, message["error"])
            if again is not None:
                start, spec, environment = again
                stale = message["error"].startswith("stale")
                why = self.request(spec, environment, start) if stale else message["error"]
                if why:
                    start.refused(why)
        elif "code" in message:
            child, one.used_s = one.children.pop(message["pid"], None), time.monotonic()
            if child is not None:
                child.ended(message["code"])
            self._close_if_empty(one)
        elif "pid" in message:
            known = one.requests.pop(message["id"], None)
            one.used_s = time.monotonic()
            if known is None:  # given up; its control socket is closed, so it ends by itself
                for fd in fds:
                    os.close(fd)
                return
            one.children[message["pid"]] = known[0]
            known[0].started(message["pid"], fds[0])

    def _unsafe(self, one: _ForkServer, why: str, package: str) -> None:
        log.warning("fork server %d is used no more: %s", one.process.pid, why)
        if package:
            self._blamed[one.key.python, package] = why
        starts, one.requests = [*one.requests.values()], {}
        self._retire(one, why)
        for start, _, _ in starts:
            start.refused(why)

    def _retire(self, one: _ForkServer, why: str) -> None:
        """Let a fork server make no more replicas; it ends with its last one."""
        one.refuses = one.refuses or why
        if self._all.get(one.key) is one:
            del self._all[one.key]
            self._retiring.append(one)
        self._close_if_empty(one)

    def _close_if_empty(self, one: _ForkServer) -> None:
        if one.refuses and not one.children and not one.requests:
            with contextlib.suppress(OSError):
                one.connection.shutdown(socket.SHUT_RDWR)  # it ends at the end of the stream

    def _read_log(self, one: _ForkServer) -> None:
        try:
            data = os.read(one.log_fd, LOG_BYTES_MAX)
        except BlockingIOError:
            return
        one.output = (one.output + data)[-LOG_BYTES_MAX:]
        if not data:
            self._unwatch(one.log_fd)
            one.log_fd = -1

    def _ended(self, one: _ForkServer) -> None:
        self._receive(one)
        if one.log_fd >= 0:
            self._read_log(one)
        code = one.process.wait()
        self._unwatch(one.connection.detach())
        self._unwatch(one.pid_fd)
        if one.log_fd >= 0:
            self._unwatch(one.log_fd)
        if self._all.get(one.key) is one:
            del self._all[one.key]
        if one in self._retiring:
            self._retiring.remove(one)
        if not one.refuses:
            output = one.output.decode("utf-8", "replace").strip()
            log.warning("fork server %d ended (code %d) %s", one.process.pid, code, output)
            quick = time.monotonic() - one.began_s < QUICK_S
            self._failures[one.key] = self._failures.get(one.key, 0) + 1 if quick else 0
            _forget_old(self._failures)
        for start, _, _ in one.requests.values():
            start.refused("the fork server ended")
        for child in one.children.values():
            child.ended(None)

    # -- time

    def next_due_s(self) -> float | None:
        """Return when `do_due` has something to do; None for never."""
        idle = [
            one.used_s + IDLE_S
            for one in self._all.values()
            if not one.children and not one.requests
        ]
        return min([*idle, *(at for at, _, _ in self._due)], default=None)

    def do_due(self) -> None:
        """Import what replicas were seen to import, and end idle fork servers."""
        now = time.monotonic()
        due = [(spec, environment) for at, spec, environment in self._due if at <= now]
        self._due = [each for each in self._due if each[0] > now]
        for spec, environment in due:
            self._find(spec, environment)
        self._end_idle(IDLE_S)

    def _end_idle(self, idle_s: float) -> bool:
        """End fork servers without replicas that were not used for so long; return True if any."""
        now = time.monotonic()
        idle = [
            one
            for one in self._all.values()
            if not one.children and not one.requests and now - one.used_s >= idle_s
        ]
        for one in idle:
            self._retire(one, "it is idle")
        return bool(idle)

    @property
    def pids(self) -> list[int]:
        """Return the process ids of the fork servers."""
        return [one.process.pid for one in [*self._all.values(), *self._retiring]]

    def close(self) -> None:
        """End all fork servers and wait for them; their replicas have ended. None is started for
        what replicas were seen to import: the supervising thread would wait until it is idle.
        """
        self._due.clear()
        for one in [*self._all.values(), *self._retiring]:
            one.refuses = "the server is being closed"
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(one.pid_fd, signal.SIGKILL)
            self._ended(one)


def _forget_old(known: dict[_Name, _Value]) -> None:
    """Remove the oldest entries beyond REMEMBERED_MAX."""
    while len(known) > REMEMBERED_MAX:
        del known[next(iter(known))]


def _packets(names: Sequence[str]) -> list[Sequence[str]]:
    """Split names so that each part fits a packet."""
    return [names[i : i + 500] for i in range(0, len(names), 500)]


def request(arguments: Sequence[str], environment: Mapping[str, str], title: str) -> bytes:
    """Return the message that starts a forked replica."""
    message = {
        "arguments": [*arguments],
        "environment": {**environment},
        "folder": os.getcwd(),
        "title": title,
    }
    return json.dumps(message).encode()


def _circumstances() -> tuple[object, ...]:
    """Return what a process inherits besides its environment; a fork server is used while it is
    the same: limits, nice value, cores, cgroup and umask.
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
        with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
            found.append(tuple(line for line in file if line.startswith(wanted)))
    return tuple(found)
