"""Policies with weights that a person has set: shares of the queries, or weights of the votes."""

import bisect
import itertools
import math
from collections.abc import Mapping, Sequence

from clipper.errors import InvalidInput
from clipper.selection.policies.stateless_policy import Models, StatelessPolicy
from clipper.selection.policy import NO_ANSWER, Combined, Plan, Predictions, Query
from clipper.selection.votes import answer_of_first, combine, sorted_models, usable
from clipper.types import VersionedModel

Shares = dict[str, float]


class AbSplit(StatelessPolicy):
    """Send each query to one model, drawn in proportion to its share; compares two versions.

    shares: by model name, or name and version, as `ab(shares={"svm:1": 0.9, "svm:2": 0.1})`. Other
    models get no queries, unless no candidate is named: then all get the same share.

    State: the linked models; nothing is learned.  Guarantee: the given shares in expectation.
    """

    name = "ab"
    chance = True

    def __init__(self, shares: Shares | None = None) -> None:
        self.shares = check_weights("shares", shares)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Draw one candidate by `query.uniform`."""
        ordered = sorted_models(candidates)
        if not ordered:
            return Plan(())
        weights = [weight_of(self.shares, model, 0.0) for model in ordered]
        if not any(weights):
            weights = [1.0] * len(ordered)
        bounds = list(itertools.accumulate(weights))
        at = min(bisect.bisect_right(bounds, query.uniform * bounds[-1]), len(ordered) - 1)
        while weights[at] == 0:  # rounding, when uniform is close to 1
            at -= 1
        return Plan((ordered[at],), (weights[at] / bounds[-1],))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Return the output of the model that was queried."""
        return answer_of_first(arrived, sorted_models(arrived)) or NO_ANSWER


class StaticWeights(StatelessPolicy):
    """Ask all models; votes, or numbers, count by weights that never change.

    weights: by model name, or name and version, as `static(weights={"svm": 2, "forest": 1})`.
    Other models weigh 1.

    State: the linked models; nothing is learned.  Guarantee: none.
    """

    name = "static"
    averages = True

    def __init__(self, weights: Shares | None = None) -> None:
        self.weights = check_weights("weights", weights)

    def select(self, state: Models, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Ask all candidates."""
        return Plan(sorted_models(candidates))

    def combine(
        self, state: Models, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Vote, or average, with the given weights."""
        votes = usable(arrived)
        selected = sorted_models({*arrived, *missing})
        if len(selected) == 1 or not votes:
            return answer_of_first(votes, votes) or NO_ANSWER
        weights = {model: weight_of(self.weights, model, 1.0) for model in selected}
        if not any(weights[model] for model in votes):  # only models of weight 0 arrived
            weights = dict.fromkeys(selected, 1.0)
        return combine(votes, weights, sum(weights.values()))


def check_weights(setting: str, numbers: Shares | None) -> Shares:
    """Return numbers by model. Raises InvalidInput unless each is at least 0 and one is above."""
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


def weight_of(numbers: Mapping[str, float], model: VersionedModel, otherwise: float) -> float:
    """Return the number for `name:version`, else for `name`, else `otherwise`."""
    return numbers.get(str(model), numbers.get(model.name, otherwise))
