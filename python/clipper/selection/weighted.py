"""Policies whose weights a person has chosen: how often each model is asked, or how much its vote
weighs."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

from clipper.errors import InvalidInput
from clipper.selection.policy import (
    NOTHING,
    Combined,
    Plan,
    Predictions,
    Query,
    is_usable,
    sound_confidence,
)
from clipper.selection.stateless_policy import Models, Unlearned
from clipper.selection.votes import combine, in_order, usable
from clipper.types import VersionedModel

Shares = dict[str, float]


class AbSplit(Unlearned):
    """Each query asks one model, chosen by chance in proportion to its share: to compare two
    versions on real traffic.

    shares: by model name, or name and version, `ab(shares={"svm:1": 0.9, "svm:2": 0.1})`; those not
    named get none, unless no candidate is named: then all get the same.
    """

    name = "ab"
    chance = True

    def __init__(self, shares: Shares | None = None) -> None:
        self.shares = checked("shares", shares)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        ordered = in_order(candidates)
        if not ordered:
            return Plan(())
        weights = of_models(self.shares, ordered)
        bounds = list(itertools.accumulate(weights))
        at = min(bisect.bisect_right(bounds, query.uniform * bounds[-1]), len(ordered) - 1)
        while weights[at] == 0:  # the last ones, when uniform is as good as 1
            at -= 1
        return Plan((ordered[at],), (weights[at] / bounds[-1],))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        for model in in_order(arrived):
            if is_usable(arrived[model].output):
                return Combined(
                    arrived[model].output, sound_confidence(arrived[model].confidence), (model,)
                )
        return NOTHING


class StaticWeights(Unlearned):
    """All models are asked; their votes, or numbers, count by weights that stay as they are.

    weights: by model name, or name and version, `static(weights={"svm": 2, "forest": 1})`; those
    not named weigh 1.
    """

    name = "static"
    averages = True

    def __init__(self, weights: Shares | None = None) -> None:
        self.weights = checked("weights", weights)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(in_order(candidates))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        votes = usable(arrived)
        asked = in_order({*arrived, *missing})
        if not votes:
            return NOTHING
        if len(asked) == 1:
            ((model, only),) = votes.items()
            return Combined(only.output, sound_confidence(only.confidence), (model,))
        weights = {model: given(self.weights, model, 1.0) for model in asked}
        if not any(weights[model] for model in votes):  # of those that count nobody was heard
            weights = dict.fromkeys(asked, 1.0)
        return combine(votes, weights, sum(weights.values()))


def checked(setting: str, numbers: Shares | None) -> Shares:
    """Numbers by model, each from 0, and not all 0. InvalidInput otherwise."""
    if numbers is None:
        return {}
    if not isinstance(numbers, dict):
        raise InvalidInput(
            f"{setting}={numbers!r}: numbers by model, as in {setting}={{'svm': 0.9, 'forest':"
            " 0.1}."
        )
    for model, number in numbers.items():
        try:
            VersionedModel.parse(model)
        except ValueError as error:
            raise InvalidInput(f"{setting}: {error}") from None
        if (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not 0 <= number < math.inf
        ):
            raise InvalidInput(f"{setting}: {number!r} for {model!r}; it must be a number from 0.")
    if not any(numbers.values()):
        raise InvalidInput(f"{setting}={numbers!r}: one of them must be above 0.")
    return {model: float(number) for model, number in numbers.items()}


def given(numbers: Mapping[str, float], model: VersionedModel, otherwise: float) -> float:
    """What is said of this version, else of its name."""
    return numbers.get(str(model), numbers.get(model.name, otherwise))


def of_models(shares: Mapping[str, float], models: Sequence[VersionedModel]) -> list[float]:
    found = [given(shares, model, 0.0) for model in models]
    return found if any(found) else [1.0] * len(models)
