"""HTTP: requests a second, CPU a request and latency of our server, beside the least that uvloop
and httptools can do.

Four processes, asked in turns by one load generator on the same machine: ours, ours without the
door (Python answers all), one that reads a request and always writes the same answer (the ceiling),
and one that also reads the numbers of its JSON (msgspec, numpy). CPU is that of the server's
process: parsing, cache, queue, answer; the model's process is another.
"""

from dataclasses import dataclass

import numpy as np

from bench.harness import Goal, Row, Sample, row
from bench.system.frontends import http_servers
from bench.system.frontends.http_load import NUMBER, Found, closed, paced
from bench.system.frontends.http_servers import Process

CONNECTIONS = 64


@dataclass(frozen=True)
class Case:
    """A request of one kind: the path, and the JSON before and after a number that makes each input
    another one."""

    path: str
    before: str
    after: str

    def request(self, fresh: bool) -> bytes:
        """Return a request: always the same one, or one whose number the generator replaces."""
        body = f"{self.before}{NUMBER if fresh else '00000001'}{self.after}"
        head = f"POST {self.path} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\n"
        return f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()


def case(name: str, size: int) -> Case:
    """Return a query of an application for a row of `size` numbers."""
    rest = np.random.default_rng(size).random(size - 1).round(6).tolist()
    return Case(f"/api/{name}/predict", '{"input": [0.', "".join(f", {x}" for x in rest) + "]}")


def binary(name: str, size: int) -> bytes:
    """Return an infer request of one row, always the same, as bytes behind its JSON."""
    data = np.random.default_rng(size).random(size).tobytes()
    tensor = f'{{"name":"input","shape":[1,{size}],"datatype":"FP64","parameters":{{"binary_data_size":{len(data)}}}}}'  # noqa: E501
    text = f'{{"inputs":[{tensor}],"parameters":{{"binary_data_output":true}}}}'.encode()
    head = (
        f"POST /v2/models/{name}/infer HTTP/1.1\r\nHost: bench\r\nInference-Header-Content-Length:"
        f" {len(text)}\r\n"
    )
    return f"{head}Content-Length: {len(text) + len(data)}\r\n\r\n".encode() + text + data


ONE, MANY, LINEAR = case("noop1", 1), case("noop784", 784), case("linear", 64)


@dataclass
class Turns:
    """Requests a second and CPU microseconds a request, turn by turn."""

    per_s: Sample
    cpu_us: Sample
    p50_us: Sample


def take_turns(
    cases: "dict[str, tuple[Process, bytes]]", connections: int, seconds: float, turns: int
) -> dict[str, Turns]:
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in cases}
    for turn in range(-1, turns):
        for name, (process, request) in cases.items():
            before = process.cpu_s()
            one = checked(closed(process.address, request, connections, seconds))
            cpu_us = (process.cpu_s() - before) / len(one.latency_us) * 1e6
            if turn >= 0:
                found[name].append((one.per_s, cpu_us, one.quantile_us(0.5)))
    return {
        name: Turns(*(Sample(values) for values in zip(*rows, strict=True)))
        for name, rows in found.items()
    }


def checked(found: Found) -> Found:
    if found.bad:
        raise RuntimeError(f"{found.bad} of {len(found.latency_us)} responses were not 200")
    return found


def main(quick: bool) -> list[Row]:
    seconds, turns = (0.2, 1) if quick else (1.5, 5)
    with http_servers.running("ours", "python", "trivial", "parsing") as (
        ours,
        python,
        trivial,
        parsing,
    ):
        busy = take_turns(
            {
                "hit": (ours, ONE.request(False)),
                "hit python": (python, ONE.request(False)),
                "hit binary": (ours, binary("noop784", 784)),
                "ceiling": (trivial, ONE.request(False)),
                "hit 784": (ours, MANY.request(False)),
                "parsing 784": (parsing, MANY.request(False)),
                "miss": (ours, ONE.request(True)),
                "miss python": (python, ONE.request(True)),
                "miss 784": (ours, MANY.request(True)),
                "linear": (ours, LINEAR.request(True)),
            },
            CONNECTIONS,
            seconds,
            turns,
        )
        alone = take_turns(
            {
                "hit": (ours, ONE.request(False)),
                "miss": (ours, ONE.request(True)),
                "ceiling": (trivial, ONE.request(False)),
            },
            1,
            seconds,
            turns,
        )
        rate = 0.5 * busy["linear"].per_s.median
        steady = checked(paced(ours.address, LINEAR.request(True), rate, 2 * seconds))
    return [*busy_rows(busy), *alone_rows(alone), *steady_rows(steady, rate)]


def busy_rows(busy: dict[str, Turns]) -> list[Row]:
    rows = []
    anchors = {
        "hit": ("ceiling", "trivial server", Goal("at_least", 0.6)),
        "hit python": ("hit", "the door", None),
        "hit binary": ("ceiling", "trivial server", None),
        "hit 784": ("parsing 784", "trivial server with msgspec", Goal("at_least", 2.0)),
        "miss": ("ceiling", "trivial server", None),
        "miss python": ("miss", "the door", None),
        "miss 784": ("parsing 784", "trivial server with msgspec", None),
        "linear": ("ceiling", "trivial server", None),
    }
    names = {
        "hit": "cache hit f64[1]",
        "hit 784": "cache hit f64[784]",
        "miss": "no-op model f64[1]",
        "hit python": "cache hit f64[1], by Python",
        "hit binary": "cache hit f64[784], binary infer",
        "miss python": "no-op model f64[1], by Python",
        "miss 784": "no-op model f64[784]",
        "linear": "linear digits model",
    }
    for key, (anchor, what, goal) in anchors.items():
        rows.append(
            row(f"{names[key]}: requests", busy[key].per_s, "1/s", what, busy[anchor].per_s, goal)
        )
        rows.append(
            row(f"{names[key]}: CPU a request", busy[key].cpu_us, "us", what, busy[anchor].cpu_us)
        )
    return rows


def alone_rows(alone: dict[str, Turns]) -> list[Row]:
    ceiling = alone["ceiling"].p50_us
    return [
        row(
            "one connection, cache hit: p50",
            alone["hit"].p50_us,
            "us",
            "trivial server",
            ceiling,
            Goal("at_most", 1.5),
        ),
        row(
            "one connection, no-op model: p50",
            alone["miss"].p50_us,
            "us",
            "trivial server",
            ceiling,
        ),
    ]


def steady_rows(steady: Found, rate: float) -> list[Row]:
    note = (
        f"linear digits model at Poisson times, {rate:.0f} a second: half of what the closed loop"
        " reached"
    )
    return [
        *(
            row(f"open loop: p{100 * q:g}", steady.quantile_us(q), "us", note=note)
            for q in (0.5, 0.99)
        ),
        row("open loop: the generator's own lateness, p99", steady.late_us(0.99), "us"),
    ]
