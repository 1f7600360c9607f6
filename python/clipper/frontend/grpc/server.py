"""The gRPC server: a thread with an event loop, and its services. Needs the extra `grpc`."""

import asyncio
import contextlib
import time
from collections.abc import Callable
from typing import Final

import grpc
import grpc.aio

from clipper.component import Health, Loop, Pool, fast_event_loop, require_descriptors
from clipper.errors import AddressInUse
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.grpc.applications import SERVICE as APPLICATIONS
from clipper.frontend.grpc.applications import ApplicationService
from clipper.frontend.grpc.calls import GrpcDispatcher
from clipper.frontend.grpc.credentials import bind
from clipper.frontend.grpc.door import Door, check_of, connection_options
from clipper.frontend.grpc.health import HEALTH, REFLECTION, HealthService, ReflectionService
from clipper.frontend.grpc.inference import SERVICE as INFERENCE
from clipper.frontend.grpc.inference import InferenceService
from clipper.frontend.grpc.mesh import SERVICE as MESH
from clipper.frontend.grpc.mesh import MeshService
from clipper.frontend.grpc.mesh_watch import SERVICE as MESH_WATCH
from clipper.frontend.grpc.mesh_watch import MeshWatchService
from clipper.frontend.grpc.payload_methods import PayloadMethods
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.mesh.data_plane import DataPlane
from clipper.metrics import GrpcCounts
from clipper.serving.models.address import held_by, is_free
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.grpc import GrpcSettings
from clipper.settings.ports import nearby

_WORKERS = 4
# further calls that are rejected with a reason; grpcio rejects the rest without one
_REFUSED_MAX = 1024
_GRACE_S = 1.0  # time to send the last replies after every query has ended
_STOP_S = 10.0  # for calls in the pools, and for the event loop
DESCRIPTORS: Final = 48  # gRPC aborts the process when it has none while it starts


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
        self._server: grpc.aio.Server | None = None
        self._calls: GrpcDispatcher
        self._draining: asyncio.Task[None] | None = None
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
        settings = self._node.config.grpc
        self._watcher = watcher = self._make_watcher(loop)
        self._server = server = grpc.aio.server(
            options=_options(settings), maximum_concurrent_rpcs=settings.calls_max + _REFUSED_MAX
        )
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
        server.add_generic_rpc_handlers(
            (Door(check_of(self._access.keys), self._counts.count_refused),)
        )
        for service in (*services, *(self._mesh or ())):
            server.add_generic_rpc_handlers(tuple(service.handlers))
        if others is not None:
            server.add_generic_rpc_handlers((others,))
        self.address = self._listen_at(server, settings.address)
        await server.start()

    def _listen_at(self, server: grpc.aio.Server, address: str) -> str:
        """Listen on an address, or on the next free one if it may move; return it."""
        if "grpc.address" not in self._node.config.may_move:
            return self._bound(server, address)
        for each in filter(is_free, nearby(address)):  # gRPC would log each one that is taken
            with contextlib.suppress(AddressInUse):
                return self._bound(server, each)
        return self._bound(server, address)

    def _bound(self, server: grpc.aio.Server, address: str) -> str:
        host = address.rpartition(":")[0]
        try:
            port = bind(server, address, self._access.certificates)
        except RuntimeError as error:
            hint = (
                "Stop what listens there, or choose another grpc.address; port 0 takes any free"
                " one."
            )
            holder = held_by(address)
            why = f"it is taken{holder}" if holder else error
            raise AddressInUse(
                f"cannot listen on grpc.address = {address!r}: {why}.", hint=hint
            ) from None
        return f"{host}:{port}"

    # -- the end

    def drain(self) -> None:
        """Accept no new calls; let the open ones finish."""
        self._loop.call(self._drain)

    def _drain(self) -> None:
        if self._draining is None and self._server is not None:
            self._calls.closing.set()
            grace_s = self._node.config.server.drain_s + _GRACE_S
            self._draining = asyncio.get_running_loop().create_task(self._server.stop(grace_s))

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
        if self._draining is not None:
            await asyncio.wait([self._draining], timeout=_GRACE_S)
            if not self._draining.done() and self._server is not None:
                await self._server.stop(0)
        if self._watcher is not None:
            self._watcher.close()


def _options(settings: GrpcSettings) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", settings.message_bytes_max),
        ("grpc.max_send_message_length", -1),
        ("grpc.max_metadata_size", settings.metadata_bytes_max),
        ("grpc.absolute_max_metadata_size", settings.metadata_bytes_max),
        ("grpc.max_concurrent_streams", settings.streams_max),
        ("grpc.max_connection_idle_ms", round(settings.idle_s * 1000)),
        *connection_options(settings.connections_max, settings.ping_s_min),
        ("grpc.so_reuseport", 0),
    ]
