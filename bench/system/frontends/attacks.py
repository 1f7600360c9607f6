"""Attacks: how long a client that behaves well waits while another attacks the server, and how much
memory that takes.

The server, the client and the attacker have a process each. The client sends a query to a cheap
model every 5 ms over a connection of its own; a latency counts from when the query was due. Windows
without and with the attack come in turns, in one run. The attacker is nice: it would be on another
machine, and here it must not take the core that the server needs; what a process takes that only
computes is the first row. How late a process wakes that only sleeps, in the same seconds, says how
much of the waiting is the machine's.
"""

import contextlib
import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench.harness import Goal, Row, Sample, row
from bench.system.frontends.attackers import ATTACKS, Target, ask
from bench.system.load.deadlines import bare_sleeper, lateness_us
from tests.processes import Program

EVERY_S = 0.005
# the goal: p99 under attack is at most so many times idle and so much more
TIMES, MORE_MS = (2.0, 5.0)
GROWTH_MIB = 64.0
PATIENCE_S = 10.0
NICE = 10
WITH_KEYS = ("gzip", "unread-python")  # of other servers the compiled part answers plain queries
MODULE = "bench.system.frontends.attackers"
BOUNDED_BY = {
    "unread": "pieces of 32 KiB of JSON, one in a turn",
    "unread-python": "the turn of 3 to 5 ms in which Python writes one large answer",
    "strangers": "accepting and closing, 18 us of the loop for each of 11 000 a second",
    "deployments": "the cores, on which containers start; see the process that only sleeps",
}


@dataclass
class Window:
    """Latencies in milliseconds, from when each query was due. bad: answers that were errors or the
    default."""

    latency_ms: list[float] = field(default_factory=list)
    bad: int = 0
    asleep_ms: list[float] = field(default_factory=list)  # lateness of a process that only sleeps

    @property
    def p99_ms(self) -> float:
        return _p99(self.latency_ms)


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]


class Client:
    """One keep-alive connection, which sends queries at their times, one after another; a late
    answer makes the next ones late."""

    def __init__(self, target: Target) -> None:
        host, _, port = target.http.rpartition(":")
        self._target, self._count = target, 0
        self._line = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self._line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        self._line.close()

    def ask_for(self, seconds: float, into: Window) -> None:
        """Send queries for `seconds`. Raises OSError if no answer arrives within 10 s."""
        sleeper = bare_sleeper(seconds)
        begun = time.perf_counter()
        for i in range(int(seconds / EVERY_S)):
            due = begun + i * EVERY_S
            if (ahead := due - time.perf_counter()) > 0:
                time.sleep(ahead)
            answer = self._ask()
            into.latency_ms.append((time.perf_counter() - due) * 1000)
            into.bad += not answer.startswith(b"HTTP/1.1 200") or b'"default":true' in answer
        into.asleep_ms += [late / 1000 for late in lateness_us(sleeper)]

    def _ask(self) -> bytes:
        self._count += 1
        body = b'{"input": [1.0, 2.0, 3.0, %d.0]}' % self._count
        self._line.sendall(ask(self._target, "/api/cheap/predict", body))
        answer = b""
        while (end := answer.find(b"\r\n\r\n")) < 0 or len(answer) < end + 4 + _length(
            answer[:end]
        ):
            piece = self._line.recv(65536)
            if not piece:
                raise ConnectionError("the server closed the client's connection")
            answer += piece
        return answer


def _length(head: bytes) -> int:
    at = head.lower().index(b"content-length:")
    return int(head[at + 15 :].split(b"\r\n", 1)[0])


class Attacker:
    """A process that attacks when it is told to."""

    def __init__(self, name: str, target: Target) -> None:
        words = ["nice", "-n", NICE, sys.executable, "-W", "ignore", "-m", MODULE]
        self._program = Program(*words, name, json.dumps(target), apart=True)
        self._program.line()

    def begin(self, seconds: float) -> None:
        self._program.say(seconds)

    def end(self) -> int:
        """Wait until it has ended; how many times it did what it does."""
        return int(self._program.line())

    def close(self) -> None:
        self._program.kill()


@contextlib.contextmanager
def served(keys: bool = False) -> Iterator[Target]:
    """Start a server in a process of its own, from the root of the repository. keys: whether its
    clients need one."""
    root = Path(__file__).resolve().parents[3]
    words = [sys.executable, "-W", "ignore", "-m", MODULE, "server", *(["keys"] if keys else [])]
    with Program(*words, folder=root, apart=True) as program:
        yield Target(*json.loads(program.line()))
        program.end_input()
        program.wait()


def memory_mib(pid: int, line: str) -> float:
    """Return VmRSS, or VmHWM, the peak since `forget_peak`."""
    text = Path(f"/proc/{pid}/status").read_text()
    return int(text.partition(f"{line}:")[2].split()[0]) / 1024


def forget_peak(pid: int) -> None:
    Path(f"/proc/{pid}/clear_refs").write_text("5")


def measure(name: str, target: Target, turns: int, seconds: float) -> list[Row]:
    """Measure one attack. Return its rows."""
    idle, attacked, count = [Window() for _ in range(turns)], [Window() for _ in range(turns)], 0
    with (
        contextlib.closing(Client(target)) as client,
        contextlib.closing(Attacker(name, target)) as attacker,
    ):
        forget_peak(target.pid)
        before = memory_mib(target.pid, "VmRSS")
        for calm, hard in zip(idle, attacked, strict=True):
            client.ask_for(seconds / 4, Window())  # what the attack before has left behind
            client.ask_for(seconds, calm)
            attacker.begin(seconds + 0.1)
            time.sleep(0.05)
            client.ask_for(seconds, hard)
            count += attacker.end()
        growth = memory_mib(target.pid, "VmHWM") - before
    return rows_of(name, idle, attacked, growth, count)


def rows_of(
    name: str, idle: list[Window], attacked: list[Window], growth: float, count: int
) -> list[Row]:
    """Return the rows. The p99s are medians of the turns, because a busy moment of the machine
    affects one of them."""
    calm, hard = (
        Sample(tuple(window.p99_ms for window in windows)) for windows in (idle, attacked)
    )
    floor, hard_floor = (
        Sample(tuple(_p99(window.asleep_ms) for window in windows)) for windows in (idle, attacked)
    )
    bound = Goal("value_at_most", TIMES * calm.median + MORE_MS)
    longest = max(max(window.latency_ms) for window in attacked)
    bad = sum(window.bad for window in attacked)
    note = f"{count} times; the longest took {longest:.1f} ms; {bad} errors and defaults"
    title, why = ATTACKS[name][1], BOUNDED_BY.get(name, "")
    asleep = row(f"{title}: p99 of a process that only sleeps", hard_floor, "ms", "idle", floor)
    if name == "compute":
        return [row(f"{title}: p99", hard, "ms", "idle", calm, note=note), asleep]
    memory = Goal("value_at_most", GROWTH_MIB)
    return [
        row(f"{title}: p99", hard, "ms", "idle", calm, bound, note, why),
        asleep,
        row(f"{title}: memory", growth, "MiB", goal=memory, bounded_by=why),
    ]


def main(quick: bool, rows: list[str] | None = None) -> list[Row]:
    """Run the benchmark. rows: names of attacks, of ATTACKS in attackers.py; None: all."""
    if unknown := set(rows or ()) - set(ATTACKS):
        raise SystemExit(f"no attack {', '.join(sorted(unknown))}. Attacks: {', '.join(ATTACKS)}.")
    turns, seconds = (1, 0.5) if quick else (3, 2.0)
    found = []
    for name in rows or ATTACKS:
        with served(keys=name in WITH_KEYS) as target:
            found += measure(name, target, turns, seconds)
    return found
