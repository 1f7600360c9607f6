"""HTTP beside servers that others wrote, on the same models: requests a second, CPU a request,
goodput at p99 of 20 ms, start, memory, a killed model process, rows that make a batch fail.

Ours and each peer that is installed (python -m bench.peers) take turns under one load generator
(http_load.c) on one machine; CPU and memory are those of all processes of a server. Goodput is the
highest Poisson rate, found by bisection, at which the p99 counted from the time each request was
meant to leave stays within 20 ms and every response is a 200.
"""

import contextlib
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from sklearn.svm import LinearSVC  # type: ignore[import-untyped,unused-ignore]

from bench.harness import Goal, Row, Sample, absent, row
from bench.peers import PEERS, Peer, answers, memory_mib, processes, serving
from bench.system.frontends.http_load import Found, closed, paced
from bench.system.frontends.http_servers import Process
from bench.system.frontends.rest import Case
from clipper_demo import digits

CONNECTIONS = 64
SLO_US = 20_000.0
MODELS = {"noop1": 1, "noop784": 784, "linear": 64}
TITLES = {"noop1": "no-op f64[1]", "noop784": "no-op f64[784]", "linear": "linear digits model"}
GOALS = {  # how many times a peer's requests a second ours are to be
    "mosec": {"noop1": 3.0, "linear": 3.0},
    "granian": {"noop1": 2.0, "linear": 3.0},
    "ray": {"linear": 20.0},
    "bentoml": {"linear": 20.0},
    "litserve": {"linear": 20.0},
    "mlserver": {"linear": 20.0},
}
POISONED_EVERY = 50  # one request of so many makes the model fail
FAULT_RATE = 200.0  # requests a second while a process is killed, or rows are poisoned


@dataclass(frozen=True)
class Server:
    """A server that is measured.

    query: returns the path and the body of a model's queries. pid: of its first process.
    model_pid: returns the process that evaluates the linear model. start_s: seconds until its
    first answer.
    """

    name: str
    address: str
    query: Callable[[str, int], tuple[str, str]]
    pid: int
    model_pid: Callable[[], int]
    start_s: float

    def request(self, model: str, first: str = "0.") -> bytes:
        """Return a request for a row that begins with `first` and a number of the generator."""
        path, body = self.query(model, MODELS[model])
        rest = np.random.default_rng(7).random(MODELS[model] - 1).round(6).tolist()
        before, after = body.split("%s")
        return Case(
            path, f"{before}[{first}", "".join(f", {x}" for x in rest) + f"]{after}"
        ).request(fresh=True)

    def cpu_s(self) -> float:
        """Return the seconds of CPU that all its processes have used so far."""
        return sum(processes(self.pid).values())


@contextlib.contextmanager
def ours() -> Iterator[Server]:
    """Start our server with the models of the peers."""
    with tempfile.TemporaryDirectory(prefix="clipper-ours-") as folder:
        pid_file = Path(folder, "linear.pid")
        begun = time.monotonic()
        process = Process("fragile", str(pid_file))
        try:
            path, body = "/api/linear/predict", '{"input": %s}'
            while not answers(process.address, path, body):
                time.sleep(0.01)
            yield Server(
                "clipper",
                process.address,
                lambda model, _: (f"/api/{model}/predict", body),
                process.pid,
                lambda: int(pid_file.read_text()),
                time.monotonic() - begun,
            )
        finally:
            process.close()


@contextlib.contextmanager
def theirs(peer: Peer, linear: object) -> Iterator[Server]:
    """Start a peer."""
    with serving(peer, linear) as served:
        yield Server(
            peer.name, served.address, served.asked, served.pid, served.model_pid, served.start_s
        )


@dataclass
class Figures:
    """The measurements of one server.

    per_s, cpu_us: by model, turn by turn, in a closed loop. goodput: requests a second. late_us:
    p99 of the generator's own lateness at that rate. failed: by fault, the share of requests that
    should have been answered and were not, in percent. away_s: from the kill to the first answer.
    """

    start_s: float
    per_s: dict[str, list[float]] = field(default_factory=dict)
    cpu_us: dict[str, list[float]] = field(default_factory=dict)
    memory_mib: float = 0.0
    goodput: float = 0.0
    late_us: float = 0.0
    failed: dict[str, float] = field(default_factory=dict)
    away_s: float = float("nan")


def turn(server: Server, model: str, seconds: float) -> tuple[float, float]:
    """Return requests a second, and microseconds of CPU a request. Raises: RuntimeError."""
    before = server.cpu_s()
    found = closed(server.address, server.request(model), CONNECTIONS, seconds)
    if found.bad:
        raise RuntimeError(
            f"{server.name}: {found.bad} of {len(found.records)} responses were not 200"
        )
    return found.per_s, (server.cpu_s() - before) / len(found.records) * 1e6


def within(found: Found) -> bool:
    """Return whether all were answered with p99 within the SLO."""
    return not found.bad and found.quantile_us(0.99) <= SLO_US


def goodput(server: Server, most: float, seconds: float, probes: int) -> tuple[float, float]:
    """Return the highest rate within the SLO, and the generator's lateness there."""
    low, high, late = 0.0, most, float("nan")
    rate = most * 0.6
    for _ in range(probes):
        found = paced(server.address, server.request("linear"), rate, seconds)
        if within(found):
            low, late = rate, found.late_us(0.99)
        else:
            high = rate
        rate = (low + high) / 2
    return low, late


def poisoned(server: Server, seconds: float) -> float:
    """Return the percentage of sound requests that fail beside some that fail the model."""
    found = paced(
        server.address,
        server.request("linear"),
        FAULT_RATE,
        seconds,
        other=server.request("linear", "-0."),
        every=POISONED_EVERY,
    )
    sound = found.records[found.records["other"] == 0]
    return float(np.mean(sound["status"] != 200) * 100)


def killed(server: Server, seconds: float) -> tuple[float, float]:
    """Kill the process of the linear model under load.

    Returns the percentage of requests due after the kill that failed, and the seconds from the kill
    to the first answer to one of them; nan if there was none.
    """
    kill_s = seconds / 5

    def kill() -> None:
        time.sleep(kill_s)
        os.kill(server.model_pid(), signal.SIGKILL)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(kill)
        found = paced(server.address, server.request("linear"), FAULT_RATE, seconds)
        done.result()
    after = found.records[found.records["due_s"] > kill_s + 0.01]
    answered = after[after["status"] == 200]
    ends_s = answered["due_s"] + answered["latency_us"] / 1e6
    away_s = float(ends_s.min() - kill_s) if len(answered) else float("nan")
    return float(np.mean(after["status"] != 200) * 100), away_s


def compare(name: str, linear: object, quick: bool) -> tuple[Figures, Figures]:
    """Return what was measured of a peer and of ours beside it."""
    seconds, turns, probes = (0.3, 1, 2) if quick else (1.0, 3, 5)
    with ours() as us, theirs(PEERS[name], linear) as them:
        servers = (them, us)
        found = (Figures(them.start_s), Figures(us.start_s))
        for model in MODELS:
            for server in servers:
                turn(server, model, seconds / 2)
            for _ in range(turns):
                for figures, server in zip(found, servers, strict=True):
                    per_s, cpu_us = turn(server, model, seconds)
                    figures.per_s.setdefault(model, []).append(per_s)
                    figures.cpu_us.setdefault(model, []).append(cpu_us)
        for figures, server in zip(found, servers, strict=True):
            most = float(np.median(figures.per_s["linear"]))
            figures.goodput, figures.late_us = goodput(server, most, seconds, probes)
            figures.memory_mib = memory_mib(server.pid)
            figures.failed["poisoned"] = poisoned(server, 4 * seconds)
            figures.failed["killed"], figures.away_s = killed(server, 10 * seconds)
    return found


def main(quick: bool, rows: list[str] | None = None) -> list[Row]:
    """Measure the peers that are installed, each beside ours."""
    names = [
        name for name, peer in PEERS.items() if peer.installed and (rows is None or name in rows)
    ]
    scans = digits.load()
    linear = LinearSVC(max_iter=50).fit(scans.train_x / 16, scans.train_y)
    found: list[Row] = []
    for name in names:
        try:
            found += rows_of(name, *compare(name, linear, quick))
        except RuntimeError as error:  # it did not start, or did not answer
            found.append(absent(name, "", f"not measured: {error}"))
    return found + [
        absent(name, "", f"not installed: python -m bench.peers {name}")
        for name in PEERS
        if name not in names
    ]


def rows_of(name: str, them: Figures, us: Figures) -> Iterator[Row]:
    """Return the rows of one peer."""
    for model, title in TITLES.items():
        times = GOALS.get(name, {}).get(model)
        goal = Goal("at_least", times) if times else None
        ours_, theirs_ = (Sample(tuple(one.per_s[model])) for one in (us, them))
        cpu_us = [float(np.median(one.cpu_us[model])) for one in (us, them)]
        why = f"CPU: a request takes {cpu_us[0]:.0f} us here, {cpu_us[1]:.0f} us in {name}"
        yield row(f"{title}: requests", ours_, "1/s", name, theirs_, goal, bounded_by=why)
        ours_, theirs_ = (Sample(tuple(one.cpu_us[model])) for one in (us, them))
        yield row(f"{title}: CPU a request", ours_, "us", name, theirs_)
    yield row(
        "linear digits model: goodput at p99 <= 20 ms",
        us.goodput,
        "1/s",
        name,
        them.goodput,
        Goal("at_least", 3.0),
        note=f"the generator's own lateness at p99: {us.late_us:.0f} us, {name} {them.late_us:.0f}",
    )
    yield row("start to the first answer, three models", us.start_s, "s", name, them.start_s)
    yield row("memory of all processes after it", us.memory_mib, "MiB", name, them.memory_mib)
    yield row(
        f"sound requests that fail, one of {POISONED_EVERY} poisoned",
        us.failed["poisoned"],
        "% failed",
        name,
        them.failed["poisoned"],
    )
    yield row(
        "requests that fail after kill -9 of the model's process",
        us.failed["killed"],
        "% failed",
        name,
        them.failed["killed"],
        note=f"first answer to a request after the kill: {seconds_or_never(us.away_s)}, {name}"
        f" {seconds_or_never(them.away_s)}",
    )


def seconds_or_never(seconds: float) -> str:
    """Return a duration as text; nan is never."""
    return "never" if np.isnan(seconds) else f"{seconds:.2f} s"
