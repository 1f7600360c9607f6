"""One selection state as a server holds it, and as bytes in the store."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from clipper.selection import Policy
from clipper.selection.policy import State
from clipper.types import VersionedModel

PREFIX = "selection/"  # of the keys of all states
SHARED = ""  # the context of those without one
LEFT_OUT = ""  # in the place of a server's name: how often servers have left this state


class Stored(msgspec.Struct, array_like=True):
    """A state in the store. applied: by server, the number of the last of its observations that is
    in here, and `LEFT_OUT`."""

    policy: str
    models: tuple[VersionedModel, ...]
    applied: dict[str, int]
    state: bytes


@dataclass(slots=True, eq=False)
class Held:
    """One state in memory. base: as the store has it; since: journal number of the first
    observation it has not.

    prior: the shared state that this one is a beginning of, until its first observation.  doubts:
    what was written without an answer, by the number of its last observation.  own: up to which of
    this server's observations are in `base`; none between that and `since` is in here, as when it
    began while the store did not answer.
    """

    state: State
    base: State
    revision: int
    applied: dict[str, int]
    since: int = 0
    touched: bool = True
    prior: State = None
    doubts: dict[int, State] = field(default_factory=dict)
    own: int = 0


def sealed(
    policy: Policy, models: Sequence[VersionedModel], applied: dict[str, int], state: object
) -> bytes:
    """Return a state for the store, with a checksum in front."""
    return resealed(Stored(policy.name, tuple(models), applied, policy.encode(state)))


def resealed(stored: Stored) -> bytes:
    """Return what `unsealed` has read, for the store."""
    body = msgspec.msgpack.encode(stored)
    return zlib.crc32(body).to_bytes(4, "little") + body


def unsealed(data: bytes) -> Stored:
    """Return what `sealed` wrote. ValueError or MsgspecError for anything else."""
    if len(data) < 4 or zlib.crc32(data[4:]).to_bytes(4, "little") != data[:4]:
        raise ValueError(f"the checksum does not fit its {len(data)} bytes")
    return msgspec.msgpack.decode(data[4:], type=Stored)
