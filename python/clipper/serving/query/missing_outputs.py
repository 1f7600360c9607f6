"""Stragglers: what to do at the deadline about numbers that have not come.

The mean of those that came is biased by whoever is missing: an ensemble of models that each predict
around a level of their own jumps when one of them is late. So a policy that averages gets, in the
place of a missing number, the mean of that model's outputs so far; the answer's confidence and
`used` stay those of the predictions that arrived, and the missing are named. A label has no mean:
votes are combined without. Source: the paper, section 5.2.2 ("we substitute missing predictions
with their average value").
"""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from clipper.errors import InvalidInput, did_you_mean
from clipper.selection import Combined, Policy, Prediction
from clipper.selection.policy import is_number, is_usable
from clipper.types import UserValue, VersionedModel
from clipper_core.application.output_means import OutputMeans

MISSING = ("mean", "skip")


def check_missing(value: object) -> str:
    """Return the value. Raises InvalidInput for what is not one of MISSING."""
    if value not in MISSING:
        guess = did_you_mean(str(value), MISSING) or "."
        raise InvalidInput(
            f"missing={value!r}: no such way to treat a missing number{guess}",
            hint="'mean' or 'skip'.",
        )
    return str(value)


def combine(
    policy: Policy,
    state: object,
    means: OutputMeans | None,
    arrived: Mapping[VersionedModel, Prediction],
    missing: Sequence[VersionedModel],
) -> Combined:
    """Return the policy's combination, with means in the place of numbers that are missing. means:
    None to do without."""
    found = policy.combine(state, arrived, missing)
    if means is None:
        return found
    for model, prediction in arrived.items():
        means.add(model, prediction.output)
    if not missing or not found.used or not is_number(found.output):
        return found
    filled = {
        model: Prediction(mean) for model in missing if _fits(mean := means.of(model), found.output)
    }
    if not filled:
        return found
    left = [model for model in missing if model not in filled]
    whole = policy.combine(state, {**arrived, **filled}, left)
    return (
        msgspec.structs.replace(found, output=whole.output, set=whole.set)
        if is_usable(whole.output)
        else found
    )


def _fits(mean: UserValue, output: UserValue) -> bool:
    return mean is not None and np.shape(mean) == np.shape(output) and is_usable(mean)


def averages(policy: Policy) -> bool:
    """Return whether the policy averages numbers, by its attribute `averages = True`."""
    return bool(getattr(policy, "averages", False))
