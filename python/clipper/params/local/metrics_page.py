"""`GET /metrics` of a set without a server: `clipper params up --metrics`, `clipper params shard
--metrics`.

A server that uses the set exports the same metrics at its own `/metrics`.
"""

import logging
import socket
import threading
from collections.abc import Callable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from clipper.component import Backoff, Health, Stop, Worker
from clipper.errors import AddressInUse, ClipperError, ConfigError
from clipper.metrics import CONTENT_TYPES, ParamsMetrics, Samples, prometheus
from clipper.metrics.stats import ShardReading

log = logging.getLogger("clipper.params")
_SLOW_S: Final = 5.0  # a slower request is closed
_LOOK_S: Final = 0.25  # between two looks whether it is to stop
_AGAIN_S: Final = (0.1, 5.0)  # after an unexpected error


def samples_of(stats: Sequence[ShardReading]) -> Samples:
    """Return the metrics of statistics that were read once."""
    samples = Samples()
    ParamsMetrics(lambda: stats).collect(samples)
    return samples


class MetricsPage:
    """HTTP server of the metrics. Threads: start and stop from one. Raises AddressInUse,
    ConfigError.

    address: HOST:PORT; everybody who can reach it may read. stats: reads the statistics of the
    shards.
    """

    def __init__(self, address: str, stats: Callable[[], Sequence[ShardReading]]) -> None:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ConfigError(
                f"bad address {address!r} for metrics.", hint="Write HOST:PORT, as 127.0.0.1:9300."
            )
        self._metrics, self._lock = ParamsMetrics(stats), threading.Lock()
        try:
            self._server = _Server((host.strip("[]"), int(port)), self._answer)
        except (OSError, OverflowError) as error:
            raise AddressInUse(
                f"cannot listen at {address}: {error}.", hint="Name another port."
            ) from None
        self.address = f"{host}:{self._server.server_address[1]}"
        self._server.timeout = _LOOK_S
        self._worker = Worker("clipper-params-metrics", self._run, again=Backoff(*_AGAIN_S))

    def start(self) -> "MetricsPage":
        """Start the thread. Raises NotStarted."""
        self._worker.start()
        return self

    def stop(self) -> None:
        """End the thread, and close the socket. Idempotent."""
        self._worker.end()
        self._server.server_close()

    def health(self) -> Health:
        """Return the state of the thread."""
        return self._worker.health()

    def _run(self, stop: Stop) -> None:
        while not stop.requested:
            self._server.handle_request()

    def _answer(self) -> bytes:
        samples = Samples()
        with self._lock:
            self._metrics.collect(samples)
        return prometheus(samples)


class _Server(ThreadingHTTPServer):
    daemon_threads = False  # server_close waits for them

    def __init__(self, address: tuple[str, int], answer: Callable[[], bytes]) -> None:
        self.answer = answer
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        super().__init__(address, _MetricsRequest)


class _MetricsRequest(BaseHTTPRequestHandler):
    timeout = _SLOW_S
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] != "/metrics":
            self.send_error(404, "there is GET /metrics")
            return
        if "Origin" in self.headers:
            self.send_error(403, "not for pages of others")
            return
        try:
            body = self.server.answer()
        except ClipperError as error:
            self.send_error(503, str(error).partition("\n")[0])
            return
        self.send_response(200)
        self.send_header("Content-Type", CONTENT_TYPES["prometheus"].decode())
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        log.debug("metrics: %s", format % args)
