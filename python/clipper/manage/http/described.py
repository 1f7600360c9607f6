"""OpenAPI descriptions of the management routes, from the signatures and docstrings of verbs."""

import inspect
import re
from collections.abc import Mapping
from typing import Any, get_type_hints

import msgspec

from clipper.frontend.openapi.document import (
    RouteInfo,
    RouteTable,
    Schema,
    document,
    list_of,
    members,
)
from clipper.frontend.openapi.endpoint import describe
from clipper.frontend.openapi.routes import ABOUT, SchemaLimits, of_applications
from clipper.frontend.openapi.routes import table as of_listener
from clipper.manage.change import Change
from clipper.manage.http.rest import (
    ALL_VERBS,
    arguments_of,
    lists,
    needed_by,
    specified_by,
)
from clipper.manage.operations import EVALUATED_MAX
from clipper.manage.tables.operations import (
    IDS_MAX,
    SHARDS_MAX,
    TableChange,
)
from clipper.selection import POLICIES
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import at
from clipper.store.history import ENTRIES_MAX, Changed
from clipper.types import NAME_GRAMMAR, VERSION

MANAGEMENT = "management"
_DRY_RUN: Schema = {
    "type": "boolean",
    "description": "make every check of the real thing, and write nothing",
}
_REHEARSED = {"dry_run": _DRY_RUN}
_ACTOR: Schema = {"type": "string", "description": "who makes the change, for the history"}
_MODEL: Schema = {
    "type": "string",
    "pattern": f"^{NAME_GRAMMAR}(:[1-9][0-9]{{0,8}})?$",
    "description": "`svm`, or `svm:3`",
}
_REPLICAS: Schema = {
    "anyOf": [
        {"type": "integer", "minimum": 0, "maximum": 64},
        {"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 2},
    ],
    "description": "so many, or [least, most]",
}
_SHARE: Schema = {"type": "number", "exclusiveMinimum": 0, "maximum": 1}
_POLICY: Schema = {
    "type": "string",
    "description": "a name, or with settings, as `exp3(eta=0.05)`, or `package.module:Class`",
    "pattern": f"^({'|'.join(sorted(POLICIES))})$",
}


def of_management() -> RouteTable:
    """Return the descriptions of the management routes."""
    return {**_verbs(), **_applications(), **_moving(), **_query_routes(), **_read_routes()}


def plain_document(*, management: bool) -> dict[str, object]:
    """Return the document of a server without applications."""
    table = {**of_listener(management=management), **(of_management() if management else {})}
    found = document("clipper management" if management else "clipper", VERSION, ABOUT, table)
    describe(found, (), SchemaLimits())
    return found.json()


def _verbs() -> RouteTable:
    found: dict[tuple[str, str], RouteInfo] = {}
    verbs = [(owner, *verb) for owner, verbs in ALL_VERBS.items() for verb in verbs]
    for owner, method, pattern, verb, names in verbs:
        function = getattr(owner, verb)
        summary, more = _doc_parts(function)
        fields = specified_by(function)
        takes = {
            name: fields[name].json_schema() if name in fields else _argument(verb, name, type_)
            for name, type_ in arguments_of(function).items()
            if name not in names
        }
        reads = method == "GET"
        found[method, pattern] = RouteInfo(
            id=_camel(verb) if names or "{}" not in pattern else verb,
            summary=summary,
            more=more,
            tag=MANAGEMENT,
            names=tuple(_place(verb, name) for name in names),
            query=takes if reads else {"dry_run": _DRY_RUN},
            query_needed=tuple(needed_by(function, names)) if reads else (),
            takes=None if reads else _object(takes, needed_by(function, names)),
            needs_body=bool(needed_by(function, names)),
            gives=_given(verb, function),
            errors=(404,) if reads else (404, 409, 503),
            headers={} if reads else {"Clipper-Actor": _ACTOR},
        )
    for noun, one in (("models", "Each version of one model."), ("streams", "One stream.")):
        all_, named = ("GET", f"/admin/{noun}"), ("GET", f"/admin/{noun}/{{}}")
        found[all_] = msgspec.structs.replace(found[all_], query={})
        found[named] = msgspec.structs.replace(found[named], id=f"{noun}Named", summary=one)
    if ("GET", "/admin/applications/{}/rollout") in found:
        about = found["GET", "/admin/applications/{}/rollout"]
        found["GET", "/admin/applications/{}/rollout"] = msgspec.structs.replace(
            about, id="rolloutOf", summary="Its last rollout."
        )
    return found


def _doc_parts(function: object) -> tuple[str, str]:
    text = " ".join((inspect.getdoc(function) or "").split())
    first, _, rest = text.partition(". ")
    return (
        first.removesuffix(".").partition(":")[0] if len(first) > 90 else first.removesuffix(".")
    ), (text if rest else "")


def _camel(verb: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), verb)


def _place(verb: str, name: str) -> str:
    """Return the name of a part of the path: promote needs a version, others may have one."""
    return ("exact_version" if verb == "promote" else "model_version") if name == "model" else name


def _given(verb: str, function: object) -> object:
    if verb in lists:
        return list_of(lists[verb], {"type": "string"} if verb == "logs" else {"type": "object"})
    schemas = {Change: CHANGE, TableChange: TABLE_CHANGE}
    return schemas.get(get_type_hints(function)["return"], {"type": "object"})


CHANGE: Schema = members(
    Change,
    changed={
        "type": "array",
        "items": members(Changed, before={}, after={}),
        "description": "the records, before and after; empty: it was so already",
    },
)


TABLE_CHANGE: Schema = members(TableChange, changed=CHANGE["properties"]["changed"])


def _object(properties: Mapping[str, Schema], needed: list[str]) -> Schema:
    found: Schema = {
        "type": "object",
        "properties": dict(properties),
        "additionalProperties": False,
    }
    return {**found, "required": needed} if needed else found


def _argument(verb: str, name: str, type_: object) -> Schema:
    return _ARGUMENTS.get(f"{verb}.{name}") or _ARGUMENTS.get(name) or msgspec.json.schema(type_)


_ARGUMENTS: Mapping[str, Schema] = {
    "application": {"type": ["string", "null"], "pattern": f"^{NAME_GRAMMAR}$"},
    "reshard.shards": {"type": "integer", "minimum": 1, "maximum": SHARDS_MAX},
    "evaluation.policy": _POLICY,
    "evaluation.count": {"type": "integer", "minimum": 1, "maximum": EVALUATED_MAX},
    "rollouts.application": {
        "type": "string",
        "pattern": f"^({NAME_GRAMMAR})?$",
        "description": "of one; else of all",
    },
    "canary": {
        "anyOf": [
            {"type": "string", "pattern": "^[1-9]%$"},
            {"type": "number", "minimum": 0.01, "maximum": 0.09},
            {"type": "null"},
        ],
        "description": "the first share: in per cent as a string, or a number",
    },
    "count": {"type": "integer", "minimum": 1, "maximum": ENTRIES_MAX},
    "error_rate": {
        "type": "number",
        "minimum": 1e-6,
        "maximum": 0.5,
        "description": "of the tests behind the guard",
    },
    "guard": {
        "type": "string",
        "pattern": "^(error<[1-9]%|p99<[1-9][0-9]ms)(, reward>=-[1-9]%)?$",
        "description": "see docs/managing.md",
    },
    "hold": {
        "type": "string",
        "pattern": "^[1-9][0-9]{0,2}(ms|s|m)$",
        "description": "how long each stage lasts at least",
    },
    "file": {
        "type": "string",
        "pattern": "^[A-Za-z0-9_][A-Za-z0-9_.-]{0,99}\\.(npz|safetensors|parquet|npy)$",
        "description": "in the folder `files` of the set of shards",
    },
    "ids": {
        "type": "array",
        "items": {"type": "integer", "minimum": -(1 << 63), "maximum": (1 << 64) - 1},
        "minItems": 1,
        "maxItems": IDS_MAX,
    },
    "to": {"type": "string", "pattern": f"^{NAME_GRAMMAR}$"},
    "model": _MODEL,
    "replica": {"type": "integer", "minimum": 0, "maximum": 64},
    "replicas": _REPLICAS,
    "share": _SHARE,
    "stages": {
        "type": ["string", "null"],
        "pattern": "^(1[0-9],)?([2-4][0-9],)?([5-9][0-9],)?100$",
        "description": "shares, in per cent, as `5,25,50,100`",
    },
}


# -- applications, whose settings are members of the body


def _applications() -> RouteTable:
    settings = at(ApplicationSpec, "http").items()
    body = _object({name: one.json_schema() for name, one in settings}, [])

    def about(
        id: str, summary: str, query: Mapping[str, Schema] = _REHEARSED, **more: Any
    ) -> RouteInfo:
        more = {
            "needs_body": False,
            "headers": {"Clipper-Actor": _ACTOR},
            "errors": (404, 409, 503),
            **more,
        }
        return RouteInfo(
            id=id, summary=summary, tag=MANAGEMENT, names=("name",), query=query, **more
        )

    record: Schema = {
        "type": "object",
        "properties": {"name": {"type": "string"}},
        "required": ["name"],
    }
    place = "/admin/applications/{}"
    return {
        ("POST", f"{place}/set"): about(
            "setApplication", "Make one, or change what is named", takes=body, gives=CHANGE
        ),
        ("PUT", place): about(
            "putApplication",
            "Make one, or set what is named",
            takes=body,
            gives=record,
            others={201: record},
        ),
        ("PATCH", place): about(
            "patchApplication", "Change what is named of one that exists", takes=body, gives=record
        ),
        ("DELETE", place): about(
            "deleteApplication", "Delete one", query={}, gives=None, status=204
        ),
    }


def _moving() -> RouteTable:
    state: Schema = {"type": "object"}
    return {
        ("GET", "/admin/export"): RouteInfo(
            id="exportState",
            summary="The state as one file",
            tag=MANAGEMENT,
            gives=state,
            errors=(503,),
        ),
        ("POST", "/admin/import"): RouteInfo(
            id="importState",
            summary="Add what an export gave",
            tag=MANAGEMENT,
            takes=_EXPORTED,
            gives=CHANGE,
            query={"dry_run": _DRY_RUN},
            headers={"Clipper-Actor": _ACTOR},
            errors=(409, 503),
        ),
    }


_EXPORTED: Schema = {"type": "object"}


def _query_routes() -> RouteTable:
    """Return the description as the query listener gives it."""
    routes = of_applications()
    feedback = msgspec.structs.replace(routes["POST", "/api/{}/feedback"], query=_REHEARSED)
    return {
        ("POST", "/admin/applications/{}/predict"): routes["POST", "/api/{}/predict"],
        ("POST", "/admin/applications/{}/feedback"): feedback,
    }


def _read_routes() -> RouteTable:
    """Return the description of the dashboard's routes."""
    settings = _object({"settings": {"type": "array", "items": {"type": "object"}}}, ["settings"])
    text: Schema = {"type": "string"}
    return {
        ("GET", "/dashboard"): RouteInfo(
            id="dashboard", summary="The page", tag=MANAGEMENT, gives=text, media="text/html"
        ),
        ("GET", "/dashboard/{}"): RouteInfo(
            id="dashboardFile",
            summary="Its files",
            tag=MANAGEMENT,
            names=("name",),
            gives=text,
            media="text/javascript",
            also=("text/css", "text/plain", "text/html", "image/svg+xml"),
            errors=(404,),
        ),
        ("POST", "/dashboard/session"): RouteInfo(
            id="dashboardSession",
            summary="Trade the code of a one-time link for the token",
            tag=MANAGEMENT,
            takes=_object({"code": text}, ["code"]),
            gives=_object({"token": text}, ["token"]),
            errors=(400, 403),
        ),
        ("POST", "/admin/dashboard/link"): RouteInfo(
            id="dashboardLink",
            summary="Make a link that opens the page once",
            tag=MANAGEMENT,
            more="The path, behind which a code is the fragment, is good for an hour.",
            gives=_object({"path": text}, ["path"]),
        ),
        ("GET", "/admin/stream"): RouteInfo(
            id="stream",
            summary="What happens, as server-sent events without an end",
            tag=MANAGEMENT,
            gives={},
            media="text/event-stream",
            errors=(503,),
        ),
        ("GET", "/admin/configuration"): RouteInfo(
            id="configuration", summary="What is set", tag=MANAGEMENT, gives=settings
        ),
    }
