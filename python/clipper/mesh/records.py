"""Records of the mesh in the store: models, v-models and instances.

Keys: `mesh/model/ID`, `mesh/vmodel/ID`, and `mesh/instance/ID`, which has the lease of its node.
Times are wall clock milliseconds, since several hosts read them; sizes are bytes. Values that
change often (exact use, rates, queues) are not in the store: nodes send them to each other. Source:
model-mesh's slides, "etcd Registry".
"""

from collections.abc import Mapping
from typing import Final, Literal, TypeVar

import msgspec

PREFIX: Final = "mesh/"
MODELS: Final = PREFIX + "model/"
VMODELS: Final = PREFIX + "vmodel/"
INSTANCES: Final = PREFIX + "instance/"

# The model's files; the runtime as it loaded them, which may be the files, their absence, or the
# code; what the host lacks.
Fault = Literal["artifact", "load", "host"]
FAULTS: Final[Mapping[str, Fault]] = {"artifact": "artifact", "load": "load", "host": "host"}
Status = Literal["NOT_FOUND", "NOT_LOADED", "LOADING", "LOADED", "LOADING_FAILED"]
VStatus = Literal["NOT_FOUND", "DEFINED", "TRANSITIONING", "TRANSITION_FAILED"]


class Policy(msgspec.Struct, frozen=True, omit_defaults=True):
    """Settings of one model.

    copies_max: 0: as many as its use needs. pinned: never evicted. slo_ms: latency that queueing is
    compared with; 0: that of the mesh. concurrency: batches at once in one copy; 0: as its runtime
    says. requires, prefers: labels of instances, in addition to those of its type.
    """

    copies_min: int = 0
    copies_max: int = 0
    pinned: bool = False
    slo_ms: float = 0.0
    concurrency: int = 0
    requires: tuple[str, ...] = ()
    prefers: tuple[str, ...] = ()


class Copy(msgspec.Struct, frozen=True, omit_defaults=True):
    """An instance's claim on a model, written before it loads. loaded_ms: 0 while it loads."""

    claimed_ms: int
    loaded_ms: int = 0
    size_bytes: int = 0


class Failure(msgspec.Struct, frozen=True, omit_defaults=True):
    """A failed load in an instance.

    count: failures in a row. crashed: the model ended, or hung, a process that held no other model,
    at the load or at a query.
    """

    time_ms: int
    why: str = ""
    fault: Fault = "host"
    count: int = 1
    crashed: bool = False


class MeshModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A registered model. Only `copies` and the fields after it change.

    type: its runtime, `onnx`, `skops`, `python`, ... path: of the artifact. key: what else the
    runtime needs to open it. input, output: row types, `any` until a copy has stated them. refs:
    v-models that name it. auto_delete: unregister it soon after refs reach 0. used_ms: last use,
    hours late. size_bytes: as last measured, 0 while unknown.
    sha256: of the content of a URL, as its first pull found it; all later ones must have it.
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
    sha256: str = ""

    @property
    def loaded(self) -> tuple[str, ...]:
        """The instances that have it loaded, longest loaded first."""
        return tuple(
            sorted(
                (i for i, copy in self.copies.items() if copy.loaded_ms),
                key=lambda i: self.copies[i].loaded_ms,
            )
        )

    def status(self) -> Status:
        """Return the status of all copies together."""
        if self.loaded:
            return "LOADED"
        if self.copies:
            return "LOADING"
        return "LOADING_FAILED" if self.failures else "NOT_LOADED"


class VModel(msgspec.Struct, frozen=True, omit_defaults=True):
    """A name that stands for a model, and can switch to another. Usually target equals active.

    share: of the queries that go to the target of a split, 0 to 1. previous: the active model
    before, for a rollback. failed, why: the target could not be loaded; the active model stays.
    force: switch without waiting.
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
        """Return the status."""
        if self.active == self.target or self.share:
            return "DEFINED"
        return "TRANSITION_FAILED" if self.failed else "TRANSITIONING"


ANY_NUMBER: Final = 1 << 30  # of models, where an instance has no limit


class Instance(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node as the others see it, published when it has changed enough.

    peers: address for other nodes, `unix:/path` or `tcp:host:port`. containers: address that model
    hosts of other nodes connect to, to serve it. number: unique, for the replicas that it lends.
    models_max: how many models it loads at most; 0: any number. lru_ms: last use of its least
    recently used model. rate: queries a minute of its copies.
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
    models_max: int = 0

    @property
    def free_bytes(self) -> int:
        """Return the memory that is not in use; 0 where no further model may be loaded."""
        free = self.capacity_bytes - self.used_bytes
        return free if free > 0 and (not self.models_max or self.models < self.models_max) else 0

    @property
    def free_models(self) -> int:
        """Return how many further models may be loaded."""
        return max(0, self.models_max - self.models) if self.models_max else ANY_NUMBER


_T = TypeVar("_T", MeshModel, VModel, Instance)


def encode(record: MeshModel | VModel | Instance) -> bytes:
    """Return a record as bytes."""
    return msgspec.json.encode(record)


def decode(value: bytes, kind: type[_T]) -> _T:
    """Return the record in some bytes. MsgspecError when they hold none."""
    return msgspec.json.decode(value, type=kind)
