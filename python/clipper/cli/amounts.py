"""Sizes and shares as people write them: `512Mi`, `5%`."""

import math
import re
from typing import Final

import click

_SIZE: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?\s*", re.IGNORECASE)
_UNITS: Final = {
    "k": 1000,
    "m": 1000**2,
    "g": 1000**3,
    "t": 1000**4,
    "ki": 1024,
    "mi": 1024**2,
    "gi": 1024**3,
    "ti": 1024**4,
}
_MIB: Final = 1024**2


class Size(click.IntRange):
    """A memory size as `512Mi`, `2Gi` or `2G`; a number alone is MiB. Its value is whole MiB.

    least, most: bounds in MiB.
    """

    name = "size"

    def __init__(self, least: int = 1, most: int = 1 << 30) -> None:
        super().__init__(least, most)

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> int:
        """Return a size in MiB."""
        found = _SIZE.fullmatch(str(value))
        if found is None:
            self.fail(f"{value!r} is not a size, such as 512Mi or 2Gi.", param, ctx)
        unit = _UNITS[found[2].lower()] if found[2] else _MIB
        size: int = super().convert(int(float(found[1]) * unit) // _MIB, param, ctx)
        return size


class Share(click.FloatRange):
    """A share as `5%` or `0.05`. Its value is from 0 to 1."""

    name = "share"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """Return a share as a number from 0 to 1."""
        text = str(value).strip()
        number = text.removesuffix("%")
        try:
            share = float(number) / (100 if number != text else 1)
            if not math.isfinite(share):
                raise ValueError(number)
        except ValueError:
            self.fail(f"{value!r} is not a share, such as 5% or 0.05.", param, ctx)
        found: float = super().convert(share, param, ctx)
        return found
