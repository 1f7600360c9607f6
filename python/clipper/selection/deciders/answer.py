"""The answer of a query after its decider has chosen a rule and the models to use.

The output is that of the rule: the winner of the votes, the mean, or one model's output. Only
predictions that had arrived at the decision enter. The confidence is calibrated if the policy
learns and would have given the same answer; if it would have given another one, the confidence is
at most 1 less the policy's. Without learning it is the share of the queried models that agree, or
the model's own confidence where one model answers alone.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from clipper.selection.learning.learning_policy import LearningPolicy
from clipper.selection.policies.experts import WeightedVotes
from clipper.selection.policies.mixture import MixedVotes, Mixture, is_untouched
from clipper.selection.policies.stateless_policy import learns
from clipper.selection.policies.weighted import StaticWeights, weight_of
from clipper.selection.policy import (
    NO_ANSWER,
    Combined,
    Plan,
    Policy,
    Prediction,
    State,
    agrees,
    is_number,
    sound_confidence,
)
from clipper.selection.votes import (
    Votes,
    combine,
    label_key,
    label_weights,
    sorted_models,
    usable,
)
from clipper.types import VersionedModel

_BY_VOTES = ("majority", "quorum", "weighted", "mean")
_BY_POLICY = ("all", "own")


class DecisionInputs(msgspec.Struct, frozen=True, eq=False):
    """The state of a query at its decision.

    policy, state: of the application.  plan: the policy's.
    queried: all models of the query, best first.
    arrived: the predictions that had arrived.
    """

    policy: Policy
    state: State
    plan: Plan
    queried: Sequence[VersionedModel]
    arrived: Mapping[VersionedModel, Prediction]


def decided_answer(rule: str, inputs: DecisionInputs, used: Sequence[VersionedModel]) -> Combined:
    """Return the answer by `rule` from the models `used`, best first. Threads: any.

    rule: a key of clipper.selection.deciders.schedule.RULES, "row" or "own".
    """
    if not used:
        return NO_ANSWER
    if rule in _BY_POLICY:
        return _by_policy(inputs, used)
    if rule in _BY_VOTES:
        return _by_votes(rule, inputs)
    if rule == "median":
        return _by_median(inputs)
    return _by_one(inputs, used[0])


def vote_weights(
    policy: Policy, state: State, models: Sequence[VersionedModel]
) -> dict[VersionedModel, float]:
    """Return the policy's weight of each model's vote; 1 for all if it has no weights."""
    if isinstance(policy, LearningPolicy) and isinstance(
        policy.answering, WeightedVotes | MixedVotes
    ):
        return policy.answering.weights(state, set(models))
    if isinstance(policy, StaticWeights):
        weights = {model: weight_of(policy.weights, model, 1.0) for model in models}
        return weights if any(weights.values()) else dict.fromkeys(models, 1.0)
    return dict.fromkeys(models, 1.0)


def rank_models(
    policy: Policy, state: State, user: str | None, links: Sequence[VersionedModel]
) -> tuple[VersionedModel, ...]:
    """Rank the linked models, best first: as learned, by given weights, else in link order."""
    if not learns(policy):
        weights = vote_weights(policy, state, links)
        return tuple(sorted(links, key=lambda model: -weights[model]))
    if isinstance(policy, LearningPolicy):  # link order breaks ties
        standing = dict(zip(state.models, policy.standing(state).tolist(), strict=True))
        worst = min(standing.values(), default=0.0)
        return tuple(sorted(links, key=lambda model: -standing.get(model, worst)))
    known = [model for model in policy.rank_models_desc(state, user) if model in links]
    return (*known, *(model for model in links if model not in known))


def _by_policy(inputs: DecisionInputs, used: Sequence[VersionedModel]) -> Combined:
    """Combine the models that the policy chose; others only if none of those arrived."""
    chosen = {model: inputs.arrived[model] for model in used if model in inputs.plan.models}
    if usable(chosen):
        absent = [model for model in inputs.plan.models if model not in chosen]
        return inputs.policy.combine(inputs.state, chosen, absent)
    return _by_one(inputs, used[0])


def _by_votes(rule: str, inputs: DecisionInputs) -> Combined:
    votes = _numbers(inputs) if rule == "mean" else usable(inputs.arrived)
    if not votes:
        return NO_ANSWER
    equal = dict.fromkeys(inputs.queried, 1.0)
    weights = (
        vote_weights(inputs.policy, inputs.state, inputs.queried)
        if rule in ("weighted", "mean")
        else equal
    )
    if not any(weights[model] for model in votes):
        weights = equal
    found = combine(votes, weights, sum(weights.values()))
    confidence = _confidence(inputs, found.output, lambda: found.confidence)
    return Combined(found.output, confidence, found.used, found.agreement)


def _by_median(inputs: DecisionInputs) -> Combined:
    votes = _numbers(inputs)
    if not votes:
        return NO_ANSWER
    equal = dict.fromkeys(inputs.queried, 1.0)
    numbers = [np.asarray(vote.output, np.float64) for vote in votes.values()]
    if len({number.shape for number in numbers}) > 1:
        return _by_votes("mean", inputs)
    spread = combine(votes, equal, float(len(inputs.queried)))
    middle = np.median(np.stack(numbers), axis=0)
    output = float(middle) if middle.ndim == 0 else middle
    return Combined(output, spread.confidence, tuple(votes), spread.agreement)


def _numbers(inputs: DecisionInputs) -> Votes:
    """Return the votes that are numbers, integers included."""
    votes = usable(inputs.arrived)
    return {
        model: Prediction(
            vote.output if isinstance(vote.output, np.ndarray) else float(vote.output),
            vote.confidence,
        )
        for model, vote in votes.items()
        if is_number(vote.output)
        or (isinstance(vote.output, int | np.integer) and not isinstance(vote.output, bool))
    }


def _by_one(inputs: DecisionInputs, model: VersionedModel) -> Combined:
    """Return one model's output; its agreement is the share of the queried models that agree."""
    prediction = inputs.arrived.get(model)
    if prediction is None or model not in usable({model: prediction}):
        return NO_ANSWER
    agreement = _agreement(inputs, prediction.output)

    def alone() -> float:
        if _has_learned(inputs):
            absent = [other for other in inputs.queried if other != model]
            return inputs.policy.combine(inputs.state, {model: prediction}, absent).confidence
        return (
            agreement if prediction.confidence is None else sound_confidence(prediction.confidence)
        )

    confidence = _confidence(inputs, prediction.output, alone)
    return Combined(prediction.output, confidence, (model,), agreement)


def _has_learned(inputs: DecisionInputs) -> bool:
    """Return False for a policy that does not learn, and for a mixture that has not yet."""
    if isinstance(inputs.policy, Mixture) and is_untouched(inputs.state):
        return False
    return learns(inputs.policy)


def _agreement(inputs: DecisionInputs, output: object) -> float:
    votes = usable(inputs.arrived)
    equal = dict.fromkeys(inputs.queried, 1.0)
    if is_number(output):
        return combine(votes, equal, float(len(inputs.queried))).agreement
    return label_weights(votes, equal).get(label_key(output), 0.0) / len(inputs.queried)


def _confidence(inputs: DecisionInputs, output: object, raw: Callable[[], float]) -> float:
    """Return `raw()`, bounded by the calibrated confidence of a policy that learns."""
    if not _has_learned(inputs) or len(inputs.plan.models) == 1:
        return raw()
    arrived = {
        model: inputs.arrived[model]
        for model in sorted_models(inputs.arrived)
        if model in inputs.plan.models
    }
    absent = [model for model in inputs.plan.models if model not in arrived]
    whole = inputs.policy.combine(inputs.state, arrived, absent)
    if not whole.used:
        return raw()
    return whole.confidence if agrees(whole.output, output) else min(raw(), 1.0 - whole.confidence)
