"""Many servers that learn for one application on one store: what their states cost it.

Each server is only what learns: the states, the thread that writes them behind and the one that
follows the others, over a connection of its own to one Redis. All are in this process, so their CPU
has the bound of one interpreter; that of Redis has not. Every server gets feedback all the time.
"""

import contextlib
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import redis

from bench.harness import Row, row
from bench.system.fixtures.store_servers import Redis
from bench.system.several_servers.on_redis import POLICY
from clipper.selection import create_policy
from clipper.selection.policy import Observation, Plan, Prediction, Truth
from clipper.serving.feedback.journal_records import written
from clipper.serving.feedback.states import Learner, States
from clipper.serving.feedback.stored_state import SHARED
from clipper.store import RedisStore
from clipper.store.journal import Journal
from clipper.types import VersionedModel
from tests.memory_container import wait_until

COUNTS = (2, 4, 8, 16, 32, 64)
WRITE_S = 1.0  # between two writes of a server: feedback.write_ms
SECONDS = 10.0
PATIENCE_S = 60.0
MODELS = (VersionedModel("a", 1), VersionedModel("b", 1))


class Cost(NamedTuple):
    """The cost of a second. written: states. late_s: until all have learned the last feedback."""

    written: float
    redis_cpu: float
    sent_bytes: float
    server_cpu: float
    late_s: float


def cost(count: int, seconds: float) -> Cost:
    """Let so many servers learn, and return what a second costs."""
    folder = Path(tempfile.mkdtemp(prefix="states-"))
    server = Redis(folder, "--appendfsync", "everysec")
    policy = create_policy(POLICY)
    seen = Observation(
        Plan(MODELS[:1]), {one: Prediction(1) for one in MODELS}, Truth(1), Prediction(1).output
    )
    try:
        with contextlib.ExitStack() as stack:
            info = stack.enter_context(contextlib.closing(redis.Redis.from_url(server.url)))
            held: list[tuple[States, Learner]] = []
            stores = [
                stack.enter_context(contextlib.closing(RedisStore(server.url)))
                for _ in range(count)
            ]
            for number, store in enumerate(stores):
                states = States(store, Journal(None), f"n{number}", 1000, WRITE_S, follows=True)
                stack.callback(states.close)
                states.replay(lambda _: None)
                held.append((states, states.learner("a", POLICY, policy, MODELS)))

            def learn() -> None:
                for states, learner in held:
                    states.commit(
                        states.observe_one(learner, SHARED, seen, written(learner, SHARED, seen))
                    )

            def are_even(wanted: int) -> bool:
                return all(learner.state(SHARED).seen == wanted for _, learner in held)

            learn()
            wait_until(lambda: are_even(count), "all follow", PATIENCE_S)
            key = held[0][1].key(SHARED)
            before, first = info.info(), _revision(stores[0], key)
            began_s, began_cpu_s, rounds = time.monotonic(), time.process_time(), 1
            while time.monotonic() - began_s < seconds:
                learn()
                rounds += 1
                time.sleep(WRITE_S / 4)
            took_s, cpu_s = time.monotonic() - began_s, time.process_time() - began_cpu_s
            after, last = info.info(), _revision(stores[0], key)
            ended_s = time.monotonic()
            wait_until(lambda: are_even(count * rounds), "all have learned all", PATIENCE_S)
            late_s = time.monotonic() - ended_s

            def rise(*names: str) -> float:
                return sum(float(after[one]) - float(before[one]) for one in names) / took_s

            return Cost(
                (last - first) / took_s,
                rise("used_cpu_user", "used_cpu_sys"),
                rise("total_net_output_bytes"),
                cpu_s / took_s / count,
                late_s,
            )
    finally:
        server.stop()
        shutil.rmtree(folder)


def _revision(store: RedisStore, key: str) -> int:
    record = store.get(key)
    return record.revision if record else 0


def main(quick: bool = False) -> list[Row]:
    rows: list[Row] = []
    for count in COUNTS[:3] if quick else COUNTS:
        found = cost(count, 2.0 if quick else SECONDS)
        name = f"{count} servers, a write a second each"
        rows += [
            row(f"{name}: states written", found.written, "/s"),
            row(f"{name}: CPU of Redis", 100 * found.redis_cpu, "%"),
            row(f"{name}: bytes that Redis sends", found.sent_bytes, "B/s"),
            row(f"{name}: CPU of a server", 100 * found.server_cpu, "%"),
            row(f"{name}: until all have learned all", found.late_s, "s"),
        ]
    return rows
