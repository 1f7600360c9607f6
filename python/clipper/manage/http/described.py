"""OpenAPI descriptions of the management routes, from the table of verbs."""

import re
from collections.abc import Mapping
from typing import Any

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
from clipper.manage.tables.operations import TableChange
from clipper.manage.verbs.table import VERBS, Verb
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import at
from clipper.store.history import Changed
from clipper.types import VERSION

MANAGEMENT = "management"
_DRY_RUN: Schema = {
    "type": "boolean",
    "description": "make every check of the real thing, and write nothing",
}
_REHEARSED = {"dry_run": _DRY_RUN}
_ACTOR: Schema = {"type": "string", "description": "who makes the change, for the history"}


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
    for verb in VERBS:
        summary, more = _text_parts(verb.text)
        schemas = {one.name: one.json_schema() for one in verb.arguments}
        schemas |= {name: one.json_schema() for name, one in verb.fields.items()}
        for route in verb.routes:
            needed = verb.needed(route)
            takes = {name: schemas[name] for name in schemas if name not in route.names}
            found[route.method, route.pattern] = RouteInfo(
                id=_camel(verb.name),
                summary=summary,
                more=more,
                tag=MANAGEMENT,
                names=tuple(_place(verb, name) for name in route.names),
                query={"dry_run": _DRY_RUN} if route.changes else takes,
                query_needed=() if route.changes else tuple(needed),
                takes=_object(takes, needed) if route.changes else None,
                needs_body=bool(needed),
                gives=_given(verb),
                errors=(404, 409, 503) if route.changes else (404,),
                headers={"Clipper-Actor": _ACTOR} if route.changes else {},
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


def _text_parts(text: str) -> tuple[str, str]:
    """Return the first sentence of a verb's text, and the whole where there is more."""
    first, _, rest = text.partition(". ")
    return first.removesuffix(".").partition(":")[0] if len(first) > 90 else first.removesuffix(
        "."
    ), (text if rest else "")


def _camel(verb: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), verb)


def _place(verb: Verb, name: str) -> str:
    """Return the name of a part of the path: promote needs a version, others may have one."""
    exact = "exact_version" if verb.name == "promote" else "model_version"
    return exact if name == "model" else name


def _given(verb: Verb) -> object:
    if verb.member:
        items = {"type": "string"} if verb.gives == "list[str]" else {"type": "object"}
        return list_of(verb.member, items)
    if not verb.changes:
        return {"type": "object"}
    return TABLE_CHANGE if verb.on == "tables" else CHANGE


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
