"""Asynchronous training: a shard applies the gradients of a call at once.

A push is checked before anything of it is applied. A repeated push is recognized by worker and
sequence.
"""

from collections.abc import Mapping

import numpy as np

from clipper.errors import StalePush
from clipper.params.shard.parameters import DENSE, Parameters
from clipper.params.shard.replication.followers import pushes_paused
from clipper.params.shard.training.gradients import (
    OLD,
    SEEN,
    GradientApplier,
    Gradients,
    PushResult,
    check_quotas,
)
from clipper_container.params.frames import RefusalCode
from clipper_core.params.shard_loop import ShardLoop

_NONE = np.empty(0, np.int64)


class AsyncTraining:
    """Applies each push at once. Threads: the answering one.

    lag_max: refuse gradients that are more versions old; 0: none. slows: divide the learning rate
    by the age.
    """

    by_python = False  # pushes of rows alone are applied by the core

    def __init__(
        self, core: ShardLoop, parameters: Parameters, *, lag_max: int = 0, slows: bool = False
    ) -> None:
        self.core, self.parameters, self._lag_max, self._slows = core, parameters, lag_max, slows
        self._gradients = GradientApplier(core, parameters)

    def push(self, message: Mapping[str, object]) -> PushResult:
        """Apply a push. Raises InvalidInput, UnknownTable, UnknownVariable, StalePush; nothing has
        changed then."""
        gradients = self._gradients.checked(message)
        sight = self.core.look(gradients.worker, gradients.sequence)
        if sight == SEEN:
            return PushResult(
                {"accepted": True, "repeated": True, "version": self.core.version},
                self.core.position,
            )
        if sight == OLD:
            raise StalePush(
                f"push {gradients.sequence} of worker {gradients.worker} is too old to know whether"
                " it was applied.",
                hint="Do not send it again.",
            )
        lag = self._gradients.age(gradients)
        if self._lag_max and lag > self._lag_max:
            why = f"the gradient is {lag} versions old, and at most {self._lag_max} are accepted"
            self.core.counts.refuse(RefusalCode.TOO_STALE)
            return PushResult({"accepted": False, "version": self.core.version, "why": why}, 0)
        return self._apply(
            gradients, gradients.scale / max(1, lag) if self._slows else gradients.scale
        )

    def tick(self) -> None:
        """Do nothing: asynchronous training has no work that is due at a time."""

    def _apply(self, gradients: Gradients, scale: float) -> PushResult:
        """Apply gradients as one step, which makes one version."""
        with pushes_paused(self.core):
            for place, ids, _ in gradients.rows:
                check_quotas(self.core, place, ids)
            version = self.core.version + 1
            self.parameters.dense.apply(gradients.variables, scale, version)
            no_room = sum(
                self._gradients.push_rows(table, ids, rows, scale)
                for table, ids, rows in gradients.rows
            )
            changed = np.fromiter(gradients.variables, np.int64) if gradients.variables else _NONE
            position = self.core.note(DENSE, changed, gradients.worker, gradients.sequence)
            self.core.version = version
        self.core.counts.take()
        return PushResult({"accepted": True, "version": version, "no_room": no_room}, position)
