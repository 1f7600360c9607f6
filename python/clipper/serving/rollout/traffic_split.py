"""Traffic split of a rollout: which queries see the new version, and what becomes of both sides.

Each side is a resolved application with models, learned state and decider of its own, so the new
side behaves as the application will after the rollout. A user stays on one side: the hash of the
name in [0, 1) never changes, and a growing share only adds users. Queries without a user are drawn
at random.
"""

import hashlib
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clipper.catalog.view import Rollout
from clipper.selection import Observation
from clipper.selection.learning.batch_learning import Column, ObservationRows, losses_by_model
from clipper.selection.policy import Predictions, loss
from clipper.serving.feedback.states import FeedbackObserver
from clipper.serving.rollout.guards import Counts, Figures, guards_in
from clipper.types import VersionedModel
from clipper_core.engine.model import Model as CoreModel
from clipper_core.learning.answer_counts import SideCounts
from clipper_core.learning.label_feedback import LabelCounts

if TYPE_CHECKING:
    from clipper.serving.query.processor import ResolvedApplication


COMPARED_S_MAX = (
    100.0  # of the new version's queries, so many a second are sent to the one before, too
)


def place_of(salt: str, key: str) -> float:
    """Return a stable hash of a key in [0, 1)."""
    return (
        int.from_bytes(
            hashlib.blake2b(f"{salt}\0{key}".encode("utf-8", "replace"), digest_size=8).digest()
        )
        / 2.0**64
    )


class SideStats:
    """Counts of one side of a rollout. Threads: any. limits_us: latencies whose excess is
    counted.
    """

    __slots__ = ("_feedback_count", "_guard", "_reward", "answers")

    def __init__(self, limits_us: Sequence[int]) -> None:
        self.answers = SideCounts(limits_us)
        self._guard = threading.Lock()
        self._feedback_count = self._reward = 0.0

    def count_rows(self, latencies_us: np.ndarray, is_default: np.ndarray) -> None:
        """Count the answers of an array."""
        for latency_us, default in zip(latencies_us.tolist(), is_default.tolist(), strict=True):
            self.answers.add(latency_us, default)

    def reward(self, n: float, total: float) -> None:
        """Add n feedbacks with this sum of rewards, each 0 to 1."""
        with self._guard:
            self._feedback_count += n
            self._reward += min(max(total, 0.0), n)

    def counts(self) -> Counts:
        """Return the counts so far."""
        with self._guard:
            feedback_count, reward = self._feedback_count, self._reward
        answers, took = self.answers, self.answers.duration.snapshot()
        quantiles = (took.quantile(0.5), took.quantile(0.99)) if took.count else (None, None)
        slower = {limit: counter.value for limit, counter in answers.slower.items()}
        return Counts(
            answers.answers.value,
            answers.defaults.value,
            slower,
            feedback_count,
            reward,
            *quantiles,
        )


class RolloutObserver:
    """Observer that passes feedback to the application's counters and to one side's. Threads:
    any.
    """

    __slots__ = ("_arm", "_next")

    labels: LabelCounts | None = None  # each label is a call

    def __init__(self, next: FeedbackObserver, arm: SideStats) -> None:
        self._next, self._arm = next, arm

    def on_feedback(self, seen: Observation) -> bool:
        """Pass one feedback on."""
        truth = seen.truth
        self._arm.reward(
            1.0, 1.0 - loss(seen.answer, truth.label) if truth.known else float(truth.score or 0.0)
        )
        self._next.on_feedback(seen)
        return True

    def on_label(
        self, arrived: Predictions, label: object, answer: object, weight: float = 1.0
    ) -> bool:
        """Pass a label on, if the application's counters count it."""
        if not self._next.on_label(arrived, label, answer, weight):
            return False
        self._arm.reward(1.0, 1.0 - loss(answer, label))
        return True

    def on_feedback_rows(self, rows: ObservationRows, answers: Column) -> None:
        """Pass feedback in columns on."""
        self._next.on_feedback_rows(rows, answers)
        lost = losses_by_model(
            msgspec.structs.replace(
                rows, outputs=(*rows.outputs, answers), arrived=(*rows.arrived, None)
            )
        )
        if lost is not None:
            self._arm.reward(
                len(rows), float(len(rows) - np.nansum(np.where(np.isnan(lost[-1]), 1.0, lost[-1])))
            )
            return
        for i in range(len(rows)):
            self._arm.reward(1.0, 1.0 - loss(answers[i], rows.observation(i).truth.label))


class StageStats:
    """Counts of one stage of a rollout. started_s: when counting began here, on the monotonic
    clock.
    """

    __slots__ = ("before", "compared", "guards", "new", "of", "started_s")

    def __init__(
        self, rollout: Rollout, started_s: float, compared: Callable[[], tuple[int, int]]
    ) -> None:
        self.of, self.started_s = rollout, started_s
        self.compared = _since(compared)
        self.guards = guards_in(rollout.guard)
        limits = [round(guard.limit) for guard in self.guards if guard.q]
        self.new, self.before = SideStats(limits), SideStats(limits)

    @property
    def compares(self) -> bool:
        """True if a guard compares outputs of both versions."""
        return any(guard.metric == "agreement" for guard in self.guards)

    def is_of(self, rollout: Rollout) -> bool:
        """Return whether these counts are of this stage of this rollout."""
        mine = self.of
        return (mine.model, mine.began_us, mine.stage) == (
            rollout.model,
            rollout.began_us,
            rollout.stage,
        )

    def figures(self) -> Figures:
        """Return the counts of both sides."""
        return Figures(self.new.counts(), self.before.counts(), *self.compared())


def _since(compared: Callable[[], tuple[int, int]]) -> Callable[[], tuple[int, int]]:
    n, agreed = compared()

    def now() -> tuple[int, int]:
        more, agreeing = compared()
        return (more - n, agreeing - agreed) if more >= n else (more, agreeing)

    return now


class TrafficSplit:
    """Division of an application's queries between two versions. new, before: the application with
    either version, without a split. cores: handles of both sides' models.
    """

    __slots__ = ("_draw", "_salt", "before", "cores", "new", "share", "stage")

    def __init__(
        self,
        new: "ResolvedApplication",
        before: "ResolvedApplication",
        stage: StageStats,
        cores: dict[VersionedModel, CoreModel],
        draw: Callable[[], float],
    ) -> None:
        rollout = stage.of
        self.new, self.before = new, before
        self.stage = stage
        self.cores = cores
        self.share = rollout.share
        self._salt, self._draw = f"{rollout.application}\0{rollout.model}\0{rollout.began_us}", draw

    def takes(self, user: str | None) -> bool:
        """Return whether a query of this user sees the new version."""
        return (place_of(self._salt, user) if user else self._draw()) < self.share
