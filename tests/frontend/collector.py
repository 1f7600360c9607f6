"""A collector of OTLP/HTTP: a socket, and opentelemetry-proto's own classes to read requests. Other
requests are stored."""

import http.server
import threading
import time
from collections.abc import Callable
from typing import Any

from tests.frontend.conftest import PATIENCE_S
from tests.threads import join


class Collector:
    """A fake collector of traces. spans: the spans that it received, as {name, trace_id, span_id,
    ...}, by hexadecimal ids. statuses: of its next answers; 200 when there are none."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.posts: list[tuple[str, dict[str, str]]] = []
        self.resource: dict[str, str] = {}
        self.lines: list[bytes] = []  # what was posted elsewhere
        self.statuses: list[int] = []
        self.hold = threading.Event()
        self.hold.set()
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                collector.hold.wait(PATIENCE_S)
                status = collector.statuses.pop(0) if collector.statuses else 200
                collector.posts.append(
                    (self.path, {name.lower(): value for name, value in self.headers.items()})
                )
                if status == 200:
                    (collector.take if self.path == "/v1/traces" else collector.lines.append)(body)
                self.send_response(status)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.01,), daemon=True
        )
        self._thread.start()

    def take(self, body: bytes) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
            ExportTraceServiceRequest,
        )

        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resource = {
                each.key: each.value.string_value for each in resource.resource.attributes
            }
            for scope in resource.scope_spans:
                assert scope.scope.name == "clipper"
                self.spans += scope.spans

    def named(self, name: str, count: int = 1) -> list[Any]:
        """Return the spans of a name as soon as there are `count` of them."""
        self.await_that(lambda: len([span for span in self.spans if span.name == name]) >= count)
        return [span for span in self.spans if span.name == name]

    def await_that(self, holds: Callable[[], Any]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not holds() and time.monotonic() < until:
            threading.Event().wait(0.005)
        assert holds(), sorted(span.name for span in self.spans)

    def close(self) -> None:
        self.hold.set()
        self._server.shutdown()
        join(self._thread)
        self._server.server_close()


def attributes_of(span: Any) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = (
            [item.string_value for item in value.values] if kind == "array_value" else value
        )
    return found
