"""Keyword arguments of ClipperServer's methods: groups of options, types for editors, and the
refusal of unknown ones, here and in other public classes."""

import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import TypeVar, cast

import msgspec

from clipper.errors import InvalidInput, refuse_unknown
from clipper.schema import Schema, Tensors
from clipper.spec.model import Reads
from clipper.types import InputType, UserValue

_C = TypeVar("_C", bound=type)
_F = TypeVar("_F", bound=Callable[..., object])


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """The replicas of a model, and what each of them may use."""

    replicas: int | tuple[int, int] = 1  # (1, 4): as many of 1 to 4 as the load requires
    deployer: str = ""  # "process", "docker" or "podman"; empty: server.deployer
    memory_mib: int = 0  # memory of each container; 0: no limit
    cpus: float = 0.0  # the same of its CPUs
    gpus: str = ""  # Docker and Podman: GPUs of each: "all", a number, or ids such as "0,2"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """The environment of a model. The default is that of the server."""

    requirements: str | os.PathLike[str] | Sequence[str] = ()  # a file, or lines for pip
    python: str = ""  # "3.12", or the path of an interpreter
    code: str | Sequence[str] = ()  # folders or files that the model imports
    env: Mapping[str, str] | None = None  # environment variables: {"MODE": "fast"}


class TableAccess(msgspec.Struct, frozen=True, kw_only=True):
    """The parameter tables of a model: docs/params.md, "Serving"."""

    tables: Mapping[str, Mapping[str, UserValue]] | None = None  # {"factors": {"dim": 8}}
    reads: Reads | None = None  # rows that a prediction depends on: input columns by table
    tolerance: float = 0.0  # a cached prediction lasts until a row moves by this share of its norm


def types_of(
    input: str | InputType | Mapping[str, str] | None,
    output: str | Mapping[str, str],
    inputs: Mapping[str, str] | None,
    outputs: Mapping[str, str] | None,
    schema: str | Schema | None,
) -> tuple[str | InputType | Mapping[str, str] | None, str | Mapping[str, str]]:
    """Return the input and output of a model that is deployed, from the keywords that state them.

    Raises InvalidInput when two of them state the same.
    """
    if schema is not None:
        if input is not None or output != "any" or inputs is not None or outputs is not None:
            raise InvalidInput("schema is given beside input or output: give one of the two.")
        schema = Schema.parse(schema)
        return (None if schema.input == "any" else schema.input), schema.output
    if inputs is not None:
        if input is not None:
            raise InvalidInput("inputs is given beside input: give one of the two.")
        input = Tensors.parse(inputs).to_json()
    if outputs is not None:
        if output != "any":
            raise InvalidInput("outputs is given beside output: give one of the two.")
        output = Tensors.parse(outputs).to_json()
    return input, output


def grouped(
    group: type[msgspec.Struct], given: msgspec.Struct | None, keywords: Mapping[str, UserValue]
) -> dict[str, UserValue]:
    """Return the keywords that a group of options states; none if the group is not given.

    A keyword that is None counts as not given. Raises InvalidInput when an option of the group is
    given by itself, too.
    """
    if given is None:
        return {}
    single = [name for name in group.__struct_fields__ if keywords.get(name) is not None]
    if single:
        raise InvalidInput(
            f"{', '.join(single)} is given beside {group.__name__}(...): give one of the two."
        )
    return msgspec.structs.asdict(given)


# -- keywords that a public function does not have


def keywords_of(function: Callable[..., object]) -> tuple[str, ...]:
    """Return the names of the arguments that may be given by keyword."""
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    given = inspect.signature(function).parameters.values()
    return tuple(one.name for one in given if one.kind in kinds and one.name != "self")


def only_known(function: _F) -> _F:
    """Let a function refuse unknown keywords before it is called. One with `**` keywords of its own
    stays as it is, since it refuses them itself."""
    parameters = inspect.signature(function).parameters.values()
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
    if takes_any or inspect.iscoroutinefunction(function):
        return function
    names = keywords_of(function)
    known = frozenset(names)

    @functools.wraps(function)
    def call(*given: object, **keywords: object) -> object:
        if not known.issuperset(keywords):
            refuse_unknown(function.__qualname__, keywords.keys() - known, names)
        return function(*given, **keywords)

    return cast(_F, call)


def refusing_unknown_keywords(kind: _C) -> _C:
    """Let the public methods of a class refuse unknown keywords."""
    for name, method in list(vars(kind).items()):
        if isinstance(method, FunctionType) and not name.startswith("_"):
            setattr(kind, name, only_known(method))
    return kind
