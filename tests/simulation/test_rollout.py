"""Rollouts on a virtual clock, by seed: how often a good version is reverted, and how long a bad
one lasts."""

import random
from collections import Counter

import msgspec
import pytest

from clipper.catalog.view import Rollout
from clipper.manage.rollouts.decisions import STAGES, decide, moved
from clipper.serving.rollout.guards import Counts, Figures
from clipper.serving.rollout.traffic_split import place_of
from clipper.types import VersionedModel

LOOK_US = 200_000
RATE_S = 200.0  # queries
GUARD = "p99<20ms, error<2%, reward>=-5%, agreement>80%"


def a_life(
    seed: int, *, defaults: float, slow: float, reward: float, agrees: float, most_s: float = 900.0
) -> tuple[str, float]:
    """Run one rollout to its end; return its state and its duration. The version before gives 90 %
    right answers and no defaults."""
    rng = random.Random(seed)
    one, two = VersionedModel("m", 1), VersionedModel("m", 2)
    now = Rollout("a", two, VersionedModel("m"), one, STAGES, 10.0, GUARD, 0.05)
    time_us, each = 0, RATE_S * LOOK_US / 1e6
    figures = Figures(Counts(slower={20_000: 0}), Counts())
    while now.is_open and time_us < most_s * 1e6:
        time_us += LOOK_US
        mine = sum(rng.random() < now.share for _ in range(round(each)))
        new, before = figures.new, figures.before
        new.answers += mine
        new.defaults += sum(rng.random() < defaults for _ in range(mine))
        new.slower[20_000] += sum(rng.random() < slow for _ in range(mine))
        new.feedbacks, new.reward = (
            new.feedbacks + mine,
            new.reward + sum(rng.random() < reward for _ in range(mine)),
        )
        others = round(each) - mine
        before.answers += others
        before.feedbacks, before.reward = (
            before.feedbacks + others,
            before.reward + sum(rng.random() < 0.9 for _ in range(others)),
        )
        figures.compared += mine
        figures.agreed += sum(rng.random() < agrees for _ in range(mine))
        after = moved(now, decide(now, figures, (time_us - now.stage_us) / 1e6))
        if after != now:
            now = msgspec.structs.replace(after, stage_us=time_us)
            figures = Figures(Counts(slower={20_000: 0}), Counts())
    return now.state, time_us / 1e6


GOOD = {"defaults": 0.002, "slow": 0.001, "reward": 0.9, "agrees": 0.95}


def test_a_good_version_is_promoted() -> None:
    ends = Counter(a_life(seed, **GOOD)[0] for seed in range(40))
    assert ends["reverted"] <= 3, ends
    assert ends["promoted"] >= 36, ends


def test_a_version_at_the_limit_of_its_guard_is_rarely_reverted() -> None:
    """A version at the limit of a guard is reverted in one of twenty rollouts, and by chance."""
    ends = Counter(a_life(seed, **{**GOOD, "defaults": 0.02}, most_s=120)[0] for seed in range(60))
    assert ends["reverted"] <= 8, ends


@pytest.mark.parametrize(
    ("bad", "within_s"),
    [
        ({"defaults": 1.0}, 1.0),
        ({"defaults": 0.3}, 5.0),
        ({"slow": 0.5}, 3.0),
        ({"reward": 0.1}, 15.0),
        ({"agrees": 0.2}, 6.0),
    ],
)  # fmt: skip
def test_a_clear_regression_is_reverted_within_seconds(
    bad: dict[str, float], within_s: float
) -> None:
    """Seconds of the virtual clock, at 10 queries a second for the new version."""
    for seed in range(20):
        state, after_s = a_life(seed, **{**GOOD, **bad})
        assert (state, after_s <= within_s) == ("reverted", True), (seed, after_s)


def test_a_user_stays_with_the_new_version_as_the_share_grows() -> None:
    places = {f"user{i}": place_of("digits svm:2", f"user{i}") for i in range(5000)}
    before: set[str] = set()
    for share in STAGES:
        inside = {user for user, place in places.items() if place < share}
        assert before <= inside
        assert abs(len(inside) / 5000 - share) < 0.02
        before = inside
    other = {f"user{i}": place_of("digits svm:3", f"user{i}") for i in range(5000)}
    both = sum(places[user] < 0.25 and other[user] < 0.25 for user in places) / 5000
    assert abs(both - 0.0625) < 0.015, "other users are the first of the next rollout"
