"""The data that operations of the mesh (`clipper.mesh.node.node.MeshNode`) take and return.

It is plain and fit for JSON by msgspec.
"""

from typing import Annotated, Literal

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


class VModelRequest(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The arguments of `MeshNode.set_vmodel`, which are the body of its route over HTTP."""

    target: str
    owner: str = ""
    update_only: bool = False
    model: Info | None = None
    auto_delete: bool = False
    load_now: bool = False
    force: bool = False
    sync: bool = False
    expected: str = ""
    share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    give_up_s: Annotated[float, msgspec.Meta(ge=0, le=86_400)] = 0.0


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
