"""HTTP beside servers that others wrote, on the same models: requests a second, CPU a request,
goodput at p99 of 20 ms.

Ours and each peer that is installed (python -m bench.peers) take turns under one load generator on
one machine; CPU is that of all processes of a server, the model's too. Goodput is the highest
Poisson rate, found by bisection, at which the p99 counted from the time each request was meant to
leave stays within 20 ms and every response is a 200.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from sklearn.svm import LinearSVC  # type: ignore[import-untyped,unused-ignore]

from bench.harness import Goal, Row, Sample, absent, row
from bench.peers import PEERS, Peer, serving
from bench.system import http_servers
from bench.system.http_load import Found, Next, closed, paced
from bench.system.rest import Case
from clipper.demo import digits

CONNECTIONS = 64
SLO_US = 20_000.0
MODELS = {"noop1": 1, "noop784": 784, "linear": 64}
_SAID = {"noop1": "no-op f64[1]", "noop784": "no-op f64[784]", "linear": "linear digits model"}
_TIMES = {  # how many times a peer's figure ours is to be; docs: GOALS of the frontend
    "mosec": {"noop1": 3.0, "linear": 3.0},
    "granian": {"noop1": 2.0, "linear": 3.0},
    "ray": {"linear": 20.0},
    "bentoml": {"linear": 20.0},
    "litserve": {"linear": 20.0},
    "mlserver": {"linear": 20.0},
}


@dataclass
class Asked:
    """One server. asked: the path and the body of a model's queries.  cpu_s: of its processes so
    far."""

    name: str
    address: str
    asked: Callable[[str, int], tuple[str, str]]
    cpu_s: Callable[[], float]

    def requests(self, model: str) -> Next:
        path, body = self.asked(model, MODELS[model])
        rest = np.random.default_rng(7).random(MODELS[model] - 1).round(6).tolist()
        before, after = body.split("%s")
        return Case(path, f"{before}[0.", "".join(f", {x}" for x in rest) + f"]{after}").requests(
            fresh=True
        )


def below(pid: int) -> float:
    """CPU seconds of a process and all that it started."""
    started: dict[int, list[tuple[int, int]]] = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            ticks = sum(int(fields[i]) for i in (11, 12, 13, 14))
            started.setdefault(int(fields[1]), []).append((int(entry.name), ticks))
            if int(entry.name) == pid:
                total = ticks
    waiting = [pid]
    while waiting:
        for child, ticks in started.get(waiting.pop(), []):
            total += ticks
            waiting.append(child)
    return total / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def ours() -> Iterator[Asked]:
    with http_servers.running("ours") as (process,):
        yield Asked(
            "clipper",
            process.address,
            lambda model, _: (f"/api/{model}/predict", '{"input": %s}'),
            lambda: below(process.pid),
        )


@contextlib.contextmanager
def theirs(peer: Peer, linear: object) -> Iterator[Asked]:
    with serving(peer, linear) as served:
        yield Asked(peer.name, served.address, served.asked, served.cpu_s)


@dataclass
class Figures:
    """per_s, cpu_us: turn by turn, in a closed loop.  goodput: requests a second."""

    per_s: list[float]
    cpu_us: list[float]
    goodput: float = 0.0


def turn(server: Asked, model: str, seconds: float) -> tuple[float, float]:
    before = server.cpu_s()
    found = closed(server.address, server.requests(model), CONNECTIONS, seconds)
    if found.bad:
        raise RuntimeError(
            f"{server.name}: {found.bad} of {len(found.latency_us)} responses were not 200"
        )
    return found.per_s, (server.cpu_s() - before) / len(found.latency_us) * 1e6


def within(found: Found) -> bool:
    return not found.bad and found.quantile_us(0.99) <= SLO_US


def goodput(server: Asked, model: str, most: float, seconds: float, probes: int) -> float:
    low, high = 0.0, most
    rate = most * 0.6
    for _ in range(probes):
        if within(paced(server.address, server.requests(model), rate, seconds)):
            low = rate
        else:
            high = rate
        rate = (low + high) / 2
    return low


def main(quick: bool, rows: list[str] | None = None) -> list[Row]:
    names = [
        name for name, peer in PEERS.items() if peer.installed and (rows is None or name in rows)
    ]
    missing = [
        absent(name, "", f"not installed: python -m bench.peers {name}")
        for name in PEERS
        if name not in names
    ]
    seconds, turns, probes = (0.3, 1, 2) if quick else (1.0, 3, 5)
    scans = digits.load()
    linear = LinearSVC(max_iter=50).fit(scans.train_x / 16, scans.train_y)
    found: dict[str, dict[str, Figures]] = {}
    for name in names:
        with ours() as us, theirs(PEERS[name], linear) as them:
            for model in MODELS:
                both = found.setdefault(name, {}), found.setdefault(f"clipper beside {name}", {})
                for figures, server in zip(both, (them, us), strict=True):
                    figures[model] = Figures([], [])
                    turn(server, model, seconds / 2)
                for _ in range(turns):
                    for figures, server in zip(both, (them, us), strict=True):
                        per_s, cpu_us = turn(server, model, seconds)
                        figures[model].per_s.append(per_s)
                        figures[model].cpu_us.append(cpu_us)
                if model == "linear":
                    for figures, server in zip(both, (them, us), strict=True):
                        most = float(np.median(figures[model].per_s))
                        figures[model].goodput = goodput(server, model, most, seconds, probes)
    return [
        one for name in names for one in told(name, found[name], found[f"clipper beside {name}"])
    ] + missing


def told(name: str, them: dict[str, Figures], us: dict[str, Figures]) -> Iterator[Row]:
    for model, said in _SAID.items():
        times = _TIMES.get(name, {}).get(model)
        goal = Goal("at_least", times) if times else None
        yield row(
            f"{said}: requests",
            Sample(tuple(us[model].per_s)),
            "1/s",
            name,
            Sample(tuple(them[model].per_s)),
            goal,
        )
        yield row(
            f"{said}: CPU a request",
            Sample(tuple(us[model].cpu_us)),
            "us",
            name,
            Sample(tuple(them[model].cpu_us)),
        )
    ours_, theirs_ = us["linear"].goodput, them["linear"].goodput
    yield row(
        "linear digits model: goodput at p99 <= 20 ms",
        ours_,
        "1/s",
        name,
        theirs_,
        Goal("at_least", 3.0),
    )
