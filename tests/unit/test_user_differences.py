"""A bounded sample of users shows how much they differ, and so how a new user begins."""

import random
import zlib
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.selection import Observation, Plan, Prediction, Query, Truth, create_policy
from clipper.selection.learning.batch_learning import ObservationRows, count_user, observe_rows
from clipper.selection.learning.learned_state import LearnedState
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.user_differences import (
    EACH_MAX,
    MODELS_MAX,
    PRIOR_COUNTS,
    USERS_MAX,
    UserDifferences,
)
from clipper.types import VersionedModel

MODELS = tuple(VersionedModel(name, 1) for name in "abcde")


def learned(policy: LearningPolicy, differ: bool, seed: int, users: int = 60, per: int = 40):
    """Learn from the feedback of ten users at a time. With `differ` each has another best model,
    else all have the same."""
    draw, shared = random.Random(seed), policy.init(MODELS)
    for first in range(0, users, 10):
        best = [draw.randrange(5) if differ else 4 for _ in range(10)]
        states = [policy.init(MODELS, shared) for _ in range(10)]
        begun = set[int]()
        for _ in range(10 * per):
            user = draw.randrange(10)
            if user not in begun:
                begun.add(user)
                states[user] = policy.init(MODELS, shared)
            outputs = {
                model: Prediction(int(draw.random() < (0.1 if i == best[user] else 0.35)))
                for i, model in enumerate(MODELS)
            }
            plan = policy.select(states[user], Query(uniform=draw.random()), MODELS)
            seen = Observation(plan, {m: outputs[m] for m in plan.models}, Truth(0))
            states[user] = policy.observe(states[user], seen)
            shared = policy.observe(shared, seen)
            shared = count_user(policy, shared, f"u{first + user}", seen)
    return shared


def evidence(name: str, state: LearnedState) -> Any:
    """Return how many observations are behind each model."""
    if name == "thompson":
        return (state.rows - 1.0).max(axis=1)
    return state.rows[:-1, [5, 6, 9, 10, 13, 14]].max(axis=1) / 0.25


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["thompson", "mixture"])
def test_a_new_user_begins_with_as_much_as_users_have_in_common(name: str, seed: int) -> None:
    policy = create_policy(name)
    assert isinstance(policy, LearningPolicy)
    same, apart = (learned(policy, differ, seed) for differ in (False, True))
    assert same.differences.prior_counts > 100 > PRIOR_COUNTS > apart.differences.prior_counts
    for shared in (same, apart):
        before, begun = evidence(name, shared), evidence(name, policy.init(MODELS, shared))
        assert begun == pytest.approx(np.minimum(before, shared.differences.prior_counts))


def test_without_users_the_shared_state_counts_as_thirty() -> None:
    found = UserDifferences()
    assert found.prior_counts == PRIOR_COUNTS
    for i in range(40):  # one observation of a user shows nothing of how users differ
        found = found.with_losses(f"u{i}", [float(i % 2)])
    assert found.prior_counts == pytest.approx(PRIOR_COUNTS)
    same = UserDifferences()
    for i in range(100):  # a model that always has the same loss
        same = same.with_losses(f"u{i % 9}", [0.3])
    assert same.prior_counts == PRIOR_COUNTS
    policy = create_policy("thompson")
    for models in ((), MODELS[:1]):
        state = policy.init(models)
        other = Observation(Plan(models), {MODELS[4]: Prediction(1)}, Truth(1))
        assert count_user(policy, state, "u", other) is state


class Unread(ObservationRows):
    """Observations that fail if one of them is read as an object instead of in columns."""

    def observation(self, i: int) -> Observation:
        """Fail."""
        raise AssertionError(f"row {i} was made an object")


def test_rows_of_many_models_are_not_read_one_by_one() -> None:
    policy, k, n = create_policy("thompson"), MODELS_MAX + 1, 3
    models = tuple(VersionedModel(f"m{i:03}", 1) for i in range(k))
    column = np.zeros(n, np.int64)
    each = np.zeros(n, np.int32)
    rows = Unread(models, (column,) * k, (None,) * k, (None,) * k, column, each, np.ones(1))
    state = observe_rows(policy, policy.init(models), rows)
    assert state.seen == n
    assert not state.wants("u")
    assert count_user(policy, state, "u", rows) is state


@pytest.mark.parametrize("k", [MODELS_MAX, MODELS_MAX + 1])
def test_a_state_of_many_models_stays_small(k: int) -> None:
    policy = create_policy("thompson")
    models = tuple(VersionedModel(f"m{i:03}", 1) for i in range(k))
    outputs = {model: Prediction(i % 2) for i, model in enumerate(models)}
    state, seen = policy.init(models), Observation(Plan(models), outputs, Truth(1))
    before = len(policy.encode(state))
    for i in range(USERS_MAX):
        state = count_user(policy, state, f"u{i}", seen)
    assert (len(state.differences.users) > USERS_MAX // 4) == (k <= MODELS_MAX)
    assert len(policy.encode(state)) - before < 256 << 10


def test_the_sample_is_bounded_and_does_not_depend_on_the_order() -> None:
    draw, names = random.Random(3), [f"user {i}" for i in range(5000)]
    found = []
    for _ in range(2):
        draw.shuffle(names)
        one = UserDifferences()
        for name in names * 2:
            if one.wants(name):
                one = one.with_losses(name, [1.0, None])
        found.append(one)
    assert USERS_MAX // 4 <= len(found[0].users) <= USERS_MAX
    assert found[0].users.keys() == found[1].users.keys()
    assert found[0].zeros == found[1].zeros > 0
    assert all(key % (1 << found[0].zeros) == 0 for key in found[0].users)
    assert not any(one.wants(name) for one in found for name in names if _zeros(name) < one.zeros)
    many = UserDifferences()
    while many.wants("u"):
        many = many.with_losses("u", [1.0])
    assert many.users == {zlib.crc32(b"u"): (EACH_MAX, EACH_MAX, EACH_MAX, EACH_MAX)}


def _zeros(name: str) -> int:
    key = zlib.crc32(name.encode())
    return (key & -key).bit_length() - 1 if key else 32


def test_two_servers_add_what_each_has_counted() -> None:
    draw = random.Random(5)
    base = UserDifferences()
    events = [(f"u{draw.randrange(200)}", [draw.random(), None]) for _ in range(900)]

    def after(start: UserDifferences, part: list) -> UserDifferences:
        for user, losses in part:
            if start.wants(user):
                start = start.with_losses(user, losses)
        return start

    base = after(base, events[:300])
    mine, theirs = after(base, events[300:600]), after(base, events[600:])
    merged, whole = mine.merged(base, theirs), after(base, events[300:])
    assert merged.zeros == whole.zeros
    assert {k: pytest.approx(row) for k, row in merged.users.items()} == whole.users
    assert merged.is_valid(2)
    assert not merged.is_valid(3)


def test_a_state_without_differences_is_read_and_one_of_other_models_begins_anew() -> None:
    policy = create_policy("thompson")
    assert isinstance(policy, LearningPolicy)
    state = learned(policy, True, 1, users=10)
    assert policy.decode(policy.encode(state)).differences == state.differences
    before = msgspec.msgpack.decode(policy.encode(state)[4:])
    body = msgspec.msgpack.encode(before[:-1])
    old = policy.decode(zlib.crc32(body).to_bytes(4, "little") + body)
    assert old.differences == UserDifferences()
    assert (old.rows == state.rows).all()
    before[-1][1] = 1e9
    body = msgspec.msgpack.encode(before)
    damaged = policy.decode(zlib.crc32(body).to_bytes(4, "little") + body)
    assert damaged.differences == UserDifferences()
    assert policy.remove_model(state, MODELS[0]).differences == UserDifferences()
    assert policy.init(MODELS, state).differences == UserDifferences()


def test_rows_of_a_user_count_as_one_by_one() -> None:
    policy = create_policy("exp4")
    assert isinstance(policy, LearningPolicy)
    n, draw = EACH_MAX + 20, random.Random(6)
    rows = ObservationRows(
        MODELS[:2],
        ([draw.randrange(3) for _ in range(n)], [draw.randrange(3) for _ in range(n)]),
        (None, None),
        (None, None),
        [0] * n,
        np.full(1, -1, np.int32),
        np.ones(1),
    )
    at_once = count_user(policy, policy.init(MODELS[:2]), "u", rows)
    state = policy.init(MODELS[:2])
    for i in range(n):
        state = count_user(policy, state, "u", rows.observation(i))
    assert at_once.differences == state.differences
    assert at_once.differences.users[zlib.crc32(b"u")][0] == EACH_MAX
