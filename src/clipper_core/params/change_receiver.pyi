from typing import NamedTuple

from clipper_core.params.shard_loop import ShardLoop

class Changes(NamedTuple):
    position: int
    version: int
    epoch: int
    exact: bool
    ends: bool
    clock_s: float

class ChangeReceiver:
    def __init__(
        self, fd: int, copy: ShardLoop, *, frame_bytes_max: int = 268435456, spin_us: int = 0
    ) -> None: ...
    def receive(self, wait_s: float) -> Changes | None: ...
    def apply(self) -> None: ...
    def acknowledge(self, position: int, *, wants_reply: bool = False) -> None: ...
