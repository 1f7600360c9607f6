"""A verb of management is reached by every way in, or its row says why it is not; what it takes is
the same everywhere."""

import inspect
from collections.abc import Callable
from typing import Any

import click
import pytest

from clipper.cli import main
from clipper.errors import InvalidInput, UnknownKeyword
from clipper.manage.client import Client
from clipper.manage.http.described import of_management
from clipper.manage.operations import Operations
from clipper.manage.streams.client import StreamClient
from clipper.manage.streams.operations import StreamOperations
from clipper.manage.tables.client import TableClient
from clipper.manage.tables.operations import TableOperations
from clipper.manage.verbs.table import REQUIRED, VERBS, Verb

OPERATIONS = {"": Operations, "tables": TableOperations, "streams": StreamOperations}
CLIENTS = {"": Client, "tables": TableClient, "streams": StreamClient}
# public methods of operations that are no rows, and why
NO_ROWS = {
    "Operations.by": "it says who acts",
    "Operations.on_tables": "it has verbs of its own",
    "Operations.on_streams": "it has verbs of its own",
    "Operations.set_application": "four routes: POST, PUT, PATCH, and DELETE of the same settings",
    "Operations.export_state": "its answer is a file",
    "Operations.import_state": "its body is a file",
}
# the ways in that a verb lacks
LACKING = {
    ("about", "command"),
    ("follow", "command"),
    ("model_stats", "command"),
    ("stages", "command"),
    ("application_stats", "command"),
    ("tables", "command"),
    ("table", "command"),
    ("shards", "command"),
}
EVERY = pytest.mark.parametrize("verb", VERBS, ids=[verb.name for verb in VERBS])


def method_of(verb: Verb) -> Callable[..., object]:
    found: Callable[..., object] = getattr(OPERATIONS[verb.on], verb.name)
    return found


def command_at(words: str) -> click.Command | None:
    command: click.Command | None = main
    for word in words.split():
        command = command.commands.get(word) if isinstance(command, click.Group) else None
    return command


def positional(function: Callable[..., object]) -> dict[str, object]:
    """Return the defaults of arguments that are no flags of a specification, by name."""
    return {
        one.name: REQUIRED if one.default is one.empty else one.default
        for one in inspect.signature(function).parameters.values()
        if one.name not in ("self", "dry_run") and one.kind is not one.VAR_KEYWORD
    }


def test_what_ways_in_lack_is_listed_with_the_reason() -> None:
    lacking = set()
    for verb in VERBS:
        own = getattr(CLIENTS[verb.on], verb.method, None)
        if own is None:
            assert verb.without["client"], verb.name
            lacking.add((verb.name, "client"))
        if command_at(verb.command or "no such command") is None:
            assert verb.without["command"], verb.name
            lacking.add((verb.name, "command"))
        assert set(verb.without) == {way for name, way in lacking if name == verb.name}
    assert lacking == LACKING


def test_every_operation_is_a_row() -> None:
    methods = {
        f"{kind.__name__}.{name}"
        for kind in OPERATIONS.values()
        for name in vars(kind)
        if not name.startswith("_") and name not in ("actor", "dry_run")
    }
    rows = {f"{OPERATIONS[verb.on].__name__}.{verb.name}" for verb in VERBS}
    assert methods - rows == NO_ROWS.keys()
    assert rows <= methods


@EVERY
def test_an_operation_takes_what_its_row_says(verb: Verb) -> None:
    takes = positional(method_of(verb))
    row = {one.name: one.default for one in verb.arguments}
    hold = row.pop("hold", None)
    assert (takes.pop("hold", None), hold) in ((None, None), (60.0, "60s"))
    assert takes == row
    kinds = {one.kind for one in inspect.signature(method_of(verb)).parameters.values()}
    assert (inspect.Parameter.VAR_KEYWORD in kinds) is (verb.spec is not None)


@EVERY
def test_a_route_takes_what_its_row_says(verb: Verb) -> None:
    every = {one.name for one in verb.arguments} | set(verb.fields)
    for route in verb.routes:
        about = of_management()[route.method, route.pattern]
        body = about.takes["properties"] if about.takes else {}
        assert len(about.names) == len(route.names)
        if route.changes:
            assert set(body) == every - set(route.names)
            assert about.takes.get("required", []) == verb.needed(route)
        elif len(verb.routes) == 1:
            assert set(about.query) == every - set(route.names)


@EVERY
def test_the_client_takes_what_the_row_says(verb: Verb) -> None:
    method = getattr(CLIENTS[verb.on], verb.method)
    signature = inspect.signature(method)
    assert ("dry_run" in signature.parameters) is verb.changes
    if "client" not in verb.by_hand:
        assert positional(method) == {one.name: one.default for one in verb.arguments}
        assert method.__doc__ == verb.text


@EVERY
def test_a_command_takes_what_the_row_says(verb: Verb) -> None:
    command = command_at(verb.command) if verb.command else None
    if command is None or "command" in verb.by_hand:
        return
    names = {one.name for one in command.params}
    assert {one.name for one in verb.arguments} <= names
    assert "dry_run" in names
    needed = [one.name for one in command.params if one.required]
    assert sorted(needed) == sorted(one.name for one in verb.arguments if one.default is REQUIRED)
    assert f"clipper {verb.command}" in (command.help or "")


class Sent:
    """Records the requests of a client."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[Any, ...]] = []
        self.client = Client("http://127.0.0.1:1")
        monkeypatch.setattr(Client, "_object", self._object)

    def _object(self, *request: Any) -> dict[str, object]:
        self.requests.append(request)
        members = {verb.member: [] for verb in VERBS if verb.member}
        return {"message": "done", **members}


def test_what_a_client_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    client = sent.client
    assert client.models() == []
    assert client.models("a b:1") == []
    assert client.logs("m:1", replica=2) == []
    assert client.follow("m") == {"message": "done", **client.follow("m")}
    client.rollouts()
    client.rollouts("a")
    client.promote("m:2", dry_run=True)
    client.promote("m:2", "a")
    client.scale("m", (1, 4))
    client.tables.alter("t", rows_max=None, evicts=True)
    client.streams.stop("s/1")
    client.tables.erase("t", ids=(1, 2))
    assert sent.requests == [
        ("GET", "/admin/models", None),
        ("GET", "/admin/models/a%20b:1", None),
        ("GET", "/admin/models/m:1/logs?replica=2", None),
        *[("GET", "/admin/models/m/follow", None)] * 2,
        ("GET", "/admin/rollouts", None),
        ("GET", "/admin/applications/a/rollout", None),
        ("POST", "/admin/models/m:2/promote?dry_run=true", {}),
        ("POST", "/admin/models/m:2/promote", {"application": "a"}),
        ("POST", "/admin/models/m/scale", {"replicas": (1, 4)}),
        ("POST", "/admin/tables/t/alter", {"evicts": True}),
        ("POST", "/admin/streams/s%2F1/stop", {}),
        ("POST", "/admin/tables/t/erase", {"ids": (1, 2)}),
    ]


def test_a_client_refuses_what_no_verb_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = Sent(monkeypatch)
    with pytest.raises(UnknownKeyword, match="did you mean 'role'"):
        sent.client.link("a", "m", rol="shadow")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'model'"):
        sent.client.link("a")  # type: ignore[call-arg]
    with pytest.raises(InvalidInput, match="a name is empty"):
        sent.client.retire("")
    assert sent.requests == []
