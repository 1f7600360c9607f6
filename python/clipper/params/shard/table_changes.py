"""Changes to a table that are no training: its settings, and rows that are written or erased.

Followers get the change as after a push, and the call is answered when those that are waited for
have it.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clipper.errors import InvalidInput, StoreError
from clipper.params.shard.durability.dropped_tables import Drop
from clipper.params.shard.parameters import DENSE, DROPPED, Ids, Piece
from clipper.params.shard.replication.followers import pushes_paused
from clipper.params.shard.training.gradients import PushResult, check_quotas
from clipper.params.tables import altered, empty_table
from clipper_container.params.frames import TABLES_MAX

if TYPE_CHECKING:
    from clipper.params.shard.shard import CallId, Shard


class TableChanges:
    """Answers the calls alter, drop, erase and write of one shard. Threads: the answering one."""

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard

    def alter(self, message: Piece, call_id: "CallId") -> None:
        """Change settings of a table. Raises UnknownTable, InvalidInput; nothing has changed then.

        With `check` it is only looked at whether they can be.
        """
        shard, parameters = self._shard, self._shard.parameters
        changes = message.get("changes")
        if not isinstance(changes, dict):
            raise InvalidInput("alter: changes are a map.")
        spec = altered(parameters.specs[parameters.place(str(message.get("table")))], changes)
        position = shard.core.position
        if not message.get("check"):
            position = shard.alter_table(spec)
        answer = PushResult({"spec": msgspec.to_builtins(spec)}, position)
        shard.answer_when_replicated(answer, call_id)

    def drop(self, request: Piece, call_id: "CallId") -> None:
        """Remove a table, if there is one. Raises StoreError; nothing has changed then."""
        shard, parameters = self._shard, self._shard.parameters
        name = str(request.get("table"))
        number = parameters.numbers().get(name)
        if number is None:
            nothing = PushResult({"dropped": False, "rows": 0}, shard.core.position)
            shard.answer_when_replicated(nothing, call_id)
            return
        place = number % TABLES_MAX
        table, rows = parameters.tables[place], len(parameters.tables[place])
        shard.followers.end_streams()  # a reply tells them
        shard.core.drop_table(number, empty_table(DROPPED))
        try:
            with pushes_paused(shard.core):
                epoch, position = shard.core.epoch, shard.resync_log.position
                shard.dropped.note(Drop(number, epoch, position))
                parameters.drop(place)
        except StoreError:
            shard.core.add_table(table, number, by_python=shard.training.by_python)
            raise
        shard.set_quotas()
        shard.changes.lose()
        position = shard.core.note(DENSE, [])
        shard.answer_when_replicated(PushResult({"dropped": True, "rows": rows}, position), call_id)

    def erase(self, message: Piece, call_id: "CallId") -> None:
        """Remove rows. Raises UnknownTable, InvalidInput."""
        shard = self._shard
        place = shard.parameters.place(str(message.get("table")))
        ids = _ids(message)
        with pushes_paused(shard.core):
            count = shard.parameters.tables[place].remove(ids)
            position = shard.core.note(place, ids)
        shard.answer_when_replicated(PushResult({"erased": count}, position), call_id)

    def write(self, message: Piece, call_id: "CallId") -> None:
        """Write rows as they are, f32[n, dim] or with their state f32[n, width]. steps: the table
        has had at least so many. Raises UnknownTable, InvalidInput; nothing has changed then."""
        shard = self._shard
        place = shard.parameters.place(str(message.get("table")))
        table, ids, rows = shard.parameters.tables[place], _ids(message), message.get("rows")
        if not isinstance(rows, np.ndarray) or rows.shape not in (
            (ids.size, table.dim),
            (ids.size, table.width),
        ):
            raise InvalidInput(f"table {table.name!r}: rows are f32[{ids.size}, {table.dim}].")
        steps = message.get("steps", 0)
        if not isinstance(steps, int):
            raise InvalidInput(f"steps is a number, not {steps!r}.")
        with pushes_paused(shard.core):
            check_quotas(shard.core, place, ids)
            stamps = np.full(ids.size, shard.core.stamp, np.uint32)
            counted = table.write(ids, rows.astype(np.float32, copy=False), stamps)
            table.steps = max(table.steps, steps)
            position = shard.core.note(place, ids)
        answer = {"written": counted["applied"], "no_room": counted["refused"]}
        shard.answer_when_replicated(PushResult(answer, position), call_id)


def _ids(message: Piece) -> Ids:
    ids = message.get("ids")
    if not isinstance(ids, np.ndarray) or ids.dtype not in (np.int64, np.uint64) or ids.ndim != 1:
        raise InvalidInput("ids are i64[n].")
    return ids.view(np.int64)
