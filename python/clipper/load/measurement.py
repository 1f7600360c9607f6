"""Results of a load test: when each query was due, sent and answered, and its outcome."""

import math
from array import array
from collections import Counter
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

SHARES = (0.5, 0.9, 0.99, 0.999)
_LAG_MS = 1.0  # acceptable p99 of the generator's own lateness


class QueryOutcome(IntEnum):
    """Outcome of a query.

    OK: a model's answer. MISSING: an answer without some of the models. DEFAULT: the application's
    default. REFUSED: no time or room (429, 503). ERROR: anything else. UNANSWERED: no answer within
    the patience.
    """

    OK = 0
    MISSING = 1
    DEFAULT = 2
    REFUSED = 3
    ERROR = 4
    UNANSWERED = 5


@dataclass
class Measurement:
    """Results at one rate. rate: wanted queries per second. slo_ms: bound of goodput. Times are
    seconds since the start.

    Threads: one until the run is over.
    """

    rate: float
    seconds: float
    slo_ms: float
    due_s: "array[float]" = field(default_factory=lambda: array("d"))
    sent_s: "array[float]" = field(default_factory=lambda: array("d"))
    done_s: "array[float]" = field(default_factory=lambda: array("d"))
    outcomes: bytearray = field(default_factory=bytearray)
    errors: "Counter[str]" = field(default_factory=Counter)
    waited: int = 0  # queries that waited for a free connection
    cpu_s: float = 0.0  # CPU time of the generator
    interrupted: bool = False

    def sent(self, due_s: float, now_s: float) -> int:
        """Record a query; return its number."""
        self.due_s.append(due_s)
        self.sent_s.append(now_s)
        self.done_s.append(math.nan)
        self.outcomes.append(QueryOutcome.UNANSWERED)
        return len(self.due_s) - 1

    def done(self, number: int, outcome: QueryOutcome, now_s: float, error: str = "") -> None:
        """Record the outcome of a query."""
        self.done_s[number] = now_s
        self.outcomes[number] = outcome
        if error:
            self.errors[error if error in self.errors or len(self.errors) < 20 else "others"] += 1

    # -- figures

    def counts(self) -> dict[str, int]:
        """Return the number of queries by outcome."""
        found = Counter(self.outcomes)
        return {kind.name.lower(): found[kind] for kind in QueryOutcome}

    @property
    def total(self) -> int:
        """Return the number of queries sent."""
        return len(self.due_s)

    @property
    def answered(self) -> NDArray[np.bool_]:
        """Return bool (n,): queries with an answer, including defaults."""
        return np.frombuffer(self.outcomes, np.uint8) <= QueryOutcome.DEFAULT

    @property
    def latency_ms(self) -> NDArray[np.float64]:
        """Return the latency of each query from its due time; NaN without an answer."""
        return _between_ms(self.due_s, self.done_s)

    def answers_ms(self) -> NDArray[np.float64]:
        """Return the latencies of answered queries, including defaults."""
        return self.latency_ms[self.answered]

    def strict_ms(self) -> NDArray[np.float64]:
        """Return the latency of each query until a model's answer; infinite without one."""
        predicted = np.frombuffer(self.outcomes, np.uint8) <= QueryOutcome.MISSING
        return np.where(predicted, self.latency_ms, np.inf)

    @property
    def lag_ms(self) -> NDArray[np.float64]:
        """Return how late the generator sent each query."""
        return _between_ms(self.due_s, self.sent_s)

    @property
    def lasted_s(self) -> float:
        """Return the duration: the planned one, or until the last due time if interrupted."""
        return max(self.due_s[-1] if self.interrupted and self.total else self.seconds, 1e-9)

    def goodput(self) -> float:
        """Return models' answers within the SLO, per second."""
        return float(np.sum(self.strict_ms() <= self.slo_ms)) / self.lasted_s

    def is_behind(self) -> bool:
        """Return True if the generator was too late for its figures to describe the server
        alone.
        """
        return bool(self.total) and quantile(self.lag_ms, 0.99) > max(_LAG_MS, 0.05 * self.slo_ms)

    def holds(self, slo_ms: float, share: float = 0.99) -> bool:
        """Return True if that share of all queries got a model's answer within `slo_ms`."""
        return bool(self.total) and float(np.mean(self.strict_ms() <= slo_ms)) >= share

    def summary(self) -> dict[str, object]:
        """Return all figures for JSON."""
        answers, lag = self.answers_ms(), self.lag_ms
        return {
            "rate": self.rate,
            "seconds": round(self.lasted_s, 3),
            "interrupted": self.interrupted,
            "sent": self.total,
            "sent_per_s": round(self.total / self.lasted_s, 2),
            "outcomes": self.counts(),
            "late": int(np.sum(answers > self.slo_ms)),
            "slo_ms": self.slo_ms,
            "goodput_per_s": round(self.goodput(), 2),
            "latency_ms": (
                quantiles(answers)
                | {"max": _rounded(float(answers.max()) if len(answers) else math.nan)}
            ),
            "errors": dict(self.errors.most_common()),
            "generator": {
                "behind": self.is_behind(),
                "lag_p99_ms": _rounded(quantile(lag, 0.99)),
                "lag_max_ms": _rounded(float(lag.max()) if len(lag) else math.nan),
                "waited_for_a_connection": self.waited,
                "cpu_share": round(self.cpu_s / self.lasted_s, 3),
            },
        }


def _between_ms(started_s: "array[float]", ended_s: "array[float]") -> NDArray[np.float64]:
    return np.array(ended_s, np.float64) * 1000 - np.array(started_s, np.float64) * 1000


def quantile(values: NDArray[np.float64], share: float) -> float:
    """Return a quantile; NaN of an empty array."""
    return float(np.quantile(values, share, method="inverted_cdf")) if len(values) else math.nan


def quantiles(values: NDArray[np.float64]) -> dict[str, float | None]:
    """Return the quantiles of SHARES by name."""
    return {f"p{100 * share:g}": _rounded(quantile(values, share)) for share in SHARES}


def _rounded(value: float) -> float | None:
    return round(value, 4) if math.isfinite(value) else None
