"""Selection: the worlds of Figures 7 to 9, and how fast feedback is learned from."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, absent, interleave, row
from bench.paper import figure7, figure8, figure9

PAPER_PER_S = 11_000.0  # observations a second with the prediction cache: the paper, section 5.3
PAPER_RATIO = 1.6  # with the cache, beside without: the same section
POLICIES = ("exp3", "squarecb", "exp4", "stacking")
SETS_AND_CONTEXTS = (
    ("stacking with a coverage", "stacking(coverage=0.9)", None),
    ("mixture with a context", "mixture", (0.5, -0.2, 0.1)),
    ("linucb with a context", "linucb", (0.5, -0.2, 0.1)),
)
SINGLE, MANY, ARRAY = 1000, 1000, 100_000
GOALS = {
    "one by one": Goal("value_at_least", 300_000),
    "a list": Goal("value_at_least", 1_000_000),
    "an array": Goal("value_at_least", 1_000_000),
}
BOUNDS = {
    "one by one": "reading the answer's objects, and a copy of the state for each label",
    "a list": "Python: the join and the record, an object an answer",
    "an array": "",
}


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    told = feedback(quick) + with_input(quick)
    return told + figure8.main(quick, plot) + figure7.main(quick, plot) + figure9.main(quick, plot)


def feedback(quick: bool) -> list[Row]:
    """Measure feedback for answers whose predictions are known, with two models, written to a
    journal that survives a kill."""
    with tempfile.TemporaryDirectory() as folder, clipper.start(state=folder) as server:
        deploy(server)
        cases: dict[str, Callable[[], float]] = {}
        for policy in POLICIES:
            app = server.app(
                policy.replace("_", "-"), models=["one", "two"], policy=policy, slo_ms=5000
            )
            cases[f"{policy}: one by one"] = one_by_one(app)
            cases[f"{policy}: a list"] = a_list(app)
            cases[f"{policy}: an array"] = an_array(app, ARRAY // 10 if quick else ARRAY)
        for name, policy, context in SETS_AND_CONTEXTS:
            app = server.app(
                name.replace(" ", "-"), models=["one", "two"], policy=policy, slo_ms=5000
            )
            cases[f"{name}: one by one"] = one_by_one(app, context)
            cases[f"{name}: a list"] = a_list(app, context)
            if context is None:  # arrays have none
                cases[f"{name}: an array"] = an_array(app, ARRAY // 10 if quick else ARRAY)
        found = interleave(cases, repetitions=1 if quick else 5, warmups=1)
    anchor = river_per_s(quick)
    rows = [
        row(
            f"feedback, {name}",
            sample,
            "1/s",
            "river's learn_one" if anchor else "the paper's",
            anchor or PAPER_PER_S,
            GOALS[name.split(": ")[1]],
            bounded_by=BOUNDS[name.split(": ")[1]],
        )
        for name, sample in found.items()
    ]
    if anchor is None:
        rows.append(absent("river's learn_one", "1/s", "river is not installed"))
    return rows


def with_input(quick: bool) -> list[Row]:
    """Measure feedback that has the input again: its predictions come from the cache, or from the
    models."""
    count = 100 if quick else 1000
    with tempfile.TemporaryDirectory() as folder, clipper.start(state=folder) as server:
        deploy(server)
        deploy(server, "-uncached", cache=False)
        apps = {
            "cached": server.app("a", models=["one", "two"], policy="exp4", slo_ms=5000),
            "not cached": server.app(
                "b", models=["one-uncached", "two-uncached"], policy="exp4", slo_ms=5000
            ),
        }
        found = interleave(
            {name: told_by_input(app, count) for name, app in apps.items()},
            1 if quick else 5,
            warmups=1,
        )
    cached, plain = found["cached"], found["not cached"]
    return [
        row("feedback by input, not cached", plain, "1/s"),
        row(
            "feedback by input, cached",
            cached,
            "1/s",
            "not cached",
            plain,
            Goal("at_least", PAPER_RATIO),
            note="one thread that waits for each",
        ),
    ]


def deploy(server: Any, suffix: str = "", **settings: Any) -> None:
    for name, shift in (("one", 0), ("two", 1)):
        server.deploy(name + suffix, shifted(shift), input="f64[1]", **settings)


def shifted(by: int) -> Callable[[Any], Any]:
    def predict(xs: Any) -> Any:
        return xs[:, 0].astype(int) + by

    return predict


def one_by_one(app: Any, context: tuple[float, ...] | None = None) -> Callable[[], float]:
    def measure() -> float:
        answers = [app.predict(np.ones(1), context=context).result() for _ in range(SINGLE)]
        begun = time.perf_counter()
        for answer in answers:
            app.feedback(answer, label=1)
        return SINGLE / (time.perf_counter() - begun)

    return measure


def a_list(app: Any, context: tuple[float, ...] | None = None) -> Callable[[], float]:
    labels = [1] * MANY

    def measure() -> float:
        answers = [app.predict(np.ones(1), context=context).result() for _ in range(MANY)]
        begun = time.perf_counter()
        counted = app.feedback_many(answers, labels)
        seconds = time.perf_counter() - begun
        assert counted.counted == MANY
        return MANY / seconds

    return measure


def an_array(app: Any, n: int) -> Callable[[], float]:
    labels = np.ones(n, np.int64)

    def measure() -> float:
        answers = app.predict_many(np.ones((n, 1))).result()
        begun = time.perf_counter()
        counted = app.feedback_many(answers, labels)
        seconds = time.perf_counter() - begun
        assert counted.counted == n
        return n / seconds

    return measure


def told_by_input(app: Any, count: int) -> Callable[[], float]:
    x = np.ones(1)

    def measure() -> float:
        begun = time.perf_counter()
        for _ in range(count):
            app.feedback(input=x, label=1)
        return count / (time.perf_counter() - begun)

    return measure


def river_per_s(quick: bool) -> float | None:
    """Return the observations per second of river's logistic regression on two votes, as in
    stacking. None without river."""
    try:
        from river import linear_model
    except ImportError:
        return None
    model, n = linear_model.LogisticRegression(), 1000 if quick else 20_000
    begun = time.perf_counter()
    for _ in range(n):
        model.learn_one({"one": 1.0, "two": 0.0}, True)
    return n / (time.perf_counter() - begun)
