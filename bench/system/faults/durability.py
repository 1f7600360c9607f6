"""Durability: a server, and its store, killed again and again while feedback comes in; what was
acknowledged is there once.

A teacher is a process of its own with a real server and real containers. Its threads teach an
application each: single labels, right or wrong, lists, arrays, for several users. When
a feedback has been acknowledged, the teacher says how many observations it was. The driver kills it
at a seeded instant and reads the journal: it has what was acknowledged, and perhaps what was in
flight. Then the driver starts the teacher again on what is left, and compares its states, bit for
bit, with those that come of the records, one after another.

The states are in a SQLite file; in a Redis or an etcd, which is killed or stopped for a while in
the middle of it; or in memory, beside a folder that has the journal.
"""

import dataclasses
import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, absent, row
from bench.system.fixtures.store_servers import Etcd, Redis
from clipper.selection import create_policy
from clipper.selection.learning.batch_learning import (
    ObservationRows,
    count_user,
    native_update_of,
    observe,
    observe_rows,
)
from clipper.serving.feedback.journal_records import read
from clipper.store.journal import Journal
from clipper.types import VersionedModel
from clipper_container import Scored
from tests.processes import Program

APPLICATIONS = {
    "a": "exp3",
    "b": "stacking(coverage=0.9)",
    "c": "linucb",
    "d": "mixture",
    "e": "bandit",
}
STORES = {"sqlite": "", "redis": "redis-server", "etcd": "etcd", "memory": ""}  # name -> program
MODELS = ("one", "two")
USERS = ("", "u", "v", "w")
LIFE = 20  # kills of one folder; then another begins
ROOT = Path(__file__).resolve().parents[3]
LIVES_MAX_S = 120.0  # a teacher that is not up by then has failed

State = dict[tuple[str, str], Any]  # by application and user


# -- the teacher, a process of its own


def model(by: int) -> Callable[[Any], Any]:
    """Deploy a model; the second one reports class probabilities."""

    def predict(xs: Any) -> Any:
        outputs = (xs[:, 0].astype(int) * by) % 7
        if by == 1:
            return outputs
        said = [{f"p:{x}": 0.6, f"p:{(x + 1) % 7}": 0.3} for x in outputs.tolist()]
        return Scored(outputs, qualifiers=said)

    return predict


def teach(state: str, folder: str, seed: int) -> None:
    """Give feedback until the process is killed.

    stdout: a line of its states, then one for each feedback that was acknowledged.
    """
    faulthandler.dump_traceback_later(LIVES_MAX_S - 10)  # the log shows what it waits for
    settings: dict[str, Any] = {"state": state, "folder": folder, "feedback": {"write_ms": 5}}
    with clipper.start(**settings) as server:
        for by, name in enumerate(MODELS, 1):
            if name not in server.catalog.view.versions:
                server.deploy(name, model(by), input="f64[1]")
        apps = {
            name: server.app(name, models=MODELS, policy=policy, slo_ms=30_000)
            for name, policy in APPLICATIONS.items()
        }
        states = {name: encoded(app) for name, app in apps.items()}
        say({"states": states})
        for app in apps.values():
            app.predict(np.ones(1)).result(LIVES_MAX_S)
        say({"ready": True})
        faulthandler.cancel_dump_traceback_later()
        for i, app in enumerate(apps.values()):
            threading.Thread(
                target=predict_and_give_feedback, args=(app, random.Random(seed + i)), daemon=True
            ).start()
        threading.Event().wait()


def encoded(app: Any) -> dict[str, str]:
    learner = app._resolve(app.name).learner
    return {user: learner.policy.encode(learner.state(user)).hex() for user in USERS}


_saying = threading.Lock()


def say(what: dict[str, Any]) -> None:
    line = json.dumps(what).encode() + b"\n"
    with _saying:
        while line:
            line = line[os.write(1, line) :]


def predict_and_give_feedback(app: Any, draw: random.Random) -> None:
    try:
        while True:
            counted = taught(app, draw)
            say({"acknowledged": app.name, "count": counted})
    except Exception as error:
        say({"failed": f"{type(error).__name__}: {error}"})


def taught(app: Any, draw: random.Random) -> int:
    """Send one feedback of some kind. Return its number of observations."""
    kind = draw.choice(["label", "label", "correct", "list", "array"])
    if kind == "array":
        xs = np.array([[draw.randrange(50)] for _ in range(draw.randint(1, 60))], float)
        answers = app.predict_many(xs, user=draw.choice(USERS), slo_ms=30_000).result()
        rows = draw.sample(range(len(xs)), draw.randint(1, len(xs)))
        return int(
            app.feedback_many(answers, np.array([int(xs[i, 0]) % 7 for i in rows]), rows).counted
        )
    asked = [draw.randrange(50) for _ in range(draw.randint(1, 40) if kind == "list" else 1)]
    answers = [app.predict(np.array([float(x)]), user=draw.choice(USERS)).result() for x in asked]
    if kind == "list":
        return int(app.feedback_many(answers, [x % 7 for x in asked]).counted)
    if kind == "correct":
        return int(app.feedback(answers[0], correct=answers[0].output == asked[0] % 7))
    return int(app.feedback(answers[0], label=asked[0] % 7))


# -- what the states should be


def after(states: State, record: bytes) -> State:
    """Replay observations one by one: a user's first observation starts from the state that all
    users share."""
    application, text, models, user, seen = read(record)
    policy, found = create_policy(text), dict(states)
    for whose in dict.fromkeys((user, "")):
        state = state_of(found, application, whose, models)
        if isinstance(seen, ObservationRows):
            found[application, whose] = observe_rows(policy, state, seen)
        else:
            found[application, whose] = observe(policy, state, seen, native_update_of(policy))
    if user:
        found[application, ""] = count_user(policy, found[application, ""], user, seen)
    return found


def state_of(states: State, application: str, user: str, models: Any) -> Any:
    if (application, user) in states:
        return states[application, user]
    return create_policy(APPLICATIONS[application]).init(
        models, state_of(states, application, "", models) if user else None
    )


def is_so(states: State, application: str, recorded: dict[str, str]) -> bool:
    models = [VersionedModel(name, 1) for name in MODELS]
    policy = create_policy(APPLICATIONS[application])
    return all(
        policy.encode(state_of(states, application, user, models)).hex() == recorded[user]
        for user in USERS
    )


@dataclasses.dataclass
class Book:
    """Reports of the processes that gave feedback on one folder.

    in_flight: of the last one, records by application.  last: number of the last record read.
    """

    states: State = dataclasses.field(default_factory=dict)
    in_flight: dict[str, list[bytes]] = dataclasses.field(default_factory=dict)
    acknowledged: int = 0
    feedbacks: int = 0
    last: int = 0

    def check(self, found: dict[str, dict[str, str]]) -> str:
        """Compare with what a teacher has found; -> what is wrong. Of what was in flight some may
        have been written down."""
        for application, recorded in found.items():
            states, records = self.states, self.in_flight.pop(application, [])
            for record in records:
                if is_so(states, application, recorded):
                    break
                states = after(states, record)
            if not is_so(states, application, recorded):
                return self._difference(application, recorded)
            self.states = states
        return ""

    def _difference(self, application: str, recorded: dict[str, str]) -> str:
        policy = create_policy(APPLICATIONS[application])
        models = [VersionedModel(name, 1) for name in MODELS]
        seen = {user: policy.decode(bytes.fromhex(recorded[user])).seen for user in USERS}
        expected = {user: state_of(self.states, application, user, models).seen for user in USERS}
        return (
            f"application {application}: observations by user {seen}, acknowledged {expected}; or"
            " the states differ"
        )

    def read(self, lines: list[str], journal: Path) -> str:
        """Add the report of a killed process and its journal; return what is wrong with them."""
        counts: dict[str, int] = dict.fromkeys(APPLICATIONS, 0)
        for line in lines:
            said = json.loads(line)
            if "failed" in said:
                return str(said["failed"])
            if "acknowledged" in said:
                counts[said["acknowledged"]] += said["count"]
                self.feedbacks += 1
        self.in_flight = self._new_records(journal)
        for application, count in counts.items():
            self.acknowledged += count
            records = self.in_flight.setdefault(application, [])
            while count > 0 and records:
                seen = read(records[0])[4]
                count -= len(seen) if isinstance(seen, ObservationRows) else 1
                self.states = after(self.states, records.pop(0))
            if count:
                return f"application {application}: the journal lacks {count} observations"
        return ""

    def _new_records(self, folder: Path) -> dict[str, list[bytes]]:
        found: dict[str, list[bytes]] = {}
        journal = Journal(folder)
        for number, record in journal.replay(self.last):
            found.setdefault(read(record)[0], []).append(record)
            self.last = number
        journal.close()
        return found


# -- the driver


class Teacher:
    """A teacher's process, and what it says."""

    def __init__(self, state: str, folder: str, seed: int) -> None:
        words = [sys.executable, "-m", "bench.system.faults.durability", state, folder, seed]
        self.program = Program(*words, folder=ROOT)

    def said(self) -> list[str]:
        """Return the lines that are no log."""
        return [line for line in self.program.lines if line.startswith("{")]

    def ready(self) -> dict[str, Any]:
        """Wait until it is ready; return what it found. Raises: AssertionError."""
        self.program.until(lambda: len(self.said()) >= 2, limit_s=LIVES_MAX_S)
        found: dict[str, Any] = json.loads(self.said()[0])
        return found

    def kill(self) -> list[str]:
        """Kill the process. Return its output after it was ready."""
        self.program.kill()
        return self.said()[2:]


def disturb(store: Redis | Etcd, draw: random.Random) -> None:
    """Kill a store and start it again, or stop it for a while, at some instant."""
    time.sleep(draw.uniform(0.0, 0.3))
    if draw.random() < 0.5:
        store.stop(signal.SIGKILL)
        time.sleep(draw.uniform(0.0, 0.3))
        store.start()
        return
    store.send(signal.SIGSTOP)
    time.sleep(draw.uniform(0.0, 0.6))
    store.send(signal.SIGCONT)


class Life:
    """One folder, and perhaps a store's process, over several kills. store: a key of STORES."""

    def __init__(self, store: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="durability-"))
        self.server: Redis | Etcd | None = None
        self.state = str(self.folder / "state") if store == "sqlite" else ""
        if STORES[store]:
            self.server = (Redis if store == "redis" else Etcd)(self.folder)
            self.state = self.server.url
        self.book = Book()

    def one_kill(self, seed: int) -> str:
        """Kill the process once. Return what went wrong."""
        draw = random.Random(seed)
        teacher = Teacher(self.state, str(self.folder / "state"), seed)
        try:
            wrong = self.book.check(teacher.ready()["states"])
            if wrong:
                return wrong
            if self.server:
                disturb(self.server, draw)
            time.sleep(draw.uniform(0.0, 0.5))
        except AssertionError as error:
            return f"the server did not come up: {error}"
        finally:
            said = teacher.kill()
        return self.book.read(said, self.folder / "state" / "journal")

    def last_look(self) -> str:
        """Start once more and check the states without a kill."""
        return self.one_kill(0)

    def end(self) -> None:
        if self.server:
            self.server.stop(signal.SIGKILL)
        shutil.rmtree(self.folder, ignore_errors=True)


@dataclasses.dataclass
class Outcome:
    kills: int = 0
    feedbacks: int = 0
    observations: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)


def killed(kills: int, seed: int, store: str, tell: Callable[[str], None]) -> Outcome:
    """Make `kills` kills, LIFE per folder; seeds count up from `seed`. A folder whose states are
    wrong is not used any more. store: a key of STORES."""
    found = Outcome()
    while found.kills < kills and len(found.failures) < 3:
        life = Life(store)
        try:
            wrong = ""
            for _ in range(min(LIFE, kills - found.kills)):
                at = seed + found.kills
                tell(
                    f"{store}: kill {found.kills + 1} of {kills}, seed {at}, {found.observations}"
                    " observations acknowledged"
                )
                before = life.book.acknowledged, life.book.feedbacks
                wrong = life.one_kill(at)
                found.kills += 1
                found.observations += life.book.acknowledged - before[0]
                found.feedbacks += life.book.feedbacks - before[1]
                if wrong:
                    break
            wrong = wrong or life.last_look()
            if wrong:
                found.failures.append(f"{store}, seed {seed}, kill {found.kills}: {wrong}")
        finally:
            life.end()
    return found


def progress() -> Callable[[str], None]:
    """Print a progress line: overwritten on a terminal, otherwise every tenth one."""
    count = iter(range(1 << 60))

    def tell(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r{text}\033[K", end="", file=sys.stderr, flush=True)
        elif next(count) % 10 == 0:
            print(text, file=sys.stderr, flush=True)

    return tell


def main(quick: bool, kills: int | None = None, seed: int | None = None) -> list[Row]:
    total = kills if kills is not None else 4 if quick else 20
    seed = seed if seed is not None else random.SystemRandom().randrange(1 << 30)
    print(f"durability: {total} kills, --seed {seed}", file=sys.stderr)
    shares = [(total + i) // len(STORES) for i in range(len(STORES))]
    return [
        line for store, n in zip(STORES, shares, strict=True) for line in rows_of(store, n, seed)
    ]


def rows_of(store: str, kills: int, seed: int) -> Iterator[Row]:
    what = f"{kills} kills, states in {store}: wrong afterwards"
    if STORES[store] and shutil.which(STORES[store]) is None:
        yield absent(what, "starts", f"no {STORES[store]} on this machine")
        return
    begun = time.monotonic()
    found = killed(kills, seed, store, progress())
    note = (
        f"seed {seed}; {found.feedbacks} feedbacks, {found.observations} observations acknowledged"
        + "".join(f"; {failure}" for failure in found.failures)
    )
    yield row(what, float(len(found.failures)), "starts", goal=Goal("value_at_most", 0), note=note)
    yield row(f"acknowledged, states in {store}", float(found.observations), "observations")
    yield row(f"time for {found.kills} kills, states in {store}", time.monotonic() - begun, "s")


if __name__ == "__main__":
    teach(sys.argv[1], sys.argv[2], int(sys.argv[3]))
