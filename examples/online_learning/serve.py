"""A model that learns online from feedback. See README.md.

Run: python examples/online_learning/serve.py

--world digits: other data. --kill 2: kill two shards in the middle. --admin 127.0.0.1:8002: watch
the accuracy on the dashboard.
"""

import argparse
import os
import signal
import tempfile
import time

import numpy as np
from machine import Clicks, Digits
from worlds import clicks, digits

import clipper

WORLDS = {"clicks": (clicks, Clicks), "digits": (digits, Digits)}
BATCH = 32  # queries at once; their feedback is sent before the next batch


def run(
    world,
    queries,
    *,
    shards=2,
    containers=2,
    kills=0,
    admin=None,
    slo_ms=500.0,
    pace_s=0.0,
    say=print,
):
    """-> for each query whether it was right; and how many had the default."""
    make, model = WORLDS[world]
    inputs, labels, best = make(queries, seed=1)
    with tempfile.TemporaryDirectory(prefix="clipper-online-") as folder:
        of_set = {
            "shards": shards,
            "replicas": shards - 1,
            "replication": "waited",
            "snapshot_s": 0,
        }
        with clipper.start(server={"params": folder}, params=of_set, admin=admin) as server:
            server.deploy(world, model, replicas=containers, cache=False)
            app = server.app(world, models=[world], policy="stacking", slo_ms=slo_ms, default=-1)
            say(
                f"{world}: {shards} shards, {containers} containers; the best guesser possible is"
                f" right {best:.0%} of the time"
            )
            if server.admin_address:
                say(f"watch: http://{server.admin_address}")
            return learn(server, app, inputs, labels, kills, pace_s, say)


def learn(server, app, inputs, labels, kills, pace_s, say):
    right, defaults = np.zeros(len(labels), bool), 0
    due = [len(labels) * (i + 1) // (kills + 1) // BATCH * BATCH for i in range(kills)]
    told = time.monotonic()
    for at in range(0, len(labels), BATCH):
        if at in due:
            kill(server, due.index(at) % len(server.params), say)
        truth = labels[at : at + BATCH]
        answers = [future.result() for future in [app.predict(x) for x in inputs[at : at + BATCH]]]
        right[at : at + BATCH] = [
            answer.output == label for answer, label in zip(answers, truth, strict=True)
        ]
        known = [i for i, answer in enumerate(answers) if not answer.is_default]
        defaults += len(answers) - len(known)
        app.feedback_many([answers[i] for i in known], truth[known])
        time.sleep(pace_s)
        if time.monotonic() >= told + 1:
            told = time.monotonic()
            last, itself = (
                right[max(0, at - 1000) : at + BATCH].mean(),
                server.stats()["models"][f"{app.name}:1"]["accuracy"],
            )
            says = "" if itself is None else f", the model says {itself:.0%}"
            say(
                f"after {at + BATCH:6} queries: {last:.0%} of the last 1000 right{says}; {defaults}"
                " defaults"
            )
    say(
        f"first tenth: {right[: len(right) // 10].mean():.0%} right; last tenth:"
        f" {right[-len(right) // 10 :].mean():.0%}"
    )
    return right, defaults


def kill(server, shard, say):
    pid = server.params.call(shard, "stats")["pid"]
    os.kill(pid, signal.SIGKILL)
    say(f"killed shard {shard} (process {pid})")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world", choices=WORLDS, default="clicks")
    parser.add_argument("--queries", type=int, default=20_000)
    parser.add_argument("--shards", type=int, default=2)
    parser.add_argument("--kill", type=int, default=0, metavar="N")
    parser.add_argument(
        "--admin", metavar="HOST:PORT", help="where management and the dashboard listen"
    )
    parser.add_argument(
        "--pace", type=float, default=0.0, metavar="S", help="pause after each 32 queries, to watch"
    )
    given = parser.parse_args()
    run(
        given.world,
        given.queries,
        shards=given.shards,
        kills=given.kill,
        admin=given.admin,
        pace_s=given.pace,
    )
