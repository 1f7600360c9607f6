"""Management over HTTP: a route for each row of clipper.manage.verbs.table, on a listener of its
own. Who may is frontend/auth/management.py's.

The arguments of a verb come as members of a JSON object, or, for a GET, as parameters of the query;
`?dry_run=true` rehearses any change. `Clipper-Actor` names the client for the history: it is
trusted with the shared token; a personal token names its owner itself.
"""

import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, get_args

import msgspec

from clipper.errors import InvalidInput, did_you_mean
from clipper.frontend.http.applications import ApplicationRoutes
from clipper.frontend.http.messages import (
    HandlerResult,
    HttpRequest,
    HttpResponse,
    answer_json,
    on_worker,
    read_json,
)
from clipper.frontend.http.router import HttpRouter
from clipper.frontend.server_interface import ServerInterface
from clipper.manage.operations import Operations
from clipper.manage.verbs.table import VERBS, Verb, VerbRoute
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import at, converted
from clipper.types import UserValue

_OBJECT = msgspec.json.Decoder(dict[str, UserValue])
_FLAG = {"dry_run": bool}


class Management:
    """Threads: any. Every verb runs on a worker thread: the store may take its time."""

    def __init__(self, node: ServerInterface, operations: Operations) -> None:
        self._node, self._operations = node, operations
        self._queries = ApplicationRoutes(node)

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        for verb in VERBS:
            for route in verb.routes:
                routes.add(route.method, route.pattern, on_worker(self._calling(verb, route)))
        for method, suffix, handler in (
            ("POST", "/set", self.set_application),
            ("PUT", "", self.put_application),
            ("PATCH", "", self.patch_application),
            ("DELETE", "", self.delete_application),
        ):
            routes.add(method, f"/admin/applications/{{}}{suffix}", on_worker(handler))
        routes.add(
            "GET",
            "/admin/export",
            on_worker(lambda request: answer_json(self._operations.export_state())),
        )
        routes.add("POST", "/admin/import", on_worker(self.import_state))
        # for who manages, there need be no other listener to try an application
        routes.add("POST", "/admin/applications/{}/predict", self._queries.predict)
        routes.add("POST", "/admin/applications/{}/feedback", self.feedback)

    def _calling(self, verb: Verb, route: VerbRoute) -> Callable[[HttpRequest], HttpResponse]:
        takes, needed = verb.takes(), verb.needed(route)

        def call(request: HttpRequest) -> HttpResponse:
            flags = _flags(request, _FLAG if route.changes else takes, route.names)
            given = read_members(request, takes, route.names) if route.changes else flags
            if lacking := [name for name in needed if name not in given]:
                raise InvalidInput(
                    f"the request lacks `{lacking[0]}`.", hint=f"Members: {', '.join(takes)}."
                )
            operations = self._by(request, route.changes and flags.get("dry_run", False))
            acts = getattr(operations, f"on_{verb.on}") if verb.on else operations
            named = zip(route.names, request.params, strict=True)
            result = getattr(acts, verb.name)(**dict(named), **given)
            return answer_json({verb.member: result} if verb.member else result)

        return call

    def _by(self, request: HttpRequest, dry_run: object) -> Operations:
        return self._operations.by(actor_of(request), dry_run=bool(dry_run))

    def feedback(self, request: HttpRequest) -> HandlerResult:
        """Handle feedback, or its dry run."""
        if _flags(request, _FLAG).get("dry_run", False):
            return self._queries.rehearse_feedback(request)
        return self._queries.feedback(request)

    # -- applications, whose settings are members of the body

    def set_application(self, request: HttpRequest) -> HttpResponse:
        """Handle POST of an application's settings."""
        settings = _settings(request)
        models = settings.pop("models", None)
        operations = self._by(request, _flags(request, _FLAG).get("dry_run", False))
        return answer_json(operations.set_application(request.params[0], models, settings))

    def put_application(self, request: HttpRequest) -> HttpResponse:
        """Make the application, or set what the body names; what it does not name stays."""
        name = request.params[0]
        is_new = name not in self._node.catalog.view.applications
        self.set_application(request)
        return answer_json(self._operations.application(name), 201 if is_new else 200)

    def patch_application(self, request: HttpRequest) -> HttpResponse:
        """Handle PATCH of an application."""
        name = request.params[0]
        self._node.catalog.application(name)
        self.set_application(request)
        return answer_json(self._operations.application(name))

    def delete_application(self, request: HttpRequest) -> HttpResponse:
        """Handle DELETE of an application."""
        self._by(request, False).remove_application(request.params[0])
        return HttpResponse(204, b"")

    def import_state(self, request: HttpRequest) -> HttpResponse:
        """Handle the import of an exported state."""
        operations = self._by(request, _flags(request, _FLAG).get("dry_run", False))
        return answer_json(operations.import_state(bytes(request.body)))


# -- what comes in


def actor_of(request: HttpRequest) -> str:
    """Return who acts, for the history."""
    actor = request.headers.get(b"clipper-actor", b"").decode("ascii", "replace")[:128]
    return request.actor or (actor if actor.isprintable() and actor else "http")


def _with_integers(value: object, type_: object) -> object:
    """Return the value with whole floats as integers where the type has integers and no floats: 1.0
    is an integer by JSON Schema."""
    if isinstance(value, list):
        return [_with_integers(one, type_) for one in value]
    if isinstance(value, float) and value.is_integer() and _is_integer(type_):
        return int(value)
    return value


def _is_integer(type_: object) -> bool:
    """Return whether values of a type are integers, or contain them, and are no floats."""
    simple = _simple_types(type_)
    return int in simple and float not in simple


def _simple_types(type_: object) -> set[object]:
    """Return the types that a type is made of, such as int of `list[int] | None`."""
    parts = get_args(type_)
    if not parts:
        return {type_} if isinstance(type_, type) else set()
    return set().union(*map(_simple_types, parts))


def read_members(
    request: HttpRequest, takes: dict[str, object], names: tuple[str, ...]
) -> dict[str, object]:
    """Return the members of the body as a verb takes them. Raises InvalidInput for one it does not
    know, lacks, or of another type."""
    given = read_json(_OBJECT, request.body or b"{}")
    found = {name: _converted(name, value, takes, names) for name, value in given.items()}
    if isinstance(replicas := found.get("replicas"), list):
        found["replicas"] = tuple(replicas)
    return found


def _converted(
    name: str,
    value: object,
    takes: Mapping[str, object],
    names: tuple[str, ...],
    strict: bool = True,
) -> object:
    known = [other for other in takes if other not in names]
    if name not in known:
        guess = did_you_mean(name, known) or "."
        raise InvalidInput(
            f"unknown member {name!r}{guess}", hint=f"Members: {', '.join(known) or 'none'}."
        )
    try:
        return msgspec.convert(_with_integers(value, takes[name]), takes[name], strict=strict)
    except msgspec.ValidationError as error:
        raise InvalidInput(f"`{name}`: {error}.") from None


def _flags(
    request: HttpRequest, takes: Mapping[str, object], names: tuple[str, ...] = ()
) -> dict[str, object]:
    """Return the parameters of the query."""
    pairs = urllib.parse.parse_qsl(request.query.decode("ascii", "replace"), keep_blank_values=True)
    return {name: _converted(name, value, takes, names, strict=False) for name, value in pairs}


def read_query(request: HttpRequest, takes: dict[str, object]) -> dict[str, Any]:
    """Return the parameters of the query, of the types that `takes` names. Raises InvalidInput for
    another one."""
    return _flags(request, takes)


def _settings(request: HttpRequest) -> dict[str, UserValue]:
    """Return the settings of an application that the body names. Raises InvalidInput."""
    settings = read_json(_OBJECT, request.body or b"{}")
    if settings.pop("name", request.params[0]) != request.params[0]:
        raise InvalidInput(
            "the body names another application than the path.", hint="Leave `name` out."
        )
    known = at(ApplicationSpec, "http")
    others = {key: value for key, value in settings.items() if key not in known}  # refused later
    named = {key: value for key, value in settings.items() if key in known}
    return {**others, **converted(ApplicationSpec, named, "http")}
