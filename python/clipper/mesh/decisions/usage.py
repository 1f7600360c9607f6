"""Counters of how much models are used, on which scaling decides."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Final

MINUTE_MS: Final = 60_000
REGULAR_FROM: Final = 7  # minutes; use is regular with a use now and one between these two
REGULAR_TO: Final = 40


@dataclass(frozen=True, slots=True)
class Usage:
    """Use of one model since the last look.

    rate: queries a minute, all copies together. regular: used now, and also 7 to 40 minutes ago.
    queue_ms: mean time that rows waited for a free copy. service_ms: mean time of one copy for a
    query, 0 if unknown. waiting: rows that wait now. heavy_ms: when a copy was last near its limit.
    """

    used_ms: int = 0
    rate: float = 0.0
    regular: bool = False
    queue_ms: float = 0.0
    service_ms: float = 0.0
    waiting: int = 0
    heavy_ms: int = 0


def together(usages: Iterable[Usage]) -> Usage:
    """Combine the usage of one model as several nodes have seen it."""
    found = Usage()
    for usage in usages:
        found = Usage(
            max(found.used_ms, usage.used_ms),
            found.rate + usage.rate,
            found.regular or usage.regular,
            max(found.queue_ms, usage.queue_ms),
            max(found.service_ms, usage.service_ms),
            found.waiting + usage.waiting,
            max(found.heavy_ms, usage.heavy_ms),
        )
    return found


@dataclass(slots=True)
class _Counted:
    used_ms: int = 0
    count: int = 0
    waited_ms: float = 0.0
    served_ms: float = 0.0
    served: int = 0
    heavy_ms: int = 0
    minute: int = 0
    minutes: int = 0  # bit n: used n minutes before `minute`


class UsageCounter:
    """Counts uses since the last look, and remembers the minutes with a use for forty minutes.

    Memory: a few hundred bytes for each model used within forty minutes. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._models: dict[str, _Counted] = {}
        self._used: dict[str, _Counted] = {}
        self._read: dict[str, Usage] = {}
        self._here = self._since_ms = 0
        self._swept_ms = 0
        self.rate = 0.0  # queries a minute that copies of this node answered, as of the last `read`

    def note(
        self,
        model: str,
        now_ms: int,
        count: int = 1,
        waited_ms: float = 0.0,
        served_ms: float = 0.0,
        here: int | None = None,
    ) -> None:
        """Count queries until now, or until a time before: reports of other nodes come late.

        count: of all copies together. here: of them, those of this node's copy; None: all.
        waited_ms, served_ms: their total time waiting for a copy, and in one.
        """
        self._here += count if here is None else here
        held = self._models.get(model)
        if held is None:
            held = self._models[model] = _Counted()
        held.used_ms = max(held.used_ms, now_ms)
        held.count += count
        held.waited_ms += waited_ms
        if served_ms:
            held.served_ms += served_ms
            held.served += count
        minute = now_ms // MINUTE_MS
        if minute > held.minute:
            held.minutes = (held.minutes << min(minute - held.minute, 64)) & ((1 << 64) - 1)
            held.minute = minute
        held.minutes |= 1 << min(held.minute - minute, 64) & ((1 << 64) - 1)
        self._used[model] = held

    def read(self, now_ms: int, at_s: float | None = None) -> dict[str, Usage]:
        """Return the usage of the models used since the last call, and reset the counts.

        at_s: the time by a clock that nobody sets, for rates; None: `now_ms` is such a time.
        """
        at_ms = now_ms if at_s is None else int(at_s * 1000)
        window_ms = max(1, at_ms - self._since_ms) if self._since_ms else MINUTE_MS
        self._since_ms = at_ms
        found = {model: self._usage(held, window_ms) for model, held in self._used.items()}
        for held in self._used.values():
            held.count, held.waited_ms, held.served_ms, held.served = 0, 0.0, 0.0, 0
        self._used, self._read = {}, found
        self.rate, self._here = self._here * MINUTE_MS / window_ms, 0
        if now_ms - self._swept_ms > REGULAR_TO * MINUTE_MS:
            self._swept_ms = now_ms
            self._models = {
                m: h
                for m, h in self._models.items()
                if now_ms - h.used_ms <= REGULAR_TO * MINUTE_MS
            }
        return found

    def heavy(self, model: str, now_ms: int) -> None:
        """Note that a copy of the model is near its limit."""
        held = self._models.get(model)
        if held is not None:
            held.heavy_ms = now_ms

    def last(self, model: str, now_ms: int) -> Usage:
        """Return the last use of a model, with its rates as of the last `read`."""
        held = self._models.get(model)
        if held is None:
            return Usage()
        return replace(
            self._read.get(model, Usage()),
            used_ms=held.used_ms,
            regular=self._regular(held),
            heavy_ms=held.heavy_ms,
        )

    def forget(self, model: str) -> None:
        """Drop all counts of a model."""
        for counts in (self._models, self._used, self._read):
            counts.pop(model, None)

    def _regular(self, held: _Counted) -> bool:
        return bool((held.minutes >> REGULAR_FROM) & ((1 << (REGULAR_TO - REGULAR_FROM + 1)) - 1))

    def _usage(self, held: _Counted, window_ms: int) -> Usage:
        return Usage(
            held.used_ms,
            held.count * MINUTE_MS / window_ms,
            self._regular(held),
            held.waited_ms / held.count if held.count else 0.0,
            held.served_ms / held.served if held.served else 0.0,
            heavy_ms=held.heavy_ms,
        )
