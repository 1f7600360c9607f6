"""The services of gRPC, and the threads for their work. Needs the extra `grpc`."""

import asyncio
import time
from collections.abc import Sequence

from clipper.component import Health, Pool
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.credential_files import CredentialFiles
from clipper.frontend.grpc.applications import SERVICE as APPLICATIONS
from clipper.frontend.grpc.applications import ApplicationService
from clipper.frontend.grpc.call_stream import CallServer
from clipper.frontend.grpc.calls import GrpcDispatcher
from clipper.frontend.grpc.door import Door, check_of
from clipper.frontend.grpc.fast_calls import FastCalls
from clipper.frontend.grpc.health import HEALTH, REFLECTION, HealthService, ReflectionService
from clipper.frontend.grpc.inference import SERVICE as INFERENCE
from clipper.frontend.grpc.inference import InferenceService
from clipper.frontend.grpc.mesh import SERVICE as MESH
from clipper.frontend.grpc.mesh import MeshService
from clipper.frontend.grpc.mesh_watch import SERVICE as MESH_WATCH
from clipper.frontend.grpc.mesh_watch import MeshWatchService
from clipper.frontend.grpc.method import CallMethods
from clipper.frontend.grpc.payload_methods import PayloadMethods
from clipper.frontend.http.body_memory import BodyMemory
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.mesh.data_plane import DataPlane
from clipper.metrics import GrpcCounts
from clipper.serving.query.future_watcher import FutureWatcher
from clipper_core.engine.engine import Engine

_WORKERS = 4
# further calls that are rejected with the reason; those beyond are rejected at once
_REFUSED_MAX = 1024


class GrpcServer:
    """The services of gRPC, and the threads for their work. Its calls come over the connections of
    an HttpListeners (CallSource). Threads: `open`, `drain` and `close` are the event loop's; the
    others are called from one.

    access: keys and tokens. counts: of the calls. exporter: exports spans; None for none. engines:
    of the models.
    """

    def __init__(
        self,
        node: ServerInterface,
        access: CredentialFiles,
        counts: GrpcCounts,
        access_log: AccessLog,
        exporter: SpanExporter | None = None,
        engines: Sequence[Engine] = (),
    ) -> None:
        self._node = node
        self._access = access
        self._counts = counts
        self._access_log = access_log
        self._exporter = exporter
        path = node.config.mesh.data_plane
        self._table = DataPlane(path, time.monotonic) if path else None
        self._engines = engines
        self._fast: FastCalls | None = None
        self._workers = Pool("clipper-grpc-work", _WORKERS)
        self._managers = Pool("clipper-grpc-manage", _WORKERS)
        self._open: CallServer | None = None
        self._calls: GrpcDispatcher
        self._mesh: tuple[MeshService, MeshWatchService] | None = None

    def start(self) -> None:
        """Start the threads. Raises NotStarted; then nothing of it is left."""
        try:
            self._workers.start()
            self._managers.start()
        except BaseException:
            self.stop()
            raise

    def health(self) -> list[Health]:
        """Return the state of the threads."""
        return [self._workers.health(), self._managers.health()]

    def open(self, watcher: FutureWatcher, bodies: BodyMemory) -> CallServer:
        """Return the server of the calls. watcher: of its queries. bodies: the memory for
        messages."""
        config = self._node.config
        self._calls = GrpcDispatcher(
            self._node,
            watcher,
            (self._workers, self._managers),
            self._counts,
            self._access_log,
            self._access.keys,
            self._exporter,
        )
        self._fast = self._fast_calls(watcher)
        self._open = CallServer(
            self._handlers(self._calls),
            config.grpc.message_bytes_max,
            bodies,
            self._workers,
            config.grpc.calls_max + _REFUSED_MAX,
            config.grpc.ping_s_min,
            self._fast,
        )
        if self._fast is not None:
            self._fast.open(asyncio.get_running_loop())
        return self._open

    def _fast_calls(self, watcher: FutureWatcher) -> FastCalls | None:
        """Return what answers calls in the core; None where each call is logged or has spans, or
        the data plane's methods rewrite requests."""
        is_seen = self._exporter is not None or self._access_log.logs_all
        if is_seen or self._table is not None or not self._engines:
            return None
        return FastCalls(
            self._node,
            self._engines,
            self._counts,
            self._access.keys,
            self._access_log,
            watcher,
        )

    def _handlers(self, calls: GrpcDispatcher) -> list[CallMethods]:
        """Return what answers calls; the first that knows a call does."""
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
            managing = MeshService(calls, mesh, self._access.tokens)
            self._mesh = (managing, MeshWatchService(calls, mesh, managing.check_manages))
        handlers: list[CallMethods] = [
            Door(check_of(self._access.keys), self._counts.count_refused)
        ]
        for service in (*services, *(self._mesh or ())):
            handlers += service.handlers
        if others is not None:
            handlers.append(others)
        return handlers

    # -- the end

    def drain(self) -> None:
        """Accept no new calls; tell streams that have no end of their own. Idempotent."""
        if self._open is not None:
            self._calls.closing.set()

    async def close(self) -> None:
        """End the calls that are open. Idempotent."""
        self.drain()
        if self._open is not None:
            await self._open.tasks.cancel()
        if self._fast is not None:
            self._fast.close()

    def stop(self) -> None:
        """Stop the threads. The event loop has ended. Idempotent."""
        self._workers.shutdown()
        self._managers.shutdown()
        for service in self._mesh or ():
            service.close()
