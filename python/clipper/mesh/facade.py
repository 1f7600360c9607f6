"""What management asks of the mesh and what it hears: the face of `mesh.node.Mesh`, for the doors
that stand before it.

Everything here is plain data, fit for JSON by msgspec. Errors: UnknownModel, AlreadyExists,
StillLinked, Forbidden, InvalidInput, Overloaded, DeadlineExceeded, StoreError.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from clipper.mesh.records import Instance, MeshModel, Policy, Status, VModel, VStatus

CopyState = Literal["LOADING", "LOADED", "LOADING_FAILED"]
LIST_MAX = 10_000  # models that one call lists


class Info(msgspec.Struct, frozen=True):
    """What a model is made from, as `register` is told it."""

    path: str
    type: str = ""
    key: str = ""
    input: str = ""
    output: str = ""
    policy: Policy = Policy()


class CopyStatus(msgspec.Struct, frozen=True):
    """One copy, or one instance where loading failed. since_ms: wall clock; of its claim, its load
    or its failure."""

    instance: str
    state: CopyState
    since_ms: int
    size_bytes: int = 0
    why: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """errors: why loads failed, newest first.  copies: newest first.  info: its record; None when
    there is none. used_ms: last use that is known here, wall clock; 0: never."""

    id: str
    status: Status
    errors: tuple[str, ...] = ()
    copies: tuple[CopyStatus, ...] = ()
    info: MeshModel | None = None
    used_ms: int = 0


class VModelStatus(msgspec.Struct, frozen=True):
    """active, target: ids; `_status` of each.  share: of the queries that ask the target while a
    split was asked for."""

    id: str
    status: VStatus
    active: str = ""
    target: str = ""
    active_status: Status = "NOT_FOUND"
    target_status: Status = "NOT_FOUND"
    owner: str = ""
    share: float = 0.0
    previous: str = ""
    why: str = ""
    since_ms: int = 0


class Verdict(msgspec.Struct, frozen=True):
    """What placement says of one instance for one model. rank: 0 is the best; -1: not possible,
    because of `why`."""

    instance: str
    ok: bool
    why: str = ""
    rank: int = -1


class Decision(msgspec.Struct, frozen=True):
    """One thing that this node did about a model, and why."""

    time_ms: int
    what: str
    why: str = ""


class Explanation(msgspec.Struct, frozen=True):
    """Why a model is where it is. verdicts: were a copy placed now.  history: this node's
    decisions, newest last. next: what happens next, in a sentence."""

    id: str
    status: Status
    verdicts: tuple[Verdict, ...] = ()
    history: tuple[Decision, ...] = ()
    next: str = ""


class MeshEvent(msgspec.Struct, frozen=True):
    """A change of the registry. record: what is there now, None when it is gone.  RESET: changes
    were missed, read again. SYNC: what was there at first has been told."""

    kind: Literal["PUT", "DELETE", "SYNC", "RESET"]
    of: Literal["model", "vmodel", "instance", ""]
    id: str
    revision: int
    record: MeshModel | VModel | Instance | None = None


class MigrationProgress(msgspec.Struct, frozen=True):
    """Of a drain. done + failed + left = total: models that had been used lately and were held
    here."""

    total: int
    done: int
    failed: int
    left: int


class MeshFacade(Protocol):
    """One node's door to the mesh: what it does, the whole mesh sees. Threads: any."""

    @property
    def instance(self) -> str:
        """The id of this node."""
        ...

    def register(
        self,
        id: str,
        path: str,
        type: str = "",
        key: str = "",
        *,
        input: str = "",
        output: str = "",
        load_now: bool = False,
        sync: bool = False,
        used_ms: int = 0,
        policy: Policy = ...,
        owner: str = "",
    ) -> ModelStatus:
        """Make a model known; type: guessed from the path when empty. The same again is no error;
        AlreadyExists when it differs. sync: with load_now, wait until it is loaded or has failed.
        used_ms: last use, wall clock; 0: an hour ago, so that a model nobody has asked yet takes no
        room from those in use."""
        ...

    def unregister(self, id: str) -> None:
        """Forget a model; its copies are unloaded by and by. Absent: no error. StillLinked while a
        v-model or an application names it."""
        ...

    def status(self, id: str) -> ModelStatus:
        """NOT_FOUND is a status here and no error."""
        ...

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        """Load it if no copy is; counts as a use at `used_ms`, 0: now. UnknownModel."""
        ...

    def set_vmodel(
        self,
        id: str,
        target: str,
        *,
        owner: str = "",
        update_only: bool = False,
        model: Info | None = None,
        auto_delete: bool = False,
        load_now: bool = False,
        force: bool = False,
        sync: bool = False,
        expected: str = "",
        share: float = 0.0,
        give_up_s: float = 0.0,
    ) -> VModelStatus:
        """Make a v-model, or let it stand for another model: the switch comes when the target
        serves as well as the active one does. model: registers the target. expected: only if this
        is its target now. Errors: Forbidden (another owner's), StoreConflict (expected),
        UnknownModel, AlreadyExists."""
        ...

    def delete_vmodel(self, id: str, owner: str = "") -> None:
        """Absent: no error. Forbidden when it is another owner's."""
        ...

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        """NOT_FOUND when absent, or another owner's."""
        ...

    def rollback_vmodel(self, id: str) -> VModelStatus:
        """Back to the model before; at once, if that is loaded."""
        ...

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        """By id, those after `after`."""
        ...

    def vmodels(
        self, prefix: str = "", after: str = "", limit: int = 1000
    ) -> list[VModelStatus]: ...

    def instances(self) -> list[Instance]:
        """Those that live, by id."""
        ...

    def explain(self, id: str) -> Explanation: ...

    def watch(self, prefix: str = "", *, stop: Callable[[], bool] = ...) -> Iterator[MeshEvent]:
        """What is there whose id starts with `prefix`, then SYNC, then changes, until this node
        stops or `stop()` is true."""
        ...

    def stats(self) -> Mapping[str, Any]:
        """Counters and gauges of this node; never a row a model. Histograms as Snapshots."""
        ...

    def drain(
        self, progress: Callable[[MigrationProgress], None] | None = None
    ) -> MigrationProgress:
        """Take no more models, and have those used lately loaded elsewhere, within
        `mesh.drain_s`."""
        ...
