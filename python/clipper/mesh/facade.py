"""The public interface of the mesh: its operations, and the data that they take and return.

`clipper.mesh.node.node.MeshNode` implements it. The data is plain and fit for JSON by msgspec.
Errors: UnknownModel, AlreadyExists, StillLinked, Forbidden, InvalidInput, Overloaded,
DeadlineExceeded, StoreError.
"""

from collections.abc import Callable, Generator, Mapping
from typing import Any, Literal, Protocol

import msgspec

from clipper.mesh.records import Instance, MeshModel, Policy, Status, VModel, VStatus

CopyState = Literal["LOADING", "LOADED", "LOADING_FAILED"]
LIST_MAX = 10_000  # models that one call lists


class Info(msgspec.Struct, frozen=True):
    """The arguments of `register`: where a model is and how it is opened."""

    path: str
    type: str = ""
    key: str = ""
    input: str = ""
    output: str = ""
    policy: Policy = Policy()


class CopyStatus(msgspec.Struct, frozen=True):
    """One copy, or one instance where loading failed.

    since_ms: wall clock time of the claim, the load or the failure.
    """

    instance: str
    state: CopyState
    since_ms: int
    size_bytes: int = 0
    why: str = ""


class ModelStatus(msgspec.Struct, frozen=True):
    """The status of a model.

    errors: reasons of failed loads, newest first. copies: newest first. info: its record; None if
    it is not registered. used_ms: last use known here, wall clock; 0: never.
    """

    id: str
    status: Status
    errors: tuple[str, ...] = ()
    copies: tuple[CopyStatus, ...] = ()
    info: MeshModel | None = None
    used_ms: int = 0


class VModelStatus(msgspec.Struct, frozen=True):
    """The status of a v-model.

    active, target: ids of models. share: of the queries that go to the target of a split.
    """

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
    """Placement's opinion of one instance for one model. rank: 0 is best; -1: impossible."""

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
    """Reasons for where a model is loaded, or why it is not.

    verdicts: for a copy placed now. history: this node's decisions, newest last. next: what happens
    next, in a sentence.
    """

    id: str
    status: Status
    verdicts: tuple[Verdict, ...] = ()
    history: tuple[Decision, ...] = ()
    next: str = ""


class MeshEvent(msgspec.Struct, frozen=True):
    """A change of the registry.

    record: the new record; None when it is gone. RESET: changes were missed, read again. SYNC: all
    records that existed at the start have been sent.
    """

    kind: Literal["PUT", "DELETE", "SYNC", "RESET"]
    of: Literal["model", "vmodel", "instance", ""]
    id: str
    revision: int
    record: MeshModel | VModel | Instance | None = None


class MigrationProgress(msgspec.Struct, frozen=True):
    """Progress of a drain, in models that were used lately and held here.

    done + failed + left = total.
    """

    total: int
    done: int
    failed: int
    left: int


class MeshFacade(Protocol):
    """One node's interface to the mesh; changes are visible on all nodes. Threads: any."""

    @property
    def instance(self) -> str:
        """The id of this node."""

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
        """Register a model; the same registration again has no effect.

        type: from the path when empty. sync: with load_now, wait until it is loaded or has failed.
        used_ms: last use, wall clock; 0: hours ago, so that a model without queries evicts none
        that is in use. AlreadyExists when it differs.
        """

    def unregister(self, id: str) -> None:
        """Unregister a model; its copies are unloaded later. No error if it does not exist.

        StillLinked while a v-model or an application names it.
        """

    def status(self, id: str) -> ModelStatus:
        """Return the status of a model; NOT_FOUND is a status and no error."""

    def ensure_loaded(self, id: str, *, sync: bool = False, used_ms: int = 0) -> ModelStatus:
        """Load a model unless it is loaded; counts as a use at `used_ms`, 0: now.

        UnknownModel.
        """

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
        """Make a v-model, or change its target.

        It switches when the target serves as well as the active model. model: registers the target.
        expected: only if this is its target now. Forbidden (another owner), StoreConflict
        (expected), UnknownModel, AlreadyExists.
        """

    def delete_vmodel(self, id: str, owner: str = "") -> None:
        """Delete a v-model; no error if there is none. Forbidden for another owner's."""

    def vmodel_status(self, id: str, owner: str = "") -> VModelStatus:
        """Return the status of a v-model; NOT_FOUND when absent, or another owner's."""

    def rollback_vmodel(self, id: str) -> VModelStatus:
        """Switch back to the previous model; at once if that is loaded."""

    def models(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[ModelStatus]:
        """Return the status of models by id, after the id `after`."""

    def vmodels(self, prefix: str = "", after: str = "", limit: int = 1000) -> list[VModelStatus]:
        """Return the status of v-models by id, after the id `after`."""

    def instances(self) -> list[Instance]:
        """Return the nodes that are alive, by id."""

    def explain(self, id: str) -> Explanation:
        """Explain where a model is and why."""

    def watch(
        self, prefix: str = "", *, stop: Callable[[], bool] = ...
    ) -> Generator[MeshEvent, None, None]:
        """Yield the records whose ids start with `prefix`, then SYNC, then changes.

        Ends when this node stops or `stop()` returns True.
        """

    def stats(self) -> Mapping[str, Any]:
        """Return counters and gauges of this node, never one for each model.

        Histograms are Snapshots.
        """

    def drain(
        self, progress: Callable[[MigrationProgress], None] | None = None
    ) -> MigrationProgress:
        """Refuse new models, and move those used lately to other nodes within `mesh.drain_s`."""
