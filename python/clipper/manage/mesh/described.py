"""OpenAPI descriptions of the mesh routes."""

from typing import Any

import msgspec

from clipper.frontend.openapi.document import RouteInfo, RouteTable, Schema
from clipper.mesh.records import Instance
from clipper.mesh.reports import LIST_MAX, Explanation, ModelStatus, VModelRequest, VModelStatus

MESH = "mesh"
_TEXT: Schema = {"type": "string"}
_OWNER: Schema = {"type": "string", "description": "only if that is its owner"}
_CHANGES: dict[str, Any] = {
    "query": {
        "dry_run": {
            "type": "boolean",
            "description": "check, answer what it would be, and write nothing",
        }
    },
    "headers": {
        "Clipper-Actor": {"type": "string", "description": "who makes the change, for the history"}
    },
}
_PREFIX: Schema = {"type": "string", "description": "those whose ids begin so"}
_PAGED = {
    "prefix": _PREFIX,
    "after": {
        "type": "string",
        "description": "those that come after this id: `next` of the answer before",
    },
    "limit": {
        "type": "integer",
        "minimum": 1,
        "maximum": LIST_MAX,
        "description": "so many at most",
    },
}


class ModelPage(msgspec.Struct, frozen=True):
    """A page of models. next: what to give as `after` for the next page; empty: there are no
    more."""

    models: list[ModelStatus]
    next: str = ""


class VModelPage(msgspec.Struct, frozen=True):
    """A page of vmodels. next: as in a page of models."""

    vmodels: list[VModelStatus]
    next: str = ""


class Instances(msgspec.Struct, frozen=True):
    """Response of the node list."""

    instances: list[Instance]


class Counts(msgspec.Struct, frozen=True):
    """The counts of a node. instance: the node that answers.  stats: its counters and gauges."""

    instance: str
    stats: dict[str, object]


def _about(id: str, summary: str, more: str = "", **rest: Any) -> RouteInfo:
    names = ("name",) if rest.pop("named", True) else ()
    return RouteInfo(id=id, summary=summary, more=more, tag=MESH, names=names, **rest)


def of_mesh(registering: type[msgspec.Struct], loading: type[msgspec.Struct]) -> RouteTable:
    """Return the descriptions, given the types of request bodies."""
    model, vmodel = "/v1/mesh/models/{}", "/v1/mesh/vmodels/{}"
    return {
        ("GET", "/v1/mesh"): _about(
            "meshStats", "What this node counts", named=False, gives=Counts
        ),
        ("GET", "/v1/mesh/instances"): _about(
            "meshInstances",
            "The nodes that live, and how full they are",
            named=False,
            gives=Instances,
            errors=(503,),
        ),
        ("GET", "/v1/mesh/models"): _about(
            "meshModels",
            "Models, by id",
            named=False,
            query=_PAGED,
            gives=ModelPage,
            errors=(503,),
        ),
        ("GET", model): _about(
            "meshModel",
            "The state of a model and of each copy",
            gives=ModelStatus,
            errors=(404, 503),
        ),
        ("PUT", model): _about(
            "registerMeshModel",
            "Register a model, to be loaded at its first query",
            "The same once more changes nothing; another path, type or key is a conflict.",
            takes=registering,
            gives=ModelStatus,
            errors=(409, 429, 503, 504),
            **_CHANGES,
        ),
        ("DELETE", model): _about(
            "unregisterMeshModel",
            "Forget a model; its copies are unloaded",
            gives=None,
            status=204,
            errors=(409, 503),
            **_CHANGES,
        ),
        ("POST", f"{model}/load"): _about(
            "loadMeshModel",
            "Have it loaded, if no copy is",
            takes=loading,
            needs_body=False,
            gives=ModelStatus,
            errors=(404, 429, 503, 504),
        ),
        ("GET", f"{model}/explain"): _about(
            "explainMeshModel",
            "Why it is where it is, and what happens next",
            gives=Explanation,
            errors=(404, 503),
        ),
        ("GET", "/v1/mesh/vmodels"): _about(
            "meshVModels",
            "V-models, by id",
            named=False,
            query=_PAGED,
            gives=VModelPage,
            errors=(503,),
        ),
        ("GET", vmodel): _about(
            "meshVModel",
            "What a v-model stands for",
            query={"owner": _OWNER},
            gives=VModelStatus,
            errors=(404, 503),
        ),
        ("PUT", vmodel): _about(
            "setMeshVModel",
            "Make one, or let it stand for another model",
            "The switch comes when the target serves as well as the active one does.",
            takes=VModelRequest,
            gives=VModelStatus,
            errors=(403, 404, 409, 429, 503, 504),
            **_CHANGES,
        ),
        ("DELETE", vmodel): _about(
            "deleteMeshVModel",
            "Delete one",
            gives=None,
            status=204,
            errors=(403, 503),
            **{**_CHANGES, "query": {"owner": _OWNER, **_CHANGES["query"]}},
        ),
        ("POST", f"{vmodel}/rollback"): _about(
            "rollbackMeshVModel",
            "Back to the model before",
            gives=VModelStatus,
            errors=(404, 409, 503),
            **_CHANGES,
        ),
        ("GET", "/v1/mesh/watch"): _about(
            "watchMesh",
            "What there is, then what changes, as server-sent events without an end",
            "Events `put`, `delete`, `reset`: changes were missed, read again; `sync`: the "
            "initial list is complete.",
            named=False,
            query={"prefix": _PREFIX},
            gives=_TEXT,
            media="text/event-stream",
            errors=(503,),
        ),
    }
