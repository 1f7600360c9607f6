"""Prediction sets: labels, or an interval, that hold the truth as often as an application asks for
(conformal prediction).

One threshold is adjusted with every label that feedback brings: up by `step x coverage` when the
set of now would have missed it, down by `step x (1 - coverage)` when not. Whatever the stream does,
the share of misses over T labels is then off by no more than the threshold moved, over step x T: no
distribution is assumed, and a model that fails widens the sets at once.

A label's score is 1 less the chance that the policy gives it; a number's is its distance in units
of a running mean of distances, and its threshold is moved as a logarithm, so that the unit does not
matter. Of arrays, the element furthest off counts.

Source: Gibbs and Candes 2021, adaptive conformal inference, with the threshold itself as what is
tracked (Angelopoulos, Candes and Tibshirani 2023).
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from clipper.errors import InvalidInput
from clipper.selection.votes import label_key

STEP = 0.03  # of the threshold of labels, which lies in 0 to 1
LOG_STEP = 0.1  # of the logarithm of that of numbers
LOG_MAX = 10.0
SCALE_RATE = 0.02  # of the running mean of distances
KNOWN_MAX = 64  # labels remembered, of at most so many bytes or characters each
FAR = 1e300  # no interval is wider: its ends stay finite
FIRST_LOG = math.log(2.0)


class Tracked(msgspec.Struct, frozen=True, array_like=True):
    """labels: threshold of scores.  numbers: logarithm of that of distances, in units of `scale`,
    their running mean; count: of numbers seen.  known: labels seen, the first of them."""

    labels: float = 0.9
    numbers: float = FIRST_LOG
    scale: float = 0.0
    count: float = 0.0
    known: tuple[Any, ...] = ()


class Chances(msgspec.Struct, frozen=True):
    """What a policy makes of the votes: each label that was voted for with its chance, and the
    chance of any other one."""

    voted: dict[object, tuple[Any, float]]
    other: float


FRESH = Tracked()
Bounds = tuple[Any, ...]


def labels_of(tracked: Tracked, chances: Chances, answer: Any) -> Bounds:
    """The set: `answer`, then the labels whose chance is high enough, likeliest first."""
    found = [
        (chance, label)
        for label, chance in chances.voted.values()
        if 1.0 - chance <= tracked.labels
    ]
    if 1.0 - chances.other <= tracked.labels:
        found += [
            (chances.other, label)
            for label in tracked.known
            if label_key(label) not in chances.voted
        ]
    found.sort(key=lambda one: -one[0])
    first = label_key(answer)
    return (answer, *(label for _, label in found if label_key(label) != first))


def interval_of(tracked: Tracked, answer: Any) -> Bounds:
    """(low, high) around a number, or an array; () while no number was heard of."""
    if tracked.count == 0:
        return ()
    radius = min(math.exp(tracked.numbers) * tracked.scale, FAR)
    if isinstance(answer, np.ndarray):
        return (answer - radius, answer + radius)
    return (float(answer) - radius, float(answer) + radius)


def after_label(
    tracked: Tracked, coverage: float, chances: Chances, answer: Any, label: Any
) -> Tracked:
    """Chances and answer as the policy gave them before it knew."""
    key = label_key(label)
    held = any(label_key(one) == key for one in labels_of(tracked, chances, answer))
    labels = min(max(tracked.labels + STEP * (coverage - held), 0.0), 1.0 + STEP)
    known = tracked.known
    if len(known) < KNOWN_MAX and _is_short(label) and all(label_key(one) != key for one in known):
        known = (*known, label)
    return Tracked(labels, tracked.numbers, tracked.scale, tracked.count, known)


def after_number(tracked: Tracked, coverage: float, answer: Any, label: Any) -> Tracked:
    """As it is when the label is no number of that shape, or too far away for a float."""
    if isinstance(label, str | bytes) or np.shape(answer) != np.shape(label):
        return tracked
    with np.errstate(over="ignore"):
        away = np.abs(np.asarray(answer, np.float64) - np.asarray(label, np.float64))
    distance = float(away.max(initial=0.0))
    if not math.isfinite(distance):
        return tracked
    if tracked.count == 0:
        return Tracked(tracked.labels, FIRST_LOG, distance, 1.0, tracked.known)
    held = distance <= math.exp(tracked.numbers) * tracked.scale
    numbers = min(max(tracked.numbers + LOG_STEP * (coverage - held), -LOG_MAX), LOG_MAX)
    count = tracked.count + 1.0
    scale = tracked.scale + max(SCALE_RATE, 1.0 / count) * (distance - tracked.scale)
    return Tracked(tracked.labels, numbers, scale, count, tracked.known)


def merged(base: Tracked, mine: Tracked, theirs: Tracked) -> Tracked:
    """Thresholds half way; what two servers have counted and met, together."""
    known = list(mine.known)
    for label in theirs.known:
        if len(known) < KNOWN_MAX and all(label_key(one) != label_key(label) for one in known):
            known.append(label)
    heard = [one for one in (mine, theirs) if one.count > 0] or [base]
    return Tracked(
        (mine.labels + theirs.labels) / 2,
        sum(one.numbers for one in heard) / len(heard),
        sum(one.scale for one in heard) / len(heard),
        max(mine.count + theirs.count - base.count, 0.0),
        tuple(known),
    )


def check_coverage(coverage: Any) -> float:
    if (
        isinstance(coverage, bool)
        or not isinstance(coverage, int | float)
        or not 0.5 <= coverage <= 0.999
    ):
        hint = "0.9: nine sets in ten hold the truth."
        raise InvalidInput(f"coverage={coverage!r}: it must lie between 0.5 and 0.999.", hint=hint)
    return float(coverage)


def with_coverage(policy: str, coverage: float | None) -> str:
    """The text of a policy with an application's coverage among its settings."""
    if coverage is None:
        return policy
    name, _, rest = policy.strip().partition("(")
    settings = rest.rstrip().removesuffix(")").strip().removesuffix(",")
    return f"{name}({settings + ', ' if settings else ''}coverage={coverage!r})"


def _is_short(label: Any) -> bool:
    if isinstance(label, str | bytes):
        return len(label) <= KNOWN_MAX
    return isinstance(label, bool) or (isinstance(label, int) and -(2**63) <= label < 2**64)


def sound(tracked: Tracked) -> bool:
    figures: Sequence[float] = (tracked.labels, tracked.numbers, tracked.scale, tracked.count)
    return (
        all(isinstance(figure, float) and math.isfinite(figure) for figure in figures)
        and 0 <= tracked.labels <= 2
    )
