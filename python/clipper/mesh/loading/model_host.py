"""The processes that hold this node's models: queried, and replaced when they fail (docs/hosts.md).

The supervisor of processes starts them, and starts them again. A host connects to the socket that
it is given, and presents the token of its start. When that connection ends, all its models are
gone, and `lost` is called. A host that does not answer, or reports that it is FAILING, is killed,
so that it restarts. The models that were at work when it ended are read from a file that it maps:
`blamed`. Threads: all on the event loop of the node, unless stated.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from clipper.child_environment import OF_HOSTS, child_environment
from clipper.errors import ClipperError, NotStarted
from clipper.mesh.records import MeshModel
from clipper.mesh.transport.channel import (
    ChannelServer,
    ConnectionLost,
    Message,
    PeerChannel,
    RequestFailed,
)
from clipper.processes import (
    NEVER_HELD,
    Notice,
    NoticeKind,
    RestartPolicy,
    Spawned,
    StartCommand,
    Supervisor,
)
from clipper.processes.supervisor import KILL_S
from clipper.settings.mesh import MeshSettings
from clipper_container.start_folder import StartFolder

TOKEN_ENV: Final = "CLIPPER_TOKEN"
START_S: Final = 60.0  # to import packages, connect, and be ready
GRACE_S: Final = 3.0
POLICY: Final = RestartPolicy(
    backoff_s_max=5.0,
    healthy_s=60.0,
    exits_max=NEVER_HELD,
    grace_s=GRACE_S,
    ready_s=START_S,
    served_share=0.1,
)
CHECK_S: Final = 0.5  # between two status requests
WORK_SLOTS, WORK_SLOT_BYTES = 512, 256  # of the file of models at work
PULL_S_MAX: Final = 86_400.0  # the host ends it before, at artifacts.pull_s
EVICT_S: Final = 60.0  # the host's own limit for the batches of models that it unloads
_REQUEST_S: Final = 10.0  # beyond the host's own time limit of a request
_log = logging.getLogger(__name__)


class HostDied(ConnectionLost):
    """The process of a host ended before it answered. blamed: the models at work in it then."""

    def __init__(self, why: str, blamed: frozenset[str]) -> None:
        super().__init__(why)
        self.blamed = blamed


class LoadResult(msgspec.Struct, frozen=True):
    """A host's report of a model that it has loaded."""

    size_bytes: int = 0
    concurrency: int = 1
    input: str = "any"
    output: str = "any"
    took_ms: float = 0.0


class HostStatus(msgspec.Struct, frozen=True):
    """A host's report of itself. resident: pairs of model and size in bytes."""

    state: str = "STARTING"
    capacity_bytes: int = 0
    loading_max: int = 1
    load_timeout_ms: float = 0.0
    default_size_bytes: int = 1 << 20
    resident: tuple[tuple[str, int], ...] = ()


class Pulled(msgspec.Struct, frozen=True):
    """The answer of a host that pulled a model: where its files are, and the SHA-256 of their
    content.
    """

    path: str
    sha256: str


class ModelHost(Protocol):
    """The interface of a host for the loader. Calls raise RequestFailed, ConnectionLost.

    is_ready: set while it answers.
    """

    types: tuple[str, ...]
    status: HostStatus
    is_ready: asyncio.Event

    async def pull(self, model: MeshModel) -> Pulled:
        """Pull a model whose path is a URL."""

    async def load(
        self,
        model: MeshModel,
        timeout_s: float,
        evict: Sequence[str] = (),
    ) -> LoadResult:
        """Load a model. HostDied when the process ends meanwhile.

        evict: models that are unloaded before.
        """

    async def unload(self, model: str, timeout_s: float) -> None:
        """Unload a model after its batches are answered."""

    async def predict_size(self, model: MeshModel) -> int:
        """Return an estimate of the memory of a model, in bytes; 0 if unknown."""

    async def serve(
        self, model: str, address: str, token: str, replica: int, timeout_s: float
    ) -> None:
        """Make a loaded model connect to a server and serve it, as this replica number."""

    async def leave(self, model: str, address: str, timeout_s: float) -> None:
        """Make a loaded model leave a server."""


class SupervisedHost(ModelHost, Protocol):
    """A model host that a node starts, and that is replaced when it ends.

    blamed: the models that were at work when it last ended. starts: how often it was started.
    """

    name: str
    starts: int
    blamed: frozenset[str]

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""

    async def start(self) -> None:
        """Start the host; `is_ready` is set when it answers."""

    async def stop(self) -> None:
        """End the host after it has answered what it has."""


OnHost = Callable[[SupervisedHost], None]
OnLeft = Callable[[str, str, str], None]
NewHost = Callable[[str, str, Path, MeshSettings, OnHost, OnHost, OnLeft], SupervisedHost]


class HostProcesses:
    """Makes the model hosts of a node, which are processes of this machine.

    processes: starts them. environment: of the hosts, besides what they get of this process's.
    """

    def __init__(self, processes: Supervisor, environment: Mapping[str, str] = {}) -> None:
        self._processes = processes
        self._environment = environment

    def new_host(
        self,
        node: str,
        name: str,
        folder: Path,
        settings: MeshSettings,
        ready: OnHost,
        lost: OnHost,
        left: OnLeft,
    ) -> SupervisedHost:
        """Return a host with its share of the node's memory. node: the node's id.

        See HostProcess.
        """
        each_mib = settings.capacity_mib // settings.hosts

        def command(control: str) -> Sequence[str]:
            return host_command(
                control, name, each_mib, settings.loading_max, settings.load_s, settings.runtimes
            )

        return HostProcess(
            name,
            folder,
            command,
            self._processes,
            ready,
            lost,
            left,
            silence_s=settings.host_silence_s,
            environment=self._environment,
            node=node,
        )


def host_command(
    control: str,
    name: str,
    capacity_mib: int,
    loading_max: int,
    load_s: float,
    runtimes: Sequence[str] = (),
) -> Sequence[str]:
    """Return the command line of a host. It contains no secret."""
    words = [
        sys.executable,
        "-X",
        "faulthandler",
        "-m",
        "clipper_container",
        "host",
        "--control",
        control,
    ]
    words += [
        "--token-env",
        TOKEN_ENV,
        "--name",
        name,
        "--load-s",
        f"{load_s:g}",
        "--die-with-parent",
        str(os.getpid()),
    ]
    words += ["--capacity-mib", str(capacity_mib)] if capacity_mib else []
    words += [word for runtime in runtimes for word in ("--runtime", runtime)]
    return words + (["--loading-max", str(loading_max)] if loading_max else [])


class WorkFile:
    """The file in which a host notes the models that are at work (docs/hosts.md)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def clear(self) -> None:
        """Make the file, or note that nothing is at work. Raises OSError."""
        self.path.write_bytes(bytes(WORK_SLOTS * WORK_SLOT_BYTES))

    def models(self) -> frozenset[str]:
        """Return the models that are at work; none if the file is gone."""
        with contextlib.suppress(OSError):
            data = self.path.read_bytes()
            slots = (data[at : at + WORK_SLOT_BYTES] for at in range(0, len(data), WORK_SLOT_BYTES))
            return frozenset(
                slot[1 : 1 + slot[0]].decode("utf-8", "replace") for slot in slots if slot[0]
            )
        return frozenset()

    def remove(self) -> None:
        """Remove the file."""
        self.path.unlink(missing_ok=True)


class HostProcess:
    """A model host that is a process of its own.

    command: returns the command line for a control address. processes: starts it, and starts it
    again. ready, lost: called at each start and end. left: called with (model, address, reason)
    when a connection to a server has ended by itself. silence_s: a host that has not answered for
    so long is restarted. environment: of the process, besides what it gets of this one's. node: id
    of its node, so that several nodes may have one supervisor. blamed: the models that were at work
    when it last ended. pid: 0 while there is no process.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Callable[[str], Sequence[str]],
        processes: Supervisor,
        ready: OnHost = lambda _: None,
        lost: OnHost = lambda _: None,
        left: OnLeft = lambda *_: None,
        silence_s: float = 10.0,
        environment: Mapping[str, str] = {},
        node: str = "",
    ) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._silence_s = silence_s
        self._processes = processes
        self._child = f"{node}/{name}"
        self._folder = StartFolder()
        self._work_file = WorkFile(folder / f"{name}.work")
        self.blamed: frozenset[str] = frozenset()
        self._over: asyncio.Future[None] | None = None  # ends with the process
        self._ready, self._lost, self._left = ready, lost, left
        self._token = secrets.token_urlsafe(24)
        self._server = ChannelServer(
            "", self._token, folder, name, on_event=self._on_event, on_accept=self._on_connected
        )
        self._channel: PeerChannel | None = None
        self._connected = asyncio.Event()
        self.is_ready = asyncio.Event()
        self.types: tuple[str, ...] = ()
        self.status = HostStatus()
        self.pid = 0
        self.starts = 0
        self._was_ready = False
        self._loop: asyncio.AbstractEventLoop
        self._following: asyncio.Task[None] | None = None
        self._at_rest = asyncio.Event()  # no process, and none will start
        self._at_rest.set()
        self._stopping = False

    # -- life

    async def start(self) -> None:
        """Have the process started; `is_ready` is set when it answers.

        Raises: NotStarted, ShuttingDown if no process is started any more.
        """
        await self._server.open()
        self._loop = asyncio.get_running_loop()
        process = Spawned(self, self._folder)
        self._processes.add(self._child, process, POLICY, self, log_lines=True)
        self._at_rest.clear()

    async def stop(self) -> None:
        """End the process: SIGTERM lets it answer what it has, SIGKILL follows after a while."""
        self._stopping = True
        if self._following is not None:
            self._following.cancel()
        try:
            self._processes.stop([self._child], limit_s=0)
            await self._until_at_rest(GRACE_S)
        finally:  # also if the task that stops it is cancelled
            if (status := self._processes.get(self._child)) is not None:
                self._kill(status.pid)
            await self._until_at_rest(KILL_S)
            self._server.close()
            self._work_file.remove()
            with contextlib.suppress(NotStarted):
                self._processes.post(self._forget)

    async def _until_at_rest(self, limit_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(limit_s):
                await self._at_rest.wait()

    def _forget(self) -> None:
        self._folder.close()
        self._processes.forget(self._child)

    def _kill(self, pid: int) -> None:
        with contextlib.suppress(NotStarted):
            self._processes.restart(self._child, pid)

    def command(self, number: int) -> StartCommand:
        """Return the command of a start. Raises OSError. Threads: the supervisor's."""
        self._work_file.clear()
        environment = {
            **child_environment(patterns=OF_HOSTS),
            **self._environment,
            "PYTHONUNBUFFERED": "1",
            TOKEN_ENV: self._token,
        }
        words = [*self._command(self._server.address), "--work-file", str(self._work_file.path)]
        return StartCommand(words, environment, joins=True)

    def on_notice(self, name: str, notice: Notice) -> None:
        """Pass what happened to the process on to the node. Threads: the supervisor's."""
        # read here, as the next start clears it
        blamed = self._work_file.models()
        try:
            self._loop.call_soon_threadsafe(self._take, notice, blamed)
        except RuntimeError:  # the loop is closed, and its node gone
            self._processes.stop([name])

    def _take(self, notice: Notice, blamed: frozenset[str]) -> None:
        match notice.kind:
            case NoticeKind.STARTED:
                self._has_started(notice.pid)
            case NoticeKind.EXITED:
                tail = "\n".join(notice.log_tail[-10:])
                _log.warning(
                    "the model host %s (pid %d): %s. Its last lines:\n%s",
                    self.name,
                    notice.pid,
                    notice.detail,
                    tail,
                )
                self._has_ended(blamed)
            case NoticeKind.RESTARTING:
                _log.warning("the model host %s: %s", self.name, notice.detail)
            case NoticeKind.STOPPED | NoticeKind.FAILED:
                self._has_ended(blamed)
                self._at_rest.set()

    def _has_started(self, pid: int) -> None:
        self.pid = pid
        self._was_ready = False
        self.starts += 1
        self._over = self._loop.create_future()
        if not self._stopping:
            self._following = self._loop.create_task(self._follow(pid))

    def _has_ended(self, blamed: frozenset[str]) -> None:
        if not self.pid or self._over is None:
            return
        self.pid = 0
        self.is_ready.clear()
        if self._following is not None:
            self._following.cancel()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        self._connected.clear()
        self.blamed = blamed
        self._over.set_result(None)
        if self._was_ready and not self._stopping:
            self._lost(self)

    async def _follow(self, pid: int) -> None:
        """Wait until a process is ready, and until it must be replaced; then have it killed. The
        end of the process cancels this.
        """
        try:
            await self._connected.wait()
            if await self._become_ready():
                self._was_ready = True
                self.is_ready.set()
                self._processes.serves(self._child, pid)
                self._ready(self)
                await self._until_replaced()
        except Exception:
            _log.exception("the model host %s is started again", self.name)
        self.is_ready.clear()
        self._kill(pid)

    async def _until_replaced(self) -> None:
        """Wait until the process must be replaced, or its connection has ended."""
        channel = self._channel
        while channel is not None and not channel.closed.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_S):
                    await channel.closed.wait()
                    return
            if why := await self._why_replaced():
                _log.error(
                    "the model host %s (pid %d) %s: it is replaced", self.name, self.pid, why
                )
                return

    async def _why_replaced(self) -> str:
        """Return why the process must be replaced; empty: it need not be.

        It is checked twice: if this process was suspended, the first answer may be overdue.
        """
        for _ in range(2):
            try:
                status = await self.read_status(self._silence_s / 2)
            except ConnectionLost:
                if self._channel is None or self._channel.closed.is_set():
                    return ""  # it has ended by itself
                continue
            except (RequestFailed, msgspec.ValidationError) as failure:
                _log.warning("the model host %s does not report its status: %s", self.name, failure)
                return ""
            return "reports that it is failing" if status.state == "FAILING" else ""
        return f"has not answered for {self._silence_s:g} s"

    def _on_connected(self, channel: PeerChannel) -> None:
        self._channel = channel
        self.types = tuple(str(type) for type in channel.hello.get("types", ()))
        self._connected.set()

    async def _become_ready(self) -> bool:
        """Wait until the process is ready; return False if it must be replaced."""
        while True:
            try:
                status = await self.read_status()
            except (RequestFailed, msgspec.ValidationError) as failure:
                _log.warning("the model host %s does not report its status: %s", self.name, failure)
                return False
            if status.state in ("READY", "FAILING"):
                return status.state == "READY"
            await asyncio.sleep(0.02)

    def _on_event(self, message: Message) -> None:
        if message.get("event") == "left":
            self._left(
                str(message.get("model", "")),
                str(message.get("address", "")),
                str(message.get("why", "")),
            )

    # -- requests

    async def _request(self, verb: str, timeout_s: float, **fields: object) -> Message:
        if self._channel is None:
            raise ConnectionLost(f"the model host {self.name} is not there")
        return await self._channel.request(verb, timeout_s, **fields)

    async def read_status(self, timeout_s: float = _REQUEST_S) -> HostStatus:
        """Request the status, without the list of models."""
        self.status = msgspec.convert(
            await self._request("status", timeout_s, brief=True), HostStatus, strict=False
        )
        return self.status

    async def pull(self, model: MeshModel) -> Pulled:
        """Pull a model whose path is a URL. RequestFailed, ConnectionLost."""
        request = {
            "model": model.id,
            "type": model.type,
            "path": model.path,
            "sha256": model.sha256,
        }
        found = await self._request("pull", PULL_S_MAX, **request)
        return msgspec.convert(found, Pulled, strict=False)

    async def load(
        self,
        model: MeshModel,
        timeout_s: float,
        evict: Sequence[str] = (),
    ) -> LoadResult:
        """Load a model. RequestFailed; HostDied when the process ends meanwhile."""
        request: Message = {"model": model.id, "type": model.type, "path": model.path}
        request |= {"key": model.key, "input": model.input, "output": model.output}
        request |= {"evict": evict, "timeout_ms": int(timeout_s * 1000)}
        limit_s = timeout_s + _REQUEST_S + (EVICT_S if evict else 0.0)
        over, channel = self._over, self._channel
        try:
            found = await self._request("load", limit_s, **request)
        except ConnectionLost as lost:
            if over is None or channel is None or not channel.closed.is_set():
                raise
            await asyncio.shield(over)
            raise HostDied(lost.why, self.blamed) from None
        return msgspec.convert(found, LoadResult, strict=False)

    async def unload(self, model: str, timeout_s: float) -> None:
        """Unload a model."""
        await self._request("unload", timeout_s, model=model)

    async def predict_size(self, model: MeshModel) -> int:
        """Return an estimate of the memory of a model, in bytes; 0 if unknown."""
        request = {"model": model.id, "type": model.type, "path": model.path, "key": model.key}
        found = await self._request("predict_size", _REQUEST_S, **request)
        return int(found.get("size_bytes", 0))

    async def serve(
        self, model: str, address: str, token: str, replica: int, timeout_s: float
    ) -> None:
        """Make a loaded model connect to a server and serve it."""
        request = {"model": model, "address": address, "token": token, "replica": replica}
        await self._request("serve", timeout_s + 1.0, timeout_ms=int(timeout_s * 1000), **request)

    async def leave(self, model: str, address: str, timeout_s: float) -> None:
        """Make a loaded model leave a server."""
        await self._request("leave", timeout_s, model=model, address=address)


async def started(host: SupervisedHost) -> SupervisedHost:
    """Start a host and return it when it is ready.

    RequestFailed when no process is started any more, or that takes longer than START_S; the host
    is stopped then.
    """
    try:
        await host.start()
        async with asyncio.timeout(START_S):
            await host.is_ready.wait()
    except BaseException as error:
        await host.stop()
        if isinstance(error, ClipperError):
            raise RequestFailed(f"the model host {host.name} is not started: {error}") from None
        if isinstance(error, TimeoutError):
            raise RequestFailed(
                f"the model host {host.name} was not ready after {START_S:g} s"
            ) from None
        raise
    return host
