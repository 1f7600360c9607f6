"""Guards of rollouts: their syntax, and that their tests keep their error rates however often they
are read."""

import random
from collections.abc import Callable

import pytest

from clipper.errors import InvalidInput
from clipper.serving.rollout.guards import (
    BESIDE_MIN,
    Counts,
    Figures,
    guards_in,
    judged_difference,
    judged_share,
)

RATE = 0.05


def test_what_a_person_writes() -> None:
    written = guards_in("p99<20ms, error<1%,reward>=-1%, agreement>90%, p50<=500us, reward>0.8")
    assert [(one.metric, one.limit, one.q, one.beside) for one in written] == [
        ("p99", 20_000.0, 0.01, False),
        ("error", 0.01, 0.0, False),
        ("reward", 0.01, 0.0, True),
        ("agreement", 0.9, 0.0, False),
        ("p50", 500.0, 0.5, False),
        ("reward", 0.8, 0.0, False),
    ]
    assert guards_in("") == ()
    assert guards_in("error<=+2%")[0].beside


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("errors<1%", "did you mean 'error'"),
        ("p98<1ms", "There are"),
        ("error>1%", "must be <"),
        ("reward<1%", "must be >"),
        ("p99<20", "a time is needed"),
        ("p99<0ms", "a time is needed"),
        ("error<0%", "above 0 %"),
        ("error<100%", "below 100 %"),
        ("error", "cannot read"),
        ("error<1..2%", "not a number"),
        ("agreement>=-1%", "against the version before"),
        ("reward>=+1%", "against the version before"),
        ("error<1ms", "a share"),
    ],
)
def test_invalid_guards_are_refused(text: str, why: str) -> None:
    with pytest.raises(InvalidInput, match=why):
        guards_in(text)


def figures(**new: float) -> Figures:
    return Figures(
        Counts(answers=1000, defaults=0, slower={20_000: 0}, **new), Counts(answers=1000)
    )  # type: ignore[arg-type]


def test_each_metric_is_judged_by_its_own_counts() -> None:
    def outcome(guard: str, found: Figures) -> str:
        (one,) = guards_in(guard)
        return one.judge(found, RATE).outcome

    good, bad = (
        figures(),
        Figures(
            Counts(100, 60, {20_000: 70}, feedbacks=100, reward=10),
            Counts(100, feedbacks=100, reward=90),
            100,
            20,
        ),
    )
    for guard in ("error<1%", "p99<20ms"):
        assert (outcome(guard, good), outcome(guard, bad)) == ("holds", "broken")
    for guard in ("agreement>90%", "reward>80%", "reward>=-1%"):
        assert (outcome(guard, good), outcome(guard, bad)) == ("undecided", "broken"), guard
    assert outcome("error<=+5%", bad) == "broken"
    assert outcome("p99<30ms", bad) == "undecided", (
        "of a limit that nobody counts nothing is known to be slow"
    )


def test_nothing_is_known_from_nothing() -> None:
    assert judged_share(0, 0, 0.01, RATE) == "undecided"
    few = BESIDE_MIN - 1
    assert judged_difference((few, 0), (1000, 1000), 0.01, RATE) == "undecided"
    assert judged_share(3, 3, 0.01, RATE) == "broken", (
        "a clear regression takes a handful of answers"
    )


def how_often(end: str, trial: Callable[[random.Random], str], trials: int = 300) -> float:
    return sum(trial(random.Random(seed)) == end for seed in range(trials)) / trials


def walk(rng: random.Random, p: float, limit: float, most: int = 1500) -> str:
    """Judge after every observation until there is a verdict."""
    bad = 0
    for n in range(1, most + 1):
        bad += rng.random() < p
        if n % 10 == 0 or n < 20:
            verdict = judged_share(n, bad, limit, RATE)
            if verdict != "undecided":
                return verdict
    return "undecided"


def walk_beside(
    rng: random.Random, p: float, other: float, margin: float, share: float = 0.2, most: int = 6000
) -> str:
    one, before = [0, 0], [0, 0]
    for n in range(1, most + 1):
        side, q = (one, p) if rng.random() < share else (before, other)
        side[0] += 1
        side[1] += rng.random() < q
        if n % 50 == 0:
            verdict = judged_difference((one[0], one[1]), (before[0], before[1]), margin, RATE)
            if verdict != "undecided":
                return verdict
    return "undecided"


def test_a_good_version_is_rarely_reverted() -> None:
    """A version at the limit, which is the hardest case, is found broken at most at the stated
    rate."""
    assert how_often("broken", lambda rng: walk(rng, 0.02, 0.02)) <= 0.085
    assert how_often("broken", lambda rng: walk_beside(rng, 0.85, 0.9, 0.05)) <= 0.085
    assert how_often("broken", lambda rng: walk_beside(rng, 0.94, 0.99, 0.05)) <= 0.085


def test_a_bad_version_rarely_gets_by() -> None:
    assert how_often("holds", lambda rng: walk(rng, 0.0393, 0.02)) <= 0.085
    assert how_often("holds", lambda rng: walk_beside(rng, 0.8, 0.9, 0.05)) <= 0.085


def test_clear_differences_are_reported() -> None:
    assert how_often("holds", lambda rng: walk(rng, 0.002, 0.02), 50) == 1.0
    assert how_often("broken", lambda rng: walk(rng, 0.3, 0.02), 50) == 1.0
    assert how_often("broken", lambda rng: walk_beside(rng, 0.5, 0.9, 0.05), 50) == 1.0
    assert how_often("holds", lambda rng: walk_beside(rng, 0.9, 0.9, 0.05), 50) >= 0.9
