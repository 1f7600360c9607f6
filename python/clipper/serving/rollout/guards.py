"""Guards of a rollout, as `p99<20ms, error<1%, reward>=-1%, agreement>90%`, and their tests, which
may be evaluated at any time.

A bare threshold on what was counted so far is wrong sooner or later: looked at often enough, every
good version is over it once. So each guard is two sequential tests, whose error rates hold however
often one looks.

- Broken: the evidence that the version is worse than its limit. A false alarm has at most the named
  error rate, ever.
- Holds: the evidence that it is not worse than the limit by another time the limit. A version that
  is gets by with at most the named rate. Until there is that much evidence the guard is undecided,
  and a rollout does not grow.

Between the limit and twice the limit either may come out: those cannot be distinguished quickly,
and the user drew no line there.

A share (of answers that were the default, that were slower than T, that did not agree) is tested by
a mixture of likelihood ratios against alternatives on the other side; that is a martingale under
the limit, and Ville's inequality bounds how often it ever passes 1 / error rate. A quantile is a
share: p99 < 20 ms means that at most 1 % of the answers take longer. A difference to the version
before (a guard whose limit has a sign) is tested by mixtures of normal densities, which is right
from a few dozen observations on: none is judged by less than `BESIDE_MIN` of each. Sources: Wald,
"Sequential Analysis", 1947; Robbins, "Statistical Methods Related to the Law of the Iterated
Logarithm", 1970; Johari et al., "Always Valid Inference", 2022.
"""

import math
import re
from typing import Final, Literal

import msgspec

from clipper.errors import InvalidInput, did_you_mean

BESIDE_MIN: Final = 50
_METRICS: Final = ("error", "reward", "agreement", "p50", "p90", "p95", "p99", "p99.9")
_WRITTEN: Final = re.compile(r"([a-z0-9.]+)\s*(<=|>=|<|>)\s*([+-]?)\s*([0-9.]+)\s*(%|ms|us|s)?")
_UNITS_US: Final = {"us": 1.0, "ms": 1e3, "s": 1e6}
_EXAMPLE: Final = 'Write "p99<20ms, error<1%, reward>=-1%, agreement>90%".'
Outcome = Literal["holds", "undecided", "broken"]


class Counts(msgspec.Struct):
    """Counts of one side. slower: by time limit in us, the answers that took longer. reward: sum
    over `feedbacks` feedbacks, each 0 to 1.
    """

    answers: int = 0
    defaults: int = 0
    slower: dict[int, int] = {}
    feedbacks: float = 0.0
    reward: float = 0.0
    p50_us: float | None = None
    p99_us: float | None = None


class Figures(msgspec.Struct):
    """Counts of a stage so far. new: the version that is rolled out. before: the one that it
    replaces. agreed: out of `compared`.
    """

    new: Counts
    before: Counts
    compared: int = 0
    agreed: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """Judgement of one guard. reason: the figure behind it, as text."""

    guard: str
    outcome: Outcome
    reason: str


class Guard(msgspec.Struct, frozen=True):
    """A condition that a rollout must keep. limit: a share, or with `q` (a quantile's share above
    it) microseconds.  beside: measured against the version before."""

    text: str
    metric: str
    limit: float
    q: float = 0.0
    beside: bool = False

    def judge(self, figures: Figures, error_rate: float) -> Verdict:
        """Return the verdict on the figures. error_rate: of each of its two tests."""
        if self.beside:
            return self._beside(figures, error_rate)
        n, bad, most, text = self._bad(figures)
        return Verdict(self.text, judged_share(n, bad, most, error_rate), text)

    def _bad(self, figures: Figures) -> tuple[float, float, float, str]:
        """Return the number of observations, how many of them were bad, the share that may be bad,
        and the same in words."""
        new = figures.new
        if self.q:
            slower = new.slower.get(round(self.limit), 0)
            return (
                new.answers,
                slower,
                self.q,
                f"{slower} of {new.answers} answers took longer than {self.limit / 1e3:g} ms",
            )
        if self.metric == "error":
            return (
                new.answers,
                new.defaults,
                self.limit,
                f"{new.defaults} of {new.answers} answers were the default",
            )
        if self.metric == "agreement":
            away = figures.compared - figures.agreed
            return (
                figures.compared,
                away,
                1.0 - self.limit,
                f"{away} of {figures.compared} answers differed from those before",
            )
        mean = f"{new.reward / new.feedbacks:.1%}" if new.feedbacks else "none"
        return (
            new.feedbacks,
            new.feedbacks - new.reward,
            1.0 - self.limit,
            f"the mean reward of {new.feedbacks:g} was {mean}",
        )

    def _beside(self, figures: Figures, error_rate: float) -> Verdict:
        new, before = figures.new, figures.before
        if self.metric == "error":
            one: tuple[float, float] = (new.answers, new.answers - new.defaults)
            other: tuple[float, float] = (before.answers, before.answers - before.defaults)
            what = "answers that were not the default"
        else:
            one, other, what = (
                (new.feedbacks, new.reward),
                (before.feedbacks, before.reward),
                "mean reward",
            )
        if not (one[0] and other[0]):
            return Verdict(
                self.text,
                "undecided",
                f"{what}: {one[0]:g} observations, and {other[0]:g} of the version before",
            )
        text = (
            f"{what}: {one[1] / one[0]:.1%} of {one[0]:g}, before {other[1] / other[0]:.1%} of"
            f" {other[0]:g}"
        )
        return Verdict(self.text, judged_difference(one, other, self.limit, error_rate), text)


# -- reading


def guards_in(text: str) -> tuple[Guard, ...]:
    """Parse guards. Raises InvalidInput that names the wrong part and why."""
    return tuple([_guard(part.strip()) for part in text.split(",") if part.strip()])


def _guard(text: str) -> Guard:
    found = _WRITTEN.fullmatch(text)
    if found is None:
        raise InvalidInput(f"cannot read the guard {text[:60]!r}.", hint=_EXAMPLE)
    metric, sense, sign, number, unit = found.groups()
    if metric not in _METRICS:
        guess = did_you_mean(metric, _METRICS) or "."
        raise InvalidInput(
            f"no guard {metric!r}{guess}", hint=f"There are {', '.join(_METRICS)}. {_EXAMPLE}"
        )
    above = metric in ("reward", "agreement")
    if (sense[0] == ">") != above:
        raise InvalidInput(
            f"guard {text!r}: {metric} must be {'>' if above else '<'} something.", hint=_EXAMPLE
        )
    try:
        value = float(number)
    except ValueError:
        raise InvalidInput(f"guard {text!r}: {number!r} is not a number.", hint=_EXAMPLE) from None
    return (
        _of_time(text, metric, sign, value, unit)
        if metric[0] == "p"
        else _of_share(text, metric, sign, value, unit)
    )


def _of_time(text: str, metric: str, sign: str, value: float, unit: str | None) -> Guard:
    if unit not in _UNITS_US or sign or not value > 0:
        raise InvalidInput(f"guard {text!r}: a time is needed, as 20ms.", hint=_EXAMPLE)
    return Guard(
        text, metric, float(round(value * _UNITS_US[unit])), round(1 - float(metric[1:]) / 100, 6)
    )


def _of_share(text: str, metric: str, sign: str, value: float, unit: str | None) -> Guard:
    share = value / 100 if unit == "%" else value
    if unit not in ("%", None) or not 0 < share < 1:
        raise InvalidInput(
            f"guard {text!r}: a share above 0 % and below 100 % is needed, as 1%.", hint=_EXAMPLE
        )
    if sign and (metric == "agreement" or sign != ("-" if metric == "reward" else "+")):
        hint = "Against the version before there are reward>=-1% and error<=+1%."
        raise InvalidInput(
            f"guard {text!r} cannot be measured against the version before.", hint=hint
        )
    return Guard(text, metric, share, beside=bool(sign))


# -- the tests


def judged_share(n: float, bad: float, limit: float, error_rate: float) -> Outcome:
    """Test whether the mean of n observations in 0 (good) to 1 (bad) is at most `limit`. bad: their
    sum.
    """
    bound = math.log(1.0 / error_rate)
    odds = limit / (1.0 - limit)
    worse = [share for k in range(1, 30) if (share := _share(odds * 2.0**k)) < 0.999_999]
    if worse and _mixture(n, bad, limit, worse) >= bound:
        return "broken"
    far = _share(2.0 * odds)
    better = [_share(2.0 * odds / 2.0**k) for k in range(1, 7)]
    return "holds" if _mixture(n, bad, far, better) >= bound else "undecided"


def _share(odds: float) -> float:
    return odds / (1.0 + odds)


def _mixture(n: float, bad: float, limit: float, others: list[float]) -> float:
    """Return the logarithm of the mean likelihood ratio of these shares to the limit."""
    logs = [
        bad * math.log(p / limit) + (n - bad) * math.log((1.0 - p) / (1.0 - limit)) for p in others
    ]
    return _log_mean(logs)


def _log_mean(logs: list[float]) -> float:
    top = max(logs)
    return (
        top
        if math.isinf(top)
        else top + math.log(sum(math.exp(one - top) for one in logs) / len(logs))
    )


def judged_difference(
    one: tuple[float, float], other: tuple[float, float], margin: float, error_rate: float
) -> Outcome:
    """Test whether the first side's mean lies at most `margin` below the second's.

    Each side is a number of observations and the sum of their values in 0 to 1.
    """
    if min(one[0], other[0]) < BESIDE_MIN:
        return "undecided"
    away = one[1] / one[0] - other[1] / other[0]
    spread = _variance(*one) / one[0] + _variance(*other) / other[0]
    bound = math.log(1.0 / error_rate)
    if _evidence(-margin - away, spread, margin) >= bound:
        return "broken"
    return "holds" if _evidence(away + 2.0 * margin, spread, margin) >= bound else "undecided"


def _variance(n: float, total: float) -> float:
    """Return an upper bound of what values from 0 to 1 can have, of a mean that is a little
    unsure."""
    mean = (total + 1.0) / (n + 2.0)
    return mean * (1.0 - mean)


def _evidence(beyond: float, spread: float, margin: float) -> float:
    """Return the logarithm of the evidence that a mean whose estimate has this variance lies beyond
    0, as its estimate does."""
    if beyond <= 0.0:
        return -math.inf
    logs = []
    for wide in (2.0 * margin, 0.1, 0.4):
        both = spread + wide * wide
        logs.append(
            0.5 * math.log(spread / both) + beyond * beyond * wide * wide / (2.0 * spread * both)
        )
    return _log_mean(logs)
