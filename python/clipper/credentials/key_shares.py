"""Shares of keys: their numbers, which queries carry, and their weights in the queue of a model."""

from collections.abc import Mapping
from typing import Final

from clipper.errors import InvalidInput

SHARES_MAX: Final = 15  # keys with a share; the bands of the core have room for no more
_ALL: Final = 100  # percent


class KeyShares:
    """The shares of the keys of a file, by the names of their owners. Threads: one at a time.

    A name keeps its number while the file has it, so rows that wait keep their place.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._percents: dict[str, int] = {}

    def assign(self, percents: Mapping[str, int]) -> None:
        """Take the shares of a file, in percent, which `check_shares` has accepted."""
        self._percents = dict(percents)
        kept = {name: number for name, number in self._numbers.items() if name in percents}
        free = (number for number in range(1, SHARES_MAX + 1) if number not in kept.values())
        self._numbers = {name: kept.get(name) or next(free) for name in percents}

    def number(self, name: str) -> int:
        """Return the number of a name's share; 0 for one without."""
        return self._numbers.get(name, 0)

    @property
    def weights(self) -> list[int]:
        """The weight of each share by its number; number 0 is of all keys without one."""
        found = [1] * (SHARES_MAX + 1)
        found[0] = _ALL - sum(self._percents.values())
        for name, number in self._numbers.items():
            found[number] = self._percents[name]
        return found


def check_shares(percents: Mapping[str, int]) -> None:
    """Raise InvalidInput for more shares than there may be, and for shares that leave nothing to
    keys without one."""
    if len(percents) > SHARES_MAX:
        raise InvalidInput(
            f"{len(percents)} keys have a share: at most {SHARES_MAX} may.",
            hint="Leave out the smallest: keys without a share have one together.",
        )
    total = sum(percents.values())
    if total >= _ALL:
        raise InvalidInput(
            f"the shares of the keys add up to {total}%: at least 1% stays for keys without one.",
            hint="clipper key list shows them.",
        )
