"""What the mesh knows of models, v-models and instances, as records of the store.

Keys: `mesh/model/ID`, `mesh/vmodel/ID`, `mesh/instance/ID` (leased: it goes with its node). Times
are milliseconds of the wall clock, since several hosts read them; sizes are bytes. Hot values
(precise use, rates, queues) are not here: they travel between nodes in digests. Source: seeds'
model-mesh slides, "etcd Registry"; research on its records.
"""

from typing import Final, Literal, TypeVar

import msgspec

PREFIX: Final = "mesh/"
MODELS: Final = PREFIX + "model/"
VMODELS: Final = PREFIX + "vmodel/"
INSTANCES: Final = PREFIX + "instance/"

Fault = Literal["artifact", "host"]  # whose: the model's own files, or the place where it was tried
Status = Literal["NOT_FOUND", "NOT_LOADED", "LOADING", "LOADED", "LOADING_FAILED"]
VStatus = Literal["NOT_FOUND", "DEFINED", "TRANSITIONING", "TRANSITION_FAILED"]


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a user asks for one model. copies_max 0: as many as the load asks for.  pinned: never
    evicted. slo_ms: what queueing is held against; 0: the mesh's.  concurrency: batches at once in
    one copy; 0: what its runtime says. requires, prefers: labels of instances, beside those of its
    type."""

    copies_min: int = 0
    copies_max: int = 0
    pinned: bool = False
    slo_ms: float = 0.0
    concurrency: int = 0
    requires: tuple[str, ...] = ()
    prefers: tuple[str, ...] = ()


class Copy(msgspec.Struct, frozen=True, omit_defaults=True):
    """One instance's claim on a model: written before it loads, completed when it has. loaded_ms 0:
    loading."""

    claimed_ms: int
    loaded_ms: int = 0
    size_bytes: int = 0


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A load that failed in an instance. count: how often in a row.  crashed: it ended, or hung, a
    process that held no other model, be it at a query after the load."""

    time_ms: int
    why: str = ""
    fault: Fault = "host"
    count: int = 1
    crashed: bool = False


class MeshModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model that can be loaded anywhere its type allows. Immutable but for `copies` and what
    follows.

    type: its runtime, `onnx`, `skops`, `python`, ...  path: of the artifact.  key: what else its
    runtime needs to open it. input, output: types of a row, `any` until a copy has said them.
    refs: v-models that name it.  auto_delete: unregister it soon after refs come to 0.  used_ms:
    last use, lazily written.  size_bytes: as last measured, 0 while unknown.
    """

    id: str
    type: str
    path: str = ""
    key: str = ""
    input: str = "any"
    output: str = "any"
    policy: Policy = Policy()
    registered_ms: int = 0
    owner: str = ""
    copies: dict[str, Copy] = {}
    failures: dict[str, Failure] = {}
    refs: int = 0
    auto_delete: bool = False
    used_ms: int = 0
    size_bytes: int = 0

    @property
    def loaded(self) -> tuple[str, ...]:
        """The instances where it can be asked, longest loaded first."""
        return tuple(
            sorted(
                (i for i, copy in self.copies.items() if copy.loaded_ms),
                key=lambda i: self.copies[i].loaded_ms,
            )
        )

    def status(self) -> Status:
        """What is known of all its copies together."""
        if self.loaded:
            return "LOADED"
        if self.copies:
            return "LOADING"
        return "LOADING_FAILED" if self.failures else "NOT_LOADED"


class VModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name that stands for a model, and may come to stand for another. In steady state target
    equals active.

    share: of the queries that ask the target while a split was asked for, 0 to 1.  previous: the
    active one before, for a rollback.  failed, why: the target could not be loaded; the active one
    goes on.  force: switch without waiting.
    """

    id: str
    active: str
    target: str
    owner: str = ""
    share: float = 0.0
    previous: str = ""
    failed: bool = False
    why: str = ""
    force: bool = False
    since_ms: int = 0
    give_up_ms: int = 0

    def status(self) -> VStatus:
        if self.active == self.target or self.share:
            return "DEFINED"
        return "TRANSITION_FAILED" if self.failed else "TRANSITIONING"


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node as the others see it, published when it has changed enough. peers: where nodes talk to
    it, `unix:/path` or `tcp:host:port`.  containers: where model hosts of others may dial in to
    serve it.  number: of the node, unique, for the replicas it lends.  lru_ms: last use of its
    least recently used model.  rate: queries a minute over its copies.
    """

    id: str
    number: int
    peers: str
    containers: str
    host: str = ""
    labels: tuple[str, ...] = ()
    types: tuple[str, ...] = ()
    zone: str = ""
    version: str = ""
    started_ms: int = 0
    capacity_bytes: int = 0
    used_bytes: int = 0
    models: int = 0
    lru_ms: int = 0
    loading: int = 0
    queued: int = 0
    loading_max: int = 1
    rate: float = 0.0
    stopping: bool = False

    @property
    def free_bytes(self) -> int:
        return max(0, self.capacity_bytes - self.used_bytes)


_T = TypeVar("_T", MeshModel, VModel, Instance)


def encode(record: MeshModel | VModel | Instance) -> bytes:
    return msgspec.json.encode(record)


def decode(value: bytes, kind: type[_T]) -> _T:
    """MsgspecError when it is none."""
    return msgspec.json.decode(value, type=kind)
