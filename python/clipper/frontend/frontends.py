"""The frontends of a server: the routes of each HTTP listener, gRPC, metrics and traces."""

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

from clipper.component import Health
from clipper.errors import ConfigError
from clipper.frontend.access_log import AccessLog
from clipper.frontend.auth.credential_files import OPEN, CredentialFiles, tls_of_listeners
from clipper.frontend.auth.management import guard
from clipper.frontend.http.applications import ApplicationRoutes
from clipper.frontend.http.fast_path import FastPath
from clipper.frontend.http.health import HealthRoutes
from clipper.frontend.http.inference import InferenceRoutes
from clipper.frontend.http.listeners import (
    Admit,
    Handle,
    HttpListeners,
    ListenAddress,
    refuse_no_call,
)
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpRequest,
    HttpResponse,
    answer_json,
    inflating,
)
from clipper.frontend.http.metrics import MetricsRoutes
from clipper.frontend.http.repository import ModelContainers
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.http.tls import secured_by
from clipper.frontend.influx_push import InfluxPush
from clipper.frontend.openapi.endpoint import OpenApiEndpoint
from clipper.frontend.openapi.routes import SchemaLimits
from clipper.frontend.server_interface import ServerInterface
from clipper.frontend.tracing.exporter import SpanExporter
from clipper.frontend.tracing.spans import Batch
from clipper.metrics import (
    GrpcCounts,
    HttpCounts,
    MeshMetrics,
    MetricsSource,
    ParamsMetrics,
    TlsCounts,
)
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.settings.grpc import connection_settings, own_address, shares_http
from clipper.settings.http import HttpSettings, admin_tls
from clipper.settings.tracing import export_settings
from clipper_core.engine.engine import BatchLog, Engine

if TYPE_CHECKING:
    from clipper.frontend.grpc.server import GrpcServer

_PAGE = "/dashboard"


class Frontends:
    """All frontends of one server. Threads: any; start, drain and stop from one.

    `routes` and `admin_routes` take further routes until start().
    """

    def __init__(
        self,
        node: ServerInterface,
        make_watcher: Callable[[asyncio.AbstractEventLoop], FutureWatcher],
        engines: Sequence[Engine] = (),
    ) -> None:
        self._node, self._make_watcher, self._engines = node, make_watcher, engines
        self._listeners: HttpListeners | None = None
        self._grpc: GrpcServer | None = None
        self.routes, self.admin_routes = HttpRouter(), HttpRouter()
        limits = SchemaLimits(node.config.limits.slo_ms_max, node.config.http.queries_max)
        self.address = self.admin_address = self.grpc_address = ""
        ApplicationRoutes(node).add_to(self.routes)
        InferenceRoutes(node).add_to(self.routes)
        ModelContainers(node).add_to(self.admin_routes)
        for segment in ("admin", "dashboard", "metrics"):
            self.routes.refer(segment, "the management address, http.admin")
        for segment in ("api", "v2"):
            self.admin_routes.refer(segment, "the query address, http.address")
        self._counts = {"address": HttpCounts("query"), "admin": HttpCounts("admin")}
        self._access, self._grpc_counts = CredentialFiles(), GrpcCounts()
        self._access_log = AccessLog(node.config.logging.access_lines_s_max)
        self._exporter = _exporter(node, engines)
        self._tls_counts = {
            "address": TlsCounts("query"),
            "admin": TlsCounts("admin"),
            "grpc": TlsCounts("grpc"),
        }
        tls_counts = [
            self._tls_counts[key] for key in tls_of_listeners(node.config.http, node.config.grpc)
        ]
        beside: list[MetricsSource] = [
            *self._counts.values(),
            self._grpc_counts,
            *tls_counts,
            self._access,
        ]
        beside += [self._exporter] if self._exporter else []
        beside += [MeshMetrics(node.mesh.stats)] if node.mesh is not None else []
        if node.params is not None:
            beside.append(ParamsMetrics(node.params.shards, node.config.http.metrics_names_max))
        scrape = self.scrape = MetricsRoutes(node, beside)
        self._push: InfluxPush | None = None
        if node.config.influx.url:
            self._push = InfluxPush(
                node.config.influx,
                scrape.metrics.collect,
                node.version,
                node.config.http.metrics_old_names,
            )
            scrape.metrics.add(self._push)
        scrape.add_to(self.admin_routes)
        if node.config.http.metrics:
            scrape.add_to(self.routes)
        for routes in (self.routes, self.admin_routes):
            HealthRoutes(node).add_to(routes)
            routes.add("GET", "/", _index(node, routes))
        queries = OpenApiEndpoint(node, self.routes, limits)
        queries.add_to(self.routes)
        OpenApiEndpoint(node, self.admin_routes, limits, queries).add_to(self.admin_routes)

    def start(self) -> None:
        """Listen on the addresses of [http] and [grpc]. Raises AddressInUse, ConfigError."""
        config = self._node.config
        self._access.read(config.http, config.grpc, self._tls_counts)
        self._follow_shares()
        self._access.start()
        if self._exporter is not None:
            self._exporter.start()
        if self._push is not None:
            self._push.start()
        if config.grpc.address:
            self._start_grpc()
        each = list(self._addresses())
        if not each:
            return
        self._listeners = HttpListeners(
            config.http, each, self._make_watcher, self._grpc, self._exporter, self._access_log
        )
        found = self._listeners.addresses
        self.address = found.get("http.address", "")
        self.admin_address = found.get("http.admin", "")
        is_shared = shares_http(config.grpc, config.http)
        self.grpc_address = self.address if is_shared else found.get("grpc.address", "")
        self._listeners.start()

    def _addresses(self) -> Iterator[ListenAddress]:
        """Yield the addresses to listen on."""
        config, access = self._node.config, self._access
        http, secured = config.http, access.certificates
        if http.address:
            yield ListenAddress(
                "http.address",
                http.address,
                http,
                inflating(_finding(self.routes), http.body_bytes_max),
                self._counts["address"],
                access.key_check(),
                secured.get("address"),
                self._hot(),
                may_move="http.address" in config.may_move,
                has_calls=shares_http(config.grpc, http),
            )
        if http.admin:
            yield ListenAddress(
                "http.admin",
                http.admin,
                http,
                inflating(_finding(self.admin_routes), http.body_bytes_max),
                self._counts["admin"],
                _except_public(guard(http, access.tokens)),
                secured.get("admin"),
                own_user=_is_for_own_user(http),
                may_move="http.admin" in config.may_move,
            )
        if own := own_address(config.grpc, http):
            yield ListenAddress(
                "grpc.address",
                own,
                connection_settings(http, config.grpc),
                refuse_no_call,
                HttpCounts(""),
                secured=secured.get("grpc"),
                hot=self._hot_calls(),
                may_move="grpc.address" in config.may_move,
                has_calls=True,
            )

    def _follow_shares(self) -> None:
        """Give the engines the shares of the keys, now and whenever the file changes."""
        keys = self._access.keys
        if keys is None:
            return

        def weigh() -> None:
            for engine in self._engines:
                engine.set_weights(keys.weights)

        keys.on_change(weigh)
        weigh()

    def _hot(self) -> FastPath | None:
        """Return the fast path of queries."""
        http = self._node.config.http
        counts = self._counts["address"]
        return self._fast_path("address", http, self.routes, counts) if http.address else None

    def _hot_calls(self) -> FastPath | None:
        """Return the fast path of an address of gRPC alone."""
        config = self._node.config
        if config.mesh.data_plane:  # calls are Python's
            return None
        settings = connection_settings(config.http, config.grpc)
        return self._fast_path("grpc", settings, None, HttpCounts(""))

    def _fast_path(
        self, name: str, settings: HttpSettings, routes: HttpRouter | None, counts: HttpCounts
    ) -> FastPath | None:
        """Return a fast path, for queries without exported traces and an access log; else None.
        name: of its certificate."""
        access = self._access
        if not (settings.workers and self._engines) or self._exporter is not None:
            return None
        certificate = access.certificates.get(name)
        secured = None if certificate is None else secured_by(certificate)
        if self._access_log.logs_all or (certificate is not None and secured is None):
            return None
        return FastPath(self._node, settings, routes, counts, self._engines, access.keys, secured)

    def _start_grpc(self) -> None:
        try:
            from clipper.frontend.grpc.server import GrpcServer
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "google":
                raise
            hint = 'pip install "clipper-serving[grpc]".'
            raise ConfigError(
                f"grpc.address is set, and gRPC cannot be imported: {error}.", hint=hint
            ) from None
        self._grpc = GrpcServer(
            self._node,
            self._access,
            self._grpc_counts,
            self._access_log,
            self._exporter,
            self._engines,
        )
        self._grpc.start()

    def drain(self) -> None:
        """Accept no new connections; close each one after its open responses."""
        if self._listeners is not None:
            self._listeners.drain()

    @property
    def is_busy(self) -> bool:
        """True while connections of HTTP are open."""
        return self._listeners is not None and self._listeners.is_busy

    def health(self) -> list[Health]:
        """Return the state of all threads, event loops and pools."""
        each = (self._listeners, self._grpc, self._access, self._exporter, self._push)
        return [health for one in each if one is not None for health in one.health()]

    def stop(self) -> None:
        """Send the last responses and stop. Every query has ended before. Idempotent.

        An error of one part does not keep the others; it is raised at the end.
        """
        with contextlib.ExitStack() as stack:
            for one in (self._push, self._exporter, self._access, self._grpc, self._listeners):
                if one is not None:
                    stack.callback(one.stop)
            self._listeners = None


def _is_for_own_user(http: HttpSettings) -> bool:
    """Return whether only the server's own user may use management: there is neither a token nor
    are there client certificates."""
    tls = admin_tls(http)
    return not (http.token or http.tokens_file or (tls is not None and tls.client_ca))


def _exporter(node: ServerInterface, engines: Sequence[Engine]) -> SpanExporter | None:
    """Return the exporter of spans, as configured by [tracing] and OpenTelemetry's environment
    variables.

    Returns None if no endpoint is set. Raises ConfigError.
    """
    settings = node.config.tracing
    try:
        found = export_settings(settings, os.environ)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    if not found.url:
        return None
    logs = [BatchLog(engine) for engine in engines]

    def find(ids: Iterable[int]) -> dict[int, Batch]:
        wanted = list(ids)
        return {id: batch for log in logs for id, batch in log.find(wanted).items()}

    return SpanExporter(settings, found, node.version, find)


def _finding(routes: HttpRouter) -> Handle:
    def handle(request: HttpRequest) -> HandlerResult:
        return routes.find(request)(request)

    return handle


def _except_public(check: Admit) -> Admit:
    def guarded(request: HttpRequest) -> None:
        if request.path not in OPEN:
            check(request)

    return guarded


def _index(node: ServerInterface, routes: HttpRouter) -> Handle:
    def index(request: HttpRequest) -> HandlerResult:
        """Show a browser the dashboard, where there is one."""
        if ("GET", _PAGE) in routes and b"text/html" in request.headers.get(b"accept", b""):
            return HttpResponse(303, b"", headers=((b"location", _PAGE.encode()),))
        lines = [
            f"{method} {pattern.replace('{}', 'NAME', 1).replace('{}', 'VERSION')}"
            for method, pattern in routes
        ]
        return answer_json({"name": "clipper", "version": node.version, "routes": lines})

    return index
