"""Synchronous training: the gradients of several workers make one step.

All shards use the same pushes for the same step. Shard 0 decides: it accepts a push for the step
that it gathers, or refuses it as stale. A worker first has the other shards check the push, then
pushes to shard 0, then to the others with the step that shard 0 returned. So a push is accepted by
all shards or by none. A shard closes a step when it has `grads_to_wait` pushes for it: dense
gradients are averaged, those of rows are summed.

Pushes that were accepted and not applied yet are part of the parameters, and of replicas and
snapshots. A worker that dies between shard 0 and the others leaves their step open until `late_s`;
then it is closed without that push.
"""

import time
from collections.abc import Mapping

import numpy as np

from clipper.errors import DoesNotFit, InvalidInput, Overloaded, StalePush
from clipper.params.shard.parameters import DENSE, Parameters, Piece
from clipper.params.shard.replication.followers import pushes_paused
from clipper.params.shard.training.gradients import (
    OLD,
    SEEN,
    GradientApplier,
    Gradients,
    PushResult,
    check_quotas,
    whole,
)
from clipper_container.params.frames import RefusalCode
from clipper_core.params.shard_loop import ShardLoop

NOTHING: list[int] = []
WORKERS_MAX = 1 << 12  # of one push: the product of the sizes of the sets that it was made to
GATHERED_MAX = 4096  # accepted pushes beyond those of the open steps


class SyncTraining:
    """Gathers the pushes of a step. Threads: the answering one.

    decides: this is shard 0. grads_to_wait: number of pushes that make a step. lag_max: accept a
    push that is at most so many versions old. late_s: see the module.
    """

    by_python = True

    def __init__(
        self,
        core: ShardLoop,
        parameters: Parameters,
        *,
        decides: bool,
        grads_to_wait: int,
        lag_max: int = 0,
        late_s: float = 10.0,
    ) -> None:
        self.core, self.parameters = core, parameters
        self._gradients = GradientApplier(core, parameters)
        self._decides, self._waits_for, self._lag_max = decides, grads_to_wait, lag_max
        self._late_s = late_s
        self._ahead_s: float | None = None

    def push(self, message: Mapping[str, object]) -> PushResult:
        """Accept a push for a step. Raises what AsyncTraining.push raises, DoesNotFit, Overloaded.

        A message with `check` only checks whether the push could be accepted. One with `step` says
        that shard 0 has accepted it for that step. `workers` are further numbers as which the
        shards of sets before this one have sent it, if it was made to them.
        """
        gradients = self._gradients.checked(message)
        workers = gradients.worker, *_workers_in(message)
        version, step = self.core.version, message.get("step")
        sight = self.core.look(gradients.worker, gradients.sequence)
        if sight == OLD:
            raise StalePush(
                f"push {gradients.sequence} of worker {gradients.worker} is too old to know whether"
                " it was applied."
            )
        if sight == SEEN and any(
            self.core.look(one, gradients.sequence) != SEEN for one in workers
        ):
            raise StalePush(
                f"push {gradients.sequence} was accepted by shard 0 before the set was resharded,"
                " and other shards made the step without it: it was applied in part.",
                hint="Do not send it again. The worker had not answered for long.",
            )
        if message.get("check"):
            return PushResult({"accepted": True, "version": version}, 0)
        if sight == SEEN:
            taken = self._taken_for(gradients, version)
            return PushResult(
                {"accepted": True, "repeated": True, "version": version, "step": taken},
                self.core.position,
            )
        if self._decides:
            lag = self._gradients.age(gradients)
            if lag > self._lag_max:
                self.core.counts.refuse(RefusalCode.TOO_STALE)
                why = (
                    f"the gradient is of version {gradients.version}, and {version} is gathered; at"
                    f" most {self._lag_max} behind"
                )
                return PushResult({"accepted": False, "version": version, "why": why}, 0)
            step = version
        if not isinstance(step, int):
            raise DoesNotFit(
                "these shards make steps of several workers' gradients.",
                hint="Use client.push_gradients.",
            )
        if len(self.parameters.gathered) >= GATHERED_MAX + 2 * self._waits_for:
            hint = "Do all workers push to all shards?"
            raise Overloaded(
                f"{len(self.parameters.gathered)} gradients wait for steps that are not made.",
                hint=hint,
            )
        with pushes_paused(self.core):
            for place, ids, _ in gradients.rows:
                check_quotas(self.core, place, ids)
            self.parameters.gathered.append(_part(gradients, step))
            each = (self.core.note(DENSE, NOTHING, one, gradients.sequence) for one in workers)
            position = max(*each, self._close_steps(self._waits_for))
        self.core.counts.take()
        return PushResult({"accepted": True, "version": self.core.version, "step": step}, position)

    def tick(self) -> None:
        """Close a step that shard 0 closed long ago, without the push of a worker that has died."""
        ahead = any(part["step"] > self.core.version for part in self.parameters.gathered)
        now = time.monotonic()
        self._ahead_s = (self._ahead_s or now) if ahead else None
        if self._ahead_s is not None and now - self._ahead_s > self._late_s:
            with pushes_paused(self.core):
                self._close_steps(1 if self._has(self.core.version) else 0)
            self._ahead_s = None

    def _taken_for(self, gradients: Gradients, version: int) -> int:
        """Return the step that a push was accepted for, as far as it is still known."""
        mine = (gradients.worker, gradients.sequence)
        found = (
            part["step"]
            for part in self.parameters.gathered
            if (part["worker"], part["sequence"]) == mine
        )
        return int(next(found, gradients.version or version))

    def _has(self, step: int) -> int:
        return sum(part["step"] == step for part in self.parameters.gathered)

    def _close_steps(self, enough: int) -> int:
        """Close the steps that have enough pushes, while pushes are paused.

        Pushes for steps that are closed already are applied at once. Returns the position, 0 if
        nothing was applied.
        """
        position = 0
        while True:
            now = self.core.version
            late = [part for part in self.parameters.gathered if part["step"] < now]
            parts = [part for part in self.parameters.gathered if part["step"] == now]
            closes = len(parts) >= enough
            due = [*late, *parts] if closes else late
            self.parameters.gathered = [
                part for part in self.parameters.gathered if not any(part is one for one in due)
            ]
            if due:
                position = self._apply_parts(
                    due, max(len(parts), 1) if closes else self._waits_for, now + closes
                )
            if closes:
                self.core.version = now + 1
            if not closes or not any(part["step"] > now for part in self.parameters.gathered):
                return position
            enough = self._waits_for

    def _apply_parts(self, parts: list[Piece], count: int, version: int) -> int:
        scale = float(np.mean([part["scale"] for part in parts]))
        sums: dict[int, np.ndarray] = {}
        for part in parts:
            for number, gradient in part["variables"].items():
                sums[number] = sums.get(number, 0) + gradient / np.float32(count)
        self.parameters.dense.apply(sums, scale, version)
        for table in sorted({row["table"] for part in parts for row in part["rows"]}):
            mine = [row for part in parts for row in part["rows"] if row["table"] == table]
            ids = np.concatenate([row["ids"] for row in mine])
            gradients = np.concatenate([row["gradients"] for row in mine])
            self._gradients.push_rows(table, ids, gradients, scale)
        return self.core.note(DENSE, list(sums))


def _workers_in(message: Mapping[str, object]) -> list[int]:
    found = message.get("workers", [])
    if not isinstance(found, list) or len(found) > WORKERS_MAX:
        raise InvalidInput(f"workers is a list of at most {WORKERS_MAX} numbers.")
    return [whole({"workers": one}, "workers") for one in found]


def _part(gradients: Gradients, step: int) -> Piece:
    rows = [
        {"table": table, "ids": ids, "gradients": given} for table, ids, given in gradients.rows
    ]
    message = {
        "step": step,
        "worker": gradients.worker,
        "sequence": gradients.sequence,
        "scale": gradients.scale,
    }
    return {**message, "variables": gradients.variables, "rows": rows}
