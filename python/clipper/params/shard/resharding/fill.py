"""Filling of a shard of a new set with the rows of the old one, before it serves: see move.

What it takes is replicated, logged and in snapshots as pushes are, and each piece is acknowledged
when that is done. Until the move is decided it refuses workers.
"""

from typing import TYPE_CHECKING

import msgspec
import numpy as np

from clipper.errors import DoesNotFit
from clipper.params.shard.durability.recovery import SEQUENCES, WINDOW
from clipper.params.shard.parameters import DENSE, Piece
from clipper.params.shard.replication.followers import pushes_paused
from clipper.params.shard.resharding.decision import decision_in, durable_decision
from clipper.params.shard.resharding.move import CLOSED, OPEN
from clipper.params.shard.training.gradients import PushResult
from clipper.spec.table import TableSpec
from clipper_container.params.push_identity import SEQUENCE_MAX, origin_worker

if TYPE_CHECKING:
    from clipper.params.shard.shard import CallId, Shard

_NONE = np.empty(0, np.int64)


class SetFill:
    """Takes the rows of an old set. Threads: the answering one."""

    def __init__(self, shard: "Shard") -> None:
        self._shard = shard
        self._gathered: dict[int, list[Piece]] = {}  # by old shard, its part of each push

    def restore(self) -> None:
        """Refuse workers, before this shard serves, until the move is decided."""
        config = self._shard.config
        if config.fills and config.home is not None and decision_in(config.home) != "commit":
            self._shard.core.access = CLOSED

    @property
    def _fills(self) -> bool:
        return self._shard.config.fills and self._shard.core.access == CLOSED

    def open(self, _: Piece, __: "CallId") -> Piece:
        """Serve, if that was decided."""
        self.tick()
        return {"open": self._shard.core.access == OPEN}

    def tick(self) -> None:
        """Serve when the move is decided: also if its supervisor was killed just then."""
        home = self._shard.config.home
        if self._fills and home is not None and durable_decision(home) == "commit":
            self._shard.core.access = OPEN

    def resync(self, _: Piece, __: "CallId") -> Piece:
        """Have followers copy the sequences that were seen, which changes do not have."""
        for one in self._shard.followers.each:
            one.give_up()
        return {}

    def fill(self, message: Piece, call_id: "CallId") -> None:
        """Take rows, variables, and what was seen. Raises DoesNotFit.

        source: number of the old shard. seen: by worker, its window of sequences, as of the
        beginning. told: worker, sequence, worker, ... of each push since. specs, steps, version,
        dense: what the old shard has for all rows. gathered: pushes that wait for a step.
        """
        shard, core, parameters = self._shard, self._shard.core, self._shard.parameters
        if not self._fills:
            raise DoesNotFit(f"shard {shard.config.number} is not being filled.")
        self._take_specs(message)
        self._take_seen(message)
        with pushes_paused(core):
            for part in message.get("rows", ()):
                self._take_rows(part)
            for name, steps in message.get("steps", {}).items():
                table = parameters.tables[parameters.place(name)]
                table.steps = max(table.steps, int(steps))
            core.version = max(core.version, int(message.get("version", 0)))
        self._take_dense(message)
        if "gathered" in message:
            self._take_gathered(int(message["source"]), message["gathered"])
        shard.answer_when_replicated(PushResult({}, core.position), call_id)

    def _take_specs(self, message: Piece) -> None:
        """Have the tables of the old set, with the settings that they have there."""
        shard, parameters = self._shard, self._shard.parameters
        for given in message.get("specs", ()):
            spec = msgspec.convert(given, TableSpec)
            if spec.name not in parameters.numbers():
                shard.add_table(spec)
            elif parameters.specs[parameters.place(spec.name)] != spec:
                shard.alter_table(spec)

    def _take_seen(self, message: Piece) -> None:
        """Note which pushes the old shard has seen, and that pushes of their numbers are old."""
        core, generation = self._shard.core, self._shard.config.generation
        source = int(message["source"])
        for worker, window in message.get("seen", {}).items():
            high, _, *bits = SEQUENCES.unpack(window)
            core.saw(origin_worker(worker, generation, source), SEQUENCES.pack(high, 0, *bits))
            above = max(min(high + WINDOW, SEQUENCE_MAX), core.highest(worker))
            core.saw(worker, SEQUENCES.pack(above, 1, *[0] * len(bits)))
        pairs = message.get("told", [])
        highest: dict[int, int] = {}
        for worker, sequence in zip(pairs[::2], pairs[1::2], strict=True):
            core.note(DENSE, _NONE, origin_worker(worker, generation, source), sequence)
            highest[worker] = max(sequence, highest.get(worker, 0))
        for worker, sequence in highest.items():
            above = min(sequence + WINDOW, SEQUENCE_MAX)
            if above > core.highest(worker):
                core.note(DENSE, _NONE, worker, above)  # which no client uses

    def _take_rows(self, part: Piece) -> None:
        parameters, core = self._shard.parameters, self._shard.core
        place = parameters.place(str(part["table"]))
        table = parameters.tables[place]
        if "gone" in part:
            table.remove(part["gone"])
            core.note(place, part["gone"])
            return
        counted = table.write(part["ids"], part["rows"], part["stamps"])
        core.note(place, part["ids"])
        if counted["refused"]:
            raise DoesNotFit(
                f"table {table.name!r}: {counted['refused']} rows have no room in shard"
                f" {self._shard.config.number}.",
                hint="Raise its rows_max, or use more shards.",
            )

    def _take_gathered(self, source: int, pushes: list[Piece]) -> None:
        """Have the pushes that wait for a step, of which each old shard has a part, in place of
        those that this one sent before."""
        parameters, core = self._shard.parameters, self._shard.core
        self._gathered[source] = pushes
        numbers = {name: number for number, (name, _) in enumerate(parameters.dense.names())}
        whole: dict[tuple[int, int], Piece] = {}
        for part in (part for each in self._gathered.values() for part in each):
            worker = origin_worker(part["worker"], self._shard.config.generation, 0)
            mine = {**part, "worker": worker, "variables": {}, "rows": []}
            push = whole.setdefault((worker, part["sequence"]), mine)
            push["variables"] |= {numbers[name]: g for name, g in part["variables"].items()}
            for row in part["rows"]:
                push["rows"].append({**row, "table": parameters.place(row["table"])})
        with pushes_paused(core):
            parameters.gathered = list(whole.values())
        core.note(DENSE, _NONE)

    def _take_dense(self, message: Piece) -> None:
        dense, core = self._shard.parameters.dense, self._shard.core
        given = message.get("variables", [])
        new = [one for one in given if one["name"] not in dict(dense.names())]
        summary: Piece = message.get("dense") or {"initialized": False}
        initialized = summary["initialized"] and not dense.initialized
        with pushes_paused(core):
            if initialized:
                dense.receive(summary)
            changed = [dense.overwrite(one) for one in given if one not in new]
        if new or initialized:
            with pushes_paused(core):
                dense.write(new)
            self._shard.serve_variables()
        elif changed:
            core.note(DENSE, changed)
