"""Queries observers if there is room, and compares their outputs with answers without waiting.

An observer's output is read when the application's next answer is made, or its statistics are read:
by then its future is done, or is left for the next time. The number of outputs that wait is
bounded, and those beyond the bound are counted. An observer's tasks that are open are few: a
stuck model costs `OPEN_MAX` futures and nothing else. A shadow is shed first: when a task of the
application, or its own, ends because there was no room or no time, no shadow is queried for
`REST_S` seconds.
"""

import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from clipper.errors import ClipperError
from clipper.selection import Prediction
from clipper.selection.policy import agrees, is_number, is_usable
from clipper.serving.rollout.roles import PRIMARY, Role
from clipper.serving.rollout.sketch import Drift, Quantiles, size_of
from clipper.types import UserValue, VersionedModel
from clipper_core.engine.model import Model as CoreModel
from clipper_core.engine.model import predict_all
from clipper_core.learning.answer_counts import Bucket
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status

OPEN_MAX = 256
PENDING_MAX = 1024
REST_S = 0.1
Late = Sequence[tuple[VersionedModel, Future]]
_NO_ROOM = (Status.FULL, Status.DROPPED, Status.DEADLINE)


class Watch:
    """One observer's tasks. Threads: any; counts are exact."""

    __slots__ = (
        "_bucket",
        "_lock",
        "_open",
        "_rest_until_s",
        "answered",
        "failed",
        "late",
        "over_budget",
        "refused",
        "sent",
        "shed",
    )

    def __init__(self) -> None:
        self.sent = self.answered = self.late = self.refused = self.failed = self.shed = (
            self.over_budget
        ) = 0
        self._open: deque[Future] = deque()
        self._bucket: Bucket | None = None
        self._rest_until_s = 0.0
        self._lock = threading.Lock()

    def submit(
        self,
        core: CoreModel,
        x: object,
        slo_us: int,
        salt: int,
        now_s: float,
        role: Role = PRIMARY,
        rests: float = 0.0,
        reader: object = None,
    ) -> Future | None:
        """Return the observer's future, if its gate lets the query in. rests: until when shadows
        rest. reader: an object whose `output_name` is the named output that the future reads."""
        with self._lock:
            self._sweep(now_s)
            if len(self._open) >= OPEN_MAX or (
                role.kind == "shadow" and now_s < max(rests, self._rest_until_s)
            ):
                self.shed += 1
                return None
            if not self._has_budget(role, now_s):
                self.over_budget += 1
                return None
            self.sent += 1
        try:
            future = (
                core.predict(x, slo_us / 1000, salt)
                if reader is None
                else predict_all((core,), x, slo_us, salt, None, reader)
            )  # not under the lock: a large row takes its time to copy
        except ClipperError:
            with self._lock:
                self.refused += 1
            return None
        with self._lock:
            self._open.append(future)
        return future

    def _has_budget(self, role: Role, now_s: float) -> bool:
        if role.rate_max == float("inf"):
            return True
        if self._bucket is None or self._bucket.rate != role.rate_max:
            self._bucket = Bucket(role.rate_max, 1.0 + role.rate_max / 10, now_s)
        return self._bucket.take(now_s)

    def _sweep(self, now_s: float) -> None:
        """Count those that have ended. One that is not done hides those behind it, for its SLO at
        most."""
        while self._open and self._open[0].done():
            status = self._open.popleft().status()
            if status is Status.OK:
                self.answered += 1
                continue
            if status in _NO_ROOM:
                self._rest_until_s = now_s + REST_S
            if status is Status.FULL:
                self.refused += 1
            elif status in (Status.DEADLINE, Status.DROPPED):
                self.late += 1
            else:
                self.failed += 1

    def stats(self) -> dict[str, int]:
        """Return counters of the observer."""
        with self._lock:
            self._sweep(0.0)
            return {
                "sent": self.sent,
                "answered": self.answered,
                "late": self.late,
                "refused": self.refused,
                "failed": self.failed,
                "shed": self.shed,
                "over_budget": self.over_budget,
                "open": len(self._open),
            }


class _Compared:
    """One model beside a canary, or an observer beside the answer. Threads: one at a time."""

    __slots__ = ("away", "n", "same")

    def __init__(self) -> None:
        self.n = self.same = 0
        self.away = Quantiles()

    def add(self, output: UserValue, standard: UserValue) -> None:
        """Add a comparison: labels by equality, numbers by how far `output` lies above `standard`,
        arrays by their distance."""
        if not (is_usable(output) and is_usable(standard)):
            return
        if is_number(output) and is_number(standard):
            if np.shape(output) != np.shape(standard):
                return
            with np.errstate(over="ignore", invalid="ignore"):
                away = size_of(output - standard)
            self.away.add(away)
            self.same += away == 0.0
        else:
            self.same += agrees(output, standard)
        self.n += 1

    def stats(self) -> dict[str, object]:
        share = {"agreement": self.same / self.n} if self.n else {}
        return {
            "n": self.n,
            **share,
            **({"difference": self.away.stats()} if self.away.count else {}),
        }


class _Canary:
    __slots__ = ("drift", "others")

    def __init__(self) -> None:
        self.drift = Drift()
        self.others: dict[VersionedModel, _Compared] = {}


class Watched:
    """Predictions of an application's observers, compared with its answers. Threads: any."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.canaries: frozenset[VersionedModel] = frozenset()
        self.rests_until_s = 0.0
        self._clock = clock
        self._lock = threading.Lock()
        self._pending: deque[tuple[Mapping[VersionedModel, Prediction], UserValue, Late]] = deque()
        self._canaries: dict[VersionedModel, _Canary] = {}
        self._beside: dict[VersionedModel, _Compared] = {}
        self.unlooked = 0

    def overloaded(self) -> None:
        """Note an overload: shadows get no queries for a while."""
        self.rests_until_s = self._clock() + REST_S

    def keep(self, models: Collection[VersionedModel]) -> None:
        """Forget models that are not among these."""
        with self._lock:
            self._canaries = {
                model: one for model, one in self._canaries.items() if model in models
            }
            for canary in self._canaries.values():
                canary.others = {
                    model: one for model, one in canary.others.items() if model in models
                }
            self._beside = {model: one for model, one in self._beside.items() if model in models}

    def add(self, arrived: Mapping[VersionedModel, Prediction], answer: object, late: Late) -> None:
        """Add an answer whose observers were queried, and compare earlier ones that are
        complete."""
        with self._lock:
            self._pending.append((arrived, answer, late))
            if len(self._pending) > PENDING_MAX:
                self._pending.popleft()
                self.unlooked += 1
            self._compare_with(
                3
            )  # more than come in, and some may have to wait for a stuck observer

    def _compare_with(self, most: int) -> None:
        """Compare those that are complete; the others go to the back of the queue."""
        for _ in range(min(most, len(self._pending))):
            entry = self._pending.popleft()
            if all(future.done() for _, future in entry[2]):
                self._compare(*entry)
            else:
                self._pending.append(entry)

    def _compare(
        self, arrived: Mapping[VersionedModel, Prediction], answer: object, late: Late
    ) -> None:
        predictions = {
            model: future.output(0)
            for model, future in late
            if future.done() and future.status() is Status.OK
        }
        for model, output in predictions.items():
            self._beside.setdefault(model, _Compared()).add(output, answer)
        everybody = {
            **{model: prediction.output for model, prediction in arrived.items()},
            **predictions,
        }
        for model in self.canaries & predictions.keys():
            canary = self._canaries.setdefault(model, _Canary())
            canary.drift.add(predictions[model])
            for other, output in everybody.items():
                if other != model:
                    canary.others.setdefault(other, _Compared()).add(output, predictions[model])

    def compared(self, canary: VersionedModel, model: VersionedModel) -> tuple[int, int]:
        """Return how often this model and that canary both answered, and how often they agreed."""
        for _ in range(PENDING_MAX // 16):
            with self._lock:
                self._compare_with(16)
        with self._lock:
            standard = self._canaries.get(canary)
            found = standard.others.get(model) if standard is not None else None
            return (found.n, found.same) if found is not None else (0, 0)

    def stats(self) -> dict[str, object]:
        """Return the comparisons: `observers`: with the answer; `canaries`: their drift, and the
        others against them."""
        for _ in range(PENDING_MAX // 16):
            with self._lock:  # a few at a time: answers are made meanwhile
                self._compare_with(16)
        with self._lock:
            found: dict[str, object] = {}
            if self._beside:
                found["observers"] = {
                    str(model): one.stats() for model, one in sorted(self._beside.items())
                }
            if self._canaries:
                found["canaries"] = {
                    str(model): {
                        "drift": canary.drift.stats(),
                        "others": {
                            str(other): one.stats() for other, one in sorted(canary.others.items())
                        },
                    }
                    for model, canary in sorted(self._canaries.items())
                }
            if self.unlooked:
                found["unlooked"] = self.unlooked
            return found
