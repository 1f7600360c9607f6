"""Fields of a specification, and what each of the ways in ("doors") makes of them.

`at(ModelSpec, "http")` returns the fields that a body of HTTP may have, by their names there.
"""

import functools
import operator
from collections.abc import Iterable, Mapping
from types import UnionType
from typing import (
    Annotated,
    Final,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from clipper.errors import InvalidInput
from clipper.types import UserValue

Door = Literal["python", "http", "client", "file", "command"]
DOORS: Final[tuple[Door, ...]] = get_args(Door)
_S = TypeVar("_S", bound=msgspec.Struct)


def field(
    text: str,
    unit: str = "",
    *,
    ge: float | None = None,
    le: float | None = None,
    wire: object = None,
    python: str = "",
    names: Mapping[Door, str] | None = None,
    without: Mapping[Door, str] | None = None,
    since: str = "0.1",
) -> Meta:
    """Describe a field of a specification, beside its type.

    text: one sentence, without its full stop. ge, le: bounds of a number. wire: the type as JSON
    has it, where that is another one. python: the type of the keyword, where Python takes more.
    names: its names in doors where it has another; of a command: its options. without: the doors
    that lack the field, each with the reason. since: the version that brought it.
    """
    extra = {
        "unit": unit,
        "wire": wire,
        "python": python,
        "names": dict(names or {}),
        "without": dict(without or {}),
        "since": since,
    }
    return Meta(description=text, extra=extra, ge=ge, le=le)


def one_of(*texts: str) -> UserValue:
    """Return the type of a text that is one of these, for descriptions: who uses it refuses others
    by the nearest one."""
    return Annotated[str, Meta(extra_json_schema={"enum": [*texts]})]


class SpecField(NamedTuple):
    """A field of a specification: see `field`. type: as JSON has it, with its bounds."""

    name: str
    type: UserValue
    default: UserValue
    text: str
    unit: str
    bounds: tuple[float, float] | None
    python: str
    names: Mapping[Door, str]
    without: Mapping[Door, str]

    def convert(self, value: object, *, strict: bool = True) -> UserValue:
        """Return the value as this field has it. Raises msgspec.ValidationError."""
        found = msgspec.convert(value, self.type, strict=strict)
        return self.default if found is None else found

    def json_schema(self) -> dict[str, UserValue]:
        """Return the JSON Schema of the field, with its sentence."""
        unit = f", in {self.unit}" if self.unit else ""
        return {**schema_of(self.type), "description": f"{self.text}{unit}"}


@functools.cache
def fields(kind: type[msgspec.Struct]) -> tuple[SpecField, ...]:
    """Return the fields of a specification in their order."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        _field(one.name, default_of(one), *get_args(hints[one.name]))
        for one in msgspec.structs.fields(kind)
    )


def _field(name: str, default: object, annotation: UserValue, meta: Meta) -> SpecField:
    extra = meta.extra or {}
    type_ = extra.get("wire") or annotation
    bounds = None
    if meta.ge is not None and meta.le is not None:
        bounds = (meta.ge, meta.le)
    return SpecField(
        name,
        bounded(type_, meta),
        default,
        meta.description or "",
        extra.get("unit", ""),
        bounds,
        extra.get("python", ""),
        extra.get("names", {}),
        extra.get("without", {}),
    )


def bounded(type_: UserValue, meta: Meta) -> UserValue:
    """Return a type whose numbers have the bounds of `meta`. A union with bounds of its own, as
    `Annotated` in it states them, stays as it is."""
    if not is_union(type_):
        return Annotated[type_, meta]
    if not isinstance(type_, UnionType) or (meta.ge is None and meta.le is None):
        return type_
    bounds = Meta(ge=meta.ge, le=meta.le)
    parts = [Annotated[one, bounds] if one in (int, float) else one for one in get_args(type_)]
    return functools.reduce(operator.or_, parts)


def is_union(type_: object) -> bool:
    """Return whether a type is a union."""
    origin: object = get_origin(type_)
    return isinstance(type_, UnionType) or origin is Union


def plain_type(type_: UserValue) -> UserValue:
    """Return a type without bounds and without None."""
    origin: object = get_origin(type_)
    if origin is Annotated:
        return plain_type(get_args(type_)[0])
    if is_union(type_):
        given = [part for part in get_args(type_) if part is not type(None)]
        return plain_type(given[0]) if len(given) == 1 else functools.reduce(operator.or_, given)
    return type_


def default_of(info: msgspec.structs.FieldInfo) -> UserValue:
    """Return the default of a field of a struct; dicts are made anew."""
    if info.default_factory is msgspec.NODEFAULT:
        return None if info.required else info.default
    return info.default_factory()


@functools.cache
def at(kind: type[msgspec.Struct], door: Door) -> Mapping[str, SpecField]:
    """Return the fields that a door has, by their names there."""
    return {one.names.get(door, one.name): one for one in fields(kind) if door not in one.without}


def stated(spec: msgspec.Struct, without: Iterable[str] = ()) -> dict[str, UserValue]:
    """Return the fields that differ from their defaults, by name, except `without`."""
    left_out = set(without)
    return {
        one.name: value
        for one in fields(type(spec))
        if one.name not in left_out and (value := getattr(spec, one.name)) != one.default
    }


def specified(kind: type[_S], members: Mapping[str, object], door: Door) -> _S:
    """Return a specification from its members as a door has them: see `converted`."""
    return kind(**converted(kind, members, door))


def converted(
    kind: type[msgspec.Struct], members: Mapping[str, object], door: Door
) -> dict[str, UserValue]:
    """Return members as a door has them as values of a specification's fields, by name; each is
    known there.

    None is a member that is not given, unless the field's default is None. Raises InvalidInput for
    a value of another type or out of its bounds.
    """
    known = at(kind, door)
    found = {}
    for name, value in members.items():
        one = known[name]
        if value is None and one.default is not None:
            continue
        try:
            found[one.name] = one.convert(value)
        except msgspec.ValidationError as error:
            raise InvalidInput(f"`{name}`: {error}.") from None
    return found


def schema_of(type_: object) -> dict[str, UserValue]:
    """Return the JSON Schema of a type without references, so that it may stand anywhere."""
    (found,), components = msgspec.json.schema_components(
        (type_,), ref_template="#/components/{name}"
    )
    inlined = _inlined(found, components)
    assert isinstance(inlined, dict)
    return inlined


def _inlined(schema: object, components: Mapping[str, UserValue]) -> object:
    if isinstance(schema, list):
        return [_inlined(one, components) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(components[schema["$ref"].rpartition("/")[2]], components)
    found = {key: _inlined(value, components) for key, value in schema.items()}
    # generators of clients have to be told that items may be anything
    if found.get("type") == "array":
        found.setdefault("items", {})
    return found
