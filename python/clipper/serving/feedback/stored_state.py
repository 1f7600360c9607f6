"""One selection state as a server holds it, and as bytes in the store."""

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from clipper.selection import Policy
from clipper.selection.learning.learned_state import LearnedState, on_block
from clipper.selection.policy import State
from clipper.types import VersionedModel
from clipper_core.learning.policy_states import Held

PREFIX = "selection/"  # of the keys of all states
SHARED = ""  # the context of those without one
LEFT_OUT = ""  # in the place of a server's name: how often servers have left this state


class Latest:
    """Stands for the state that users without an observation have: `Learner.first_state`.

    It is `state`, `base` and `prior` of those that begin with the shared state of the same models:
    all of them read one state, which is made once a version of the shared one.
    """


LATEST: Final = Latest()


class Stored(msgspec.Struct, array_like=True):
    """A state in the store. applied: by server, the number of the last of its observations that is
    in here, and `LEFT_OUT`."""

    policy: str
    models: tuple[VersionedModel, ...]
    applied: dict[str, int]
    state: bytes


@dataclass(slots=True, eq=False)
class StateOrigin:
    """The place where a state begins that has no observation of its own yet.

    models: of the state that it begins from.  held: that state; None: as the store had it, or
    nothing, or the shared one.  is_shared: whether it is the shared state of the same models, of
    which a context begins with little evidence.
    """

    models: tuple[VersionedModel, ...]
    held: Held | None
    is_shared: bool = False


def publish(held: Held, state: State) -> None:
    """Make a state the newest one of a context, its numbers as a block of the core. Under the lock
    of the states."""
    held.publish(on_block(state) if isinstance(state, LearnedState) else state)


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
