"""Where spans leave: a thread that makes them of what requests noted, and posts them to a collector by OTLP/HTTP.

A request costs an append to a queue that has an end; what comes when it is full is dropped and counted, and so is what the
collector has not taken after `tracing.tries_max` posts. Nobody ever waits for the collector, but for a moment when the server
closes.
"""

import http.client
import logging
import random
import ssl
import threading
import urllib.parse
from collections import Counter, deque
from collections.abc import Sequence
from typing import Final

from clipper.errors import ConfigError
from clipper.frontend.otlp import encode
from clipper.frontend.spans import Told, epoch_ns, spans_of
from clipper.frontend.traces import sampler_named
from clipper.metrics import Samples
from clipper.settings.tracing import Exporting, TracingSettings
from clipper.tls import client_context

_log = logging.getLogger(__name__)
_RETRIED: Final = frozenset((429, 502, 503, 504))
_PAUSE_S_MIN, _PAUSE_S_MAX = 0.2, 10.0
_LAST_S = 2.0  # for what is left when the server closes
_ANSWER_BYTES_MAX = 1 << 16


class Exporter:
    """Threads: put from any; start and stop from one. sample: which traces are recorded."""

    def __init__(self, settings: TracingSettings, exporting: Exporting, version: str) -> None:
        """ConfigError for an address that is none."""
        assert exporting.url is not None
        self.sample = sampler_named(exporting.sampler, exporting.share)
        self._settings, self._exporting, self._version = settings, exporting, version
        split = urllib.parse.urlsplit(exporting.url)
        if split.scheme not in ("http", "https") or not split.hostname:
            raise ConfigError(f"tracing.endpoint: {exporting.url!r} is no address.", hint="Write http://HOST:4318.")
        self._host, self._port = split.hostname, split.port or (443 if split.scheme == "https" else 4318)
        self._path = split.path + (f"?{split.query}" if split.query else "")
        self._tls: ssl.SSLContext | None = client_context(exporting.ca) if split.scheme == "https" else None
        self._queue: deque[Told] = deque()
        self._counts: Counter[str] = Counter({"exported": 0, "dropped": 0})
        self._more, self._stopping = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="clipper-otlp", daemon=True)
        self._is_away = False

    def put(self, told: Told) -> None:
        if len(self._queue) >= self._settings.queue_max:
            self._counts["dropped"] += 1
            return
        self._queue.append(told)
        if len(self._queue) == self._settings.batch_max:
            self._more.set()

    def collect(self, into: Samples) -> None:
        for outcome, count in self._counts.copy().items():
            into.add("clipper_traced_requests_total", count, outcome)
        into.add("clipper_traced_requests_waiting", len(self._queue))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Sends what is left, if the collector takes it within a moment. Idempotent."""
        self._stopping.set()
        self._more.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._more.wait(self._settings.delay_s)
            self._more.clear()
            try:
                while self._queue:
                    self._send(self._taken())
            except Exception:
                _log.exception("exporting spans failed")
        self._counts["dropped"] += len(self._queue)
        self._queue.clear()

    def _taken(self) -> list[Told]:
        return [self._queue.popleft() for _ in range(min(len(self._queue), self._settings.batch_max))]

    def _send(self, batch: Sequence[Told]) -> None:
        shift_ns = epoch_ns()
        spans = [span for told in batch for span in spans_of(told, shift_ns)]
        body = encode(spans, self._exporting.attributes, self._version)
        pause_s = _PAUSE_S_MIN
        for tried in range(1, self._settings.tries_max + 1):
            after_s, why = self._post(body)
            if after_s is None:
                self._counts["refused" if why else "exported"] += len(batch)
                self._tell(why)
                return
            self._tell(why)
            if self._stopping.is_set() or tried == self._settings.tries_max:
                break
            self._stopping.wait(min(_PAUSE_S_MAX, max(after_s, pause_s * random.uniform(0.5, 1.5))))
            pause_s *= 2
        self._counts["dropped"] += len(batch)

    def _post(self, body: bytes) -> tuple[float | None, str]:
        """-> after how long to try again (None: not at all), and why it was not taken, if it was not."""
        timeout_s = min(self._exporting.timeout_s, _LAST_S) if self._stopping.is_set() else self._exporting.timeout_s
        line: http.client.HTTPConnection
        if self._tls is None:
            line = http.client.HTTPConnection(self._host, self._port, timeout=timeout_s)
        else:
            line = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_s, context=self._tls)
        try:
            headers = {"content-type": "application/x-protobuf", "user-agent": f"clipper/{self._version}"}
            line.request("POST", self._path, body, headers | self._exporting.headers)
            response = line.getresponse()
            response.read(_ANSWER_BYTES_MAX)
            if response.status < 300:
                return None, ""
            why = f"it says {response.status} {response.reason}"
            if response.status not in _RETRIED:
                return None, why
            after = response.getheader("retry-after", "")
            return (float(after) if after.isdecimal() else 0.0), why
        except (OSError, http.client.HTTPException) as error:
            return 0.0, str(error) or type(error).__name__
        finally:
            line.close()

    def _tell(self, why: str) -> None:
        """Once when it begins, once when it is over."""
        if why and not self._is_away:
            _log.warning("spans do not reach %s: %s", self._exporting.url, why)
        elif not why and self._is_away:
            _log.info("spans reach %s again", self._exporting.url)
        self._is_away = bool(why)
