"""Floods by key: what a client loses while another sends many times the rows that a model can do.

The server and the client that floods have a process each. The model sleeps, so its capacity is
known and no core is busy with it. Two clients have a key each: a steady one, which sends a quarter
of the capacity at its times, whatever becomes of the answers, and one that sends 2, 10 and 100
times its half of the capacity. Without anything, rows are taken in the order of their deadlines,
whosever they are. With a rate of its half on its key, the other requests of the flood are refused
by their heads. With half of the model as the share of the steady key, or with a lower priority of
the key that floods, those of its rows are refused that would be late.
"""

import contextlib
import json
import selectors
import socket
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

import clipper
from bench.harness import Goal, Row, row
from clipper.credentials.credential_file import line_of, new_key
from clipper.credentials.key_limits import KeyLimits
from tests.processes import Program

SIZE, BATCH_S = 8, 0.02  # rows of a batch, and how long it takes
CAPACITY: Final = SIZE / BATCH_S  # rows a second
HALF: Final = CAPACITY / 2
STEADY: Final = CAPACITY / 4
SLO_MS: Final = 150
FLOODS: Final = (2, 10, 100)
CONNECTIONS: Final = 8  # of the flood
SLICE_S: Final = 0.01  # in which a flood writes at once
MODULE: Final = "bench.system.frontends.fair"
NAMES: Final = ("steady", "flood")
# what the keys have, by how the rows name it
KEYS: Final[dict[str, dict[str, KeyLimits]]] = {
    "no limits": {},
    f"flood limited to {HALF:.0f}/s": {"flood": KeyLimits.of(f"{HALF:.0f}/s")},
    "steady has a share of 50%": {"steady": KeyLimits.of(share="50%")},
    "flood has priority 3": {"flood": KeyLimits.of(priority="3")},
}


def sleeper(rows: Any) -> Any:
    time.sleep(BATCH_S)
    return np.asarray(rows).sum(axis=1)


def request(key: str, number: int) -> bytes:
    """Return a query that no other is equal to."""
    body = b'{"input": [%d.0, 1.0]}' % number
    return (
        b"POST /api/slow/predict HTTP/1.1\r\nHost: here\r\nAuthorization: Bearer %s\r\n"
        b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
        % (key.encode(), len(body), body)
    )


def serve(how: str) -> None:
    """Serve until the input ends. how: of KEYS."""
    keys = {name: new_key() for name in NAMES}
    limits: dict[str, KeyLimits] = KEYS[how]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "keys"
        lines = [
            line_of(name, key, "", limits.get(name, KeyLimits())) for name, key in keys.items()
        ]
        file.write_text("\n".join(lines))
        http = {"address": "127.0.0.1:0", "api_keys_file": str(file)}
        with clipper.start(http=http, logging={"access_lines_s_max": 0}) as server:
            batching = {"mode": "static", "size_max": SIZE}
            server.deploy("slow", sleeper, input="f64[2]", cache=False, batching=batching)
            server.app("slow", models=["slow"], slo_ms=SLO_MS, default=-1.0)
            print(json.dumps([server.http_address, keys]), flush=True)
            sys.stdin.read()


@contextlib.contextmanager
def served(how: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Start a server in a process of its own; give its address and keys."""
    words = [sys.executable, "-W", "ignore", "-m", MODULE, "server", how]
    with Program(*words, folder=Path(__file__).resolve().parents[3], apart=True) as program:
        address, keys = json.loads(program.line())
        yield address, keys
        program.end_input()
        program.wait()


# -- the flood, in a process of its own


def flood(address: str, key: str) -> None:
    """Send at the rates that the input names, `RATE SECONDS` a line; answer how many were
    answered."""
    host, _, port = address.rpartition(":")
    print("ready", flush=True)
    for line in sys.stdin:
        rate, seconds = map(float, line.split())
        lines = [socket.create_connection((host, int(port))) for _ in range(CONNECTIONS)]
        for one in lines:
            one.setblocking(False)
        print(_flooded(lines, key, rate, seconds), flush=True)
        for one in lines:
            one.close()


def _flooded(lines: list[socket.socket], key: str, rate: float, seconds: float) -> int:
    """Return how many predictions came. What a connection does not take is not sent."""
    poll = selectors.DefaultSelector()
    tails: dict[socket.socket, bytes] = {}
    for one in lines:
        poll.register(one, selectors.EVENT_READ)
        tails[one] = b""
    begun, sent, good = time.perf_counter(), 0, 0
    unsent = dict.fromkeys(lines, b"")
    while (now := time.perf_counter() - begun) < seconds:
        due = int(rate * now)
        for one in lines:
            if not unsent[one]:
                unsent[one] = b"".join(
                    request(key, 10**6 + number) for number in range(sent, due, CONNECTIONS)
                )
                sent += 1
            with contextlib.suppress(BlockingIOError):
                unsent[one] = unsent[one][one.send(unsent[one]) :] if unsent[one] else b""
        sent = due
        for found, _ in poll.select(SLICE_S):
            connection: Any = found.fileobj
            with contextlib.suppress(BlockingIOError):
                text = tails[connection] + connection.recv(1 << 18)
                good += text.count(b'"default":false')
                tails[connection] = text[-14:]
    return good


# -- the steady client


@dataclass(frozen=True)
class Steady:
    """The answers that a client got. latency_ms: from when each query was due. lost: the share of
    defaults and refusals."""

    latency_ms: list[float]
    lost: float

    @property
    def p99_ms(self) -> float:
        return float(np.quantile(self.latency_ms, 0.99))


def ask_steadily(address: str, key: str, seconds: float) -> Steady:
    """Send at STEADY over one connection, each query at its time."""
    host, _, port = address.rpartition(":")
    dues = [i / STEADY for i in range(int(STEADY * seconds))]
    latencies: list[float] = []
    good = at = 0
    with socket.create_connection((host, int(port))) as line:
        line.settimeout(0.001)
        begun, tail = time.perf_counter(), b""
        while len(latencies) < len(dues):
            while at < len(dues) and dues[at] <= time.perf_counter() - begun:
                line.sendall(request(key, at))
                at += 1
            with contextlib.suppress(TimeoutError):
                piece = line.recv(1 << 16)
                if not piece:
                    raise ConnectionError("the server closed the steady client's connection")
                tail += piece
            *heads, tail = tail.split(b"HTTP/1.1 ")
            whole = [head for head in heads if head]
            if tail.endswith(b"}"):
                whole, tail = [*whole, tail], b""
            for head in whole:
                latencies.append((time.perf_counter() - begun - dues[len(latencies)]) * 1000)
                good += b'"default":false' in head
    return Steady(latencies, 1 - good / len(dues))


def measure(how: str, seconds: float) -> list[Row]:
    """Measure all floods against one server, whose keys are those of KEYS. Return the rows."""
    found: list[Row] = []
    with served(how) as (address, keys):
        python = ["nice", "-n", "10", sys.executable, "-W", "ignore", "-m", MODULE]
        words = [*python, "flood", address, keys["flood"]]
        folder = Path(__file__).resolve().parents[3]
        with Program(*words, folder=folder, apart=True) as program:
            program.line()
            ask_steadily(address, keys["steady"], 1.0)  # the batcher learns
            alone = ask_steadily(address, keys["steady"], seconds)
            for times in FLOODS:
                program.say(f"{times * HALF} {seconds + 0.4}")
                time.sleep(0.3)
                other = ask_steadily(address, keys["steady"], seconds)
                answered = int(program.line()) / (seconds + 0.4)
                what = f"{how}, {times} x: "
                lost = Goal("value_at_most", 0.01)
                note = f"the flood got {answered:.0f} of {CAPACITY:.0f} predictions a second"
                name = f"{what}p99 of the steady client"
                found += [
                    row(name, other.p99_ms, "ms", "alone", alone.p99_ms, Goal("at_most", 1.1)),
                    row(f"{what}its defaults", other.lost, "share lost", goal=lost, note=note),
                ]
    return found


def main(quick: bool) -> list[Row]:
    """Run the benchmark."""
    seconds = 2.0 if quick else 10.0
    return [one for how in KEYS for one in measure(how, seconds)]


if __name__ == "__main__":
    if sys.argv[1] == "server":
        serve(sys.argv[2])
    else:
        flood(*sys.argv[2:4])
