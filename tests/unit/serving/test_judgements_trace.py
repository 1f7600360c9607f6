"""Sketches, guards, autoscaling, counters and arrays on drawn figures, compared as whole texts.

The other tests say what each is for; this one notices that something is computed otherwise.
"""

import math
import random
from types import SimpleNamespace as Object
from typing import Any

import numpy as np
import pytest

from clipper.catalog.view import Rollout
from clipper.errors import ClipperError
from clipper.schema import Tensors
from clipper.selection import Observation, Plan, Prediction, Truth
from clipper.selection.learning.batch_learning import ObservationRows
from clipper.serving.models.scaling import (
    Expected,
    Load,
    Reading,
    Rule,
    Scaling,
    StuckWatch,
    Trend,
    follow,
    needed,
    replica_bounds,
)
from clipper.serving.query.arrays import _alone, _unusable, _with_default
from clipper.serving.query.named_outputs import columns_of, only, with_default
from clipper.serving.rollout.guards import Counts, Figures, guards_in, judged_difference
from clipper.serving.rollout.sketch import Drift, Quantiles
from clipper.serving.rollout.traffic_split import (
    RolloutObserver,
    SideStats,
    StageStats,
    TrafficSplit,
    place_of,
)
from clipper.settings.server import ServerSettings
from clipper.types import VersionedModel
from clipper_core.learning.answer_counts import Bucket
from clipper_core.runtime.status import Status
from tests.expected import check_expected, shown

A, B = VersionedModel("a", 1), VersionedModel("b", 2)


def test_quantiles_drift_and_buckets() -> None:
    rng, found = random.Random(3), []
    for spread in (1.0, 1e-14, 1e14, 0.0):
        quantiles = Quantiles()
        found.append(shown([quantiles.stats(), quantiles.quantile(0.5), len(quantiles)]))
        for i in range(40):
            quantiles.add(rng.choice((math.nan, 0.0, rng.gauss(0, spread), -spread, spread / 3)))
            if i % 8 == 7:
                each = [quantiles.quantile(q / 8) for q in range(9)]
                found.append(shown([quantiles.stats(), each, quantiles.count, len(quantiles)]))
    kinds: dict[str, Any] = {
        "numbers": lambda: rng.gauss(1.0, 1.0),
        "later": lambda: rng.gauss(1.8, 1.0),
        "arrays": lambda: np.array([rng.gauss(0, 1), 3.0]),
        "labels": lambda: rng.randrange(3),
        "texts": lambda: f"t{rng.randrange(40)}",
    }
    for before, after in (
        ("numbers", "numbers"), ("numbers", "later"), ("arrays", "numbers"), ("labels", "labels"),
        ("labels", "texts"), ("texts", "texts"), ("texts", "numbers"),
    ):  # fmt: skip
        drift = Drift(30)
        for i in range(75):
            drift.add(kinds[before if i < 34 else after]())
            if i in (5, 29, 30, 33, 45, 63, 74):
                found.append(f"{before} {after} {i} {shown(drift.stats())}")
    bucket, now_s = Bucket(10.0, 5.0, 100.0), 100.0
    for _ in range(60):
        now_s += rng.choice((0.0, 0.05, 0.1, 1.0))
        tokens = rng.choice((1.0, 2.0, 5.0))
        found.append(f"{now_s:.2f} {tokens} {bucket.take(now_s, tokens)}")
    check_expected("serving/sketches.txt", "\n".join(found) + "\n")


def counts(rng: random.Random) -> Counts:
    answers = rng.choice((0, 49, 50, 51, 400, 5000))
    feedbacks = rng.choice((0.0, 49.0, 60.0, 900.0))
    share = rng.choice((0.0, 0.004, 0.01, 0.05, 0.5))
    return Counts(
        answers,
        int(answers * share),
        {20_000: int(answers * rng.choice((0.0, 0.01, 0.02, 0.2)))},
        feedbacks,
        feedbacks * rng.choice((0.0, 0.5, 0.9, 1.0)),
    )


def test_guards() -> None:
    rng, found = random.Random(4), []
    for text in (
        "p99<20ms, error<1%, reward>=-1%, agreement>90%", "error<+2%", "reward>0.5", "p50<=3s",
        "p99.9 < 40us", "", "p99<20", "p99<+20ms", "p99<0ms", "p98<1ms", "error>1%", "reward<1%",
        "error<100%", "error<0", "error<-1%", "reward>=+1%", "agreement>-1%", "error<1.2.3",
        "reward>50ms", "p95>3ms", "erorr<1%",
    ):  # fmt: skip
        try:
            found.append(f"{text!r}: {shown(guards_in(text))}")
        except ClipperError as error:
            found.append(f"{text!r}: {error} {error.hint}")
    guards = guards_in("p99<20ms, error<1%, reward>=-1%, agreement>90%, error<+2%, reward>0.5")
    for _ in range(60):
        compared = rng.choice((0, 40, 900))
        figures = Figures(counts(rng), counts(rng), compared, int(compared * rng.random() ** 0.1))
        for guard in guards:
            found += [shown(guard.judge(figures, rate)) for rate in (0.05, 0.001)]
    for n in (49, 50, 300, 20_000):
        for mean in (0.05, 0.5, 0.52, 0.97):
            sides = (float(n), n * mean), (float(n), n * 0.5)
            each = [judged_difference(*sides, margin, 0.01) for margin in (0.01, 0.05)]
            found.append(f"{n} {mean} {each}")
    check_expected("serving/guards.txt", "\n".join(found) + "\n")


def test_sides_of_a_rollout() -> None:
    rng, found = random.Random(5), []
    feedback: list[Any] = []
    rows = ObservationRows(
        (A,),
        (np.array([1, 2, 3, 4]),),
        (np.array([True, True, False, True]),),
        (None,),
        np.array([1, 2, 3, 5]),
        np.array([-1], np.int32),
        np.ones(1),
    )
    for takes in (True, False):
        side = SideStats([20_000, 5000, 20_000])
        found.append(shown(side.counts()))
        next: Any = Object(
            on_feedback=feedback.append,
            on_label=lambda *_, takes=takes: takes,
            on_feedback_rows=lambda *_: feedback.append("rows"),
        )
        observer = RolloutObserver(next, side)
        for i in range(30):
            side.answers.add(rng.choice((1, 5000, 5001, 20_000, 20_001)), i % 7 == 3)
            side.reward(rng.choice((1.0, 2.0)), rng.choice((-1.0, 0.5, 2.5)))
        side.count_rows(np.array([4999, 6000, 30_000]), np.array([True, False, True]))
        found.append(shown(side.counts()))
        for truth, answer in (
            (Truth(1), 1),
            (Truth(1), 2),
            (Truth(2.0), 3.0),
            (Truth(score=0.25), 1),
            (Truth(score=0.0), 1),
        ):
            seen = Observation(Plan((A,)), {A: Prediction(1)}, truth, answer)
            found.append(f"{observer.on_feedback(seen)} {shown(side.counts())}")
        found.append(f"{observer.on_label({}, 1, 1)} {observer.on_label({}, 3.0, 4.0)}")
        found.append(shown(side.counts()))
        for answers in (np.array([1, 2, 3, 4]), np.array([1.0, 2.0, 3.0, 4.0]), [1, "2", None, 5]):
            observer.on_feedback_rows(rows, answers)
            found.append(shown(side.counts()))
    assert len(feedback) == 16
    rollout = Rollout("app", B, A, A, (0.2, 1.0), 9.0, "p99<20ms, agreement>90%", 0.01, began_us=7)
    totals = iter([(10, 8), (15, 12), (3, 1)])
    stage = StageStats(rollout, 99, lambda: next_of(totals))
    found += [shown([stage.figures(), stage.compares, stage.started_s]), shown(stage.figures())]
    split = TrafficSplit("new", "before", stage, {}, draw=iter([0.1, 0.2, 0.3]).__next__)
    found.append(shown([split.takes(user) for user in ("u1", "u2", "u3", "u4", "", None, "")]))
    found.append(shown([place_of("s", key) for key in ("", "a", "\ud800")]))
    check_expected("serving/sides.txt", "\n".join(found) + "\n")


def next_of(totals: Any) -> tuple[int, int]:
    found: tuple[int, int] = next(totals)
    return found


def test_autoscaling() -> None:
    rng, found = random.Random(6), []
    rule, trend, now_s = Rule(), Trend(1), 0.0
    for i in range(150):
        now_s += rng.choice((0.25, 0.5, 1.0, 29.0, 30.0))
        slow = i // 12 % 2
        load = Load(
            rng.choice((0.0, 900.0, 2100.0)),
            rng.choice((0.0, 0.01, 0.02)) if i % 5 == 0 else 0.0,
            1000.0,
            rng.choice((2999.0, 3001.0, 9000.0)) if slow else rng.choice((0.0, 3000.0)),
            10_000.0,
            trend.wanted - (i % 11 == 7),
        )
        trend = follow(trend, load, 1 + (i > 100), 4, rule, now_s)
        found.append(f"{shown(trend)} {[needed(load, share) for share in (0.5, 0.7, 1.0)]}")
    for replicas in (0, 3, 9, 10, -1, True, (1, 9), (0, 2), (3, 2), (1, 10), (1, 2, 3), "2", 1.0):
        try:
            found.append(f"{replicas}: {replica_bounds('m', replicas, 9)}")  # type: ignore[arg-type]
        except ClipperError as error:
            found.append(f"{replicas}: {error} {error.hint}")
    watch, batches = StuckWatch(5.0), 0
    for i in range(40):
        batches += i % 9 == 0
        row = {"suspect": i % 13 != 12, "in_flight": 1, "number": 2, "pid": 7, "batches": batches}
        idle = {**row, "in_flight": 0, "number": 3}
        found.append(f"{i} {watch.check([(A, row), (A, idle)], float(i))}")
    acts: list[Any] = []
    stats: dict[str, Any] = {}
    server = ServerSettings()
    scaling = Scaling(
        server,
        lambda: {A: Reading(1, 4, dict(stats)), B: Reading(0, 0, dict(stats))},
        lambda *words: acts.append(words),
        lambda *words: acts.append(words),
    )
    ended = dict.fromkeys(("FULL", "DROPPED", "DEADLINE", "NO_REPLICA", "OK"), 0)
    for i in range(60):
        ended = {name: n + (i % 4 == 1) * k for k, (name, n) in enumerate(ended.items())}
        ready = {"state": "ready", "fit_us": (100.0, 50.0), "limit": i % 3 * 8, "batches": i // 20}
        ready |= {"suspect": i > 30, "in_flight": 2, "number": 1, "pid": 9}
        replicas = [ready, {**ready, "fit_us": (500.0, 9.0), "pid": 10}, {**ready, "state": "late"}]
        stats = {"ended": ended, "evaluated": i * i * 10, "replicas": replicas}
        stats |= {"delay_us": 1000.0 * (i % 20), "slo_us": 20_000.0}
        scaling.check(i * 1.5)
        found.append(f"{scaling.wanted(A, 9)} {scaling.wanted(B, 9)} {shown(acts)}")
        acts.clear()
    expected: list[Any] = []
    clock_us = [1_000_000]
    expects = Expected(lambda *words: expected.append(words), lambda: clock_us[0])
    for _ in range(60):
        clock_us[0] += rng.choice((0, 700_000))
        model, number = rng.choice((A, B)), rng.randrange(3)
        match rng.randrange(5):
            case 0 | 1:
                expects.starting(model, number, rng.choice((0.0, 0.5)))
            case 2:
                expects.connected(model, [number, 7])
            case 3:
                expects.failed(model, number)
            case 4:
                expects.stopped(model, number)
        found.append(shown(expected[-1:]))
    check_expected("serving/scaling.txt", "\n".join(found) + "\n")


def test_answers_of_arrays() -> None:
    found = []
    mask = np.array([True, False, True])
    floats, ints, lines = np.array([1.5, np.nan, np.inf]), np.array([1, 2, 3]), np.ones((3, 2))
    columns: list[Any] = [
        floats,
        ints,
        lines,
        ints > 1,
        ["a", "b", "c"],
        [1.0, np.ones(2), math.nan],
    ]
    for column in columns:
        found.append(shown(_unusable(column)))
        for default in (None, 7, 2.5, "none", True, np.zeros(2), np.zeros(3)):
            found.append(
                f"{shown(column)} {default!r}: {shown(_with_default(column, mask, default))}"
            )
        found.append(shown(_with_default(column, mask & False, 7)))
        for value in (None, {"x": 3}, {"x": 2.5}, {"x": None, "y": 1}, 4):
            found.append(f"{value!r}: {shown(with_default({'x': column}, mask, value))}")
        found.append(shown(with_default({"x": column}, mask & False, 4)))
    named = Tensors.parse({"score": "f32[2]", "label": "str", "boxes": "f32[*]"})
    row = {"score": [1.0, 2.0], "label": "cat", "boxes": [1.0]}
    for rows in ([row, row], [row, None], []):
        found.append(shown(columns_of(rows, named)))
    found.append(shown([only(row, ("label", "none")), only(3, ("label",))]))
    states = np.array([Status.OK, Status.FULL, Status.OK, Status.DEADLINE, Status.OK], np.uint8)
    for name, least, outputs in (
        ("app", 0.0, np.array([1.0, 2.0, np.nan, 4.0, 5.0])),
        ("app", 0.6, np.array([1, 2, 3, 4, 5])),
        ("", 0.9, ["a", None, "c", None, "e"]),
    ):
        resolved: Any = Object(
            name=name,
            output_name="",
            default=0,
            confidence_min=least,
            cores={A: Object(outputs=None)},
            on_demand={},
            unlisted_model=None,
        )
        future: Any = Object(
            outputs=lambda default, outputs=outputs: outputs,
            confidences=lambda: np.array([0.5, math.nan, 1.7, -3.0, math.nan]),
            detail=lambda i: f"detail {i}",
        )
        found.append(shown(_alone(future, resolved, A, states)))
    check_expected("serving/arrays.txt", "\n".join(found) + "\n")


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_user_stays_on_a_side(share: float) -> None:
    rollout = Rollout("app", B, A, A, (share, 1.0), 9.0, "", 0.01)
    split = TrafficSplit(
        "new", "before", StageStats(rollout, 0, lambda: (0, 0)), {}, draw=lambda: 0.5
    )
    assert {split.takes(f"u{i}") for i in range(20)} == {share == 1.0}
