"""Options of a command from the fields of a specification, and the values that they give."""

import json
from collections.abc import Callable, Collection, Mapping
from typing import Final, Literal, NamedTuple, get_args, get_origin

import click
import msgspec

from clipper.cli.amounts import Share, Size
from clipper.cli.command_group import Verb
from clipper.cli.server_command import bounds, read_json
from clipper.errors import InvalidInput
from clipper.schema import InvalidTensor, Schema
from clipper.spec.application import roles_of
from clipper.spec.field import SpecField, at, plain_type
from clipper.types import UserValue

_METAVARS: Final = {
    "app": "APP",
    "code": "DIR",
    "command": "COMMAND",
    "context_table": "TABLE",
    "folder": "DIR",
    "gpus": "all|N|IDS",
    "input": "TYPE",
    "models": "MODEL",
    "output": "TYPE",
    "python": "VERSION",
    "requirements": "FILE",
    "sha256": "HEX",
    "trusted": "TYPE",
    "url": "URL",
}


class Form(NamedTuple):
    """The text of a field whose value is no text. parse: its value; name of the option, text."""

    metavar: str
    parse: Callable[[str, str], UserValue]
    multiple: bool = False


def with_options_of(
    kind: type[msgspec.Struct], only: Collection[str] = ()
) -> Callable[[Verb], Verb]:
    """Return a decorator that adds an option for each field that a command has, in their order.
    only: these fields, if any."""

    def add(verb: Verb) -> Verb:
        for one in reversed([*_options_of(kind).values()]):
            if only and one.name not in only:
                continue
            verb = _option(one)(verb)
        return verb

    return add


def members_of(kind: type[msgspec.Struct], values: Mapping[str, object]) -> dict[str, UserValue]:
    """Return the members that the values of options state, by the names of fields; those that are
    not given are left out. Raises click.BadParameter."""
    found: dict[str, UserValue] = {}
    for one in _options_of(kind).values():
        value = values.get(_value_name(one))
        if value is None or value == ():
            continue
        form = FORMS.get(one.name)
        if form is None:
            found[one.name] = value
        elif isinstance(value, tuple):
            pairs = [form.parse(_words(one)[0], text) for text in value]
            found[one.name] = dict(pairs)
        else:
            found[one.name] = form.parse(_words(one)[0], str(value))
    return found


def _options_of(kind: type[msgspec.Struct]) -> dict[str, SpecField]:
    """Return the fields that are options; one in capital letters is an argument."""
    return {name: one for name, one in at(kind, "command").items() if not name.isupper()}


def _value_name(one: SpecField) -> str:
    """Return the name of the parameter with the value of an option."""
    return f"{one.name}_"


def _words(one: SpecField) -> list[str]:
    return one.names.get("command", f"--{one.name.replace('_', '-')}").split()


def _option(one: SpecField) -> Callable[[Verb], Verb]:
    words = _words(one)
    type_ = plain_type(one.type)
    origin: object = get_origin(type_)
    help_ = sentence(one.text)
    name = _value_name(one)
    metavar = _METAVARS.get(one.name, one.unit.upper() or None)
    if form := FORMS.get(one.name):
        help_ += "  (may be repeated)" if form.multiple else ""
        return click.option(*words, name, metavar=form.metavar, multiple=form.multiple, help=help_)
    if type_ is bool:
        both = f"{words[0]}/--no-{words[0].removeprefix('--')}"
        return click.option(both, name, default=None, help=help_)
    if origin is Literal:
        choices = [choice for choice in get_args(type_) if choice]
        return click.option(*words, name, type=click.Choice(choices), help=help_)
    if type_ in (int, float) and one.bounds is not None:
        range_ = _range(type_, one.bounds)
        if one.unit == "share" and one.bounds[1] <= 1:
            range_, help_ = Share(*one.bounds), f"{help_}  (as 5% or 0.05)"
        return click.option(*words, name, metavar=metavar or "N", type=range_, help=help_)
    is_list = origin is tuple and one.name not in ("command", "requirements")
    help_ += "  (may be repeated)" if is_list else ""
    return click.option(*words, name, metavar=metavar, multiple=is_list, help=help_)


def _range(type_: object, bounds: tuple[float, float]) -> click.IntRange | click.FloatRange:
    least, most = bounds
    if type_ is int:
        return click.IntRange(int(least), int(most))
    return click.FloatRange(least, most)


def sentence(text: str) -> str:
    """Return the text of a field as a sentence for a terminal."""
    plain = text.replace("`", "")
    return f"{plain[:1].upper()}{plain[1:]}."


# -- texts of fields whose values are no texts


def _refused(option: str, why: str) -> click.BadParameter:
    return click.BadParameter(why, param_hint=option)


def _replicas(option: str, text: str) -> UserValue:
    return bounds(text)


def _schema(option: str, text: str) -> UserValue:
    try:
        Schema.parse(text)
    except InvalidTensor as error:
        raise _refused(option, str(error)) from None
    return text


def _rows(option: str, text: str) -> UserValue:
    """Parse rows of a warm-up, given as JSON."""
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise _refused(option, f"this is not JSON: {error}") from None
    if not isinstance(rows, list):
        raise _refused(option, "it is not a list of rows, such as [[1.0, 2.0]].")
    return rows


def _batching(option: str, text: str) -> UserValue:
    """Parse a mode, or `cost=length,padded=true`."""
    return _keys(option, text, "cost=length") if "=" in text else text


def _similar(option: str, text: str) -> UserValue:
    """Parse a width, or `width=0.5,projections=8`."""
    return _keys(option, text if "=" in text else f"width={text}", "width=0.5")


def _table(option: str, text: str) -> UserValue:
    """Parse `factors:dim=8,optimizer=adagrad`."""
    table, colon, keys = text.partition(":")
    if not (table and colon):
        raise _refused(option, f"{text!r} is not NAME:KEY=VALUE, such as factors:dim=8.")
    return table, _keys(option, keys, "dim=8")


def _variable(option: str, text: str) -> UserValue:
    """Parse `MODE=fast`."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise _refused(option, f"{text!r} is not NAME=VALUE, such as MODE=fast.")
    return name, value


def _columns(option: str, text: str) -> UserValue:
    """Parse `taste=0,1`."""
    table, _, columns = text.rpartition("=")
    if not table or not all(part.strip().isdecimal() for part in columns.split(",")):
        raise _refused(option, f"{text!r} is not TABLE=COLUMNS, such as taste=0,1.")
    return table, [int(part) for part in columns.split(",")]


def _role(option: str, text: str) -> UserValue:
    """Parse `svm:2=shadow`."""
    try:
        ((model, role),) = roles_of([text]).items()
    except InvalidInput as error:
        raise _refused(option, str(error)) from None
    return model, role


def _number(option: str, text: str) -> UserValue:
    """Parse `rate=0.01`."""
    key, equals, value = text.partition("=")
    try:
        return key, float(value if equals else "")
    except ValueError:
        raise _refused(option, f"{text!r} is not NAME=NUMBER, such as rate=0.01.") from None


def _answer(option: str, text: str) -> UserValue:
    """Parse JSON; what is none is a text."""
    return read_json(text, option)


def _keys(option: str, text: str, example: str) -> dict[str, object]:
    found: dict[str, object] = {}
    for part in text.split(","):
        key, equals, value = part.partition("=")
        if not equals:
            raise _refused(option, f"{part!r} is not KEY=VALUE, such as {example}.")
        try:
            found[key.strip()] = json.loads(value)
        except ValueError:
            found[key.strip()] = value.strip()
    return found


def _size(option: str, text: str) -> UserValue:
    """Parse `512Mi`; a number alone is MiB."""
    try:
        return Size(0).convert(text, None, None)
    except click.BadParameter as error:
        raise _refused(option, error.message) from None


FORMS: Final[Mapping[str, Form]] = {
    "default": Form("JSON", _answer),
    "memory_mib": Form("SIZE", _size),
    "replicas": Form("N|MIN-MAX", _replicas),
    "schema": Form("'IN -> OUT'", _schema),
    "batching": Form("MODE|KEY=VALUE,..", _batching),
    "similar": Form("WIDTH|KEY=VALUE,..", _similar),
    "reads": Form("TABLE=COLUMNS", _columns, multiple=True),
    "env": Form("NAME=VALUE", _variable, multiple=True),
    "tables": Form("NAME:KEY=VALUE,..", _table, multiple=True),
    "initializer_settings": Form("NAME=NUMBER", _number, multiple=True),
    "optimizer_settings": Form("NAME=NUMBER", _number, multiple=True),
    "roles": Form("MODEL=ROLE", _role, multiple=True),
    "warmup": Form("ROWS", _rows),
}
