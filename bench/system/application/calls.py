"""The cost of a query to an application, beside that of the same query to its model alone.

Every case runs in rounds of calls, in turn with the model's own call: a figure is its best round,
and another the mean of all rounds, in which the garbage collector and what a full feedback window
gives up count too. Inputs are f64[4] rows that the cache holds; models are no-ops that return an
int. A row is CPU time of the calling thread, which does all the work; only with new inputs it is
the time of the clock.
"""

import asyncio
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

import clipper
from bench.harness import CPU, Goal, Row, absent, interleave, loop_factory, per_call_ns, row
from bench.system.application.plain import PlainApplication
from clipper.types import PredictionRequest

KNOWN = 50  # inputs in the cache
CALLS = 1000  # of a round
# models that return an int
LABELS = ("one", "two", "three", "four", "five")
# models that return a float
FLOATS = ("low", "middle", "high")
THREE = LABELS[:3]
LEARNED = 300  # feedbacks to an application before it is measured
OUTSTANDING = 1000  # queries of one event loop
BARE = "the model's call"


@dataclass(frozen=True)
class Case:
    """An application, a call to it, and the goal of its cost as a multiple of the model's."""

    models: tuple[str, ...]
    policy: str
    at_most: float
    user: str | None = None
    decider: str = "all"
    learns: bool = False
    # the caller's own of each query
    id: str = ""

    @property
    def name(self) -> str:
        """The name of its application."""
        policy = self.policy if self.decider == "all" else self.decider
        kind = "floats" if self.models[0] in FLOATS else "labels"
        return f"{policy}-{len(self.models)}-{kind}"


CASES = {
    "one model": Case(("one",), "ensemble", 3),
    "one model, user": Case(("one",), "ensemble", 3.5, "ann"),
    "ensemble of 3": Case(THREE, "ensemble", 4),
    "stacking of 3, user": Case(THREE, "stacking", 5, "ann", learns=True),
    "mixture of 3": Case(THREE, "mixture", 5, learns=True),
    "mixture of 5": Case(LABELS, "mixture", 6, learns=True),
    "exp3 of 3, user": Case(THREE, "exp3", 4, "ann", learns=True),
    "exp3 of 3, chosen by the caller's id": Case(THREE, "exp3", 8, learns=True, id="a-name"),
    "majority of 3": Case(THREE, "ensemble", 4, decider="majority"),
    "ensemble of 3 floats": Case(FLOATS, "ensemble", 5),
    "ridge of 3 floats": Case(FLOATS, "ridge", 5, learns=True),
}


def main(quick: bool) -> list[Row]:
    """Measure queries, feedback, event loops, and the memory of answers that await feedback."""
    rounds = 3 if quick else 40
    inputs = [np.full(4, float(i)) for i in range(KNOWN)]
    with started() as server:
        apps = applications(server)
        for case in CASES.values():
            prepare(apps[case.name], case, inputs)
        kept = memory(apps["ensemble-3-labels"], inputs, 60_000)
        return [
            *queries(server, apps, inputs, rounds),
            *first_queries(apps, inputs, rounds),
            *feedback(server, apps, inputs, rounds),
            *event_loop(apps, inputs, max(rounds // 5, 2)),
            kept,
            absent(
                "two threads without the GIL",
                "ns",
                "queries to applications need the GIL",
                "one thread",
                Goal("at_most", 1.2),
            ),
        ]


@contextmanager
def started() -> Iterator[clipper.ClipperServer]:
    """Start a server with the models."""
    with clipper.start() as server:
        for name in (*LABELS, *FLOATS):
            function = "first" if name in FLOATS else "label"
            server.deploy(
                name, f"bench.system.fixtures.noop:{function}", input="f64[4]", wait=False
            )
        server.wait_ready(timeout=120)
        yield server


def applications(server: clipper.ClipperServer) -> dict[str, clipper.ApplicationHandle]:
    """Set the applications of all cases; return them by name."""
    return {
        case.name: server.app(
            case.name,
            models=list(case.models),
            policy=case.policy,
            decider=case.decider,
            slo_ms=60_000,
        )
        for case in CASES.values()
    }


def prepare(app: clipper.ApplicationHandle, case: Case, inputs: Sequence[Any]) -> None:
    """Fill the cache, and let the policy learn."""
    for x in inputs:
        app.predict(x, user=case.user).result()
    for i in range(LEARNED if case.learns else 0):
        answer = app.predict(inputs[i % KNOWN], user=case.user).result()
        app.feedback(answer, label=answer.output)


def queries(
    server: clipper.ClipperServer,
    apps: Mapping[str, clipper.ApplicationHandle],
    inputs: Sequence[Any],
    rounds: int,
) -> list[Row]:
    """Measure one query after another."""
    many = list(inputs) * (CALLS // KNOWN)
    plain = {n: PlainApplication(n) for n in (1, 3)}
    for program in plain.values():
        for i, x in enumerate(inputs):
            program.learn(x, i)
    bare = server.model("one")
    requests = [PredictionRequest(x, CASES["one model"].name) for x in many]
    calls: dict[str, Callable[[], float]] = {BARE: partial(per_call_ns, bare.predict, many, CPU)}
    for title, case in CASES.items():
        calls[title] = partial(asked_ns, apps[case.name], case, many)
    calls["schedule_prediction"] = partial(per_call_ns, server.schedule_prediction, requests, CPU)
    for n, program in plain.items():
        calls[f"plain {n}"] = partial(per_call_ns, program.predict, many, CPU)
    found = interleave(calls, rounds)
    best = {title: sample.min for title, sample in found.items()}
    mean = {title: statistics.fmean(sample.values) for title, sample in found.items()}
    goals = {title: case.at_most for title, case in CASES.items()} | {"schedule_prediction": 3.0}
    result = []
    for title, at_most in goals.items():
        goal = Goal("at_most", at_most)
        result.append(row(title, best[title], "ns", BARE, best[BARE], goal))
        result.append(row(f"{title}, mean", mean[title], "ns", BARE, mean[BARE]))
    for n, title, times in ((1, "one model", 5.0), (3, "ensemble of 3", 3.0)):
        beside = f"{title}, beside a plain program"
        goal = Goal("times_better", times)
        result.append(row(beside, best[title], "ns", "plain Python", best[f"plain {n}"], goal))
    return result


def asked_ns(app: clipper.ApplicationHandle, case: Case, inputs: Sequence[Any]) -> float:
    """Query an application, for a user or by an id if the case has one; return ns of CPU a
    query."""
    predict, user, id = app.predict, case.user, case.id
    if user is None and not id:
        return per_call_ns(predict, inputs, CPU)
    begun = CPU()
    if user is None:
        for x in inputs:
            predict(x, id=id).result()
    else:
        for x in inputs:
            predict(x, user=user).result()
    return (CPU() - begun) / len(inputs)


def first_queries(
    apps: Mapping[str, clipper.ApplicationHandle], inputs: Sequence[Any], rounds: int
) -> list[Row]:
    """Measure the query of a user who gave no feedback, after a change of the shared state."""
    case = CASES["mixture of 3"]
    app = apps[case.name]

    def run(changes: bool) -> float:
        answers = [app.predict(x).result() for x in inputs]
        took = 0
        for answer, x in zip(answers, inputs, strict=True):
            if changes:
                app.feedback(answer, label=answer.output)
            begun = CPU()
            app.predict(x, user="newcomer").result()
            took += CPU() - begun
        return took / len(inputs)

    found = interleave({"after": partial(run, True), "without": partial(run, False)}, rounds)
    name = "mixture of 3, new user, after a change of the shared state"
    goal = Goal("at_most", 1.5)
    return [row(name, found["after"].min, "ns", "without", found["without"].min, goal)]


def feedback(
    server: clipper.ClipperServer,
    apps: Mapping[str, clipper.ApplicationHandle],
    inputs: Sequence[Any],
    rounds: int,
) -> list[Row]:
    """Measure feedback about known answers, one by one and as lists."""
    app = apps[CASES["mixture of 3"].name]
    bare = server.model("one")
    many = list(inputs) * (CALLS // KNOWN)

    def answers(user: str | None) -> list[clipper.Answer]:
        return [app.predict(x, user=user).result() for x in many]

    def singly(user: str | None) -> float:
        known = answers(user)
        begun = CPU()
        for answer in known:
            app.feedback(answer, label=answer.output)
        return (CPU() - begun) / CALLS

    def listed() -> float:
        known = answers(None)
        labels = [answer.output for answer in known]
        begun = CPU()
        app.feedback_many(known, labels)
        return (CPU() - begun) / CALLS

    found = interleave(
        {
            BARE: partial(per_call_ns, bare.predict, many, CPU),
            "alone": partial(singly, None),
            "user": partial(singly, "ann"),
            "listed": listed,
        },
        rounds,
    )
    anchor = found[BARE].min
    title = "feedback to mixture of 3"
    return [
        row(title, found["alone"].min, "ns", BARE, anchor, Goal("at_most", 4)),
        row(f"{title}, user", found["user"].min, "ns", BARE, anchor, Goal("at_most", 7)),
        row(
            f"{title}, a list of {CALLS}",
            1e3 / found["listed"].min,
            "M/s",
            goal=Goal("value_at_least", 1.5),
        ),
    ]


def event_loop(
    apps: Mapping[str, clipper.ApplicationHandle],
    inputs: Sequence[Any],
    rounds: int,
) -> list[Row]:
    """Measure one event loop with many queries outstanding: of known inputs, and of new ones."""
    app = apps[CASES["ensemble of 3"].name]
    fresh = np.random.default_rng(1)

    def known() -> float:
        return outstanding_ns(app.predict, list(inputs) * (CALLS * 5 // KNOWN), CPU)

    def new() -> float:
        inputs = list(fresh.random((CALLS * 5, 4)))
        return outstanding_ns(app.predict, inputs, time.perf_counter_ns)

    found = interleave({"known": known, "new": new}, rounds)
    title = f"ensemble of 3 on uvloop, {OUTSTANDING} outstanding"
    return [
        row(f"{title}, {what}", 1e6 / found[kind].min, "K/s", goal=Goal("value_at_least", least))
        for kind, what, least in (("known", "known inputs", 1000.0), ("new", "new inputs", 150.0))
    ]


def outstanding_ns(
    predict: Callable[[Any], Any], inputs: Sequence[Any], clock: Callable[[], int]
) -> float:
    """Await queries on uvloop with OUTSTANDING in flight; return ns per query."""

    async def run() -> float:
        begun = clock()
        for first in range(0, len(inputs), OUTSTANDING):
            for future in [predict(x) for x in inputs[first : first + OUTSTANDING]]:
                await future
        return (clock() - begun) / len(inputs)

    with asyncio.Runner(loop_factory=loop_factory(True)) as runner:
        return runner.run(run())


def memory(app: clipper.ApplicationHandle, inputs: Sequence[Any], n: int) -> Row:
    """Measure the resident memory of answers that await feedback, of which there are few yet."""
    gc.collect()
    before = resident_bytes()
    for i in range(n):
        app.predict(inputs[i % KNOWN]).result()
    gc.collect()
    grown = (resident_bytes() - before) / n
    name = "an answer of 3 models that awaits feedback"
    return row(name, grown, "bytes", goal=Goal("value_at_most", 96), note=f"{n} answers")


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
