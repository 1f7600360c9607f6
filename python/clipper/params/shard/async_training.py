"""Asynchronous training: a shard applies the gradients of a call at once.

Pushes of rows alone are applied by the core (clipper_core.params). This module applies a step of
the whole model: dense variables, and rows of several tables. A push is checked before anything of
it is applied. A repeated push is recognized by worker and sequence.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from clipper.errors import InvalidInput, StalePush
from clipper.params.frames import Refusal
from clipper.params.shard.dense import F32
from clipper.params.shard.parameters import DENSE, Ids, Parameters, Piece
from clipper.params.shard.replication import pushes_paused
from clipper_core.params.shard_door import ShardDoor

_NONE = np.empty(0, np.int64)
_SEQUENCE_MAX = (1 << 64) - 1
SEEN, OLD = 1, 2


class Gradients(NamedTuple):
    """The checked gradients of one push.

    version: of the model that they were computed at; 0: unknown. rows: (table, ids, f32[n, dim]).
    """

    worker: int
    sequence: int
    version: int
    scale: float
    variables: dict[int, F32]
    rows: list[tuple[int, Ids, F32]]


class Pushed(NamedTuple):
    """Answer to a push. It may be sent when followers have `position`."""

    answer: Piece
    position: int


class AsyncTraining:
    """Applies each push at once. Threads: the answering one.

    lag_max: refuse gradients that are more versions old; 0: none. slows: divide the learning rate
    by the age.
    """

    by_python = False  # whether pushes of rows alone come here too

    def __init__(
        self, door: ShardDoor, parameters: Parameters, *, lag_max: int = 0, slows: bool = False
    ) -> None:
        self.door, self.parameters, self._lag_max, self._slows = door, parameters, lag_max, slows

    def push(self, said: Mapping[str, Any]) -> Pushed:
        """Apply a push. Raises InvalidInput, UnknownTable, UnknownVariable, StalePush; nothing has
        changed then."""
        gradients = self.checked(said)
        sight = self.door.look(gradients.worker, gradients.sequence)
        if sight == SEEN:
            return Pushed(
                {"accepted": True, "repeated": True, "version": self.door.version},
                self.door.position,
            )
        if sight == OLD:
            raise StalePush(
                f"push {gradients.sequence} of worker {gradients.worker} is too old to know whether"
                " it was applied.",
                hint="Do not send it again.",
            )
        lag = self.lag(gradients)
        self._note_lag(gradients, lag)
        if self._lag_max and lag > self._lag_max:
            why = f"the gradient is {lag} versions old, and at most {self._lag_max} are accepted"
            self.door.counts.refuse(Refusal.TOO_STALE)
            return Pushed({"accepted": False, "version": self.door.version, "why": why}, 0)
        return self.apply(
            gradients, gradients.scale / max(1, lag) if self._slows else gradients.scale
        )

    def tick(self) -> None:
        """Do nothing: asynchronous training has no work that is due at a time."""

    def lag(self, gradients: Gradients) -> int:
        """Return the age of gradients in versions; 0 if they do not name their version."""
        return max(0, self.door.version - gradients.version) if gradients.version else 0

    def _note_lag(self, gradients: Gradients, lag: int) -> None:
        if gradients.version:
            self.door.counts.lag(lag)

    def apply(self, gradients: Gradients, scale: float) -> Pushed:
        """Apply gradients as one step, which makes one version."""
        with pushes_paused(self.door):
            version = self.door.version + 1
            self.parameters.dense.apply(gradients.variables, scale, version)
            no_room = sum(
                self.push_rows(table, ids, rows, scale) for table, ids, rows in gradients.rows
            )
            changed = np.fromiter(gradients.variables, np.int64) if gradients.variables else _NONE
            position = self.door.note(DENSE, changed, gradients.worker, gradients.sequence)
            self.door.version = version
        self.door.counts.take()
        return Pushed({"accepted": True, "version": version, "no_room": no_room}, position)

    def push_rows(self, table: int, ids: Ids, gradients: F32, scale: float) -> int:
        """Apply gradients of rows while pushes are paused. Returns how many ids found no room.

        Followers are told these rows, and those that were evicted for them.
        """
        gone: list[Ids] = []
        counted = self.parameters.tables[table].push(
            ids, gradients, scale=scale, stamp=self.door.stamp, gone=gone
        )
        self.door.counts.push(table, counted)
        for each in (*gone, ids):
            self.door.note(table, each)
        return counted["refused"]

    def checked(self, said: Mapping[str, Any]) -> Gradients:
        """Return the checked gradients of a message. Raises InvalidInput, UnknownTable,
        UnknownVariable."""
        scale = _number(said, "scale", 1.0) or 1.0  # 0: the server's own
        if not (scale > 0 and math.isfinite(scale)):
            raise InvalidInput(
                f"scale = {scale}: a finite number, 0 (the optimizer's rate) or above."
            )
        variables, rows = said.get("variables") or {}, said.get("rows") or {}
        if not isinstance(variables, dict) or not isinstance(rows, dict):
            raise InvalidInput("variables and rows are maps by name.")
        return Gradients(
            whole(said, "worker"),
            whole(said, "sequence"),
            whole(said, "version"),
            scale,
            self.parameters.dense.check(variables),
            [self._rows(name, part) for name, part in rows.items()],
        )

    def _rows(self, name: str, part: Any) -> tuple[int, Ids, F32]:
        number = self.parameters.number(name)
        dim = self.parameters.tables[number].dim
        if not isinstance(part, dict) or not {"ids", "gradients"} <= part.keys():
            raise InvalidInput(f"table {name!r}: rows are a map of ids and gradients.")
        ids, gradients = (
            np.asarray(part["ids"]),
            np.ascontiguousarray(part["gradients"], np.float32),
        )
        if ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
            raise InvalidInput(f"table {name!r}: ids are i64[n], not {ids.dtype}{list(ids.shape)}.")
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
        return number, ids.view(np.int64), gradients


def _number(said: Mapping[str, Any], key: str, default: float) -> float:
    value = said.get(key, default)
    if not isinstance(value, int | float):
        raise InvalidInput(f"{key} is a number, not {value!r}.")
    return float(value)


def whole(said: Mapping[str, Any], key: str) -> int:
    """Return a whole number of a message; 0 if it is missing. Raises InvalidInput."""
    value = said.get(key, 0)
    if not isinstance(value, int) or not 0 <= value <= _SEQUENCE_MAX:
        raise InvalidInput(f"{key} is a whole number from 0 to 2^64 - 1, not {value!r}.")
    return value
