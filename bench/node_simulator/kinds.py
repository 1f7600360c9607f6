"""Kinds of faults of a simulated mesh."""

from dataclasses import dataclass
from typing import Literal

FaultKind = Literal[
    "kill", "stop", "outage", "cut", "split", "slow", "corrupt", "host", "hang", "clock",
    "gone", "emptied", "older", "errors", "laggard", "jump", "drift", "disk", "poison",
]  # fmt: skip
KINDS: tuple[FaultKind, ...] = (
    "kill", "stop", "outage", "cut", "split", "slow", "corrupt", "host", "hang", "clock",
)  # fmt: skip
RARE_KINDS: tuple[FaultKind, ...] = (
    "gone", "emptied", "older", "errors", "laggard", "jump", "drift", "disk", "poison",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, its start and its duration.

    kill, stop (graceful): of node `number`, which starts anew afterwards. gone: it is killed, and
    never starts again.

    outage: of the store, which hangs or refuses. emptied: it loses all that it has; at the end
    somebody has it restored by a node. older: at the end, it is as it was at the start. errors:
    calls of it fail at random. laggard: they take long.

    cut: of a node's way to the store. split: of a node from all others and the store.

    slow: loads take `Plan.slow` times as long. corrupt: artifacts of the models whose number modulo
    7 is `number` modulo 7. poison: these end the host that loads them. disk: a node has no room for
    files, or cannot read them. host: a host process of the node dies. hang: it answers nothing, and
    is killed afterwards.

    clock: a node's wall clock is ahead by `number` ms. jump: it is seconds or an hour off. drift:
    it runs too fast or too slow.
    """

    kind: FaultKind
    at_s: float
    for_s: float
    number: int = 0
