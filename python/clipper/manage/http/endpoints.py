"""The network endpoints of a server: HTTP and gRPC frontends, management routes, the dashboard."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from clipper.component import Health
from clipper.errors import without_secrets
from clipper.frontend.server_interface import ServerInterface
from clipper.manage.deployment import Deployment
from clipper.manage.operations import Operations, Server
from clipper.manage.running import Running, announce, current_folder, state_named
from clipper.manage.tables.parameters import ParameterSet
from clipper.mesh.membership import MeshMembership
from clipper.serving.query.dispatch import Dispatch
from clipper.serving.query.future_watcher import FutureWatcher
from clipper.serving.query.resolver import ApplicationResolver
from clipper.settings.http import admin_tls, query_tls, scheme_of
from clipper.settings.ports import reachable
from clipper.types import VERSION

if TYPE_CHECKING:
    from clipper.frontend.frontends import Frontends
    from clipper.manage.dashboard.feed import Feed
    from clipper.manage.dashboard.page import Page


class EndpointHost(Server, Protocol):
    """The server's methods that its endpoints need."""

    @property
    def address(self) -> str:
        """Return the address for containers."""

    @property
    def admin_address(self) -> str:
        """Return the address for management."""

    def health(self) -> list[Health]:
        """Return the threads, event loops and pools with their states."""

    @property
    def manage(self) -> Operations:
        """Return the operations of management."""


class Endpoints:
    """The frontends of the configuration; none until start().

    closed: returns whether the server is closing. run_folder: the private folder of this process.
    ends_by_signal: whether SIGTERM ends the process in good order.
    """

    def __init__(
        self,
        server: EndpointHost,
        resolver: ApplicationResolver,
        dispatch: Dispatch,
        deployment: Deployment,
        parameters: ParameterSet,
        mesh: MeshMembership,
        run_folder: Path,
        closed: Callable[[], bool],
        *,
        ends_by_signal: bool,
    ) -> None:
        self._server, self._config = server, server.config
        self._resolver, self._dispatch, self._deployment = resolver, dispatch, deployment
        self._parameters, self._mesh, self._run_folder = parameters, mesh, run_folder
        self._closed, self._ends_by_signal = closed, ends_by_signal
        self._node: ServerInterface | None = None
        self.frontends: Frontends | None = None
        self.dashboard: Feed | None = None
        self._page: Page | None = None

    def start(self) -> None:
        """Listen, and publish where this server is managed. Raises ConfigError, OSError."""
        config = self._config
        node = self._make_node()
        if config.http.address or config.http.admin or config.grpc.address or config.influx.url:
            self.frontends = self._make_frontends(node)
            self.frontends.start()
            self._announce()
            if self.dashboard is not None:
                self.dashboard.start()
        self._node = node

    def drain(self) -> None:
        """Stop the dashboard and accept no further connections."""
        try:
            if self.dashboard is not None:
                self.dashboard.stop()
        finally:
            if self.frontends is not None:
                self.frontends.drain()

    def unready(self) -> list[str]:
        """Return the reasons why the server is not ready, as `/v2/health/ready` does."""
        return ["the start of the server"] if self._node is None else self._node.unready()

    def dead(self) -> list[str]:
        """Return why the server should be started anew, as `/v2/health/live` does."""
        return [] if self._node is None else self._node.dead()

    def health(self) -> list[Health]:
        """Return the state of the threads of the frontends and of the dashboard."""
        found = [] if self.frontends is None else self.frontends.health()
        return [*found, *([] if self.dashboard is None else self.dashboard.health())]

    @property
    def is_busy(self) -> bool:
        """True while connections of HTTP are open."""
        return self.frontends is not None and self.frontends.is_busy

    def stop(self) -> None:
        """Close all connections. Idempotent."""
        if self.dashboard is not None:
            self.dashboard.stop()
        if self.frontends is not None:
            self.frontends.stop()

    @property
    def http_address(self) -> str:
        """The address of HTTP queries, `host:port`; empty without [http]."""
        return "" if self.frontends is None else self.frontends.address

    @property
    def admin_address(self) -> str:
        """The address of HTTP management, `host:port`; empty without http.admin."""
        return "" if self.frontends is None else self.frontends.admin_address

    @property
    def grpc_address(self) -> str:
        """The address of gRPC queries, `host:port`; empty without [grpc]."""
        return "" if self.frontends is None else self.frontends.grpc_address

    def dashboard_link(self) -> str:
        """Return a link that opens the dashboard once, or the address of the page where it needs no
        token of this server; empty without a dashboard."""
        if self._page is None or not self.admin_address:
            return ""
        scheme = scheme_of(admin_tls(self._config.http))
        return f"{scheme}://{reachable(self.admin_address)}{self._page.link()}"

    def _make_node(self) -> ServerInterface:
        server = self._server
        return ServerInterface(
            VERSION,
            self._config,
            server.catalog,
            self._resolver.application,
            self._resolver.request,
            server.stats,
            self._closed,
            server.scale,
            self._mesh.node,
            self._parameters.served,
            server.health,
            served=self._deployment.served_versions,
        )

    def _make_frontends(self, node: ServerInterface) -> "Frontends":
        # imported here: the frontends are a tenth of what `import clipper` would take
        from clipper.frontend.frontends import Frontends
        from clipper.manage.http.described import of_management
        from clipper.manage.http.rest import Management
        from clipper.manage.mesh.rest import MeshManagement

        engines, mesh = self._dispatch.engines, self._mesh.node
        frontends = Frontends(node, lambda loop: FutureWatcher(loop, engines), engines)
        Management(node, self._server.manage).add_to(frontends.admin_routes)
        if mesh is not None:
            MeshManagement(mesh).add_to(frontends.admin_routes)
        if self._config.http.admin and self._config.http.dashboard:
            self.dashboard = self._make_dashboard(node, frontends)
        frontends.admin_routes.describe(of_management())
        return frontends

    def _make_dashboard(self, node: ServerInterface, frontends: "Frontends") -> "Feed":
        from clipper.manage.dashboard.feed import Feed
        from clipper.manage.dashboard.page import Page
        from clipper.manage.dashboard.sources import ServerSources

        sources = ServerSources(
            self._server,
            node,
            self._server.manage,
            lambda: tuple(self._deployment.incidents),
            self._resolver.slowest,
            self._addresses,
        )
        feed = Feed(sources, self._config.http.dashboard_viewers_max)
        self._page = Page(feed, self._config)
        self._page.add_to(frontends.admin_routes)
        return feed

    def _addresses(self) -> Mapping[str, str]:
        each = {
            "http": self.http_address,
            "grpc": self.grpc_address,
            "admin": self.admin_address,
            "containers": self._server.address,
        }
        return {name: address for name, address in each.items() if address}

    def _announce(self) -> None:
        """Write where this server is managed, for the commands of this user on this host."""
        if not self.admin_address:
            return
        http = self._config.http
        queries = f"{scheme_of(query_tls(http))}://{self.http_address}" if self.http_address else ""
        tls = admin_tls(http)
        running = Running(
            f"{scheme_of(tls)}://{self.admin_address}",
            os.getpid(),
            http.token,
            queries,
            without_secrets(state_named(self._config.server.state)),
            os.path.abspath(tls.cert) if tls else "",
            self.grpc_address,
            self._ends_by_signal,
            current_folder(),
            self._config.file,
        )
        announce(self._run_folder, running)
