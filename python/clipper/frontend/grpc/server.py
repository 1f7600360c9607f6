"""The gRPC server: a thread with an event loop, and its services. Needs the extra `grpc`."""

import asyncio
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final

import grpc
import msgspec

from clipper.component import Health, Loop, Pool, fast_event_loop, require_descriptors
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.grpc.applications import SERVICE as APPLICATIONS
from clipper.frontend.grpc.applications import ApplicationService
from clipper.frontend.grpc.call_stream import CallServer
from clipper.frontend.grpc.calls import GrpcDispatcher
from clipper.frontend.grpc.door import Door, check_of
from clipper.frontend.grpc.health import HEALTH, REFLECTION, HealthService, ReflectionService
from clipper.frontend.grpc.inference import SERVICE as INFERENCE
from clipper.frontend.grpc.inference import InferenceService
from clipper.frontend.grpc.listener import CallListener
from clipper.frontend.grpc.mesh import SERVICE as MESH
from clipper.frontend.grpc.mesh import MeshService
from clipper.frontend.grpc.mesh_watch import SERVICE as MESH_WATCH
from clipper.frontend.grpc.mesh_watch import MeshWatchService
from clipper.frontend.grpc.payload_methods import PayloadMethods
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.http.listeners import bind_first
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.mesh.data_plane import DataPlane
from clipper.metrics import GrpcCounts
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.grpc import GrpcSettings
from clipper.settings.http import HttpSettings, bodies_bytes
from clipper.settings.ports import nearby

_WORKERS = 4
# further calls that are rejected with the reason; those beyond are rejected at once
_REFUSED_MAX = 1024
_STOP_S = 10.0  # for calls in the pools, and for the event loop
DESCRIPTORS: Final = 16  # of a loop and of connections


class GrpcServer:
    """gRPC on `grpc.address`. Threads: start, drain and stop from one; the rest runs on its own."""

    def __init__(
        self,
        node: ServerInterface,
        make_watcher: Callable[[asyncio.AbstractEventLoop], FutureWatcher],
        access: CredentialFiles,
        counts: GrpcCounts,
        access_log: AccessLog,
        exporter: SpanExporter | None = None,
    ) -> None:
        self._access_log = access_log
        self._node, self._make_watcher, self._access, self._counts, self._exporter = (
            node,
            make_watcher,
            access,
            counts,
            exporter,
        )
        path = node.config.mesh.data_plane
        self._table = DataPlane(path, time.monotonic) if path else None
        self.address = ""
        self._loop = Loop(
            "clipper-grpc", self._listen, self._close, make=fast_event_loop, vital=True
        )
        self._workers = Pool("clipper-grpc-work", _WORKERS)
        self._managers = Pool("clipper-grpc-manage", _WORKERS)
        self._watcher: FutureWatcher | None = None
        self._listener: CallListener | None = None
        self._open: CallServer
        self._calls: GrpcDispatcher
        self._mesh: tuple[MeshService, MeshWatchService] | None = None

    def start(self) -> None:
        """Start the threads, and return when the address accepts calls.

        Raises AddressInUse, NotStarted; then nothing of it is left.
        """
        require_descriptors(DESCRIPTORS, "gRPC")
        try:
            self._workers.start()
            self._managers.start()
            self._loop.start()
        except BaseException:
            self.stop()
            raise

    def health(self) -> list[Health]:
        """Return the state of the event loop and of the threads."""
        return [self._loop.health(), self._workers.health(), self._managers.health()]

    async def _listen(self, loop: asyncio.AbstractEventLoop) -> None:
        self._watcher = watcher = self._make_watcher(loop)
        self._calls = calls = GrpcDispatcher(
            self._node,
            watcher,
            (self._workers, self._managers),
            self._counts,
            self._access_log,
            self._access.keys,
            self._exporter,
        )
        others = None if self._table is None else PayloadMethods(calls, self._table)
        if others is not None:
            calls.before_reading = others.named
        mesh = self._node.mesh
        mine = (
            INFERENCE,
            APPLICATIONS,
            HEALTH,
            REFLECTION,
            *((MESH, MESH_WATCH) if mesh is not None else ()),
        )
        services = [
            InferenceService(calls),
            ApplicationService(calls),
            HealthService(calls, mine),
            ReflectionService(calls, mine),
        ]
        if mesh is not None:
            managing = MeshService(calls, mesh, self._access.tokens, lambda: self.address)
            self._mesh = (managing, MeshWatchService(calls, mesh, managing.check_manages))
        handlers: list[grpc.GenericRpcHandler] = [
            Door(check_of(self._access.keys), self._counts.count_refused)
        ]
        for service in (*services, *(self._mesh or ())):
            handlers += service.handlers
        if others is not None:
            handlers.append(others)
        await self._accept(loop, handlers)

    async def _accept(
        self, loop: asyncio.AbstractEventLoop, handlers: list[grpc.GenericRpcHandler]
    ) -> None:
        """Listen, and serve calls by these handlers. Raises AddressInUse."""
        settings, config = self._node.config.grpc, self._node.config
        self._open = CallServer(
            handlers,
            settings.message_bytes_max,
            BodyMemory(bodies_bytes(config.http)),
            self._workers,
            settings.calls_max + _REFUSED_MAX,
            settings.ping_s_min,
        )
        assert self._watcher is not None
        self._listener = CallListener(
            loop, self._open, connection_settings(config.http, settings), self._watcher
        )
        listener = self._bound(settings.address)
        host = settings.address.rpartition(":")[0]
        self.address = f"{host}:{listener.getsockname()[1]}"
        await self._listener.listen(listener, self._access.certificates.get("grpc"))

    def _bound(self, address: str) -> socket.socket:
        """Listen on the address, or on the next free one if it may move."""
        moves = "grpc.address" in self._node.config.may_move
        choices: Iterable[str] = nearby(address) if moves else (address,)
        return bind_first("grpc.address", choices, self._node.config.http.backlog)

    # -- the end

    def drain(self) -> None:
        """Accept no new calls; let the open ones finish."""
        self._loop.call(self._drain)

    def _drain(self) -> None:
        if self._listener is not None:
            self._calls.closing.set()
            self._listener.drain()

    def stop(self) -> None:
        """Send the last replies and stop. Every query has ended before. Idempotent."""
        self.drain()
        self._loop.end(_STOP_S)
        self._workers.shutdown()
        self._managers.shutdown()
        for service in self._mesh or ():
            service.close()

    async def _close(self) -> None:
        self._drain()
        if self._listener is not None:
            await self._listener.close()
        if self._watcher is not None:
            self._watcher.close()


def connection_settings(http: HttpSettings, grpc: GrpcSettings) -> HttpSettings:
    """Return the settings of the connections of a gRPC server: those of HTTP, and its own."""
    return msgspec.structs.replace(
        http,
        connections_max=grpc.connections_max,
        pipeline_max=grpc.streams_max,
        header_bytes_max=grpc.metadata_bytes_max,
        idle_s=grpc.idle_s,
    )
