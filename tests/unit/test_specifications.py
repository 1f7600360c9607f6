"""A field of a specification is in every way in ("door"), or the field says why it is not; what
doors make of the same values is the same."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

import click
import msgspec
import pytest

import clipper
from clipper.cli import main
from clipper.cli.catalog.specification import FORMS, members_of
from clipper.config import describe, load
from clipper.errors import InvalidInput
from clipper.manage.application_record import changes_of
from clipper.manage.client import Client
from clipper.manage.http.described import of_management
from clipper.manage.model_record import model_spec, record_fields
from clipper.manage.operations import Operations
from clipper.manage.streams.client import StreamClient
from clipper.manage.tables.client import TableClient
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.application import ApplicationSpec, roles_of
from clipper.spec.field import DOORS, Door, at, converted, fields, specified, stated
from clipper.spec.model import ModelSpec
from clipper.spec.table import ALTERABLE, TableSpec
from clipper.types import Application, Batching, Model, Similar
from tests.style import parsed

PACKAGE = Path(clipper.__file__).parent

# One value of each field as a door has it. All doors: the same value; else by door.
EXAMPLES: dict[str, Any] = {
    "target": "doubler:double",
    "command": ["java", "-jar", "svm.jar"],
    "folder": "/srv",
    "data": b"\x00x",
    "kind": "onnx",
    "trusted": ["a.B"],
    "sha256": "ab" * 32,
    "code": ["lib"],
    "version": 3,
    "replicas": (1, 4),
    "replicas_max": 5,
    "input": "f64[3]",
    "output": "f64",
    "inputs": {"age": "f64"},
    "outputs": {"score": "f64"},
    "schema": "f64[3] -> f64",
    "batching": {"mode": "static", "size_max": 7},
    "cache": False,
    "similar": {"width": 0.5, "projections": 8},
    "finite": True,
    "reads": {"taste": [0, 1]},
    "tolerance": 0.25,
    "tables": {"factors": {"dim": 8}},
    "retry_singly": True,
    "row_by_row": True,
    "max_concurrency": 7,
    "calls": ["app:digits", "model:embed"],
    "warmup": [[1.0, 2.0, 3.0]],
    "requirements": ["numpy"],
    "python": "3.12",
    "env": {"MODE": "fast"},
    "deployer": "docker",
    "memory_mib": 512,
    "cpus": 1.5,
    "gpus": "0,2",
}
# the same of an application
SETTINGS: dict[str, Any] = {
    "models": ["svm", "forest:2"],
    "slo_ms": 30.5,
    "default": [-1, 0.5],
    "input": "f64[3]",
    "policy": "exp3(eta=0.05)",
    "confidence_min": 0.25,
    "roles": {"forest:2": "challenger(share=0.1)"},
    "missing": "skip",
    "decider": "first",
    "coverage": 0.9,
    "context_table": "users",
    "output": "label",
    "priority": 1,
}
SETTINGS_AS_TEXT = {"default": "[-1, 0.5]", "roles": ("forest:2=challenger(share=0.1)",)}
AS_TEXT = {  # what the command line has for it
    "command": "java -jar svm.jar",
    "replicas": "1-4",
    "batching": "mode=static,size_max=7",
    "similar": "width=0.5,projections=8",
    "reads": ("taste=0,1",),
    "tables": ("factors:dim=8",),
    "env": ("MODE=fast",),
    "warmup": "[[1.0, 2.0, 3.0]]",
    "requirements": "requirements.txt",
}
# fields of the specification that its record has under another name, or not at all
NOT_RECORDED = {
    "data": "packed into the target",
    "kind": "packed into the target",
    "trusted": "packed into the target",
    "inputs": "stated by input",
    "outputs": "stated by output",
    "schema": "stated by input and output",
}


def python_keywords(function: Callable[..., object]) -> set[str]:
    names = set()
    for one in inspect.signature(function).parameters.values():
        if one.kind is one.VAR_KEYWORD:
            (kind,) = get_args(one.annotation)
            names |= set(kind.__annotations__)
        else:
            names.add(one.name)
    return names


def command_names(words: tuple[str, ...]) -> set[str]:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        found = command.get_command(click.Context(command), word)
        assert found is not None
        command = found
    names: set[str] = set()
    for one in command.params:
        names |= {*one.opts} if isinstance(one, click.Option) else {one.name.upper()}
    return names


class Doors(NamedTuple):
    """The ways in of a specification. file: the table; route: of its body; command: its words."""

    python: Callable[..., object]
    client: Callable[..., object] | None = None
    route: tuple[str, str] | None = None
    file: str = ""
    command: tuple[str, ...] = ()


WAYS: Mapping[type[msgspec.Struct], Doors] = {
    StreamSettings: Doors(
        clipper.ClipperServer.stream,
        StreamClient.create,
        ("POST", "/admin/streams/{}/create"),
        "streams.NAME.",
        ("stream", "create"),
    ),
    ModelStreamSettings: Doors(
        clipper.ClipperServer.models_from,
        StreamClient.create_models,
        ("POST", "/admin/streams/{}/create-models"),
        "model_streams.NAME.",
        ("stream", "create-models"),
    ),
    ModelSpec: Doors(
        clipper.ClipperServer.deploy,
        Client.deploy,
        ("POST", "/admin/models/{}/deploy"),
        "models.NAME.",
        ("deploy",),
    ),
    ApplicationSpec: Doors(
        clipper.ClipperServer.app,
        Client.set_application,
        ("POST", "/admin/applications/{}/set"),
        "apps.NAME.",
        ("app", "set"),
    ),
    TableSpec: Doors(
        TableSpec,
        TableSpec,
        ("POST", "/admin/tables/{}/create"),
        command=("table", "create"),
    ),
}
FIELDS = [(kind, one) for kind in WAYS for one in fields(kind)]


def names_in(kind: type[msgspec.Struct], door: Door) -> set[str]:
    """Return what a door takes, as it is, whatever the specification says."""
    ways = WAYS[kind]
    if door == "python":
        return python_keywords(ways.python)
    if door == "client":
        return python_keywords(ways.client) if ways.client else set()
    if door == "http":
        if ways.route is None:
            return set()
        found = of_management()[ways.route]
        return {*found.takes["properties"], *(found.names if kind is TableSpec else ())}
    if door == "command":
        return command_names(ways.command) if ways.command else set()
    if not ways.file:
        return set()
    keys = [info.key for info in describe() if info.key.startswith(ways.file)]
    return {key.removeprefix(ways.file) for key in keys}


def lacking(kind: type[msgspec.Struct]) -> Iterator[tuple[str, Door]]:
    for door in DOORS:
        found = names_in(kind, door)
        for one in fields(kind):
            name = one.names.get(door, one.name).split()[0]
            if door == "command" and name == one.name:
                name = f"--{name.replace('_', '-')}"
            if name not in found:
                yield one.name, door


@pytest.mark.parametrize("kind", WAYS)
def test_what_a_door_lacks_has_a_reason(kind: type[msgspec.Struct]) -> None:
    reasons = {(one.name, door) for one in fields(kind) for door in one.without}
    assert set(lacking(kind)) == reasons
    assert all(why for one in fields(kind) for why in one.without.values())


def test_what_can_be_changed_of_a_table_is_the_same_in_each_door() -> None:
    body = of_management()["POST", "/admin/tables/{}/alter"].takes["properties"]
    assert (
        {*body} == {*ALTERABLE} == python_keywords(TableClient.alter) - {"self", "name", "dry_run"}
    )
    of_command = {
        one.names.get("command", f"--{one.name.replace('_', '-')}")
        for one in fields(TableSpec)
        if one.name in ALTERABLE
    }
    taken = command_names(("table", "alter"))
    assert of_command <= taken
    assert taken.isdisjoint({"--dtype", "--optimizer", "--seed", "--admit-after"})


def test_the_body_of_a_deployment_is_what_the_verb_takes() -> None:
    body = of_management()[WAYS[ModelSpec].route].takes
    assert set(body["properties"]) == python_keywords(Operations.deploy) - {"self", "name"}


@pytest.mark.parametrize("field", [one for _, one in FIELDS], ids=lambda one: one.name)
def test_a_field_has_a_sentence_and_its_default_is_a_value_of_it(field: Any) -> None:
    assert field.text
    assert not field.text.endswith(".")
    assert field.text[0].islower() or field.text.startswith(("GPUs", "Python"))
    if field.name not in ("batching", "name", "dim"):  # the latter have no default
        assert field.convert(msgspec.to_builtins(field.default)) == field.default
    plain = field.json_schema()
    assert "$ref" not in str(plain)
    assert plain["description"].startswith(field.text)


def test_the_record_of_an_application_has_what_is_stated() -> None:
    recorded = {one.name: one.default for one in msgspec.structs.fields(Application)}
    assert {one.name for one in fields(ApplicationSpec)} == recorded.keys() - {"name", "created_us"}
    for one in fields(ApplicationSpec):
        if one.name not in ("input", "policy", "roles"):  # made of other forms
            assert one.default == recorded[one.name]


def test_the_record_has_what_is_stated() -> None:
    recorded = {one.name: one for one in msgspec.structs.fields(Model)}
    lacking = [one.name for one in fields(ModelSpec) if one.name not in recorded]
    assert lacking == [*NOT_RECORDED]
    for one in fields(ModelSpec):
        if one.name in recorded and one.name not in ("version", "input", "output", "batching"):
            assert type(one.default) is type(one.convert(one.default))


# -- the same values, by each door


def from_http(name: str) -> ModelSpec:
    one = next(one for one in fields(ModelSpec) if one.name == name)
    body = msgspec.json.decode(msgspec.json.encode(EXAMPLES[name]))
    return specified(ModelSpec, {one.names.get("http", name): body}, "http")


def from_file(name: str) -> ModelSpec:
    table = {"m": {name: EXAMPLES[name]}}
    if name == "tolerance":
        table["m"]["reads"] = EXAMPLES["reads"]
    if name == "replicas_max":
        table["m"]["replicas"] = 2
    if name == "replicas":
        table["m"]["replicas"] = [1, 4]
    return load(env={}, models=table).models["m"]


def from_environment(name: str) -> ModelSpec:
    value = EXAMPLES[name]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    env = {f"CLIPPER_MODELS__M__{name.upper()}": text}
    if name == "tolerance":
        env["CLIPPER_MODELS__M__READS"] = '{"taste": [0, 1]}'
    if name == "replicas_max":
        env["CLIPPER_MODELS__M__REPLICAS"] = "2"
    return load(env=env).models["m"]


def from_command(name: str) -> dict[str, Any]:
    values: dict[str, object] = dict.fromkeys(f"{one.name}_" for one in fields(ModelSpec))
    example = EXAMPLES[name]
    values[f"{name}_"] = AS_TEXT.get(name, tuple(example) if isinstance(example, list) else example)
    return members_of(ModelSpec, values)


def names_at(door: Door) -> list[str]:
    return [one.name for one in fields(ModelSpec) if door not in one.without]


def test_every_field_has_an_example() -> None:
    assert [*EXAMPLES] == [one.name for one in fields(ModelSpec)]
    assert [*SETTINGS] == [one.name for one in fields(ApplicationSpec)]
    assert FORMS.keys() <= EXAMPLES.keys() | SETTINGS.keys() | TABLE.keys()


@pytest.mark.parametrize("name", names_at("file"))
def test_a_file_and_the_environment_say_what_http_says(name: str) -> None:
    if name == "replicas_max":
        assert from_file(name).bounds == from_environment(name).bounds == (2, 5)
        return
    expected = getattr(from_http(name), name)
    if name == "batching":
        expected = Batching(**expected)
    assert getattr(from_file(name), name) == expected
    assert getattr(from_environment(name), name) == expected
    assert expected != getattr(ModelSpec(), name)


@pytest.mark.parametrize("name", names_at("command"))
def test_a_command_says_what_http_says(name: str) -> None:
    if name == "target":  # an argument
        return
    (given,) = from_command(name).items()
    if name in ("command", "requirements"):  # the client reads the file, and splits the words
        assert given == (name, AS_TEXT[name])
        return
    found = specified(ModelSpec, dict([given]), "http")
    assert found == from_http(name)


@pytest.mark.parametrize("name", names_at("python"))
def test_keywords_say_what_http_says(name: str) -> None:
    if name in ("target", "command"):  # what runs is no part of it
        return
    keywords: Any = {name: EXAMPLES[name]}
    found, expected = model_spec("m", keywords), from_http(name)
    config = load(env={}, limits={"replicas_max": 64})
    if name == "gpus":
        config = load(env={}, deployer="docker")
    if name == "deployer":
        assert found.deployer == expected.deployer
    assert record_fields("m", found, config) == record_fields("m", expected, config)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"gpus": "all"}, "gpus is for containers of docker"),
        ({"memory_mib": 8}, "16 or more"),
        ({"env": {"CLIPPER_TOKEN": "x"}}, "CLIPPER_TOKEN is Clipper's own"),
        ({"env": {"A-B": "x"}}, "'A-B' is no variable"),
        ({"env": {"A": "x\0"}}, "'A' is no variable"),
        ({"env": {f"A{i}": "" for i in range(65)}}, "at most 64 variables"),
        ({"env": {"A": "x" * (16 << 10)}}, "and 16384 bytes"),
        ({"warmup": []}, "warmup of model"),
        ({"schema": "f64 -> f64", "input": "f64"}, "schema is given beside"),
        ({"replicas": (3, 2)}, "are no bounds"),
        ({"batching": {"padded": True}}, "no cost"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(members: Any, why: str) -> None:
    spec = specified(ModelSpec, members, "http")
    with pytest.raises(InvalidInput, match=why):
        record_fields("m", spec, load(env={}))


@pytest.mark.parametrize(
    "members",
    [
        {"memory_mib": -1},
        {"cpus": 5000},
        {"tolerance": -0.1},
        {"version": -1},
        {"replicas": 2000},
        {"deployer": "dockr"},
        {"similar": {"width": 0}},
        {"cache": "yes"},
    ],
    ids=str,
)
def test_a_value_out_of_bounds_is_refused_by_its_name(members: dict[str, object]) -> None:
    (name,) = members
    with pytest.raises(InvalidInput, match=f"`{name}`: "):
        specified(ModelSpec, members, "http")


# -- a table's

TABLE: dict[str, Any] = {
    "name": "users",
    "dim": 8,
    "optimizer": "adam",
    "optimizer_settings": {"rate": 0.5},
    "initializer": "normal",
    "initializer_settings": {"scale": 0.25},
    "seed": 3,
    "rows_max": 100,
    "evicts": True,
    "admit_after": 2,
    "expire_s": 60,
    "quota_rows": 7,
    "quota_bytes": 4096,
    "dtype": "f16",
}


def test_every_door_says_the_same_of_a_table() -> None:
    assert [*TABLE] == [one.name for one in fields(TableSpec)]
    spec = TableSpec(**TABLE)
    body = msgspec.json.decode(msgspec.json.encode(TABLE))
    assert TableSpec(**converted(TableSpec, body, "http")) == spec
    texts = {f"{name}_": value for name, value in TABLE.items()}
    texts |= {"optimizer_settings_": ("rate=0.5",), "initializer_settings_": ("scale=0.25",)}
    assert TableSpec("users", 8, **members_of(TableSpec, texts)) == spec
    assert all(value != getattr(TableSpec("", 0), name) for name, value in TABLE.items())
    with pytest.raises(InvalidInput, match="`admit_after`: "):
        converted(TableSpec, {"admit_after": 256}, "http")


# -- an application's, by each door


def changed_by(members: Mapping[str, Any]) -> dict[str, Any]:
    """Return what keywords of Python change of a new application's record."""
    return changes_of("a", None, members, None, 60_000.0)


@pytest.mark.parametrize("name", SETTINGS)
def test_every_door_says_the_same_of_an_application(name: str) -> None:
    value = SETTINGS[name]
    body = msgspec.json.decode(msgspec.json.encode(value))
    over_http = converted(ApplicationSpec, {name: body}, "http")
    table = {"a": {name: value}}
    in_file = load(env={}, apps=table).apps["a"]
    text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
    in_environment = load(env={f"CLIPPER_APPS__A__{name.upper()}": text}).apps["a"]
    given = SETTINGS_AS_TEXT.get(name, tuple(value) if name == "models" else value)
    values = {f"{one.name}_": None for one in fields(ApplicationSpec)} | {f"{name}_": given}
    by_command = members_of(ApplicationSpec, values)
    assert over_http[name] != getattr(ApplicationSpec(), name)
    assert getattr(in_file, name) == getattr(in_environment, name) == over_http[name]
    assert converted(ApplicationSpec, by_command, "http") == over_http
    if name not in ("models", "roles", "coverage"):  # these need others
        assert changed_by({name: value})[name] == over_http[name]


def test_a_setting_of_an_application_that_is_not_named_stays() -> None:
    known = Application("a", policy="exp3", coverage=0.9)
    assert changes_of("a", None, {"input": "", "policy": ""}, known, 60_000.0) == {}
    assert changes_of("a", None, {"coverage": None}, known, 60_000.0) == {"coverage": None}
    assert changes_of("a", ["m", "n"], {}, None, 60_000.0)["policy"] == "mixture"


def test_roles_of_a_file_are_a_table_or_lines() -> None:
    lines = load(env={}, apps={"a": {"roles": ["svm:2 = shadow"]}}).apps["a"]
    table = load(env={}, apps={"a": {"roles": {"svm:2": "shadow"}}}).apps["a"]
    assert roles_of(lines.roles) == roles_of(table.roles) == {"svm:2": "shadow"}


@pytest.mark.parametrize(
    "members",
    [{"confidence_min": 1.5}, {"coverage": 0.2}, {"missing": "drop"}, {"slo_ms": 0}, {"output": 3}],
    ids=str,
)
def test_a_setting_out_of_bounds_is_refused(members: dict[str, object]) -> None:
    (name,) = members
    with pytest.raises(InvalidInput, match=f"`{name}`: "):
        converted(ApplicationSpec, members, "http")
    with pytest.raises(InvalidInput, match=name):
        changed_by(members)


def test_none_is_not_given() -> None:
    assert specified(ModelSpec, dict.fromkeys(at(ModelSpec, "http")), "http") == ModelSpec()
    assert stated(ModelSpec()) == {}
    assert stated(ModelSpec(similar=Similar(0.5), cache=False)) == {
        "cache": False,
        "similar": Similar(0.5),
    }


# -- where an option is written by hand


def files_with(name: str) -> set[str]:
    """Return the files of the product that name an option: as a name, an attribute or a keyword."""
    found = set()
    named = [path for path in PACKAGE.rglob("*.py") if name in path.read_text()]
    for path in named:
        for node in ast.walk(parsed(path)):
            words = {getattr(node, key, None) for key in ("id", "attr", "arg", "value")}
            if name in {word for word in words if isinstance(word, str)}:
                found.add(str(path.relative_to(PACKAGE)))
    return found


USED: Mapping[str, set[str]] = {
    # what the container gets
    "retry_singly": {"deploy/deployer.py", "deploy/processes/command.py"},
    "row_by_row": {"deploy/deployer.py"},
}


@pytest.mark.parametrize("name", USED)
def test_an_option_is_written_once(name: str) -> None:
    """Beside its field there are the type of its keyword, which is generated, the record with what
    makes it, and what uses it."""
    made = {"spec/model.py", "spec/keywords.py", "types.py", "manage/model_record.py"}
    assert files_with(name) <= made | USED[name]
