"""Benchmark of resharding: the number of shards of a set changes again and again while workers
push, and a process is killed during each change; no acknowledged push may be lost or applied twice.

What is killed at a seeded moment is a shard of the set that serves, one of the set that is being
filled, or the supervisor, which does the resharding and is started again. Workers, reader and
checks are those of params_kills, with one kill at a time.
"""

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, row
from bench.system.faults.params_history import PushHistory
from bench.system.faults.params_kills import (
    PATIENCE_S,
    SHARDS,
    TABLE,
    WORKERS,
    Found,
    Reader,
    Worker,
    check,
)
from clipper.errors import ClipperError
from clipper.params import Client
from clipper.params.local.address_file import read_address_file
from clipper.params.local.live_reshard import request, request_in, sets_of, state_in
from clipper.params.shard.resharding.decision import decision_in
from clipper_container.params.connection import ShardConnection, addresses_in, call_once
from tests.processes import Program

SIZES = (2, 3, 4)
VICTIMS = ("old", "new", "supervisor")
DELAY_S = 1.5  # from the request to the kill, at most
END_S = 120.0  # for one change of the number, with all its attempts
MODES: dict[str, tuple[str, ...]] = {
    "a waited replica": ("--replicas", "1"),
    "a log on disk, no replica": ("--durability", "disk"),
}
ENVIRONMENT = {"CLIPPER_PARAMS__RESHARD_KEEP_S": "0.5", "CLIPPER_PARAMS__SNAPSHOT_S": "0"}


@dataclass
class Changes:
    """The result of all changes.

    pauses_s: of pushes, as the supervisor measured them. victims: number of kills by what was
    killed.
    """

    found: Found = field(default_factory=Found)
    pauses_s: list[float] = field(default_factory=list)
    victims: Counter[str] = field(default_factory=Counter)
    attempts: int = 0


class Supervisor:
    """Runs `clipper params up` of a folder, in a process of its own. Threads: one."""

    def __init__(self, folder: Path, options: tuple[str, ...]) -> None:
        self._folder, self._options = folder, options
        self._program: Program | None = None

    def start(self, shards: int = 0) -> None:
        """Start it. shards: 0 for those that the folder has, which the start may find to be more
        or fewer, if a change was decided when it was killed."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            number = shards or len(addresses_in(self._folder)[0])
            words = ["up", "--folder", str(self._folder), "--shards", str(number), *self._options]
            words = [sys.executable, "-m", "clipper", "params", *words]
            program = self._program = Program(*words, environment=ENVIRONMENT)
            while time.monotonic() < until_s and program.lives:
                # the shards of one that was killed may still answer
                if read_address_file(self._folder).get("pid") == program.pid:
                    with contextlib.suppress(ClipperError), Client(self._folder) as client:
                        client.call_all("tables")
                        return
                time.sleep(0.05)
        raise TimeoutError("the set does not start")

    def kill(self) -> None:
        """Kill it, and start it again."""
        assert self._program is not None
        self._program.kill()
        self.start()

    def stop(self) -> None:
        """End it, with its shards."""
        if self._program is not None:
            self._program.stop()


def kill_shard(home: Path, draw: random.Random) -> bool:
    """Kill a shard of the set in a folder; tell whether one ran."""
    try:
        addresses, token = addresses_in(home)
        number = draw.randrange(len(addresses))
        connection = ShardConnection(number, addresses.__getitem__, token, None, 2.0)
        try:
            pid = int(call_once(connection, "stats")[1]["pid"])
        finally:
            connection.close()
        os.kill(pid, signal.SIGKILL)
    except (OSError, ClipperError):
        return False
    return True


def filled(folder: Path) -> Path:
    """Wait for a set that is being filled, and return its folder; else that of the set."""
    while request_in(folder):
        for home in sets_of(folder):
            if (home / "shard-0.sock").exists() and not decision_in(home):
                time.sleep(0.2)
                return home
        time.sleep(0.01)
    return folder


def change(
    folder: Path, shards: int, supervisor: Supervisor, draw: random.Random, seen: Changes
) -> None:
    """Change the number of shards, with one kill meanwhile."""
    victim, until_s = draw.choice(VICTIMS), time.monotonic() + END_S
    request(folder, shards)
    time.sleep(draw.uniform(0, DELAY_S))
    if victim == "supervisor":
        supervisor.kill()
    elif not kill_shard(folder if victim == "old" else filled(folder), draw):
        victim = "none"
    seen.victims[victim] += 1
    while request_in(folder):
        if time.monotonic() > until_s:
            seen.found.wrong.append(f"to {shards} shards: no end, {state_in(folder)}")
            return
        time.sleep(0.02)
    state = state_in(folder)
    if state is None or state.phase != "done":
        seen.found.wrong.append(f"to {shards} shards: {state}")
    else:
        seen.attempts += state.attempt
        seen.pauses_s += [state.pause_s] if state.pause_s else []


def wait_whole(client: Client) -> None:
    """Wait until each shard has its replicas: one failure at a time is what one replica is for."""
    until_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < until_s:
        with contextlib.suppress(ClipperError):
            stats = [said for _, said in client.call_all("stats")]
            if all(one["whole"] for said in stats for one in said["followers"]):
                return
        time.sleep(0.05)


def life(changes: int, seed: int, options: tuple[str, ...]) -> Changes:
    """Change the number of shards of one set so many times."""
    draw, seen, history = random.Random(seed), Changes(), PushHistory()
    threads: list[Worker | Reader] = []
    with tempfile.TemporaryDirectory(prefix="clipper-") as name:
        folder = Path(name)
        supervisor, shards = Supervisor(folder, options), SIZES[0]
        try:
            supervisor.start(shards)
            with Client(folder, patience_s=PATIENCE_S) as client:
                client.create(TABLE)
                names = [f"w{k}-{i}" for k in range(WORKERS) for i in range(SHARDS)]
                zero: Any = np.zeros(1, np.float32)
                client.push_model(
                    dict.fromkeys(names, zero), optimizer="sgd", optimizer_settings={"rate": 1.0}
                )
                wait_whole(client)
                workers = [Worker(name, k, history) for k in range(WORKERS)]
                threads = [*workers, Reader(name, workers, seed, history)]
                for thread in threads:
                    thread.start()
                for _ in range(changes):
                    shards = draw.choice([size for size in SIZES if size != shards])
                    change(folder, shards, supervisor, draw, seen)
                    if seen.found.wrong:
                        break
                    wait_whole(client)
                for thread in threads:
                    thread.enough.set()
                for thread in threads:
                    thread.join()
                check(workers, client, seen.found)
                seen.found.wrong += history.errors()
                failed = threads[-1].failed
                seen.found.wrong += [f"the reader: {failed!r}"] if failed else []
                seen.found.reads = len(history.reads)
        finally:
            for thread in threads:
                thread.enough.set()
                thread.join()
                thread.client.close()
            supervisor.stop()
    return seen


def main(quick: bool, kills: int | None = None, seed: int | None = None) -> list[Row]:
    total = kills if kills is not None else 2 if quick else 10
    seed = seed if seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"params_reshard: {total} changes, --seed {seed}", file=sys.stderr)
    return [one for mode in MODES for one in _rows(mode, total, seed)]


def _rows(mode: str, total: int, seed: int) -> list[Row]:
    seen = life(total, seed, MODES[mode])
    found = seen.found
    note = (
        f"seed {seed}; {found.acknowledged} pushes acknowledged, {found.reads} reads;"
        f" {seen.attempts} attempts; killed: {dict(seen.victims)}"
    ) + "".join(f"; {text}" for text in found.wrong)
    print(f"{mode}: {note}", file=sys.stderr)
    return [
        row(
            f"{total} changes of the number of shards with a kill each, {mode}: wrong afterwards",
            float(len(found.wrong)),
            "findings",
            goal=Goal("value_at_most", 0),
            note=note,
        ),
        row(
            f"{mode}: pause of pushes at the switch",
            Sample(tuple(seen.pauses_s)) if seen.pauses_s else 0.0,
            "s",
        ),
    ]
