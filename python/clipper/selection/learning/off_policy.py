"""Off-policy evaluation: the accuracy that another policy would have had, from logged feedback.

The log is a sequence of observations (`Observation`): which models a query was sent to, the
probability of that choice, what they predicted, and the truth. The policy to be evaluated starts
without knowledge, goes through the log in its order, and learns from each observation after it
was scored on it (progressive validation). Three estimates of its mean reward are made; the reward
of a prediction is 1 - loss (`policy.loss`), so for labels it is the accuracy.

IPS
    Inverse propensity scoring: rewards of logged choices, each divided by the probability with
    which the running policy made it. Unbiased, with a large variance where these are small.
    Horvitz and Thompson 1952; Langford, Strehl and Wortman 2008.
SNIPS
    Self-normalised IPS: divided by the sum of the weights instead of the number of queries.
    A smaller variance for a bias that vanishes with the number of queries. Swaminathan and
    Joachims 2015.
DR
    Doubly robust: a running mean reward of each model is the estimate, and IPS corrects it.
    Unbiased, with a smaller variance than IPS. Dudik, Langford and Li 2011.

Where the log has the predictions of all models (the running policy queries all of them), the policy
is simulated on it: no weights are needed, and all three estimates are its mean reward there.

An interval is a normal approximation. It is valid for a policy that learns while it is evaluated,
because the terms of the sums are martingale differences around the policy's reward.
"""

import math
import random
from collections.abc import Iterable, Sequence

import msgspec

from clipper.errors import InvalidInput, NotAllowed
from clipper.selection.learning.learning_policy import state_in_context
from clipper.selection.policy import (
    Observation,
    Plan,
    Policy,
    Prediction,
    Query,
    State,
    Truth,
    losses,
)
from clipper.types import VersionedModel

Z95 = 1.959963984540054  # quantile of the normal distribution for 95 % intervals
DRAWS = 32  # of select(), to learn with which probability a policy chooses each model
QUERIES_MIN = 20  # with fewer no interval means anything


class Estimate(msgspec.Struct, frozen=True):
    """A mean reward with its 95 % interval, which may exceed [0, 1] where there is little data."""

    value: float
    low: float
    high: float

    @property
    def standard_error(self) -> float:
        """The standard error of the mean."""
        return (self.high - self.low) / (2 * Z95)


class Evaluation(msgspec.Struct, frozen=True):
    """The result of an evaluation: the estimates for one policy."""

    policy: str
    queries: int
    skipped: int
    effective: float
    ips: Estimate
    snips: Estimate
    dr: Estimate
    logged: Estimate | None


class _Mean:
    """Running mean and variance of the terms of a sum (Welford)."""

    def __init__(self) -> None:
        self.count, self.mean, self._squares = 0, 0.0, 0.0

    def add(self, value: float) -> None:
        self.count += 1
        difference = value - self.mean
        self.mean += difference / self.count
        self._squares += difference * (value - self.mean)

    def estimate(self) -> Estimate:
        if self.count == 0:
            return Estimate(math.nan, math.nan, math.nan)
        variance = self._squares / max(self.count - 1, 1)
        half = Z95 * math.sqrt(variance / self.count)
        return Estimate(self.mean, self.mean - half, self.mean + half)


class _WeightedMean:
    """Ratio of sums, with the variance of the delta method."""

    def __init__(self) -> None:
        self.weights = self.squares = 0.0
        self._rewards = self._squared = self._mixed = 0.0

    def add(self, weight: float, reward: float) -> None:
        self.weights += weight
        self.squares += weight * weight
        self._rewards += weight * reward
        self._squared += weight * weight * reward * reward
        self._mixed += weight * weight * reward

    def estimate(self) -> Estimate:
        if self.weights == 0.0:
            return Estimate(math.nan, math.nan, math.nan)
        value = self._rewards / self.weights
        spread = self._squared - 2 * value * self._mixed + value * value * self.squares
        half = Z95 * math.sqrt(max(spread, 0.0)) / self.weights
        return Estimate(value, value - half, value + half)


class _Target:
    """The policy that is evaluated, with the state that it has learned so far from the log."""

    def __init__(self, policy: Policy, models: Sequence[VersionedModel], seed: int) -> None:
        self.policy = policy
        self._state: State = policy.init(models)
        self._random = random.Random(seed)

    def query(self, seen: Observation, uniform: float) -> Query:
        return Query(uniform=uniform, features=seen.plan.features)

    def plan(self, seen: Observation, candidates: Sequence[VersionedModel]) -> Plan:
        """Return a choice of the policy, drawn at random if it chooses at random."""
        return self.policy.select(self._state, self.query(seen, self._random.random()), candidates)

    def probabilities(
        self, seen: Observation, candidates: Sequence[VersionedModel]
    ) -> dict[VersionedModel, float]:
        """Return with which probability the policy would send this query to each single model.

        Exact where the policy has `portions`, else estimated by DRAWS stratified draws.
        """
        portions = getattr(self.policy, "portions", None)
        if portions is not None and not seen.plan.features:
            return dict(portions(self._state))
        draws = DRAWS if self.policy.chance else 1
        found: dict[VersionedModel, float] = {}
        for i in range(draws):
            uniform = (i + self._random.random()) / draws
            plan = self.policy.select(self._state, self.query(seen, uniform), candidates)
            if len(plan.models) == 1:
                found[plan.models[0]] = found.get(plan.models[0], 0.0) + 1.0 / draws
        return found

    def combined_reward(self, plan: Plan, seen: Observation) -> float | None:
        """Return the reward of the answer that the policy makes of these models' predictions."""
        arrived = {
            model: seen.predictions[model] for model in plan.models if model in seen.predictions
        }
        missing = [model for model in plan.models if model not in arrived]
        state = state_in_context(self.policy, self._state, seen.plan.features)
        answer = self.policy.combine(state, arrived, missing)
        if not answer.used:
            return None
        reported = {answer.used[0]: Prediction(answer.output)}
        lost = losses(Observation(seen.plan, reported, seen.truth, seen.answer))
        return 1.0 - lost[answer.used[0]] if lost else None

    def learn(self, seen: Observation) -> None:
        self._state = self.policy.observe(self._state, seen)


class PolicyEvaluator:
    """Evaluates one policy on a log, observation by observation.

    models: those of the application.  seed: of the draws for policies that choose at random.
    Threads: one at a time.
    """

    def __init__(self, policy: Policy, models: Sequence[VersionedModel], seed: int = 0) -> None:
        if not models:
            raise InvalidInput("there are no models to choose from.")
        self._models = tuple(sorted(set(models)))
        self._target = _Target(policy, self._models, seed)
        self._combines = len(self._target.plan(_NOTHING_SEEN, self._models).models) > 1
        self._ips, self._dr, self._logged = _Mean(), _Mean(), _Mean()
        self._snips = _WeightedMean()
        self._rewards = {model: _WeightedMean() for model in self._models}
        self._skipped = self._certain = self._partial = 0

    def add(self, seen: Observation) -> None:
        """Score the policy on an observation, then let it learn from it."""
        rewards = {
            model: 1.0 - lost
            for model, lost in losses(seen).items()
            if model in self._rewards and model in seen.plan.models
        }
        if not rewards or seen.weight <= 0 or not math.isfinite(seen.weight):
            self._skipped += 1
        elif len(seen.plan.models) > 1 or len(self._models) == 1:
            self._simulate(seen, rewards)
        elif self._combines:
            self._partial += 1
        elif seen.plan.probability(seen.plan.models[0]) >= 1.0:
            self._certain += 1
        else:
            self._weigh(seen, rewards)

    def _simulate(self, seen: Observation, rewards: dict[VersionedModel, float]) -> None:
        """Score on an observation that has the predictions of several models."""
        if len(rewards) < len(self._models):  # one of them did not arrive or was not queried
            self._partial += 1
            return
        plan = self._target.plan(seen, self._models)
        reward = self._target.combined_reward(plan, seen)
        if reward is None:
            self._skipped += 1
            return
        self._count(1.0, reward, reward)
        arrived = {model: seen.predictions[model] for model in plan.models}
        self._target.learn(Observation(plan, arrived, seen.truth, seen.answer, seen.weight))

    def _weigh(self, seen: Observation, rewards: dict[VersionedModel, float]) -> None:
        """Score on an observation of one model that was chosen at random."""
        (model,) = seen.plan.models
        chances = self._target.probabilities(seen, self._models)
        weight = chances.get(model, 0.0) / seen.plan.probability(model)
        reward = rewards[model]
        known = {each: mean.estimate().value for each, mean in self._rewards.items()}
        expected = {each: 0.5 if math.isnan(value) else value for each, value in known.items()}
        model_based = sum(chance * expected[each] for each, chance in chances.items())
        self._count(weight, reward, model_based + weight * (reward - expected[model]))
        self._logged.add(reward)
        self._rewards[model].add(1.0 / seen.plan.probability(model), reward)
        self._target.learn(seen)

    def _count(self, weight: float, reward: float, robust: float) -> None:
        self._ips.add(weight * reward)
        self._dr.add(robust)
        self._snips.add(weight, reward)

    def result(self) -> Evaluation:
        """Return the estimates. Raises NotAllowed, with the reason, if the log allows none."""
        name, queries = self._target.policy.name, self._ips.count
        if queries < QUERIES_MIN:
            raise NotAllowed(f"{name} cannot be evaluated: {self._why_not()}.", hint=_HINT)
        return Evaluation(
            name,
            queries,
            self._skipped + self._certain + self._partial,
            self._snips.weights**2 / self._snips.squares if self._snips.squares else 0.0,
            self._ips.estimate(),
            self._snips.estimate(),
            self._dr.estimate(),
            self._logged.estimate() if self._logged.count else None,
        )

    def _why_not(self) -> str:
        if self._certain >= max(self._partial, 1):
            return (
                f"{self._certain} logged choices were made without randomness, so nothing is known"
                " of the models that were not queried"
            )
        if self._partial:
            return (
                f"{self._partial} logged queries were not answered by all models, and it combines"
                " the predictions of several"
            )
        return f"the log has {self._ips.count} usable observations; {QUERIES_MIN} are needed"


_HINT = (
    "Run a policy that chooses at random (exp3, squarecb, epsilon_greedy) or one that queries all"
    " models (ensemble, exp4, stacking) for a while."
)
_NOTHING_SEEN = Observation(Plan(()), {}, Truth())


def evaluate(
    policy: Policy,
    models: Sequence[VersionedModel],
    log: Iterable[Observation],
    seed: int = 0,
) -> Evaluation:
    """Estimate the mean reward that `policy` would have had on the queries of a log.

    models: those that it may choose from.  log: observations in the order of their feedback.
    Raises NotAllowed if the log is not sufficient, with the reason.
    """
    evaluator = PolicyEvaluator(policy, models, seed)
    for seen in log:
        evaluator.add(seen)
    return evaluator.result()
