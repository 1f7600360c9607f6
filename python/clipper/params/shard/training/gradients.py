"""Gradients that come by calls: how they are checked, and how those of rows are applied.

Pushes of rows alone are handled by the core (clipper_core.params). Calls have a step of the whole
model: dense variables, and rows of several tables.
"""

import math
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from clipper.errors import InvalidInput, QuotaExceeded
from clipper.params.shard.dense import F32
from clipper.params.shard.parameters import Ids, Parameters, Piece
from clipper_container.tensor_spec import given_type
from clipper_core.params.shard_loop import ShardLoop

_SEQUENCE_MAX = (1 << 64) - 1
SEEN, OLD = 1, 2


class Gradients(NamedTuple):
    """The checked gradients of one push.

    version: of the model that they were computed at; 0: unknown. rows: (place of a
    table, ids, f32[n, dim]).
    """

    worker: int
    sequence: int
    version: int
    scale: float
    variables: dict[int, F32]
    rows: list[tuple[int, Ids, F32]]


class PushResult(NamedTuple):
    """Answer to a push. It may be sent when followers have `position`."""

    answer: Piece
    position: int


class GradientApplier:
    """Checks gradients and applies those of rows. Threads: the answering one."""

    def __init__(self, core: ShardLoop, parameters: Parameters) -> None:
        self._core, self._parameters = core, parameters

    def age(self, gradients: Gradients) -> int:
        """Return the age of gradients in versions, and count it; 0 if they name no version."""
        if not gradients.version:
            return 0
        age = max(0, self._core.version - gradients.version)
        self._core.counts.lag(age)
        return age

    def push_rows(self, table: int, ids: Ids, gradients: F32, scale: float) -> int:
        """Apply gradients of rows while pushes are paused. Returns how many ids found no room.

        Followers get these rows, and the removal of those that were evicted for them.
        """
        gone: list[Ids] = []
        counted = self._parameters.tables[table].push(
            ids, gradients, scale=scale, stamp=self._core.stamp, gone=gone
        )
        self._core.counts.push(table, counted)
        for each in (*gone, ids):
            self._core.note(table, each)
        return counted["refused"]

    def checked(self, message: Mapping[str, object]) -> Gradients:
        """Return the checked gradients of a message. Raises InvalidInput, UnknownTable,
        UnknownVariable."""
        scale = _number(message, "scale", 1.0) or 1.0  # 0 means 1
        if not (scale > 0 and math.isfinite(scale)):
            raise InvalidInput(
                f"scale = {scale}: a finite number, 0 (the optimizer's rate) or above."
            )
        variables, rows = message.get("variables") or {}, message.get("rows") or {}
        if not isinstance(variables, dict) or not isinstance(rows, dict):
            raise InvalidInput("variables and rows are maps by name.")
        return Gradients(
            whole(message, "worker"),
            whole(message, "sequence"),
            whole(message, "version"),
            scale,
            self._parameters.dense.check(variables),
            [self._rows(name, part) for name, part in rows.items()],
        )

    def _rows(self, name: str, part: object) -> tuple[int, Ids, F32]:
        place = self._parameters.place(name)
        dim = self._parameters.tables[place].dim
        if not isinstance(part, dict) or not {"ids", "gradients"} <= part.keys():
            raise InvalidInput(f"table {name!r}: rows are a map of ids and gradients.")
        ids, gradients = (
            np.asarray(part["ids"]),
            np.ascontiguousarray(part["gradients"], np.float32),
        )
        if ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
            raise InvalidInput(f"table {name!r}: ids are i64[n], not {given_type(ids)}.")
        if gradients.shape != (ids.size, dim):
            raise InvalidInput(
                f"table {name!r}: gradients are f32[{ids.size}, {dim}], not"
                f" {list(gradients.shape)}."
            )
        if not np.isfinite(gradients).all():
            bad = ids[~np.isfinite(gradients).all(axis=1)][0]
            raise InvalidInput(
                f"table {name!r}: the gradient of id {bad} holds NaN or infinity.",
                hint="Nothing was changed.",
            )
        return place, ids.view(np.int64), gradients


def check_quotas(loop: ShardLoop, place: int, ids: Ids) -> None:
    """Raise QuotaExceeded if rows of these ids would exceed a quota, while pushes are paused."""
    number = loop.over_quota(place, ids)
    if number is not None:
        owner = "all tables of the shard" if number < 0 else f"table number {number}"
        raise QuotaExceeded(
            f"new rows would exceed the quota of {owner}.",
            hint="Nothing was changed. `clipper params alter TABLE --quota-rows N` raises one.",
        )


def _number(message: Mapping[str, object], key: str, default: float) -> float:
    value = message.get(key, default)
    if not isinstance(value, int | float):
        raise InvalidInput(f"{key} is a number, not {value!r}.")
    return float(value)


def whole(message: Mapping[str, object], key: str) -> int:
    """Return a whole number of a message; 0 if it is missing. Raises InvalidInput."""
    value = message.get(key, 0)
    if not isinstance(value, int) or not 0 <= value <= _SEQUENCE_MAX:
        raise InvalidInput(f"{key} is a whole number from 0 to 2^64 - 1, not {value!r}.")
    return value
