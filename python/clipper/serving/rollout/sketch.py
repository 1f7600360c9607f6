"""Figures of long streams in little room: quantiles, a rate that is held, whether what comes now is
distributed as it was.

Quantiles: a count for every power of 1.04, so a quantile is off by at most 2 % of itself, whatever
the distribution; at most 2 x 1410 counts. A histogram of fixed bins would need the range
beforehand; a t-digest has no bound on its error. Source: Masson, Rim and Lee, "DDSketch", VLDB
2019. Drift: the population stability index between the first window and the latest (0.1 is some,
0.25 much: the rule of thumb of credit scoring), and for numbers the Kolmogorov-Smirnov distance
beside the value that chance alone exceeds once in a hundred.
"""

import math
from collections import Counter, deque
from collections.abc import Sequence

import numpy as np

from clipper.selection.policy import is_number
from clipper.selection.votes import label_key
from clipper.types import UserValue

_GAMMA = 1.04
_LOG = math.log(_GAMMA)
_LEAST, _MOST = 1e-12, 1e12  # sizes beyond count as these
_MIDDLE = 2 / (
    1 + _GAMMA
)  # of a bucket, from its upper edge: as far from either end, in proportion
WINDOW = 1000
_LABELS = 20  # distinguished by the index; the others are one
_MUCH = 0.25


class Quantiles:
    """Quantiles of finite numbers. Threads: one at a time."""

    __slots__ = ("_counts", "count", "largest", "smallest")

    def __init__(self) -> None:
        self._counts: dict[
            tuple[int, int], int
        ] = {}  # (sign, sign x bucket): in the order of the numbers
        self.count = 0
        self.smallest, self.largest = math.inf, -math.inf

    def add(self, number: float) -> None:
        """Add a number. NaN is not counted."""
        if number != number:
            return
        self.count += 1
        self.smallest, self.largest = min(self.smallest, number), max(self.largest, number)
        sign = (number > 0) - (number < 0)
        size = min(max(abs(number), _LEAST), _MOST)
        key = (sign, sign * math.ceil(math.log(size) / _LOG)) if sign else (0, 0)
        self._counts[key] = self._counts.get(key, 0) + 1

    def quantile(self, q: float) -> float:
        """Return a quantile; NaN of nothing."""
        if not self.count:
            return math.nan
        behind = 0
        for sign, bucket in sorted(self._counts):
            behind += self._counts[sign, bucket]
            if behind >= q * self.count:
                found = sign * _MIDDLE * _GAMMA ** (sign * bucket)
                return min(max(found, self.smallest), self.largest)
        return self.largest

    def __len__(self) -> int:
        """Counts that are kept."""
        return len(self._counts)

    def stats(self) -> dict[str, float]:
        """Return quantiles."""
        if not self.count:
            return {}
        of = {f"p{100 * q:g}": self.quantile(q) for q in (0.01, 0.1, 0.5, 0.9, 0.99)}
        return {"min": self.smallest, **of, "max": self.largest}


class Drift:
    """Test whether the latest `window` scores are distributed like the first. Threads: one at a
    time.

    A score is a label, a number, or the norm of an array; the first score decides which kind is
    tested.
    """

    __slots__ = ("_first", "_last", "_numbers", "_window")

    def __init__(self, window: int = WINDOW) -> None:
        self._window = window
        self._first: list[UserValue] = []
        self._last: deque[UserValue] = deque(maxlen=window)
        self._numbers: bool | None = None

    def add(self, output: object) -> None:
        """Add a score."""
        numbers = is_number(output)
        if self._numbers is None:
            self._numbers = numbers
        if numbers != self._numbers:
            return
        score = size_of(output) if numbers else label_key(output)
        if len(self._first) < self._window:
            self._first.append(score)
        else:
            self._last.append(score)

    def stats(self) -> dict[str, object]:
        """Return psi, and ks with its bound for numbers; they are missing until something came
        after the first window."""
        seen: dict[str, object] = {"first": len(self._first), "latest": len(self._last)}
        if not self._last:
            return seen
        first, last = self._first, list(self._last)
        if not self._numbers:
            psi = _psi(*_by_label(first, last))
            return {**seen, "psi": psi, "drifted": self._is_full() and psi > _MUCH}
        before, now = np.sort(np.array(first)), np.sort(np.array(last))
        psi, ks = _psi(*_by_decile(before, now)), ks_distance(before, now)
        bound = 1.63 * math.sqrt(1 / len(first) + 1 / len(last))
        return {
            **seen,
            "psi": psi,
            "ks": ks,
            "ks_bound": bound,
            "drifted": self._is_full() and psi > _MUCH,
        }

    def _is_full(self) -> bool:
        """Return whether the latest values fill a window; in a tenth of it all is still noise."""
        return len(self._last) == self._window


def size_of(number: UserValue) -> float:
    """Return a number itself; of an array its norm."""
    if not isinstance(number, np.ndarray):
        return float(number)
    with np.errstate(over="ignore"):
        return float(np.linalg.norm(number))


def ks_distance(some: "np.ndarray", others: "np.ndarray") -> float:
    """Return the largest difference of the two shares of numbers up to x; both sorted."""
    at = np.concatenate([some, others])
    below = [np.searchsorted(each, at, side="right") / len(each) for each in (some, others)]
    return float(np.abs(below[0] - below[1]).max())


def _by_label(first: Sequence[object], last: Sequence[object]) -> tuple[list[int], list[int]]:
    before, now = Counter(first), Counter(last)
    named = [label for label, _ in (before + now).most_common(_LABELS)]
    counts = [[seen[label] for label in named] for seen in (before, now)]
    rest = [len(first) - sum(counts[0]), len(last) - sum(counts[1])]
    if any(rest):
        counts = [[*known, other] for known, other in zip(counts, rest, strict=True)]
    return counts[0], counts[1]


def _by_decile(before: "np.ndarray", now: "np.ndarray") -> tuple[list[int], list[int]]:
    edges = np.unique(np.quantile(before, np.arange(1, 10) / 10))
    counts = [
        np.bincount(np.searchsorted(edges, each, side="left"), minlength=len(edges) + 1)
        for each in (before, now)
    ]
    return counts[0].tolist(), counts[1].tolist()


def _psi(before: Sequence[int], now: Sequence[int]) -> float:
    """Return the psi of two windows. Half a count is added to each bin: an empty one is unlikely,
    not impossible."""
    n, m, k = sum(before), sum(now), len(before)
    shares = [
        ((a + 0.5) / (n + 0.5 * k), (b + 0.5) / (m + 0.5 * k))
        for a, b in zip(before, now, strict=True)
    ]
    return sum((q - p) * math.log(q / p) for p, q in shares)
