"""MLPerf: LoadGen's scenarios SingleStream, Offline and Server, in process and over HTTP.

LoadGen (package `mlcommons-loadgen`) sends the queries, checks the latency bound and says whether a
run is valid; its logs are kept in bench/results/mlperf. The model is a linear SVM on scikit-learn's
digits, in a container of its own; its predictions are not cached, as the rules of MLPerf demand.
Every answer is compared with the model's own. SingleStream is the 90th percentile of one query at a
time, Offline the rate of one query with all samples, Server the highest Poisson rate whose 99th
percentile stays within 10 ms. Anchors: a system that answers at once without a model, and the model
called with all rows in this process.

Reference: Reddi et al., MLPerf Inference Benchmark, ISCA 2020, section III.
"""

import asyncio
import contextlib
import functools
import re
import shutil
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import uvloop
from numpy.typing import NDArray
from sklearn.svm import LinearSVC

import clipper
from bench.harness import Row, absent, row
from bench.results import RESULTS
from clipper.errors import Overloaded
from clipper.types import Answer
from clipper_demo import digits
from tests.processes import Program

try:
    import mlperf_loadgen as loadgen
except ImportError:  # python -m pip install mlcommons-loadgen
    loadgen = None

LOGS = RESULTS / "mlperf"
SLO_MS = 1000.0  # of the application: an answer that is later counts as wrong
BOUND_MS = 10.0  # of the 99th percentile in the Server scenario
SECONDS = 20.0  # a run that is reported; LoadGen calls a shorter one invalid
PROBE_S = 3.0
PROBES = 6
SPAN = 1000.0
TRIES = 4  # valid runs at the probed rate, each at 0.9 times the rate before
CONNECTIONS = 32
CHUNK = 4096  # rows of one array in the Offline scenario
PATIENCE_S = 60.0

Respond = Callable[[Sequence[int], Sequence[float]], None]  # ids and outputs; NaN: no answer


class System(Protocol):
    """A system that LoadGen tests."""

    def issue(self, ids: Sequence[int], indexes: Sequence[int], respond: Respond) -> None:
        """Answer samples, now or later."""


class Instant:
    """Answers at once, without a model: the cost of LoadGen and of Python between them."""

    def __init__(self, labels: NDArray[np.float64]) -> None:
        self._labels = labels

    def issue(self, ids: Sequence[int], indexes: Sequence[int], respond: Respond) -> None:
        """Answer with what the model says, looked up."""
        respond(ids, [self._labels[index] for index in indexes])


class InProcess:
    """Queries through `predict`, and arrays through `predict_many` where many samples come."""

    def __init__(self, app: "clipper.ApplicationHandle", rows: NDArray[np.float64]) -> None:
        self._app, self._rows = app, rows

    def issue(self, ids: Sequence[int], indexes: Sequence[int], respond: Respond) -> None:
        """Send one query for each sample, or arrays of CHUNK rows."""
        if len(ids) == 1:
            try:
                future = self._app.predict(self._rows[indexes[0]])
            except Overloaded:
                respond(ids, [float("nan")])
                return
            future.add_done_callback(functools.partial(_respond_one, ids, respond))
            return
        for begin in range(0, len(ids), CHUNK):
            part = ids[begin : begin + CHUNK]
            future = self._app.predict_many(self._rows[np.asarray(indexes[begin : begin + CHUNK])])
            outputs = future.result(PATIENCE_S)
            respond(part, np.where(outputs.is_default, np.nan, outputs.outputs).tolist())


def _respond_one(ids: Sequence[int], respond: Respond, future: Future[Answer]) -> None:
    answer = future.result()
    respond(ids, [float("nan") if answer.is_default else float(answer.output)])


class _Body(msgspec.Struct):
    output: float
    default: bool = False


class OverHttp:
    """Queries over HTTP, one at a time on each connection, from an event loop in a thread."""

    def __init__(self, address: str, rows: NDArray[np.float64], connections: int) -> None:
        head = b"POST /api/linear/predict HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n"
        bodies = [msgspec.json.encode({"input": values}) for values in rows.tolist()]
        self._requests = [head % len(body) + body for body in bodies]
        self._waiting: deque[tuple[int, int, Respond]] = deque()
        self._free: deque[_Connection] = deque()
        self._connecting: set[asyncio.Task[None]] = set()
        self._closed = False
        self._place = address.rpartition(":")
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        for _ in range(connections):
            asyncio.run_coroutine_threadsafe(self._connect(), self._loop).result(PATIENCE_S)

    async def _connect(self) -> None:
        host, _, port = self._place
        make = functools.partial(_Connection, self._next, self._lost)
        _, connection = await self._loop.create_connection(make, host, int(port))
        self._next(connection)

    def _lost(self, connection: "_Connection") -> None:
        """Open another connection: the server closes those that are idle for long."""
        if self._closed:
            return
        with contextlib.suppress(ValueError):
            self._free.remove(connection)
        task = self._loop.create_task(self._connect())
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def issue(self, ids: Sequence[int], indexes: Sequence[int], respond: Respond) -> None:
        """Send a request for each sample on a free connection, or queue it."""
        self._loop.call_soon_threadsafe(self._send, tuple(ids), tuple(indexes), respond)

    def _send(self, ids: Sequence[int], indexes: Sequence[int], respond: Respond) -> None:
        self._waiting.extend((id, index, respond) for id, index in zip(ids, indexes, strict=True))
        while self._waiting and self._free:
            self._next(self._free.popleft())

    def _next(self, connection: "_Connection") -> None:
        if not self._waiting:
            self._free.append(connection)
            return
        id, index, respond = self._waiting.popleft()
        connection.send(id, self._requests[index], respond)

    def close(self) -> None:
        """Stop the event loop; the server closes the connections."""
        self._closed = True
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PATIENCE_S)
        self._loop.close()


class _Connection(asyncio.Protocol):
    """One connection with at most one request."""

    def __init__(
        self, freed: "Callable[[_Connection], None]", lost: "Callable[[_Connection], None]"
    ) -> None:
        self._freed, self._lost = freed, lost
        self._received = b""
        self._query: tuple[int, Respond] | None = None
        self._transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # of TCP there is no other

    def connection_lost(self, error: Exception | None) -> None:
        if self._query is not None:  # the server ended in the middle of a request
            (id, respond), self._query = self._query, None
            respond([id], [float("nan")])
        self._lost(self)

    def send(self, id: int, request: bytes, respond: Respond) -> None:
        """Send the request of a sample."""
        self._query = (id, respond)
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, body = self._received.partition(b"\r\n\r\n")
        length = re.search(rb"(?i)content-length: (\d+)", head)
        if not found or not length or len(body) < int(length[1]) or self._query is None:
            return
        self._received = b""
        (id, respond), self._query = self._query, None
        output = float("nan")
        if head.startswith(b"HTTP/1.1 200"):
            answer = msgspec.json.decode(body, type=_Body)
            output = float("nan") if answer.default else answer.output
        respond([id], [output])
        self._freed(self)


# -- runs


class Run(msgspec.Struct, frozen=True):
    """LoadGen's figures of a run. wrong: answers that are not the model's own, or defaults."""

    valid: bool
    samples: int
    wrong: int
    per_s: float
    p90_us: float
    p99_us: float


def run(
    system: System,
    scenario: str,
    labels: NDArray[np.float64],
    folder: Path,
    seconds: float,
    rate: float = 1.0,
) -> Run:
    """Run a scenario of LoadGen with its logs in `folder`. rate: queries a second in Server, and
    expected samples a second in Offline."""
    folder.mkdir(parents=True, exist_ok=True)
    indexes_of: dict[int, int] = {}
    answered, wrong = [0], [0]

    def respond(ids: Sequence[int], outputs: Sequence[float]) -> None:
        answered[0] += len(ids)
        wrong[0] += sum(
            labels[indexes_of.pop(id)] != output for id, output in zip(ids, outputs, strict=True)
        )
        loadgen.QuerySamplesComplete([loadgen.QuerySampleResponse(id, 0, 0) for id in ids])

    def issue(ids: Sequence[int], indexes: Sequence[int]) -> None:
        indexes_of.update(zip(ids, indexes, strict=True))
        system.issue(ids, indexes, respond)

    sut = loadgen.ConstructFastSUT(issue, lambda: None)
    qsl = loadgen.ConstructQSL(len(labels), len(labels), lambda _: None, lambda _: None)
    loadgen.StartTestWithLogSettings(
        sut, qsl, settings_of(scenario, seconds, rate), log_settings(folder)
    )
    loadgen.DestroyQSL(qsl)
    loadgen.DestroyFastSUT(sut)
    summary = (folder / "mlperf_log_summary.txt").read_text()
    return Run(
        "Result is : VALID" in summary,
        answered[0],
        wrong[0],
        _figure(summary, r"(?:Completed s|S)amples per second"),
        _figure(summary, r"90(?:th|\.00) percentile latency \(ns\)") / 1e3,
        _figure(summary, r"99\.00 percentile latency \(ns\)") / 1e3,
    )


def _figure(summary: str, name: str) -> float:
    found = re.search(rf"^{name}\s*:\s*(\S+)", summary, re.MULTILINE)
    return float(found[1]) if found else float("nan")


def settings_of(scenario: str, seconds: float, rate: float) -> "loadgen.TestSettings":
    """Return LoadGen's settings of a scenario."""
    settings = loadgen.TestSettings()
    settings.scenario = getattr(loadgen.TestScenario, scenario)
    settings.mode = loadgen.TestMode.PerformanceOnly
    settings.min_duration_ms = int(seconds * 1000)
    settings.min_query_count = 1 if scenario == "Offline" else 100
    settings.single_stream_expected_latency_ns = 100_000
    settings.offline_expected_qps = rate
    settings.server_target_qps = rate
    settings.server_target_latency_ns = int(BOUND_MS * 1e6)
    settings.server_target_latency_percentile = 0.99
    return settings


def log_settings(folder: Path) -> "loadgen.LogSettings":
    """Return settings that write the logs into a folder, and nothing to the terminal."""
    output = loadgen.LogOutputSettings()
    output.outdir, output.copy_summary_to_stdout = str(folder), False
    settings = loadgen.LogSettings()
    settings.log_output, settings.enable_trace = output, False
    return settings


def highest_rate(probe: Callable[[float], bool], most: float) -> float:
    """Return about the highest rate that a probe accepts, between most / SPAN and `most`, by
    bisection of its logarithm."""
    low, high = most / SPAN, most
    for _ in range(PROBES):
        rate = (low * high) ** 0.5
        if probe(rate):
            low = rate
        else:
            high = rate
    return low


# -- rows


@contextlib.contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve the model over HTTP by a process of its own; yield its address."""
    words = [sys.executable, "-W", "ignore", "-m", "bench.system.load.mlperf", folder]
    with Program(*words, apart=True) as program:
        yield program.line()
        program.end_input()
        program.wait()


def start(folder: Path, http: str = "") -> clipper.ClipperServer:
    """Start a server with the model, and its application `linear`."""
    scans = digits.load()
    model = LinearSVC(max_iter=50).fit(scans.train_x / 16, scans.train_y)
    server = clipper.start(folder=str(folder), http={"address": http})
    server.deploy("linear", model, input="f64[64]", cache=False)
    server.app("linear", models=["linear"], slo_ms=SLO_MS, default=-1)
    return server


def main(quick: bool) -> list[Row]:
    """Measure the three scenarios in process and over HTTP."""
    if loadgen is None:
        missing = "no LoadGen: python -m pip install mlcommons-loadgen"
        return [absent("Server", "1/s", missing), absent("Offline", "1/s", missing)]
    scans = digits.load()
    inputs = scans.held_x / 16
    model = LinearSVC(max_iter=50).fit(scans.train_x / 16, scans.train_y)
    labels = model.predict(inputs).astype(float)
    seconds = 1.0 if quick else SECONDS
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        logs = Path(scratch, "logs") if quick else LOGS
        shutil.rmtree(logs, ignore_errors=True)
        instant = Instant(labels)
        least = run(instant, "SingleStream", labels, Path(scratch, "instant"), min(seconds, 5))
        bare_per_s = bare(model, inputs)
        server = stack.enter_context(start(Path(scratch, "in-process")))
        address = stack.enter_context(served(Path(scratch, "http")))
        over_http = OverHttp(address, inputs, CONNECTIONS)
        stack.callback(over_http.close)
        in_process = InProcess(server.app("linear"), inputs)
        systems: dict[str, System] = {"in process": in_process, "over HTTP": over_http}
        for name, system in systems.items():
            measured = functools.partial(run, system, labels=labels)
            folder = logs / name.replace(" ", "-")
            one = measured("SingleStream", folder=folder / "SingleStream", seconds=seconds)
            rows.append(
                row(
                    f"{name}: SingleStream, p90",
                    one.p90_us,
                    "us",
                    "answered at once",
                    least.p90_us,
                    note=note(one),
                )
            )
            guess = bare_per_s / (4 if name == "in process" else 100)
            probe = measured(
                "Offline", folder=Path(scratch, "offline"), seconds=seconds / 10, rate=guess
            )
            whole = measured(
                "Offline", folder=folder / "Offline", seconds=seconds, rate=probe.per_s * 1.2
            )
            rows.append(
                row(
                    f"{name}: Offline",
                    whole.per_s,
                    "1/s",
                    "the model alone",
                    bare_per_s,
                    note=note(whole),
                )
            )
            valid = server_run(measured, folder / "Server", Path(scratch), seconds, probe.per_s)
            rows.append(
                row(
                    f"{name}: Server, p99 <= {BOUND_MS:g} ms",
                    valid.per_s,
                    "1/s",
                    "Offline",
                    whole.per_s,
                    note=note(valid),
                )
            )
    return rows


def server_run(
    measured: Callable[..., Run], folder: Path, scratch: Path, seconds: float, most: float
) -> Run:
    """Return a valid run of the Server scenario at about the highest rate, else the last one."""

    def holds(rate: float) -> bool:
        found = measured(
            "Server", folder=scratch / "probe", seconds=min(PROBE_S, seconds), rate=rate
        )
        return found.p99_us <= BOUND_MS * 1e3 and not found.wrong

    rate = highest_rate(holds, most)
    for _ in range(TRIES):
        rate *= 0.9
        found = measured("Server", folder=folder, seconds=seconds, rate=rate)
        if found.valid and not found.wrong:
            break
    return found


def bare(model: LinearSVC, inputs: NDArray[np.float64]) -> float:
    """Return the rows a second of the model, called with CHUNK rows in this process."""
    rows = inputs[np.arange(CHUNK) % len(inputs)]
    times = []
    for _ in range(20):
        began_s = time.perf_counter()
        model.predict(rows)
        times.append(time.perf_counter() - began_s)
    return CHUNK / float(np.median(times))


def note(found: Run) -> str:
    """Return whether LoadGen calls a run valid, and how many answers were wrong."""
    verdict = "VALID" if found.valid else "INVALID"
    return f"LoadGen: {verdict}; {found.samples} samples, {found.wrong} wrong or defaults"


if __name__ == "__main__":
    with start(Path(sys.argv[1]), http="127.0.0.1:0") as running:
        print(running.http_address, flush=True)
        sys.stdin.read()
