"""The processes that hold this node's models: started, supervised, queried and restarted
(docs/hosts.md).

A host connects to the socket that it is given, and presents the token of its start. When that
connection ends, all its models are gone, and `lost` is called. A host that does not answer, or
reports that it is FAILING, is killed and restarted. The models that were at work when it ended are
read from a file that it maps: `blamed`. Threads: all on the event loop of the node.
"""

import asyncio
import contextlib
import logging
import os
import secrets
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

import msgspec

from clipper.mesh.records import MeshModel
from clipper.mesh.transport.channel import (
    ChannelServer,
    ConnectionLost,
    Message,
    PeerChannel,
    RequestFailed,
)
from clipper.settings.mesh import MeshSettings

TOKEN_ENV: Final = "CLIPPER_TOKEN"
START_S: Final = 60.0  # to import packages, connect, and be ready
PAUSE_S_MIN, PAUSE_S_MAX = 0.05, 5.0
LINES_MAX: Final = 200
GRACE_S: Final = 3.0
CHECK_S: Final = 0.5  # between two status requests
WORK_SLOTS, WORK_SLOT_BYTES = 512, 256  # of the file of models at work
PULL_S_MAX: Final = 86_400.0  # the host ends it before, at artifacts.pull_s
EVICT_S: Final = 60.0  # the host's own limit for the batches of models that it unloads
_REQUEST_S: Final = 10.0  # beyond the host's own time limit of a request
_READ_BYTES: Final = 64 << 10
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
NewHost = Callable[
    [str, Path, MeshSettings, Mapping[str, str], OnHost, OnHost, OnLeft], SupervisedHost
]


def new_host_process(
    name: str,
    folder: Path,
    settings: MeshSettings,
    environment: Mapping[str, str],
    ready: OnHost,
    lost: OnHost,
    left: OnLeft,
) -> SupervisedHost:
    """Return a host process with its share of the node's memory. See HostProcess."""
    each_mib = settings.capacity_mib // settings.hosts

    def command(control: str) -> Sequence[str]:
        return host_command(
            control, name, each_mib, settings.loading_max, settings.load_s, settings.runtimes
        )

    return HostProcess(
        name,
        folder,
        command,
        ready,
        lost,
        left,
        silence_s=settings.host_silence_s,
        environment=environment,
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


class HostProcess:
    """A supervised model host process.

    command: returns the command line for a control address. ready, lost: called at each start and
    end. left: called with (model, address, reason) when a connection to a server has ended by
    itself. silence_s: a host that has not answered for so long is restarted. environment: of the
    process, besides that of this one. blamed: the models that were at work when it last ended.
    """

    def __init__(
        self,
        name: str,
        folder: Path,
        command: Callable[[str], Sequence[str]],
        ready: OnHost = lambda _: None,
        lost: OnHost = lambda _: None,
        left: OnLeft = lambda *_: None,
        silence_s: float = 10.0,
        environment: Mapping[str, str] = {},
    ) -> None:
        self._environment = environment
        self.name, self._command, self._silence_s = name, command, silence_s
        self._work_file = folder / f"{name}.work"
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
        self.lines: deque[str] = deque(maxlen=LINES_MAX)
        self.starts = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._supervising: asyncio.Task[None] | None = None
        self._stopping = False

    @property
    def pid(self) -> int:
        """The process id; 0 while there is no process."""
        return self._process.pid if self._process is not None else 0

    # -- life

    async def start(self) -> None:
        """Start the process and its supervision; `is_ready` is set when it answers."""
        await self._server.open()
        self._supervising = asyncio.get_running_loop().create_task(self._supervise())

    async def stop(self) -> None:
        """End the process: SIGTERM lets it answer what it has, SIGKILL follows after a while."""
        self._stopping = True
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(signal.SIGTERM)
        try:
            if self._supervising is not None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(GRACE_S):
                        await asyncio.shield(self._supervising)
        finally:  # also if the task that stops it is cancelled
            self.kill()
            if self._supervising is not None:
                await self._supervising
            self._server.close()
            self._work_file.unlink(missing_ok=True)

    def kill(self) -> None:
        """Kill the process."""
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def _supervise(self) -> None:
        pause_s = PAUSE_S_MIN
        while not self._stopping:
            began = asyncio.get_running_loop().time()
            try:
                await self._life()
            except OSError as error:
                _log.error("the model host %s cannot be started: %s", self.name, error)
            except Exception:
                _log.exception("the model host %s is started again", self.name)
            if self._stopping:
                return
            lived_s = asyncio.get_running_loop().time() - began
            pause_s = PAUSE_S_MIN if lived_s > START_S else min(2 * pause_s, PAUSE_S_MAX)
            tail = "\n".join([*self.lines][-10:])
            _log.warning(
                "the model host %s has ended; the next starts in %.1f s. Its last lines:\n%s",
                self.name,
                pause_s,
                tail,
            )
            await asyncio.sleep(pause_s)

    async def _life(self) -> None:
        """Run one process from its start to its end."""
        loop = asyncio.get_running_loop()
        ended, was_ready = asyncio.Event(), False
        self._connected.clear()
        over = self._over = loop.create_future()
        out = self._spawn()
        pidfd = os.pidfd_open(self._process.pid)  # type: ignore[union-attr]
        loop.add_reader(pidfd, ended.set)
        loop.add_reader(out, self._read_lines, out)
        try:
            if await _first(self._connected, ended, timeout_s=START_S) and await self._become_ready(
                ended
            ):
                was_ready = True
                self.is_ready.set()
                self._ready(self)
                await self._until_over(self._channel.closed, ended)  # type: ignore[union-attr]
                if self._stopping:
                    await _first(ended)
        finally:
            self.is_ready.clear()
            if self._channel is not None:
                self._channel.close()
                self._channel = None
            self.kill()
            await _first(ended)
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._read_lines(out)
            loop.remove_reader(out)
            os.close(out)
            self._process.wait()  # type: ignore[union-attr]
            self._process = None
            self.blamed = self._at_work()
            over.set_result(None)
            if was_ready and not self._stopping:
                self._lost(self)

    async def _until_over(self, closed: asyncio.Event, ended: asyncio.Event) -> None:
        """Wait until the process ends or must be replaced."""
        while not self._stopping and not (closed.is_set() or ended.is_set()):
            await _first(closed, ended, timeout_s=CHECK_S)
            if self._stopping or closed.is_set() or ended.is_set():
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

    def _at_work(self) -> frozenset[str]:
        """Return the models that were at work when the process ended, from its file."""
        with contextlib.suppress(OSError):
            data = self._work_file.read_bytes()
            slots = (data[at : at + WORK_SLOT_BYTES] for at in range(0, len(data), WORK_SLOT_BYTES))
            return frozenset(
                slot[1 : 1 + slot[0]].decode("utf-8", "replace") for slot in slots if slot[0]
            )
        return frozenset()

    def _spawn(self) -> int:
        """Start a process; return the pipe of its output."""
        self._work_file.write_bytes(bytes(WORK_SLOTS * WORK_SLOT_BYTES))
        out, its_end = os.pipe2(os.O_CLOEXEC)
        os.set_blocking(out, False)
        try:
            self._process = subprocess.Popen(
                [*self._command(self._server.address), "--work-file", str(self._work_file)],
                env={
                    **os.environ,
                    **self._environment,
                    "PYTHONUNBUFFERED": "1",
                    TOKEN_ENV: self._token,
                },
                stdin=subprocess.DEVNULL,
                stdout=its_end,
                stderr=its_end,
            )
        except BaseException:
            os.close(out)
            raise
        finally:
            os.close(its_end)
        self.starts += 1
        return out

    def _read_lines(self, out: int) -> None:
        with contextlib.suppress(BlockingIOError):
            data = os.read(out, _READ_BYTES)
            if not data:
                asyncio.get_running_loop().remove_reader(out)
            for line in data.decode("utf-8", "replace").splitlines():
                self.lines.append(line[:4096])
                _log.info("%s: %s", self.name, line[:4096])

    def _on_connected(self, channel: PeerChannel) -> None:
        self._channel = channel
        self.types = tuple(str(type) for type in channel.hello.get("types", ()))
        self._connected.set()

    async def _become_ready(self, ended: asyncio.Event) -> bool:
        until = asyncio.get_running_loop().time() + START_S
        while not ended.is_set() and asyncio.get_running_loop().time() < until:
            try:
                self.status = msgspec.convert(
                    await self._request("status", _REQUEST_S), HostStatus, strict=False
                )
            except (RequestFailed, msgspec.ValidationError) as failure:
                _log.warning("the model host %s does not report its status: %s", self.name, failure)
                return False
            if self.status.state == "READY":
                return True
            if self.status.state == "FAILING":
                return False
            await asyncio.sleep(0.02)
        return False

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

    RequestFailed when that takes longer than START_S; the host is stopped then.
    """
    try:
        await host.start()
        async with asyncio.timeout(START_S):
            await host.is_ready.wait()
    except BaseException as error:
        await host.stop()
        if isinstance(error, TimeoutError):
            raise RequestFailed(
                f"the model host {host.name} was not ready after {START_S:g} s"
            ) from None
        raise
    return host


async def _first(*events: asyncio.Event, timeout_s: float | None = None) -> bool:
    """Wait until an event is set; return whether the first one is."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return events[0].is_set()
