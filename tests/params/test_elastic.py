"""Workers that join and leave while others train: no worker waits for them, no push of theirs is
lost, and none counts twice."""

import random
import signal
import sys
import threading
from typing import Any

import numpy as np
import pytest

from clipper.params import Client, TableSpec
from tests.params.conftest import TOKEN, Shards, ones, until, zeros
from tests.processes import Program
from tests.threads import join

COUNTS = TableSpec(
    "counts", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)
WORKER = """
import sys
import numpy as np
from clipper.params import Client
client = Client(sys.argv[3:], token=sys.argv[1], worker=int(sys.argv[2]), patience_s=20.0)
done = 0
while True:
    client.push("counts", np.arange(12), -np.ones((12, 2), np.float32))
    done += 1
    print(done, flush=True)
"""


class Elastic(threading.Thread):
    """Pushes until it is told to leave; `done`: what was acknowledged."""

    def __init__(self, shards: Shards, number: int) -> None:
        super().__init__(name=f"worker-{number}")
        self.client, self.leave, self.done = shards.client(worker=number), threading.Event(), 0
        self.start()

    def run(self) -> None:
        while not self.leave.is_set():
            self.client.push("counts", range(12), -ones((12, 2)))
            self.done += 1


def counted(client: Client) -> Any:
    return client.pull("counts", range(12))


def test_workers_join_and_leave_and_every_push_counts_once(shards: Shards) -> None:
    client, draw = shards.up(3, replicas=1).client(), random.Random(3)
    client.create(COUNTS)
    here = [Elastic(shards, 1)]
    stopped: list[Elastic] = []
    for number in range(2, 12):
        until(lambda: min(one.done for one in here) >= 3)
        here.append(Elastic(shards, number))
        if draw.random() < 0.6:
            one = here.pop(draw.randrange(len(here) - 1))
            one.leave.set()
            stopped.append(one)
    for one in here:
        one.leave.set()
    for one in [*here, *stopped]:
        join(one)
    assert (counted(client) == sum(one.done for one in [*here, *stopped])).all()


@pytest.mark.slow
def test_a_killed_worker_continues_under_its_number(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(COUNTS)
    steady, acknowledged = Elastic(shards, 7), 0
    for _ in range(3):
        words = [sys.executable, "-c", WORKER, TOKEN, "9", *shards.addresses]
        with Program(*words, apart=True) as process:
            process.until("20\n")
            assert process.kill() == -signal.SIGKILL
        acknowledged += int(process.lines[-1])
    steady.leave.set()
    join(steady)
    found = counted(client) - steady.done
    # what was on its way when it was killed may have reached one shard, both or none: one push each
    # time, never two
    assert ((found >= acknowledged) & (found <= acknowledged + 3)).all()


def test_a_synchronous_step_waits_for_gradients_and_not_for_workers(shards: Shards) -> None:
    client = shards.up(2, mode="sync", grads_to_wait=2).client()
    client.push_model(
        {"w": zeros(2), "v": zeros(2)}, optimizer="sgd", optimizer_settings={"rate": 1.0}
    )
    versions = client.versions

    def push(one: Client) -> dict[str, Any]:
        return one.push_gradients({"w": -ones(2), "v": -ones(2)}, versions=one.pull_variables()[0])

    first, second = shards.client(worker=1), shards.client(worker=2)
    assert push(first)["accepted"]
    assert client.pull_variables()[0] == versions
    first.close()  # it leaves: what it had pushed counts
    assert push(second)["accepted"]
    after = client.pull_variables()[0]
    assert after != versions
    third = shards.client(worker=3)  # it joins, and one alone makes a step by two
    for _ in range(2):
        assert push(third)["accepted"]
    assert client.pull_variables()[0] != after
    assert (np.concatenate([*client.pull_variables()[1].values()]) == 2).all()
