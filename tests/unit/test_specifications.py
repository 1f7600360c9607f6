"""A field of a specification is in every way in ("door"), or the field says why it is not; what
doors make of the same values is the same."""

import ast
import inspect
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

import click
import msgspec
import pytest

import clipper
from clipper.cli import main
from clipper.cli.catalog.specification import FORMS, members_of
from clipper.config import describe, load
from clipper.errors import InvalidInput
from clipper.manage.client import Client
from clipper.manage.http.described import of_management
from clipper.manage.model_record import model_spec, record_fields
from clipper.manage.operations import Operations
from clipper.spec.field import DOORS, Door, at, fields, specified, stated
from clipper.spec.model import ModelSpec
from clipper.types import Batching, Model, Similar
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
    "warmup": [[1.0, 2.0, 3.0]],
    "requirements": ["numpy"],
    "python": "3.12",
    "deployer": "docker",
    "memory_mib": 512,
    "cpus": 1.5,
    "gpus": "0,2",
}
AS_TEXT = {  # what the command line has for it
    "command": "java -jar svm.jar",
    "replicas": "1-4",
    "batching": "mode=static,size_max=7",
    "similar": "width=0.5,projections=8",
    "reads": ("taste=0,1",),
    "tables": ("factors:dim=8",),
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


def command_names() -> set[str]:
    command = main.commands["deploy"]
    names: set[str] = set()
    for one in command.params:
        names |= {*one.opts} if isinstance(one, click.Option) else {one.name.upper()}
    return names


def names_in(door: Door) -> set[str]:
    """Return what a door takes, as it is, whatever the specification says."""
    if door == "python":
        return python_keywords(clipper.ClipperServer.deploy)
    if door == "client":
        return python_keywords(Client.deploy)
    if door == "http":
        body = of_management()["POST", "/admin/models/{}/deploy"].takes
        assert set(body["properties"]) == python_keywords(Operations.deploy) - {"self", "name"}
        return set(body["properties"])
    if door == "command":
        return command_names()
    keys = [info.key for info in describe() if info.key.startswith("models.NAME.")]
    return {key.removeprefix("models.NAME.") for key in keys}


def lacking() -> Iterator[tuple[str, Door]]:
    for door in DOORS:
        found = names_in(door)
        for one in fields(ModelSpec):
            name = one.names.get(door, one.name).split()[0]
            if door == "command" and name == one.name:
                name = f"--{name.replace('_', '-')}"
            if name not in found:
                yield one.name, door


def test_what_a_door_lacks_has_a_reason() -> None:
    reasons = {(one.name, door) for one in fields(ModelSpec) for door in one.without}
    assert set(lacking()) == reasons
    assert all(why for one in fields(ModelSpec) for why in one.without.values())


@pytest.mark.parametrize("field", fields(ModelSpec), ids=lambda one: one.name)
def test_a_field_has_a_sentence_and_its_default_is_a_value_of_it(field: Any) -> None:
    assert field.text
    assert not field.text.endswith(".")
    assert field.text[0].islower() or field.text.startswith(("GPUs", "Python"))
    if field.name != "batching":
        assert field.convert(msgspec.to_builtins(field.default)) == field.default
    plain = field.json_schema()
    assert "$ref" not in str(plain)
    assert plain["description"].startswith(field.text)


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
    assert FORMS.keys() <= EXAMPLES.keys()


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
    if name in ("memory_mib", "cpus", "gpus"):
        config = load(env={}, deployer="docker")
    if name == "deployer":
        assert found.deployer == expected.deployer
    assert record_fields("m", found, config) == record_fields("m", expected, config)


@pytest.mark.parametrize(
    ("members", "why"),
    [
        ({"memory_mib": 512}, "memory_mib is for containers of docker"),
        ({"memory_mib": 8, "deployer": "docker"}, "16 or more"),
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
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(parsed(path)):
            words = {getattr(node, key, None) for key in ("id", "attr", "arg", "value")}
            if name in {word for word in words if isinstance(word, str)}:
                found.add(str(path.relative_to(PACKAGE)))
    return found


USED: Mapping[str, set[str]] = {
    # what the container gets
    "retry_singly": {
        "deploy/deployer.py",
        "deploy/kubernetes/manifests.py",
        "deploy/processes/command.py",
    },
    "row_by_row": {"deploy/deployer.py"},
}


@pytest.mark.parametrize("name", USED)
def test_an_option_is_written_once(name: str) -> None:
    """Beside its field there are the type of its keyword, which is generated, the record with what
    makes it, and what uses it."""
    made = {"spec/model.py", "spec/keywords.py", "types.py", "manage/model_record.py"}
    assert files_with(name) <= made | USED[name]
