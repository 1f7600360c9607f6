"""What a verdict comes to: the answer by the rule that decided, from those that had been heard by
then and from nobody else.

The output is the rule's own: the votes' winner, the mean, or one model's word. How sure that is, is
honest about what it is not: a policy that learns gives its calibrated figure when it would have
answered the same, and at most what it leaves of doubt when not; one that learns nothing gives the
share of those asked that said the same, or the model's own figure where one model's word is taken.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from clipper.selection.experts import Experts
from clipper.selection.learning_policy import LearningPolicy
from clipper.selection.policy import (
    NOTHING,
    Combined,
    Plan,
    Policy,
    Prediction,
    Predictions,
    agrees,
    is_number,
    sound_confidence,
)
from clipper.selection.stateless_policy import learns
from clipper.selection.votes import Votes, combine, in_order, label_key, scores, usable
from clipper.selection.weighted import StaticWeights, given
from clipper.types import VersionedModel

VOTES = ("majority", "quorum", "weighted", "mean")
ALL_HEARD = ("all", "own")


class DecisionInputs:
    """What was asked and had arrived when the verdict fell. asked: all of the query's, best first.
    plan: the policy's."""

    __slots__ = ("arrived", "asked", "plan", "policy", "state")

    def __init__(
        self, policy: Policy, state: Any, plan: Plan, asked: Sequence[VersionedModel],
        arrived: Mapping[VersionedModel, Prediction],
    ) -> None:  # fmt: skip
        self.policy, self.state, self.plan, self.asked, self.arrived = (
            policy,
            state,
            plan,
            asked,
            arrived,
        )

    def missing(self, but: Predictions) -> list[VersionedModel]:
        return [model for model in self.asked if model not in but]


def decided_answer(rule: str, heard: DecisionInputs, used: Sequence[VersionedModel]) -> Combined:
    """The answer by `rule` (a key of clipper.selection.decider_schedule.RULES, "row" or "own") from
    `used`, best first. Threads: any; pure."""
    if not used:
        return NOTHING
    if rule in ALL_HEARD:
        return _by_policy(heard, used)
    if rule in VOTES:
        return _by_votes(rule, heard)
    if rule == "median":
        return _by_median(heard)
    return _by_one(heard, used[0])


def vote_weights(
    policy: Policy, state: Any, models: Sequence[VersionedModel]
) -> dict[VersionedModel, float]:
    """How much each model's vote weighs by the policy; the same for all where it knows no
    weights."""
    if isinstance(policy, Experts):
        return policy.weights(state, set(models))
    if isinstance(policy, StaticWeights):
        weights = {model: given(policy.weights, model, 1.0) for model in models}
        return weights if any(weights.values()) else dict.fromkeys(models, 1.0)
    return dict.fromkeys(models, 1.0)


def rank_models(
    policy: Policy, state: Any, user: str | None, links: Sequence[VersionedModel]
) -> tuple[VersionedModel, ...]:
    """The linked models, best first: as the policy has learned, by given weights, else as they are
    linked."""
    if not learns(policy):
        weights = vote_weights(policy, state, links)
        return tuple(sorted(links, key=lambda model: -weights[model]))
    if isinstance(policy, LearningPolicy):  # of those that stand alike, whoever is linked first
        standing = dict(zip(state.models, policy.standing(state).tolist(), strict=True))
        worst = min(standing.values(), default=0.0)
        return tuple(sorted(links, key=lambda model: -standing.get(model, worst)))
    known = [model for model in policy.rank_models_desc(state, user) if model in links]
    return (*known, *(model for model in links if model not in known))


def _by_policy(heard: DecisionInputs, used: Sequence[VersionedModel]) -> Combined:
    """By the policy's own rule, of the models it chose; of the others only if none of these was
    heard."""
    chosen = {model: heard.arrived[model] for model in used if model in heard.plan.models}
    if usable(chosen):
        absent = [model for model in heard.plan.models if model not in chosen]
        return heard.policy.combine(heard.state, chosen, absent)
    return _by_one(heard, used[0])


def _by_votes(rule: str, heard: DecisionInputs) -> Combined:
    votes = _numbers(heard) if rule == "mean" else usable(heard.arrived)
    if not votes:
        return NOTHING
    equal = dict.fromkeys(heard.asked, 1.0)
    weights = (
        vote_weights(heard.policy, heard.state, heard.asked)
        if rule in ("weighted", "mean")
        else equal
    )
    if not any(weights[model] for model in votes):
        weights = equal
    found = combine(votes, weights, sum(weights.values()))
    return Combined(
        found.output,
        _sureness(heard, found.output, lambda: found.confidence),
        found.used,
        found.agreement,
    )


def _by_median(heard: DecisionInputs) -> Combined:
    votes = _numbers(heard)
    if not votes:
        return NOTHING
    equal = dict.fromkeys(heard.asked, 1.0)
    numbers = [np.asarray(vote.output, np.float64) for vote in votes.values()]
    if len({number.shape for number in numbers}) > 1:
        return _by_votes("mean", heard)
    spread = combine(votes, equal, float(len(heard.asked)))
    middle = np.median(np.stack(numbers), axis=0)
    output = float(middle) if middle.ndim == 0 else middle
    return Combined(output, spread.confidence, tuple(votes), spread.agreement)


def _numbers(heard: DecisionInputs) -> Votes:
    """Those that are numbers, whole ones too."""
    votes = usable(heard.arrived)
    return {
        model: Prediction(
            vote.output if isinstance(vote.output, np.ndarray) else float(vote.output),
            vote.confidence,
        )
        for model, vote in votes.items()
        if is_number(vote.output)
        or (isinstance(vote.output, int | np.integer) and not isinstance(vote.output, bool))
    }


def _by_one(heard: DecisionInputs, model: VersionedModel) -> Combined:
    """One model's word. Agreement: the share of all asked that said the same."""
    prediction = heard.arrived.get(model)
    if prediction is None or model not in usable({model: prediction}):
        return NOTHING
    agreement = _agreement(heard, prediction.output)

    def alone() -> float:
        if learns(heard.policy):
            return heard.policy.combine(
                heard.state, {model: prediction}, heard.missing({model: prediction})
            ).confidence
        return (
            agreement if prediction.confidence is None else sound_confidence(prediction.confidence)
        )

    return Combined(
        prediction.output, _sureness(heard, prediction.output, alone), (model,), agreement
    )


def _agreement(heard: DecisionInputs, output: Any) -> float:
    votes = usable(heard.arrived)
    equal = dict.fromkeys(heard.asked, 1.0)
    if is_number(output):
        return combine(votes, equal, float(len(heard.asked))).agreement
    return scores(votes, equal).get(label_key(output), 0.0) / len(heard.asked)


def _sureness(heard: DecisionInputs, output: Any, raw: Callable[[], float]) -> float:
    """`raw()`, as far as the policy's experience does not know better."""
    if not learns(heard.policy) or len(heard.plan.models) == 1:
        return raw()
    arrived = {
        model: heard.arrived[model]
        for model in in_order(heard.arrived)
        if model in heard.plan.models
    }
    whole = heard.policy.combine(
        heard.state, arrived, [m for m in heard.plan.models if m not in arrived]
    )
    if not whole.used:
        return raw()
    return whole.confidence if agrees(whole.output, output) else min(raw(), 1.0 - whole.confidence)
