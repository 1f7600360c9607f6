"""`GET /metrics`: Prometheus text format, OpenMetrics if the client accepts it, or InfluxDB's
lines."""

import time
import urllib.parse
from collections.abc import Mapping, Sequence

from clipper.clock import wall_time_us
from clipper.errors import ClipperError, InvalidInput, did_you_mean
from clipper.frontend.http.messages import HandlerResult, HttpRequest, HttpResponse, WorkerTask
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.server_interface import ServerInterface
from clipper.metrics import CONTENT_TYPES, Metrics, MetricsSource, influx, openmetrics, prometheus
from clipper.serving.query.application import shares_of


class MetricsRoutes:
    """The route /metrics. Threads: any. Metrics are collected on worker threads."""

    def __init__(self, node: ServerInterface, counts: Sequence[MetricsSource]) -> None:
        self._node = node
        most = node.config.http.metrics_names_max
        self.metrics = Metrics(node.version, node.stats, self._slos_s, self._shares, most, counts)

    def add_to(self, routes: HttpRouter) -> None:
        """Add the route."""
        routes.add("GET", "/metrics", self.scrape)

    def scrape(self, request: HttpRequest) -> HandlerResult:
        """Return all metrics in the requested format."""
        format = format_of(request)
        return WorkerTask(lambda: self._answer(format))

    def _answer(self, format: str) -> HttpResponse:
        samples, old_names = self.metrics.collect(), self._node.config.http.metrics_old_names
        if format == "influx":
            lines = influx(samples, wall_time_us() * 1000, old_names)
            return HttpResponse(200, lines, CONTENT_TYPES[format])
        write = openmetrics if format == "openmetrics" else prometheus
        return HttpResponse(200, write(samples, old_names), CONTENT_TYPES[format])

    def _slos_s(self) -> Mapping[str, float]:
        return {
            name: app.slo_us / 1e6 for name, app in self._node.catalog.view.applications.items()
        }

    def _shares(self) -> Mapping[str, Mapping[str, float]]:
        found = {}
        for name in self._node.catalog.view.applications:
            try:
                found[name] = shares_of(self._node.resolve(name))
            except ClipperError:  # deleted in the meantime, or a failing user-defined policy
                continue
            time.sleep(0)
        return found


def format_of(request: HttpRequest) -> str:
    """Return the format of a request. Raises InvalidInput for an unknown one."""
    given = urllib.parse.parse_qs(request.query.decode("ascii", "replace")).get("format")
    if given:
        if given[-1] not in CONTENT_TYPES:
            guess = did_you_mean(given[-1], CONTENT_TYPES) or "."
            raise InvalidInput(
                f"unknown format {given[-1][:40]!r}{guess}",
                hint=f"Formats: {', '.join(CONTENT_TYPES)}.",
            )
        return given[-1]
    return (
        "openmetrics" if _prefers_openmetrics(request.headers.get(b"accept", b"")) else "prometheus"
    )


def _prefers_openmetrics(accept: bytes) -> bool:
    """Return whether OpenMetrics is accepted, and plain text has no higher `q`."""
    weights: dict[bytes, float] = {}
    for item in accept.lower().split(b","):
        kind, *parameters = [part.strip() for part in item.split(b";")]
        given = [part[2:] for part in parameters if part.startswith(b"q=")]
        try:
            weights[kind] = max(weights.get(kind, 0.0), float(given[0]) if given else 1.0)
        except ValueError:
            continue
    open = weights.get(b"application/openmetrics-text", 0.0)
    return open > 0 and open >= weights.get(b"text/plain", 0.0)
