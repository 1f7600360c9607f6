"""Selection: the worlds of Figures 7 to 9, and how fast feedback is learned from."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, interleave, row
from bench.paper import figure7, figure8, figure9

PAPER_PER_S = 11_000.0  # observations a second with the prediction cache: the paper, section 5.3
POLICIES = ("exp3", "squarecb", "exp4", "stacking")
MANY = 1000


def main(quick: bool, plot: Path | None = None) -> list[Row]:
    return feedback(quick) + figure8.main(quick, plot) + figure7.main(quick, plot) + figure9.main(quick, plot)


def feedback(quick: bool) -> list[Row]:
    """Feedback of answers whose predictions are known, written to a journal that survives a kill, two models each."""
    rounds = 1 if quick else 5
    with tempfile.TemporaryDirectory() as folder, clipper.start(state=folder) as server:
        for name, shift in (("one", 0), ("two", 1)):
            server.deploy(name, shifted(shift), input="f64[1]")
        cases: dict[str, Callable[[], float]] = {}
        for policy in POLICIES:
            app = server.app(policy.replace("_", "-"), models=["one", "two"], policy=policy, slo_ms=5000)
            cases[f"{policy}: one by one"] = timed(app, lambda app, answers: [app.feedback(a, label=1) for a in answers])
            cases[f"{policy}: many at once"] = timed(app, lambda app, answers: app.feedback_many(answers, [1] * MANY))
        found = interleave(cases, repetitions=rounds, warmups=1)
    goals = {"one by one": Goal("value_at_least", 300_000), "many at once": Goal("value_at_least", 1_000_000)}
    return [
        row(f"feedback, {name}", sample, "1/s", "the paper's", PAPER_PER_S, goals[name.split(": ")[1]],
            bounded_by="an observation is learned from in Python")
        for name, sample in found.items()
    ]  # fmt: skip


def shifted(by: int) -> Callable[[Any], Any]:
    def predict(xs: Any) -> Any:
        return xs[:, 0].astype(int) + by

    return predict


def timed(app: Any, tell: Callable[[Any, list[Any]], object]) -> Callable[[], float]:
    def measure() -> float:
        answers = [app.predict(np.ones(1)).result() for _ in range(MANY)]
        begun = time.perf_counter()
        tell(app, answers)
        return MANY / (time.perf_counter() - begun)

    return measure
