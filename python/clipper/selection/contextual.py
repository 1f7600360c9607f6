"""Policies that ask one model a query by what the query is like: a model's reward is a linear
function of its features.

The features come with the query, `app.predict(x, context=[...])`: up to 32 numbers that tell
queries apart by which model is good at them, scaled to lie around -1 to 1. A state begins with the
constant alone, which is a bandit without context; the first feedback of a query with features fixes
how many there are. Queries without any are those of which all features are 0.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from clipper.errors import InvalidInput
from clipper.selection.bandits import Bandit, within
from clipper.selection.learning_policy import Array, LearnedState
from clipper.selection.policy import Observation, Plan, Query
from clipper.selection.votes import in_order
from clipper.types import VersionedModel
from clipper_core.learning.linear import Context

FEATURES_MAX = 32
LARGEST = 1e6
DRAWS = 64  # to tell how often each model is asked
Features = tuple[float, ...]


class Contextual(Bandit):
    """State: a row a model: the factor of (1 + sum of x x'), then the sum of reward x; x: the
    constant and the features."""

    fresh = (1.0, 0.0)
    linear: Context

    def select(
        self, state: LearnedState, query: Query, candidates: Sequence[VersionedModel]
    ) -> Plan:
        """InvalidInput for another number of features than those before."""
        known = [i for i, model in enumerate(state.models) if model in candidates]
        if not known:
            return Plan(in_order(candidates)[:1], features=query.features)
        x = _point(state.rows, query.features)
        if x is None:
            have = features_in(state.rows)
            hint = (
                "A state keeps to the features that its first feedback had; another application"
                " begins anew."
            )
            raise InvalidInput(
                f"context has {len(query.features)} features; {self.name} has learned by {have}.",
                hint=hint,
            )
        rows = (
            state.rows
            if len(known) == len(state.models)
            else np.ascontiguousarray(state.rows[known])
        )
        chosen = state.models[known[self.linear.choose(rows, x, query.uniform)]]
        others: tuple[VersionedModel, ...] = ()
        if self.shadow and (query.uniform * 2**20) % 1.0 < self.shadow:
            others = tuple(model for model in in_order(candidates) if model != chosen)
        return Plan((chosen,), (), others, query.features)

    def portions(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Of queries without features."""
        x = _point(state.rows, ())
        if x is None or not state.models:
            return {}
        asked = [self.linear.choose(state.rows, x, (i + 0.5) / DRAWS) for i in range(DRAWS)]
        return {model: asked.count(i) / DRAWS for i, model in enumerate(state.models)}

    def _learned(
        self, state: LearnedState, observation: Observation, told: Mapping[VersionedModel, float]
    ) -> Array:
        """What has another number of features than the state teaches nothing."""
        features = observation.plan.features
        rows = (
            self._widened(state.rows, len(features))
            if features and features_in(state.rows) == 0
            else state.rows
        )
        x = _point(rows, features)
        if x is None:
            return state.rows
        rewards = np.array([1.0 - told.get(model, math.nan) for model in state.models])
        return self.linear.learn(rows, x, rewards, int(state.seen), observation.weight)

    def _accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        """Over all queries, whatever they are like."""
        if model not in state.models:
            return 0.5
        return float((self.standing(state) + 1.0)[state.models.index(model)] / 2.0)

    def standing(self, state: LearnedState) -> Array:
        count = state.rows[:, 0] ** 2 - 1.0
        good = state.rows[:, _triangle(features_in(state.rows) + 1)]
        return np.asarray(2.0 * np.clip((good + 1.0) / (count + 2.0), 0.0, 1.0) - 1.0)

    # -- rows of another width

    def _widened(self, rows: Array, features: int) -> Array:
        """Rows that know the constant alone, with room for features that nothing is known of."""
        d = features + 1
        wide = np.tile(self.linear.fresh(d), (len(rows), 1))
        wide[:, 0], wide[:, _triangle(d)] = rows[:, 0], rows[:, 1]
        return wide

    def _newcomer(self, rows: Array) -> Array:
        return self.linear.fresh(features_in(rows) + 1)

    def _evidence(self, rows: Array) -> Array | None:
        found: Array = rows[:, 0] ** 2 - 1.0
        return found

    def _faded(self, rows: Array, share: Array) -> Array:
        if not len(rows):
            return rows
        products, rewards = self.linear.sums(rows, features_in(rows) + 1)
        return self.linear.rows(products * share[:, None, None], rewards * share[:, None])

    def _merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Sums of products add up. Where two servers began with different features, those of more
        feedback stay."""
        if not len(mine):
            return mine
        most = max(
            (base, mine, theirs), key=lambda rows: (features_in(rows) > 0, float(rows[:, 0].sum()))
        )
        d = features_in(most) + 1
        fit = [
            rows if rows.shape == most.shape
            else self._widened(rows, d - 1) if features_in(rows) == 0
            else np.tile(self.linear.fresh(d), (len(rows), 1))
            for rows in (base, mine, theirs)
        ]  # fmt: skip
        (a0, b0), (a1, b1), (a2, b2) = (self.linear.sums(rows, d) for rows in fit)
        return self.linear.rows(a1 + a2 - a0, b1 + b2 - b0)

    def _shaped(self, numbers: Array, k: int) -> Array:
        rows = numbers.reshape(k, -1 if k else 2)
        d = features_in(rows) + 1
        if not 1 <= d <= FEATURES_MAX + 1 or rows.shape[1] != _triangle(d) + d:
            raise ValueError(f"{rows.shape[1]} numbers a model")
        if not (rows[:, [_triangle(i + 1) - 1 for i in range(d)]] > 0).all():
            raise ValueError("no factor of a positive matrix")
        return rows


class LinUcb(Contextual):
    """The model with the highest upper bound on its reward for a query like this one, by ridge
    regression on the features.

    width: of the bound, in standard deviations of a reward; below 1 it may never look at a model
    again.  discount: of what was known, an observation; .9995 forgets half in 1400.  Cost: one
    model a query, d^2 operations a model: .4 us in the core for 5 models of 8 features.  Regret: d
    sqrt(T).  Use: models that are good at different queries.  Source: Li, Chu, Langford and
    Schapire 2010.
    """

    name = "linucb"

    def __init__(self, width: float = 1.0, discount: float = 0.9995, shadow: float = 0.0) -> None:
        self.linear = Context(
            sampled=False,
            width=within("width", width, 0.0, 100.0),
            discount=within("discount", discount, 0.5, 1.0),
            ridge=1.0,
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)


class LinTs(Contextual):
    """A draw of each model's reward for a query like this one, from what ridge regression leaves
    possible; the highest is asked.

    width: standard deviation of a reward; discount, cost, use: as linucb's. Delayed feedback costs
    it less, because its choices vary meanwhile.  Source: Agrawal and Goyal 2013.
    """

    name = "lints"

    def __init__(self, width: float = 0.3, discount: float = 0.9995, shadow: float = 0.0) -> None:
        self.linear = Context(
            sampled=True,
            width=within("width", width, 0.0, 100.0),
            discount=within("discount", discount, 0.5, 1.0),
            ridge=1.0,
        )
        self.shadow = within("shadow", shadow, 0.0, 1.0)


def features_of(context: Any) -> Features:
    """What a caller gave as `context`, checked. InvalidInput for what is no array of 1 to 32 finite
    numbers."""
    if context is None:
        return ()
    try:
        found = np.asarray(context, np.float64)
    except (TypeError, ValueError):
        raise InvalidInput(
            f"context must be an array of numbers, not {str(context)[:60]!r}."
        ) from None
    if found.ndim != 1 or not 1 <= len(found) <= FEATURES_MAX:
        raise InvalidInput(
            f"a context of shape {found.shape}: it is an array of 1 to {FEATURES_MAX} numbers."
        )
    if not (np.abs(found) <= LARGEST).all():
        at = int(np.argmin(np.abs(found) <= LARGEST))
        hint = "Scale features to lie around -1 to 1."
        raise InvalidInput(
            f"context[{at}]={found[at]:g}: it must be finite and at most {LARGEST:g} in size.",
            hint=hint,
        )
    return tuple(found.tolist())


def features_in(rows: Array) -> int:
    """How many features rows have, without the constant: they hold d (d + 1) / 2 + d numbers for d
    - 1 features."""
    return (math.isqrt(9 + 8 * rows.shape[1]) - 3) // 2 - 1


def _triangle(d: int) -> int:
    return d * (d + 1) // 2


def _point(rows: Array, features: Features) -> Array | None:
    """The constant and the features, as rows take them; None when there are too many or too few."""
    have = features_in(rows)
    if have == 0 or not features:
        return np.array([1.0, *[0.0] * have])
    return np.array([1.0, *features]) if len(features) == have else None
