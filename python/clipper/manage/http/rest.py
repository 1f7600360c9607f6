"""Management over HTTP: a route for each verb of operations.py, on a listener of its own. Who may
is frontend/auth/management.py's.

The arguments of a verb come as members of a JSON object, or, for a GET, as parameters of the query;
`?dry_run=true` rehearses any change. `Clipper-Actor` names the client for the history: it is
trusted with the shared token; a personal token names its owner itself.
"""

import inspect
import types
import urllib.parse
from collections.abc import Callable, Collection, Mapping
from typing import Any, get_args, get_type_hints

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
from clipper.manage.streams.operations import STREAM_VERBS, StreamOperations
from clipper.manage.tables.operations import TABLE_VERBS, TableOperations
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import SpecField, at, converted
from clipper.spec.model import ModelSpec
from clipper.spec.table import ALTERABLE, TableSpec
from clipper.types import UserValue

# method, pattern, verb, names of what the pattern's {} are
VERBS: tuple[tuple[str, str, str, tuple[str, ...]], ...] = (
    ("GET", "/admin/about", "about", ()),
    ("GET", "/admin/ps", "ps", ()),
    ("GET", "/admin/stats", "stats", ()),
    ("GET", "/admin/history", "history", ()),
    ("GET", "/admin/models", "models", ()),
    ("GET", "/admin/models/{}", "models", ("name",)),
    ("GET", "/admin/models/{}/logs", "logs", ("model",)),
    ("GET", "/admin/models/{}/follow", "follow", ("model",)),
    ("GET", "/admin/models/{}/stats", "model_stats", ("model",)),
    ("GET", "/admin/models/{}/stages", "stages", ("name",)),
    ("POST", "/admin/models/{}/deploy", "deploy", ("name",)),
    ("POST", "/admin/models/{}/promote", "promote", ("model",)),
    ("POST", "/admin/models/{}/rollback", "rollback", ("model",)),
    ("POST", "/admin/models/{}/scale", "scale", ("model",)),
    ("POST", "/admin/models/{}/retire", "retire", ("model",)),
    ("GET", "/admin/applications", "applications", ()),
    ("GET", "/admin/applications/{}", "application", ("name",)),
    ("GET", "/admin/applications/{}/stats", "application_stats", ("name",)),
    ("GET", "/admin/applications/{}/evaluation", "evaluation", ("application",)),
    ("POST", "/admin/applications/{}/link", "link", ("application",)),
    ("POST", "/admin/applications/{}/unlink", "unlink", ("application",)),
    ("POST", "/admin/applications/{}/challenge", "challenge", ("application",)),
    ("POST", "/admin/applications/{}/shadow", "shadow", ("application",)),
    ("POST", "/admin/applications/{}/remove", "remove_application", ("name",)),
    ("POST", "/admin/store/accept", "accept_store", ()),
    ("GET", "/admin/rollouts", "rollouts", ()),
    ("GET", "/admin/applications/{}/rollout", "rollouts", ("application",)),
    ("POST", "/admin/applications/{}/rollout", "rollout", ("application",)),
    ("POST", "/admin/applications/{}/rollout/pause", "pause_rollout", ("application",)),
    ("POST", "/admin/applications/{}/rollout/resume", "resume_rollout", ("application",)),
    ("POST", "/admin/applications/{}/rollout/abort", "abort_rollout", ("application",)),
    ("POST", "/admin/applications/{}/rollout/promote", "promote_rollout", ("application",)),
)
# whose methods they are
ALL_VERBS: Mapping[
    type[Operations | TableOperations | StreamOperations],
    tuple[tuple[str, str, str, tuple[str, ...]], ...],
] = {Operations: VERBS, TableOperations: TABLE_VERBS, StreamOperations: STREAM_VERBS}
# verb -> the specification whose fields are members of its body
SPECIFICATIONS: Mapping[str, type[msgspec.Struct]] = {
    "deploy": ModelSpec,
    "create_table": TableSpec,
    "alter_table": TableSpec,
    "create_stream": StreamSettings,
    "create_model_stream": ModelStreamSettings,
}
_SOME: Mapping[str, Collection[str]] = {"alter_table": ALTERABLE}  # only these of its fields
lists = {
    "models": "models",
    "applications": "applications",
    "history": "history",
    "logs": "lines",
    "stages": "stages",
}
lists |= {"rollouts": "rollouts", "ps": "models", "tables": "tables", "streams": "streams"}
_OBJECT = msgspec.json.Decoder(dict[str, UserValue])
_FLAG = {"dry_run": bool}


class Management:
    """Threads: any. Every verb runs on a worker thread: the store may take its time."""

    def __init__(self, node: ServerInterface, operations: Operations) -> None:
        self._node, self._operations = node, operations
        self._queries = ApplicationRoutes(node)

    def add_to(self, routes: HttpRouter) -> None:
        """Add the routes."""
        for owner, verbs in ALL_VERBS.items():
            for method, pattern, verb, names in verbs:
                call = self._calling(verb, names, method == "GET", owner)
                routes.add(method, pattern, on_worker(call))
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

    def _calling(
        self,
        verb: str,
        names: tuple[str, ...],
        reads: bool,
        owner: type[Operations | TableOperations | StreamOperations],
    ) -> Callable[[HttpRequest], HttpResponse]:
        takes = arguments_of(getattr(owner, verb))
        needed = needed_by(getattr(owner, verb), names)

        def call(request: HttpRequest) -> HttpResponse:
            flags = _flags(request, takes if reads else _FLAG, names)
            given = flags if reads else read_members(request, takes, names)
            if lacking := [name for name in needed if name not in given]:
                raise InvalidInput(
                    f"the request lacks `{lacking[0]}`.", hint=f"Members: {', '.join(takes)}."
                )
            operations = self._by(request, not reads and flags.get("dry_run", False))
            acts = {
                Operations: operations,
                TableOperations: operations.on_tables,
                StreamOperations: operations.on_streams,
            }
            result = getattr(acts[owner], verb)(
                **dict(zip(names, request.params, strict=True)), **given
            )
            return answer_json({lists[verb]: result} if verb in lists else result)

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


def arguments_of(verb: Callable[..., object]) -> dict[str, object]:
    """Return the types of what a verb takes, by name: its arguments, and the fields of the
    specification that it takes."""
    hints = get_type_hints(verb)
    found = {
        one.name: _over_the_wire(hints[one.name])
        for one in inspect.signature(verb).parameters.values()
        if one.name != "self" and one.kind is not inspect.Parameter.VAR_KEYWORD
    }
    return found | {name: one.type for name, one in specified_by(verb).items()}


def specified_by(verb: Callable[..., object]) -> Mapping[str, SpecField]:
    """Return the fields of the specification that a verb takes, by name; none if it takes none."""
    kind = SPECIFICATIONS.get(verb.__name__)
    if kind is None:
        return {}
    found = at(kind, "http")
    return {name: found[name] for name in _SOME.get(verb.__name__, found)}


def needed_by(verb: Callable[..., object], names: tuple[str, ...]) -> list[str]:
    """Return the arguments that a verb requires and the path does not name."""
    parameters = inspect.signature(verb).parameters.values()
    return [
        one.name
        for one in parameters
        if one.default is inspect.Parameter.empty
        and one.kind is not inspect.Parameter.VAR_KEYWORD
        and one.name not in ("self", *names)
    ]


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


def _over_the_wire(type_: object) -> object:
    """Return a type as JSON has it: (least, most) and a number are distinguished by the value."""
    return (
        Any if isinstance(type_, types.UnionType) and tuple[int, int] in get_args(type_) else type_
    )


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
