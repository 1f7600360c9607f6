"""Streams under faults: servers of a group are killed and frozen, and their Redis is killed, while
producers add records and a reader reads answers; the history of both is checked."""

import contextlib
import json
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import clipper
from bench.harness import Goal, Row, absent, row
from bench.system.faults.stream_history import StreamHistory
from bench.system.fixtures.store_servers import SYNCED, Redis
from clipper.frontend.streams import consumer_group
from tests.processes import Program

SERVERS, PRODUCERS = 2, 2
CLAIM_S = 0.4  # of silence, after which a server's records are taken from it
FROZEN_S = 1.2
PATIENCE_S = 60.0
SLO_MS = 60_000.0
PENDING = "#redis.call('XPENDING', KEYS[1], group, entry, entry, 1) == 0"
FAULTS = ("kill", "freeze", "store")
ROOT = Path(__file__).resolve().parents[3]
WHAT = "faults of servers and Redis under streams: wrong afterwards"


# -- a server, a process of its own


def doubled(xs: Any) -> Any:
    """Answer twice the number, after a while in which the server may die."""
    time.sleep(0.02)
    return xs[:, 0] * 2


def serve(url: str, planted: str) -> None:
    """Answer records until stdin ends. planted: "twice": answer whether or not it is pending."""
    if planted == "twice":
        vars(consumer_group)["_SETTLE"] = vars(consumer_group)["_SETTLE"].replace(PENDING, "false")
    with clipper.start(drain_s=1) as server:
        server.deploy("doubled", doubled, input="f64[1]")
        server.app("numbers", models=["doubled"], slo_ms=SLO_MS)
        server.stream("numbers", url, claim_s=CLAIM_S)
        print("up", flush=True)
        sys.stdin.read()


class Servers:
    """Processes that serve one group. Use as a context manager."""

    def __init__(self, url: str, planted: str) -> None:
        self._words = [sys.executable, "-m", "bench.system.faults.stream_kills", url, planted]
        self.running: list[Program] = []

    def __enter__(self) -> "Servers":
        for _ in range(SERVERS):
            self.start()
        for program in self.running:
            program.until("up\n")
        return self

    def __exit__(self, *_: object) -> None:
        for program in self.running:
            program.kill()

    def start(self) -> None:
        """Start one more."""
        self.running.append(Program(*self._words, folder=ROOT))

    def kill(self, one: int) -> None:
        """Kill one, and start another."""
        self.running.pop(one).kill()
        self.start()

    def freeze(self, one: int, seconds: float) -> None:
        """Stop one for so long."""
        self.running[one].send(signal.SIGSTOP)
        time.sleep(seconds)
        self.running[one].send(signal.SIGCONT)


# -- clients


class Client(threading.Thread):
    """A thread with a connection of its own, that repeats a step until `enough` is set."""

    def __init__(self, url: str, step: Callable[[Any], None]) -> None:
        super().__init__(daemon=True)
        self._url, self._step = url, step
        self.enough = threading.Event()
        self.failed: Exception | None = None

    def run(self) -> None:
        import redis
        from redis.backoff import NoBackoff
        from redis.retry import Retry

        retry = Retry(NoBackoff(), 0)  # a call that is made again would be another record
        client = redis.Redis.from_url(self._url, decode_responses=True, retry=retry)
        while not self.enough.is_set():
            try:
                self._step(client)
            except (redis.exceptions.RedisError, OSError):
                time.sleep(0.01)
            except Exception as error:
                self.failed = error
                return
        client.close()


class Producer:
    """Adds records, about 400 a second: every second one with an id of its own."""

    def __init__(self, history: StreamHistory, number: int, seed: int) -> None:
        self._history, self._next, self._draw = history, number, random.Random(seed)

    def step(self, client: Any) -> None:
        """Add one record."""
        number, self._next = self._next, self._next + PRODUCERS
        fields = {"input": f"[{number}]", "q.number": str(number)}
        if number % 4 < 2:
            fields["id"] = f"r{number}"
        self._history.ask(number, lambda: client.xadd("records", fields))
        time.sleep(self._draw.expovariate(400))


class Reader:
    """Reads answers and refusals, each once."""

    def __init__(self, history: StreamHistory) -> None:
        self._history = history
        self._last = {"answers": "0", "records.refused": "0"}

    def step(self, client: Any) -> None:
        """Read what has come."""
        for name, entries in client.xread(self._last, block=50) or ():
            for at, fields in entries:
                self._history.hear(
                    at,
                    int(fields["q.number"]),
                    fields.get("entry", fields.get("refused.entry", "")),
                    fields.get("output", fields.get("refused.reason", "")),
                    is_refused=name != "answers",
                )
                self._last[name] = at


# -- a life


def life(faults: int, seed: int, planted: str = "") -> tuple[StreamHistory, list[str]]:
    """Return the history of so many faults, and what is wrong with it.

    planted: a bug that the servers have; see `serve`.
    """
    import redis

    draw, history = random.Random(seed), StreamHistory()
    with tempfile.TemporaryDirectory(prefix="streams-") as name, contextlib.ExitStack() as ends:
        store = Redis(Path(name), *SYNCED)
        ends.callback(store.stop, signal.SIGKILL)
        servers = ends.enter_context(Servers(store.url, planted))
        producers = [
            Client(store.url, Producer(history, i, seed + i).step) for i in range(PRODUCERS)
        ]
        reader = Client(store.url, Reader(history).step)
        for thread in (*producers, reader):
            thread.start()
        for i in range(faults):
            time.sleep(draw.uniform(0.1, 0.4))
            _disturb(FAULTS[(seed + i) % len(FAULTS)], draw.randrange(SERVERS), servers, store)
        time.sleep(0.2)
        for thread in producers:
            thread.enough.set()
            thread.join()
        until_s = time.monotonic() + PATIENCE_S
        while not history.is_answered() and time.monotonic() < until_s:
            time.sleep(0.02)
        time.sleep(2 * CLAIM_S)  # in which an answer too many would come
        reader.enough.set()
        reader.join()
        with redis.Redis.from_url(store.url, decode_responses=True) as client:
            kept = [at for at, _ in client.xrange("answers")]
            pending = client.xpending("records", "clipper")["pending"]
    wrong = history.errors(lambda number: json.dumps(float(2 * number)), kept)
    wrong += [f"{pending} records are pending, and all are answered"] if pending else []
    wrong += [f"a client: {thread.failed!r}" for thread in (*producers, reader) if thread.failed]
    return history, wrong


def _disturb(fault: str, one: int, servers: Servers, store: Redis) -> None:
    match fault:
        case "kill":
            servers.kill(one)
        case "freeze":
            servers.freeze(one, FROZEN_S)
        case "store":
            store.stop(signal.SIGKILL)
            time.sleep(0.1)
            store.start()


def main(quick: bool, kills: int | None = None, seed: int | None = None) -> list[Row]:
    total = kills if kills is not None else 3 if quick else 60
    seed = seed if seed is not None else random.SystemRandom().randrange(1 << 30)
    if shutil.which("redis-server") is None:
        return [absent(WHAT, "findings", "no redis-server: python tools/fetch.py redis")]
    print(f"stream_kills: {total} faults, --seed {seed}", file=sys.stderr)
    history, wrong = life(total, seed)
    acknowledged = sum(bool(one.entry) for one in history.asked.values())
    note = f"seed {seed}; {len(history.asked) - acknowledged} records without an acknowledgement"
    return [
        row(
            f"{total} {WHAT}",
            float(len(wrong)),
            "findings",
            goal=Goal("value_at_most", 0),
            note="; ".join([note, *wrong[:5]]),
        ),
        row("records acknowledged, and answered", float(acknowledged), "records"),
    ]


if __name__ == "__main__":
    serve(*sys.argv[1:])
