"""Statistics of an application's queries."""

import math
import random
from collections import Counter as Counts
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.selection import Combined, Observation, Plan, Prediction, Truth
from clipper.selection.learning.batch_learning import ObservationRows, column_of
from clipper.selection.policy import NO_ANSWER
from clipper.serving.query.stats import ApplicationCounters, closeness
from clipper.serving.rollout.roles import Role, RoleAssignment
from clipper.types import VersionedModel
from clipper_core.runtime.status import Status

A, B, C = (VersionedModel(name, 1) for name in "abc")

outputs = st.one_of(
    st.integers(-(2**63), 2**63 - 1),
    st.floats(),
    st.booleans(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.none(),
    st.lists(st.floats(), min_size=1, max_size=3).map(np.array),
    st.lists(st.integers(0, 3), min_size=1, max_size=3).map(np.array),
)


@given(outputs, outputs)
def test_closeness_is_a_share_for_all_outputs(one, other):
    found = closeness(one, other)
    assert 0.0 <= found <= 1.0
    assert found == closeness(other, one)


plain = st.integers(-(10**6), 10**6).map(lambda n: n / 100)


@given(plain, plain, st.floats(0.001, 1000))
def test_closeness_is_the_same_in_any_unit(one, other, unit):
    assert closeness(one * unit, other * unit) == pytest.approx(closeness(one, other), abs=1e-6)
    assert closeness(one, one) == 1.0
    assert closeness(np.array([one]), np.array([other])) == pytest.approx(
        closeness(one, other), abs=1e-9
    )


def test_closeness_by_hand():
    assert closeness(3, 3) == 1.0
    assert closeness(3, 4) == 0.0
    assert closeness(True, 1) == 0.0
    assert closeness(10.0, 30.0) == 0.5
    assert closeness(0.0, 0.0) == 1.0
    assert closeness(1.0, "cat") == 0.0
    assert closeness(1.0, {"score": 1.0}) == 0.0, "one of the models has named outputs"
    assert closeness(math.nan, math.nan) == 0.0
    assert closeness(None, None) == 0.0, "no answer agrees with none"
    assert closeness(np.ones(3), np.ones(4)) == 0.0


def observation(outputs, label=None, score=None, answer=None):
    return Observation(
        Plan(tuple(outputs)),
        {m: Prediction(o) for m, o in outputs.items()},
        Truth(label, score),
        answer,
    )


def test_standings_come_from_feedback():
    counters = ApplicationCounters()
    assignment = RoleAssignment({B: Role("challenger", 0.5), C: Role("shadow")}, (A, B, C))
    stats = counters.for_models((A, B, C), assignment)
    for i in range(10):
        counters.on_feedback(observation({A: 1, C: 1}, label=1 if i < 9 else 2, answer=1))
        counters.on_feedback(observation({B: 2}, label=1, answer=2))
    counters.on_feedback(observation({A: 1}, score=0.5, answer=1))
    models = counters.stats(stats)["models"]
    assert {name: row["role"] for name, row in models.items()} == {
        "a:1": "primary",
        "b:1": "challenger",
        "c:1": "shadow",
    }
    assert models["a:1"]["feedback"] == {"n": 11.0, "mean": pytest.approx(9.5 / 11)}
    assert models["b:1"]["feedback"] == {"n": 10.0, "mean": 0.0}
    assert models["c:1"]["feedback"] == {"n": 10.0, "mean": pytest.approx(0.9)}
    assert counters.stats(stats)["answers"]["feedback"] == {
        "n": 21.0,
        "mean": pytest.approx(9.5 / 21),
    }


@pytest.mark.parametrize(
    ("outputs", "label"),
    [
        ([1, 2, 1], 1),
        ([True, False, True], True),
        ([0.5, 1.0, np.nan], 0.5),
        (["a", "b", "a"], "a"),
        ([1, "a", 1], 1),
    ],
)
def test_feedback_in_columns_counts_as_its_rows(outputs: list[Any], label: Any) -> None:
    """All numbers and labels count, of mixed kinds as many as the budget allows; missing outputs do
    not count."""
    models, arrived = (A, B), (None, np.array([True, False, True]))
    both, n = (column_of(outputs), column_of(outputs[::-1])), 3
    rows = ObservationRows(
        models,
        both,
        arrived,
        (None, None),
        column_of([label] * n),
        np.array([-1], np.int32),
        np.array([1.0]),
    )
    many, single = ApplicationCounters(clock=lambda: 0.0), ApplicationCounters(clock=lambda: 0.0)
    lineups = [counters.for_models(models, None) for counters in (many, single)]
    answers = column_of([label, label, outputs[1]])
    many.on_feedback_rows(rows, answers)
    for i in range(n):
        assert single.on_feedback(msgspec.structs.replace(rows.observation(i), answer=answers[i]))
    found, expected = many.stats(lineups[0]), single.stats(lineups[1])
    assert found["answers"]["feedback"] == pytest.approx(expected["answers"]["feedback"])
    for model in ("a:1", "b:1"):
        assert found["models"][model]["feedback"] == pytest.approx(
            expected["models"][model]["feedback"]
        )
    for _ in range(11_000):
        many.on_feedback_rows(rows, answers)
    counted = many.stats(lineups[0])["answers"]["feedback"]["n"]
    alike = len({type(value) for value in outputs}) == 1
    assert counted == 33_003 if alike else counted < 32_000


def count_two(stats):
    """Count an answer of two models that agree."""
    both = {A: Prediction(1), B: Prediction(1)}
    stats.count(Ended(1), (A, B), both, Combined(1, 1.0, (A, B)), "", (), (), "all")


def test_comparing_has_a_budget_that_comes_back():
    now = [0.0]
    counters = ApplicationCounters(clock=lambda: now[0])
    stats = counters.for_models((A, B), None)

    def compared(times):
        before = counters.stats(stats)["agreement"].get("a:1 b:1", {"n": 0})["n"]
        for _ in range(times):
            count_two(stats)
        return counters.stats(stats)["agreement"]["a:1 b:1"]["n"] - before

    assert compared(10_000) == 1666, (
        "5 000 comparisons: each model with the answer, and with the other"
    )
    now[0] += 0.1
    assert compared(10_000) == 167, "500 more, and what was left"


def test_an_answer_that_has_no_utf_8_is_counted():
    """A policy of a user's own may answer with any str."""
    counters = ApplicationCounters()
    stats = counters.for_models((A, B), None)
    both = {A: Prediction("a"), B: Prediction("a")}
    stats.count(Ended(1), (A, B), both, Combined("\ud800", 1.0, (A, B)), "", (), (), "all")
    assert counters.stats(stats)["agreement"]["a:1 b:1"] == {"n": 1, "mean": 1.0}


def test_the_matrix_is_bounded():
    counters = ApplicationCounters()
    models = tuple(VersionedModel(f"m{i:02}", 1) for i in range(40))
    stats = counters.for_models(models, None)
    arrived = {model: Prediction(1) for model in models}
    stats.count(Ended(1), models, arrived, Combined(1, 1.0, models), "", (), (), "all")
    assert len(counters.stats(stats)["agreement"]) == 16 * 15 // 2


def test_counts_outlive_a_change_and_models_that_go_are_forgotten():
    counters = ApplicationCounters()
    first = counters.for_models((A, B), None)
    count_two(first)
    counters.means.add(A, 1.0)
    counters.queries.add()
    second = counters.for_models((B, C), None)
    stats = counters.stats(second)
    assert set(stats["models"]) == {"b:1", "c:1"}
    assert stats["agreement"] == {}
    assert stats["queries"] == 1
    assert stats["models"]["b:1"]["agreement"]["n"] == 1
    assert counters.means.of(A) is None
    first.counters.on_feedback(observation({A: 1}, label=1, answer=1))  # a straggler of before
    assert set(counters.stats(second)["models"]) == {"b:1", "c:1"}


def test_the_agreement_of_two_models_is_kept_while_both_are_linked():
    counters = ApplicationCounters()
    count_two(counters.for_models((A, B), None))
    assert set(counters.stats(counters.for_models((A, B, C), None))["agreement"]) == {"a:1 b:1"}
    assert counters.stats(counters.for_models((A, C), None))["agreement"] == {}


class Ended:
    """A fake of the members of a future that ApplicationStats counts: its duration, and how tasks
    ended."""

    def __init__(self, latency_us, *statuses):
        self.latency_us, self.statuses, self.id = latency_us, statuses, 1

    def __len__(self):
        return len(self.statuses)

    def latencies_us(self):
        return np.full(len(self.statuses), self.latency_us)

    def status(self, i=0):
        return self.statuses[i]


def test_durations_steps_wins_and_how_tasks_ended():
    counters = ApplicationCounters()
    stats = counters.for_models((A, B), None)
    one = {A: Prediction(1)}
    both = {A: Prediction(1), B: Prediction(2)}
    alone, together = Combined(1, 1.0, (A,)), Combined(1, 1.0, (A, B))
    for i in range(10):
        stats.count(Ended(100 + i, Status.OK, Status.OK), (A, B), both, alone, "", (), (), "first")
    stats.count(
        Ended(5000, Status.OK, Status.PENDING), (A, B), one, alone, "", (), (B,), "floor(a)"
    )
    stats.count(
        Ended(5000, Status.OK, Status.MODEL_ERROR), (A, B), one, alone, "unsure", (), (B,), "first"
    )
    stats.count(Ended(0, Status.OK, Status.OK), (A, B), both, together, "", (), (), "majority")
    stats.count(
        Ended(70, Status.DEADLINE, Status.FULL), (A, B), {}, NO_ANSWER, "late", (), (A, B), ""
    )
    stats = counters.stats(stats)
    assert stats["decided_by"] == {"first": 11, "floor(a)": 1, "majority": 1, "nobody": 1}
    took = stats["duration_us"]
    assert (took["count"], took["min"]) == (14, 0)
    assert took["mean"] == pytest.approx((sum(range(100, 110)) + 10_070) / 14)
    assert 100 <= took["p50"] <= 120
    assert 5000 <= took["p99"] <= took["max"] <= 5625
    a, b = stats["models"]["a:1"], stats["models"]["b:1"]
    assert (a["used"], a["wins"], a["in_time"], a["late"], a["failed"]) == (13, 11, 13, 1, 0)
    assert (b["used"], b["wins"], b["in_time"], b["late"], b["failed"]) == (1, 0, 11, 1, 2)


@pytest.mark.parametrize("seed", range(4))
def test_the_core_counts_as_python_does(seed: int) -> None:
    """Random answers of one to six models: counters are those of a Counter in Python, and outputs
    of all kinds are compared as by `closeness`."""
    rng = random.Random(seed)
    models = tuple(VersionedModel(name, 1) for name in "fedcba"[: rng.randrange(1, 7)])
    now = [0.0]
    counters, expected = ApplicationCounters(clock=lambda: now[0]), ApplicationCounters()
    stats = counters.for_models(models, None)
    expected.for_models(models, None)
    times: Counts[tuple[str, str]] = Counts()
    kinds = [
        [1, 2, True, 2**63, "a", b"a"],
        [0.5, 1, -0.0, 2.5, math.nan, np.float64(0.5)],
        [np.ones(2), np.zeros(2), np.ones((1, 2)), np.arange(4)[::2], np.ones(2, "f4"), 1.0],
        [None, {"a": 1}, "a", 1.0, "b", 0.5],
    ]
    for _ in range(40):
        now[0] += 1.0  # there is a budget for all
        outputs = rng.choice(kinds)
        arrived = {
            model: Prediction(rng.choice(outputs))
            for model in rng.sample(models, len(models))
            if rng.random() < 0.8
        }
        used = tuple(model for model in arrived if rng.random() < 0.7)
        answer = rng.choice(outputs)
        reason = rng.choice(["", "", "unsure"])
        ended = Ended(rng.randrange(1000), *[Status.OK] * 6)
        stats.count(ended, models, arrived, Combined(answer, 1.0, used), reason, (), (), "all")
        if len(arrived) > 1:
            expected.compare(arrived, answer)
        times.update(("used", str(model)) for model in used)
        times.update(("wins", str(model)) for model in used if len(used) == 1 and not reason)
        times.update(("unused", str(model)) for model in arrived if model not in used)
        times["ok", ""] += not reason
    found, right = counters.stats(stats), expected.stats(stats)
    assert found["answers"]["ok"] == times["ok", ""]
    assert found["duration_us"]["count"] == 40
    assert found["agreement"].keys() == right["agreement"].keys()
    for pair, mean in found["agreement"].items():
        assert mean == pytest.approx(right["agreement"][pair]), pair
    for name, row in found["models"].items():
        assert row["used"] == times["used", name]
        assert row["wins"] == times["wins", name]
        assert row["in_time"] == times["used", name] + times["unused", name]
        assert row["agreement"] == pytest.approx(right["models"][name]["agreement"])


def test_an_answer_of_a_model_that_is_not_linked() -> None:
    counters = ApplicationCounters()
    stats = counters.for_models((A, B), None)
    with pytest.raises(KeyError, match="c"):
        stats.count(Ended(1), (A, B), {}, Combined(1, 1.0, (C,)), "", (), (), "all")


def test_before_the_first_answer():
    counters = ApplicationCounters()
    stats = counters.stats(counters.for_models((A,), None))
    assert stats["duration_us"] == {
        "count": 0,
        "min": None,
        "mean": None,
        "p50": None,
        "p99": None,
        "max": None,
    }
    assert stats["decided_by"] == {}
    assert stats["since_us"] > 1_500_000_000_000_000
