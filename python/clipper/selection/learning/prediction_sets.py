"""Prediction sets: labels, or an interval, that contain the truth with a requested coverage.

The method is conformal prediction with one threshold that every labelled feedback adjusts: up by
`step * coverage` when the current set would have missed the label, down by `step * (1 - coverage)`
when it would have contained it. Over T labels the share of misses differs from 1 - coverage by at
most the movement of the threshold divided by step * T, for any stream: no distribution is assumed,
and a failing model widens the sets at once.

The score of a label is 1 less its probability. The score of a number is its distance from the
answer, in units of a running mean of distances; its threshold moves on a logarithmic scale, so the
unit does not matter. For an array the largest distance of an element counts.

Source: Gibbs and Candes 2021, "Adaptive Conformal Inference", with the threshold itself tracked
(Angelopoulos, Candes and Tibshirani 2023, "Conformal PID Control").
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from clipper.errors import InvalidInput
from clipper.selection.votes import label_key
from clipper.types import UserValue

Array = NDArray[np.uint8]
STEP = 0.03  # of the threshold of labels, which lies in 0 to 1
LOG_STEP = 0.1  # of the logarithm of the threshold of numbers
LOG_MAX = 10.0
SCALE_RATE = 0.02  # step of the running mean of distances
KNOWN_MAX = 64  # labels remembered, each of at most so many bytes or characters
WIDEST = 1e300  # largest radius of an interval, so that its ends stay finite
FIRST_LOG = math.log(2.0)


class SetThresholds(msgspec.Struct, frozen=True, array_like=True):
    """The adjusted thresholds; stored with the policy's state.

    labels: threshold of the scores of labels.
    numbers: logarithm of the threshold of distances, in units of `scale`.
    scale: running mean of the distances.  count: numbers observed.
    known: the first 64 labels observed.
    """

    labels: float = 0.9
    numbers: float = FIRST_LOG
    scale: float = 0.0
    count: float = 0.0
    known: tuple[UserValue, ...] = ()


class LabelProbabilities(msgspec.Struct, frozen=True):
    """The probabilities that a policy assigns to labels.

    voted: by label key, each label that a model gave, with its probability.
    other: probability of each further label.
    """

    voted: dict[object, tuple[UserValue, float]]
    other: float


INITIAL = SetThresholds()
Bounds = tuple[UserValue, ...]


def label_set(
    thresholds: SetThresholds, probabilities: LabelProbabilities, answer: object
) -> Bounds:
    """Return `answer`, then the other labels above the threshold, most probable first."""
    found = [
        (probability, label)
        for label, probability in probabilities.voted.values()
        if 1.0 - probability <= thresholds.labels
    ]
    if 1.0 - probabilities.other <= thresholds.labels:
        found += [
            (probabilities.other, label)
            for label in thresholds.known
            if label_key(label) not in probabilities.voted
        ]
    found.sort(key=lambda one: -one[0])
    first = label_key(answer)
    return (answer, *(label for _, label in found if label_key(label) != first))


def interval(thresholds: SetThresholds, answer: UserValue) -> Bounds:
    """Return (low, high) around a number or an array; () before the first labelled number."""
    if thresholds.count == 0:
        return ()
    radius = min(math.exp(thresholds.numbers) * thresholds.scale, WIDEST)
    if isinstance(answer, np.ndarray):
        return (answer - radius, answer + radius)
    return (float(answer) - radius, float(answer) + radius)


def update_with_label(
    thresholds: SetThresholds,
    coverage: float,
    probabilities: LabelProbabilities,
    answer: object,
    label: object,
) -> SetThresholds:
    """Adjust the threshold of labels. probabilities, answer: as they were before the feedback."""
    key = label_key(label)
    held = any(label_key(one) == key for one in label_set(thresholds, probabilities, answer))
    threshold = min(max(thresholds.labels + STEP * (coverage - held), 0.0), 1.0 + STEP)
    known = _remembered(thresholds.known, label)
    return msgspec.structs.replace(thresholds, labels=threshold, known=known)


def _remembered(known: tuple[object, ...], label: object) -> tuple[object, ...]:
    key = label_key(label)
    if len(known) < KNOWN_MAX and _is_short(label) and all(label_key(one) != key for one in known):
        return (*known, label)
    return known


class LabelSets(msgspec.Struct, frozen=True):
    """Settings by which the core adjusts the threshold of labels, as `update_with_label` does.

    doubt: observations from which on the calibration outweighs a raw confidence.
    """

    make: ClassVar = SetThresholds
    coverage: float
    step: float
    doubt: float

    def remembered(self, known: tuple[object, ...], label: object) -> tuple[object, ...]:
        """Return the labels that sets may have after one more was observed. The core calls it."""
        return _remembered(known, label)


def knowable(thresholds: SetThresholds, labels: Sequence[UserValue]) -> list[int]:
    """Return for each label whether sets may have it: 0 no, 1 yes, 2 once it was learned."""
    known = {label_key(one) for one in thresholds.known}
    return [1 if label_key(one) in known else 2 if _is_short(one) else 0 for one in labels]


def after_rows(
    thresholds: SetThresholds, threshold: float, labels: Sequence[UserValue], known: Array
) -> SetThresholds:
    """Return the thresholds after the core learned rows with these labels.

    known: for each label, as `knowable`, or 3 and above, in the order in which they became known.
    """
    new = np.flatnonzero(known > 2)
    added = [labels[i] for i in new[np.argsort(known[new])]]
    return msgspec.structs.replace(thresholds, labels=threshold, known=(*thresholds.known, *added))


def update_with_number(
    thresholds: SetThresholds, coverage: float, answer: UserValue, label: UserValue
) -> SetThresholds:
    """Adjust the threshold of numbers.

    A label of another shape, or at an infinite distance, changes nothing.
    """
    if isinstance(label, str | bytes) or np.shape(answer) != np.shape(label):
        return thresholds
    with np.errstate(over="ignore"):
        away = np.abs(np.asarray(answer, np.float64) - np.asarray(label, np.float64))
    distance = float(away.max(initial=0.0))
    if not math.isfinite(distance):
        return thresholds
    if thresholds.count == 0:
        return msgspec.structs.replace(thresholds, numbers=FIRST_LOG, scale=distance, count=1.0)
    held = distance <= math.exp(thresholds.numbers) * thresholds.scale
    numbers = min(max(thresholds.numbers + LOG_STEP * (coverage - held), -LOG_MAX), LOG_MAX)
    count = thresholds.count + 1.0
    scale = thresholds.scale + max(SCALE_RATE, 1.0 / count) * (distance - thresholds.scale)
    return msgspec.structs.replace(thresholds, numbers=numbers, scale=scale, count=count)


def merge(base: SetThresholds, mine: SetThresholds, theirs: SetThresholds) -> SetThresholds:
    """Average the thresholds of two servers; add what they counted since `base`."""
    known = list(mine.known)
    for label in theirs.known:
        if len(known) < KNOWN_MAX and all(label_key(one) != label_key(label) for one in known):
            known.append(label)
    used = [one for one in (mine, theirs) if one.count > 0] or [base]
    return SetThresholds(
        (mine.labels + theirs.labels) / 2,
        sum(one.numbers for one in used) / len(used),
        sum(one.scale for one in used) / len(used),
        max(mine.count + theirs.count - base.count, 0.0),
        tuple(known),
    )


def check_coverage(coverage: object) -> float:
    """Return the coverage. Raises InvalidInput outside 0.5 to 0.999."""
    if (
        isinstance(coverage, bool)
        or not isinstance(coverage, int | float)
        or not 0.5 <= coverage <= 0.999
    ):
        hint = "Write 0.9, for example: then nine sets in ten contain the truth."
        raise InvalidInput(f"coverage={coverage!r}: it must lie between 0.5 and 0.999.", hint=hint)
    return float(coverage)


def with_coverage(policy: str, coverage: float | None) -> str:
    """Add an application's coverage to the settings in the text of its policy."""
    if coverage is None:
        return policy
    name, _, rest = policy.strip().partition("(")
    settings = rest.rstrip().removesuffix(")").strip().removesuffix(",")
    return f"{name}({settings + ', ' if settings else ''}coverage={coverage!r})"


def _is_short(label: object) -> bool:
    if isinstance(label, str | bytes):
        return len(label) <= KNOWN_MAX
    return isinstance(label, bool) or (isinstance(label, int) and -(2**63) <= label < 2**64)


def is_valid(thresholds: SetThresholds) -> bool:
    """Return True if all numbers are finite and the threshold of labels is possible."""
    figures = (thresholds.labels, thresholds.numbers, thresholds.scale, thresholds.count)
    return (
        all(isinstance(figure, float) and math.isfinite(figure) for figure in figures)
        and 0 <= thresholds.labels <= 2
    )
