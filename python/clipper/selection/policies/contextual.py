"""Contextual bandits: each query goes to one model, chosen by the query's features.

A model's expected reward is a linear function of up to 32 features that the caller gives,
`app.predict(x, context=[...])`, scaled to about -1 to 1. A state starts with the constant feature
alone, which is a bandit without context; the first feedback of a query with features fixes their
number. A query without features counts as one whose features are all 0.
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np

from clipper.errors import InvalidInput
from clipper.selection.learning.learned_state import Array, Learn, LearnedState, share_of
from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.learning.one_model import OneModel
from clipper.selection.policies.bandits import check_range
from clipper.selection.policy import Observation, Query
from clipper.types import VersionedModel
from clipper_core.learning.bandit import Rule, RuleKind
from clipper_core.learning.linear import Context

FEATURES_MAX = 32
LARGEST = 1e6  # largest absolute value of a feature
RIDGE = 1.0  # observations of size 1 along every axis, with reward 0
DRAWS = 64  # choices from which the shares of the models are estimated
Features = tuple[float, ...]


class LinUcb(LearningPolicy):
    """LinUCB: the model with the highest upper bound on its reward for this query.

    Rewards are ridge regressions on the features. Use it where models are good at different
    queries.

    width: of the bound, in standard deviations of a reward; below 1 it may never try a model again.
    discount: of what was learned, per observation; 0.9995 forgets half in 1 400 observations.
    shadow: share of the queries for which the other models predict too, as observers.

    State: f64[K, d (d + 1) / 2 + d] for d - 1 features and the constant: the triangular factor of
    1 + sum of x x', then the sum of reward * x.
    Cost: d^2 operations per model; 0.4 us per query for 5 models and 8 features.
    Regret: O(d sqrt(T)) up to logarithms.
    Source: Li, Chu, Langford and Schapire 2010, algorithm 1.
    """

    name = "linucb"

    def __init__(self, width: float = 1.0, discount: float = 0.9995, shadow: float = 0.0) -> None:
        self.linear = _linear(False, width, discount)
        super().__init__(*_parts(self.name, self.linear, shadow, discount))


class LinTs(LearningPolicy):
    """Linear Thompson sampling: draw each model's reward for this query, take the highest.

    The rewards are drawn from the posterior of a ridge regression on the features. Delayed feedback
    costs it less than `linucb`, because its choices vary in the meantime.

    width: standard deviation of a reward.
    discount: of what was learned, per observation; 0.9995 forgets half in 1 400 observations.
    shadow: share of the queries for which the other models predict too, as observers.

    State and cost: as those of `linucb`.  Regret: O(d^1.5 sqrt(T)) up to logarithms.
    Source: Agrawal and Goyal 2013, "Thompson Sampling for Contextual Bandits".
    """

    name = "lints"

    def __init__(self, width: float = 0.3, discount: float = 0.9995, shadow: float = 0.0) -> None:
        self.linear = _linear(True, width, discount)
        super().__init__(*_parts(self.name, self.linear, shadow, discount))


def _linear(sampled: bool, width: float, discount: float) -> Context:
    return Context(
        sampled=sampled,
        width=check_range("width", width, 0.0, 100.0),
        discount=check_range("discount", discount, 0.5, 1.0),
        ridge=RIDGE,
    )


def _parts(
    name: str, linear: Context, shadow: float, discount: float
) -> "tuple[LinearRows, OneModel, Learn, Rule]":
    rows, rule = LinearRows(name, linear), Rule(RuleKind.LINEAR, floor=RIDGE, discount=discount)
    shadow = check_range("shadow", shadow, 0.0, 1.0)
    answering = OneModel(rows.choose, rows.accuracy, rows.shares, shadow, True)
    return rows, answering, rows.learn, rule


class LinearRows:
    """One ridge regression per model; the number of features is fixed by the first feedback.

    name: of the policy, for messages. Threads: any.
    """

    per_model = True

    def __init__(self, name: str, linear: Context) -> None:
        self._name, self._linear = name, linear

    # -- choosing and learning

    def choose(
        self, state: LearnedState, rows: Array, query: Query
    ) -> tuple[int, tuple[float, ...]]:
        """Choose a row. Raises InvalidInput if the number of features differs from the state's."""
        x = _point(rows, query.features)
        if x is None:
            hint = (
                "A state keeps the number of features of its first feedback; use another"
                " application for another number."
            )
            raise InvalidInput(
                f"context has {len(query.features)} features; {self._name} has learned with"
                f" {features_in(rows)}.",
                hint=hint,
            )
        return self._linear.choose(rows, x, query.uniform), ()

    def shares(self, state: LearnedState) -> dict[VersionedModel, float]:
        """Return the share of each model in queries without features."""
        x = _point(state.rows, ())
        if x is None or not state.models:
            return {}
        chosen = [self._linear.choose(state.rows, x, (i + 0.5) / DRAWS) for i in range(DRAWS)]
        return {model: chosen.count(i) / DRAWS for i, model in enumerate(state.models)}

    def learn(
        self, state: LearnedState, observation: Observation, losses: Mapping[VersionedModel, float]
    ) -> Array:
        """Update the regressions; an observation with another number of features is ignored."""
        features, rows = observation.plan.features, state.rows
        if features and features_in(rows) == 0:
            rows = self._linear.widened(rows, len(features) + 1)
        x = _point(rows, features)
        if x is None:
            return state.rows
        rewards = np.array([1.0 - losses.get(model, math.nan) for model in state.models])
        return self._linear.learn(rows, x, rewards, int(state.seen), observation.weight)

    def accuracy(self, state: LearnedState, model: VersionedModel) -> float:
        """Return the model's accuracy over all queries, whatever their features."""
        if model not in state.models:
            return 0.5
        return float((self.standing(state) + 1.0)[state.models.index(model)] / 2.0)

    def standing(self, state: LearnedState) -> Array:
        """Return each model's smoothed accuracy over all queries, scaled to -1 to 1."""
        count = state.rows[:, 0] ** 2 - 1.0
        good = state.rows[:, _triangle(features_in(state.rows) + 1)]
        return np.asarray(2.0 * np.clip((good + 1.0) / (count + 2.0), 0.0, 1.0) - 1.0)

    # -- changes of models

    def initial(self, k: int) -> Array:
        """Return rows that have the constant only."""
        return np.tile(np.array((1.0, 0.0)), (k, 1)).reshape(k, 2)

    def insert(self, rows: Array, at: int) -> Array:
        """Insert a row without observations, of the same width."""
        return np.insert(rows, at, self._linear.fresh(features_in(rows) + 1), axis=0)

    def delete(self, rows: Array, at: int) -> Array:
        """Delete a row."""
        return np.delete(rows, at, axis=0)

    def reorder(self, rows: Array, order: Sequence[int]) -> Array:
        """Permute the rows."""
        return rows[list(order)]

    def limited(self, rows: Array, counts: float) -> Array:
        """Fade rows that have a larger discounted number of observations."""
        return self.faded(rows, share_of(rows[:, 0] ** 2 - 1.0, counts))

    def faded(self, rows: Array, share: Array) -> Array:
        """Scale the sums of products."""
        if not len(rows):
            return rows
        products, rewards = self._linear.sums(rows, features_in(rows) + 1)
        return self._linear.rows(products * share[:, None, None], rewards * share[:, None])

    def merged(self, base: Array, mine: Array, theirs: Array) -> Array:
        """Add the sums of products; if the numbers of features differ, keep the most feedback."""
        if not len(mine):
            return mine
        most = max(
            (base, mine, theirs), key=lambda rows: (features_in(rows) > 0, float(rows[:, 0].sum()))
        )
        d = features_in(most) + 1
        (a0, b0), (a1, b1), (a2, b2) = (
            self._linear.sums(self._with_shape(rows, most), d) for rows in (base, mine, theirs)
        )
        return self._linear.rows(a1 + a2 - a0, b1 + b2 - b0)

    def _with_shape(self, rows: Array, most: Array) -> Array:
        if rows.shape == most.shape:
            return rows
        features = features_in(most)
        if features_in(rows) == 0:
            return self._linear.widened(rows, features + 1)
        return np.tile(self._linear.fresh(features + 1), (len(rows), 1))

    def parse(self, numbers: Array, k: int) -> Array:
        """Reshape stored numbers. Raises ValueError for an impossible width or factor."""
        rows = numbers.reshape(k, -1 if k else 2)
        d = features_in(rows) + 1
        if not 1 <= d <= FEATURES_MAX + 1 or rows.shape[1] != _triangle(d) + d:
            raise ValueError(f"{rows.shape[1]} numbers a model")
        if not (rows[:, [_triangle(i + 1) - 1 for i in range(d)]] > 0).all():
            raise ValueError("no factor of a positive matrix")
        return rows


def features_of(context: object) -> Features:
    """Convert a caller's `context`. Raises InvalidInput unless it is 1 to 32 finite numbers."""
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
    """Return d - 1, the number of features, of rows with d (d + 1) / 2 + d columns."""
    return (math.isqrt(9 + 8 * rows.shape[1]) - 3) // 2 - 1


def _triangle(d: int) -> int:
    return d * (d + 1) // 2


def _point(rows: Array, features: Features) -> Array | None:
    """Return the constant and the features; None if the rows have another number of features."""
    have = features_in(rows)
    if have == 0 or not features:
        return np.array([1.0, *[0.0] * have])
    return np.array([1.0, *features]) if len(features) == have else None
