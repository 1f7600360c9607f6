"""One frozen Config. Every limit has a name with its unit, a range, a default and a line of text:
see `describe()`.

What is given wins in this order: keyword, environment (`CLIPPER_LIMITS__TASKS_MAX=1000`), file,
default. A key that does not exist, or a value of the wrong type or out of its range, is a
ConfigError that names where the value came from.
"""

import functools
import os
import tomllib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from clipper.errors import ConfigError, did_you_mean
from clipper.schema import Schema
from clipper.settings.artifacts import ArtifactSettings
from clipper.settings.docker import DockerSettings
from clipper.settings.grpc import GrpcSettings, own_address, sharing_problems
from clipper.settings.http import (
    HttpSettings,
    is_loopback,
    listener_problems,
    query_tls,
    tls_problems,
)
from clipper.settings.influx import InfluxSettings
from clipper.settings.logging import LoggingSettings
from clipper.settings.mesh import MeshSettings
from clipper.settings.params import ParamsSettings
from clipper.settings.redaction import shown
from clipper.settings.server import (
    FeedbackSettings,
    LimitSettings,
    ServerSettings,
)
from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.settings.tracing import TracingSettings
from clipper.spec.application import ApplicationSpec, roles_of
from clipper.spec.field import bounded, default_of, is_union, plain_type
from clipper.spec.model import ModelSpec
from clipper.types import (
    Batching,
    InputType,
    Similar,
    UserValue,
    VersionedModel,
    check_name,
    check_policy,
    cost_problem,
)


class Config(msgspec.Struct, frozen=True):
    """All settings.

    origins: where each value that is not a default came from, by dotted key. file: absolute path of
    the TOML file; empty without one. may_move: keys of the addresses (`http.address`) that nobody
    named, so that the server takes the next free port if theirs is taken.
    """

    server: ServerSettings = ServerSettings()
    limits: LimitSettings = LimitSettings()
    batching: Batching = Batching()
    feedback: FeedbackSettings = FeedbackSettings()
    http: HttpSettings = HttpSettings()
    grpc: GrpcSettings = GrpcSettings()
    logging: LoggingSettings = LoggingSettings()
    tracing: TracingSettings = TracingSettings()
    docker: DockerSettings = DockerSettings()
    artifacts: ArtifactSettings = ArtifactSettings()
    influx: InfluxSettings = InfluxSettings()
    mesh: MeshSettings = MeshSettings()
    params: ParamsSettings = ParamsSettings()
    models: dict[str, ModelSpec] = {}
    apps: dict[str, ApplicationSpec] = {}
    streams: dict[str, StreamSettings] = {}
    model_streams: dict[str, ModelStreamSettings] = {}
    origins: dict[str, str] = {}
    file: str = ""
    may_move: frozenset[str] = frozenset()


class KeyInfo(msgspec.Struct, frozen=True):
    """One row of `describe()`. `unit` is empty for what has none."""

    key: str
    type: str
    unit: str
    default: object
    range: str
    text: str


_S = TypeVar("_S", bound=msgspec.Struct)
_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "server": ServerSettings,
    "limits": LimitSettings,
    "batching": Batching,
    "feedback": FeedbackSettings,
    "http": HttpSettings,
    "grpc": GrpcSettings,
    "logging": LoggingSettings,
    "tracing": TracingSettings,
    "docker": DockerSettings,
    "artifacts": ArtifactSettings,
    "influx": InfluxSettings,
    "mesh": MeshSettings,
    "params": ParamsSettings,
}
_NAMED: dict[str, type[msgspec.Struct]] = {
    "models": ModelSpec,
    "apps": ApplicationSpec,
    "streams": StreamSettings,
    "model_streams": ModelStreamSettings,
}
_NOUNS = {"models": "model", "apps": "application"}
_Path = tuple[str, ...]
KEYWORD: Final = "keyword "  # of what a program or a command gives, before its name
_MOVED: Final[dict[tuple[str, ...], str]] = {("server", "log_format"): "logging.format"}
_Leaves = dict[_Path, tuple[object, str]]  # path -> value, where it came from


def tables() -> dict[str, type[msgspec.Struct]]:
    """Return the tables of a file; `models.NAME` and its like stand for any name."""
    return {**_SECTIONS, **{f"{section}.NAME": kind for section, kind in _NAMED.items()}}


def describe() -> list[KeyInfo]:
    """Return every key that exists; `models.NAME.`, `apps.NAME.` and their like stand for any
    name."""
    rows = []
    for section, kind in tables().items():
        for field in msgspec.structs.fields(kind):
            if field.name not in keys_of(kind):
                continue
            type_, meta = typed(kind, field.name)
            extra = meta.extra or {}
            default = "as [batching]" if type_ is Batching else default_of(field)
            text = meta.description or ""
            rows.append(
                KeyInfo(
                    f"{section}.{field.name}",
                    _type_name(type_),
                    extra.get("unit", ""),
                    default,
                    _range(meta),
                    text,
                )
            )
    return rows


def load(
    path: str | os.PathLike[str] | None = None,
    env: Mapping[str, str] | None = None,
    **keywords: object,
) -> Config:
    """Return the configuration from a TOML file, the environment (None: this process's), and
    keywords.

    A keyword is a section (`limits={"tasks_max": 1000}`, `models={...}`) or a key of the first
    section that has it, by itself (`state="dir"`); `http="HOST:PORT"` is short for its address, and
    so for grpc. None means not given. Errors: ConfigError.
    """
    leaves = _from_file(Path(path)) if path is not None else {}
    for more in (_from_env(os.environ if env is None else env), _from_keywords(keywords)):
        leaves.update(more)
    sections: dict[str, Any] = {
        section: _build(kind, leaves, (section,)) for section, kind in _SECTIONS.items()
    }
    named: dict[str, Any] = {
        section: {
            name: _build(kind, leaves, (section, name), sections["batching"])
            for name in _names(leaves, section)
        }
        for section, kind in _NAMED.items()
    }
    if path is not None:
        folder = Path(path).absolute().parent
        named["models"] = {
            name: _resolved(model, folder) for name, model in named["models"].items()
        }
    sections["server"] = _with_token(sections["server"], leaves)
    config = Config(
        **sections,
        **named,
        origins={".".join(path): origin for path, (_, origin) in leaves.items()},
        file="" if path is None else str(Path(path).absolute()),
    )
    _check(config, leaves)
    return config


def _resolved(model: ModelSpec, folder: Path) -> ModelSpec:
    """Return the model with everything that it names relative to the file's folder, where it is
    there.

    A module or package that lies in the folder makes the folder part of the model's code, so that
    it is found by whoever starts the model, from any folder, and goes into its image.
    """
    target, code = model.target, [str(folder / place) for place in model.code]
    module, colon, _ = target.partition(":")
    if colon and _has_module(folder, module.partition(".")[0]):
        code.append(str(folder))
    elif target and not colon and (folder / target).exists():
        target = str(folder / target)
    lines = []
    for line in model.requirements:
        option, _, file = line.partition(" ")
        beside = folder / file.strip()
        lines.append(
            f"-r {beside}" if option in ("-r", "--requirement") and beside.is_file() else line
        )
    command = [
        str(folder / word) if os.path.isfile(folder / word) else word for word in model.command
    ]
    return msgspec.structs.replace(
        model,
        target=target,
        code=tuple(dict.fromkeys(code)),
        requirements=tuple(lines),
        command=tuple(command),
    )


def _has_module(folder: Path, name: str) -> bool:
    return bool(name) and ((folder / f"{name}.py").is_file() or (folder / name).is_dir())


def merge_batching(
    base: Batching, override: Batching | str | Mapping[str, object] | None
) -> Batching:
    """Return `base` with the changes of `override`: a mode such as "static", or some of the keys.

    Raises ConfigError.
    """
    if override is None or isinstance(override, Batching):
        return override or base
    leaves: _Leaves = {at: (leaf, "batching") for at, leaf in _flat(override, ("batching",))}
    return _build(Batching, leaves, ("batching",), base)


# -- where values come from


def _from_file(path: Path) -> _Leaves:
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise ConfigError(
            f"cannot read {path}: {error.strerror}.", hint="Name another file, or none."
        ) from None
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not UTF-8 text.", hint="Save it as UTF-8.") from None
    except tomllib.TOMLDecodeError as error:
        why, _, place = str(error).rstrip(")").partition(" (at ")
        line = place.removeprefix("line ").partition(",")[0]
        raise ConfigError(
            f"{path}{':' + line if line.isdecimal() else ''}: {why}.", hint="See https://toml.io."
        ) from None
    lines = _lines(text)

    def origin(at: _Path) -> str:
        while at and at not in lines:
            at = at[:-1]
        return f"{path}:{lines.get(at, 1)}"

    return {at: (value, origin(at)) for at, value in _flat(table)}


def _lines(text: str) -> dict[_Path, int]:
    """Return the line of each key and table of valid TOML. A statement ends where the lines since
    its start parse."""
    found: dict[_Path, int] = {}
    table: _Path = ()
    pending: list[str] = []
    for number, line in enumerate(text.split("\n"), 1):
        pending.append(line)
        try:
            parsed = tomllib.loads("\n".join(pending))
        except tomllib.TOMLDecodeError:
            continue  # a value of several lines
        start, head, pending = number - len(pending) + 1, pending[0].lstrip(), []
        if head.startswith("[") and all(isinstance(value, dict) for value in parsed.values()):
            table = max((at for at, _ in _flat(parsed)), key=len, default=())
            found.setdefault(table, start)
        else:
            for at, _ in _flat(parsed):
                for depth in range(1, len(at) + 1):
                    found.setdefault(table + at[:depth], start)
    return found


def _from_env(env: Mapping[str, str]) -> _Leaves:
    leaves: _Leaves = {}
    for name, value in env.items():
        if not name.startswith("CLIPPER_"):
            continue
        at = tuple(name.removeprefix("CLIPPER_").lower().split("__"))
        if len(at) > 1 and (table := _table_in(at, value)) is not None:
            leaves.update({below: (leaf, name) for below, leaf in _flat(table, at)})
        elif len(at) > 1:
            at, text = _shorthand(at, _EnvText(value))
            leaves[at] = (text, name)
        else:  # other variables may begin like ours; one that only lacks an underscore is a slip
            section, _, key = at[0].partition("_")
            if section in _SECTIONS and key in keys_of(_SECTIONS[section]):
                raise ConfigError(
                    f"{name}: unknown variable - did you mean"
                    f" 'CLIPPER_{section.upper()}__{key.upper()}'?"
                )
    return leaves


def _table_in(at: _Path, text: str) -> dict[str, object] | None:
    """Return the table that a variable gives as JSON, where its key is a table; else None."""
    if not text.lstrip().startswith("{"):
        return None
    kind = _SECTIONS.get(at[0]) if len(at) == 2 else _NAMED.get(at[0])
    is_key = (len(at) == 2 and at[0] in _SECTIONS) or (len(at) == 3 and at[0] in _NAMED)
    if is_key and kind is not None:
        type_ = typed(kind, at[-1])[0] if at[-1] in keys_of(kind) else None
        if type_ is not Batching and not _takes_table(type_) and not _is_nested(type_):
            return None
    try:
        return msgspec.json.decode(text, type=dict[str, object])
    except msgspec.MsgspecError:
        return None


class _EnvText(str):
    """A value from the environment: text, whatever it is to become."""


def _from_keywords(keywords: Mapping[str, object]) -> _Leaves:
    leaves: _Leaves = {}
    for name, value in keywords.items():
        if value is None:
            continue
        section = next((s for s, kind in _SECTIONS.items() if name in keys_of(kind)), None)
        if name in _NAMED or name in _SECTIONS:
            leaves.update({at: (leaf, f"{KEYWORD}{name}") for at, leaf in _flat(value, (name,))})
        elif section:
            leaves[(section, name)] = (value, f"{KEYWORD}{name}")
        else:
            choices = [
                *_SECTIONS,
                *_NAMED,
                *(key for kind in _SECTIONS.values() for key in keys_of(kind)),
            ]
            raise ConfigError(
                f"{KEYWORD}{name}: unknown key {name!r}{did_you_mean(name, choices) or '.'}"
            )
    return leaves


def _flat(table: object, at: _Path = ()) -> Iterator[tuple[_Path, object]]:
    """Return the leaves below `table`; an empty table is a leaf, so that `[models.svm]` alone names
    a model."""
    if isinstance(table, Batching):
        table = msgspec.structs.asdict(table)
    if isinstance(table, Mapping) and (table or not at):
        for key, value in table.items():
            yield from _flat(value, (*at, str(key)))
    else:
        yield _shorthand(at, table)


def _shorthand(at: _Path, value: object) -> tuple[_Path, object]:
    """Expand a short form: `batching = "static"` is short for `batching.mode = "static"`,
    `http = "HOST:PORT"` for `http.address`, `mesh = true` for `mesh.enabled`,
    `params = "FOLDER"` for `server.params`."""
    if at == ("mesh",) and isinstance(value, bool):
        return (*at, "enabled"), value
    if at == ("params",) and isinstance(value, str):
        return ("server", "params"), value
    if at in (("http",), ("grpc",)) and isinstance(value, str):
        return (*at, "address"), value
    is_batching = at == ("batching",) or (
        len(at) == 3 and at[0] == "models" and at[2] == "batching"
    )
    return ((*at, "mode"), value) if is_batching and isinstance(value, str) else (at, value)


# -- from leaves to values


@functools.cache
def keys_of(kind: type[msgspec.Struct]) -> tuple[str, ...]:
    """Return the keys of a table: the fields of its struct, but those that a file does not have."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        key
        for key in kind.__struct_fields__
        if "file" not in (get_args(hints[key])[1].extra or {}).get("without", {})
    )


@functools.cache
def typed(kind: type[msgspec.Struct], key: str) -> tuple[object, Meta]:
    """Return the plain type of a key, and its description."""
    hint = get_type_hints(kind, include_extras=True)[key]
    type_, meta = get_args(hint)
    if kind is ModelSpec and key == "batching":
        return Batching, meta
    type_ = (meta.extra or {}).get("wire") or type_
    return plain_type(type_), meta  # None is for what is not given


def _names(leaves: _Leaves, section: str) -> list[str]:
    names: dict[str, None] = {}
    for at, (value, origin) in leaves.items():
        if at[0] not in _SECTIONS and at[0] not in _NAMED:
            guess = did_you_mean(at[0], [*_SECTIONS, *_NAMED]) or "."
            raise ConfigError(f"{origin}: unknown section [{at[0]}]{guess}")
        if at[0] != section or (len(at) == 1 and value == {}):
            continue
        if len(at) == 1 or (len(at) == 2 and value != {}):
            raise ConfigError(
                f"{origin}: {'.'.join(at)} = {_shown(value, at[-1])}: expected a table, as in"
                f" [{section}.NAME]."
            )
        try:
            names[check_name(at[1], _NOUNS.get(section, "stream"))] = None
        except ValueError as error:
            raise ConfigError(f"{origin}: {error}") from None
    return list(names)


def _build(
    kind: type[_S],
    leaves: _Leaves,
    prefix: _Path,
    batching: msgspec.Struct | None = None,
) -> _S:
    """Return the section at `prefix`; `batching` is what a batching table in it starts from."""
    values: dict[str, UserValue] = (
        msgspec.structs.asdict(batching) if kind is Batching and batching else {}
    )
    nested: dict[str, dict[str, object]] = {}
    places: dict[str, str] = {}
    depth = len(prefix)
    below = {at: leaf for at, leaf in leaves.items() if at[:depth] == prefix}
    for at, (value, origin) in below.items():
        if len(at) == depth and value == {}:
            continue
        key = at[depth] if len(at) > depth else ""
        if not key:
            wanted = "a mode or a table" if kind is Batching else "a table"
            raise ConfigError(
                f"{origin}: {'.'.join(prefix)} = {_shown(value, prefix[-1])}: expected {wanted}."
            )
        if key not in keys_of(kind):
            if now := _MOVED.get((*prefix, key)):
                raise ConfigError(f"{origin}: {'.'.join((*prefix, key))} is {now} now.")
            guess = did_you_mean(key, keys_of(kind)) or f". Keys: {', '.join(keys_of(kind))}."
            raise ConfigError(f"{origin}: unknown key {key!r} in [{'.'.join(prefix)}]{guess}")
        if kind is ModelSpec and key == "batching" and (len(at) > depth + 1 or value == {}):
            continue
        if len(at) > depth + 1 and _is_nested(typed(kind, key)[0]):
            _place(nested.setdefault(key, {}), at[depth + 1 :], value)
            places.setdefault(key, origin)
            continue
        if len(at) > depth + 1 and _takes_table(typed(kind, key)[0]):
            entry = _entry_in(value, key) if len(at) == depth + 2 else {}
            more = _convert(
                kind, key, {at[depth + 1]: entry}, f"{origin}: {'.'.join(at[: depth + 1])}"
            )
            values[key] = values.get(key, {}) | more
            continue
        if len(at) > depth + 1:
            named = f"{key}s" if key in ("input", "output") else ""
            raise ConfigError(
                f"{origin}: {'.'.join(at[: depth + 1])} is a table: expected"
                f" {_expected(kind, key)}.",
                hint=f"Named tensors are {named} = {{ NAME = TYPE }}."
                if named in keys_of(kind)
                else "",
            )
        values[key] = _convert(kind, key, value, f"{origin}: {'.'.join(at)}")
    for key, entries in nested.items():
        where = f"{places[key]}: {'.'.join((*prefix, key))}"
        values[key] = _convert(kind, key, entries, where)
    if kind is ModelSpec:
        values["batching"] = _build(Batching, below, (*prefix, "batching"), batching)
    return kind(**values)


def _takes_table(type_: object) -> bool:
    """Return whether a value of a key may be a table of values by name."""
    parts = get_args(type_) if is_union(type_) else (type_,)
    return any(get_origin(part) is dict for part in parts)


def _is_nested(type_: object) -> bool:
    """Return whether the values of a key are tables of tables, or tables with keys of their own."""
    if get_origin(type_) is dict:
        return get_origin(get_args(type_)[1]) is dict
    return isinstance(type_, type) and issubclass(type_, msgspec.Struct) and type_ is not Batching


def _place(table: dict[str, object], at: _Path, value: object) -> None:
    """Put a leaf into a table of tables."""
    for key in at[:-1]:
        below = table.setdefault(key, {})
        if not isinstance(below, dict):
            return
        table = below
    table[at[-1]] = _json_or(value, str(value)) if isinstance(value, _EnvText) else value


def _convert(kind: type[msgspec.Struct], key: str, value: object, where: str) -> object:
    type_, meta = typed(kind, key)
    given = value
    if isinstance(value, _EnvText):
        given = _read_env(value, type_)
    try:
        plain = (
            given
            if type_ is UserValue
            else msgspec.convert(given, type_, strict=not isinstance(value, _EnvText))
        )
        return plain if type_ is UserValue else msgspec.convert(plain, bounded(type_, meta))
    except msgspec.ValidationError:
        raise ConfigError(
            f"{where} = {_shown(value, where.rpartition('.')[2])}: expected {_expected(kind, key)}."
        ) from None


def _read_env(text: str, type_: object) -> object:
    """Return what a variable says, in one of the forms that its type has: a list as JSON or
    separated by commas, a table as JSON, anything else as a word."""
    plain = get_origin(type_) or type_
    if type_ is UserValue or plain is dict:
        return _json_or(text, text)
    if plain is tuple or tuple[str, ...] in get_args(type_):
        return _read_list(text)
    if type_ is bool or is_union(type_):
        word = _WORDS.get(text.strip().lower())
        return _json_or(text, text) if word is None else word
    return str(text)


def _read_list(text: str) -> object:
    """Return a list as a variable has it: JSON, or words between commas."""
    words = [part.strip() for part in text.split(",") if part.strip()]
    if not text.strip().startswith("["):
        return words
    return _json_or(text, text if text.strip().endswith("]") else words)  # [::1]:80,[::1]:81


_WORDS: Final = {
    **dict.fromkeys(("true", "yes", "on", "1"), True),
    **dict.fromkeys(("false", "no", "off", "0"), False),
}


def _json_or(text: str, other: object) -> object:
    try:
        return msgspec.json.decode(str(text))
    except msgspec.DecodeError:
        return str(other) if isinstance(other, str) else other


def _entry_in(value: object, key: str) -> object:
    """Return the value of an entry of a table within a model's or an application's own. Columns
    (`reads`) may be separated by commas."""
    if not isinstance(value, _EnvText):
        return value
    if key != "reads":
        return str(value)
    if value.lstrip().startswith("["):
        return _json_or(value, value)
    return [int(part) if part.strip().isdecimal() else part for part in value.split(",")]


def _expected(kind: type[msgspec.Struct], key: str) -> str:
    type_, meta = typed(kind, key)
    unit, bounds = (meta.extra or {}).get("unit", ""), _range(meta)
    return " ".join(filter(None, (_type_name(type_), bounds and f"from {bounds}", unit)))


def _range(meta: Meta) -> str:
    return (
        f"{_number(meta.ge)} to {_number(meta.le)}"
        if meta.ge is not None and meta.le is not None
        else ""
    )


def _number(number: float) -> str:
    return str(int(number)) if number == int(number) else str(number)


def _type_name(type_: object) -> str:
    if get_origin(type_) is Literal:
        return "one of " + ", ".join(map(repr, get_args(type_)))
    if get_origin(type_) is Annotated:
        return _type_name(get_args(type_)[0])
    if is_union(type_):
        return " or ".join(map(_type_name, get_args(type_)))
    if get_origin(type_) is dict:
        return _table_name(get_args(type_)[1])
    if get_origin(type_) is tuple and plain_type(get_args(type_)[0]) is int:
        return "two of them"
    if get_origin(type_) is list and get_args(type_) == (UserValue,):
        return "a list"
    names: dict[object, str] = {
        str: "a string",
        int: "a whole number",
        float: "a number",
        bool: "true or false",
        Batching: "a mode or a table",
        Similar: "a table, as { width = 0.5 }",
        UserValue: "any value",
    }
    return names.get(type_, "a list of strings")


def _table_name(values: object) -> str:
    if values is str:
        return 'a table of strings, as { age = "f64" }'
    if get_origin(values) is dict:
        return "settings by table, as { factors = { dim = 8 } }"
    return "columns by table, as { taste = [0, 1] }"


def _shown(value: object, key: str) -> str:
    value = shown(key, value)
    text = repr(str(value)) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


# -- checks of several keys together


def _with_token(server: ServerSettings, leaves: _Leaves) -> ServerSettings:
    if not server.token_file:
        return server
    origin = leaves["server", "token_file"][1]
    if server.token:
        raise ConfigError(f"{origin}: both token and token_file are given.", hint="Leave one out.")
    try:
        token = Path(server.token_file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{origin}: cannot read token_file {server.token_file!r}: {error}."
        ) from None
    if not token:
        raise ConfigError(
            f"{origin}: token_file {server.token_file!r} is empty.", hint="Write a secret into it."
        )
    return msgspec.structs.replace(server, token=token)


def _check(config: Config, leaves: _Leaves) -> None:
    def refuse(at: _Path, why: str) -> ConfigError:
        """The error for the value at `at`, or for what set it when that was a default."""
        below = next((leaf for place, leaf in leaves.items() if place[: len(at)] == at), None)
        value, origin = leaves.get(at, (None, below[1] if below else "default"))
        given = f" = {_shown(value, at[-1])}" if at in leaves else ""
        return ConfigError(f"{origin}: {'.'.join(at)}{given}: {why}")

    _check_address(config.server, refuse)
    _check_apart(config, refuse)
    for listener, why in (
        *sharing_problems(config.grpc, config.http),
        *listener_problems(config.http, own_address(config.grpc, config.http)),
        *tls_problems("grpc", "tls", config.grpc, query_tls(config.http)),
        *tls_problems("params", "grpc_tls", config.params),
        *tls_problems("params", "tls", config.params),
    ):
        raise refuse(listener, why)
    if config.server.restart_ms_min > config.server.restart_ms_max:
        raise refuse(
            ("server", "restart_ms_min"),
            f"more than restart_ms_max ({config.server.restart_ms_max}).",
        )
    if why := cost_problem(config.batching):
        raise refuse(("batching", "cost"), why)
    for name, model in config.models.items():
        if model.command and model.target:
            raise refuse(("models", name, "command"), "give a target or a command.")
        if isinstance(model.batching, Batching) and (why := cost_problem(model.batching)):
            raise refuse(("models", name, "batching", "cost"), why)
        sides: dict[str, str | Mapping[str, str]] = {
            "input": model.input,
            "output": model.output,
            "inputs": model.inputs,
            "outputs": model.outputs,
        }
        for side, type_ in sides.items():
            try:
                InputType.parse(type_ or "any")
            except ValueError as error:
                raise refuse(("models", name, side), str(error)) from None
        try:
            Schema.parse(model.schema or "any")
        except ValueError as error:
            raise refuse(("models", name, "schema"), str(error)) from None
        problem = _replicas_problem(model, config.limits.replicas_max)
        if problem is not None:
            raise refuse(("models", name, problem[0]), problem[1])
        if model.tolerance and not model.reads:
            raise refuse(("models", name, "tolerance"), "it does not declare what it reads.")
    for name, app in config.apps.items():
        at: _Path = ("apps", name)
        try:
            at = (*at, "models")
            for model_name in app.models:
                VersionedModel.parse(model_name)
            at = ("apps", name, "input")
            if app.input:
                InputType.parse(app.input)
            at = ("apps", name, "policy")
            if app.policy:
                check_policy(app.policy)
            at = ("apps", name, "roles")
            roles_of(app.roles)
        except ValueError as error:
            raise refuse(at, str(error)) from None
        if app.slo_ms > config.limits.slo_ms_max:
            longest = _number(config.limits.slo_ms_max)
            raise refuse(("apps", name, "slo_ms"), f"more than limits.slo_ms_max ({longest} ms).")
    for section, key in (("streams", "app"), ("streams", "url"), ("model_streams", "url")):
        for name, settings in getattr(config, section).items():
            if not getattr(settings, key):
                raise refuse((section, name, key), "it is needed.")
    for name in config.model_streams:
        if name in config.streams:
            why = f"[streams.{name}] has this name: the streams of a server have different ones."
            raise refuse(("model_streams", name, "url"), why)


def _replicas_problem(model: ModelSpec, limit: int) -> tuple[str, str] | None:
    """Return the key of a model that states impossible replicas, and why; None if they are
    possible."""
    if isinstance(model.replicas, tuple):
        least, most = model.replicas
        if model.replicas_max:
            return "replicas_max", "replicas has both bounds: leave it out."
        if 1 <= least <= most <= limit:
            return None
        return "replicas", f"expected [least, most], from 1 to limits.replicas_max ({limit})."
    if model.replicas > limit:
        return "replicas", f"more than limits.replicas_max ({limit})."
    if model.replicas_max and not 1 <= model.replicas <= model.replicas_max <= limit:
        return (
            "replicas_max",
            f"expected 0, or from replicas (1 or more) to limits.replicas_max ({limit}).",
        )
    return None


def _check_apart(config: Config, refuse: Callable[[_Path, str], ConfigError]) -> None:
    """Refuse one address for two listeners."""
    listeners = {
        ("http", "address"): config.http.address,
        ("http", "admin"): config.http.admin,
        ("grpc", "address"): own_address(config.grpc, config.http),
        ("server", "address"): config.server.address.removeprefix("tcp://"),
    }
    seen: dict[str, _Path] = {}
    for at, address in listeners.items():
        port = address.rpartition(":")[2]
        if port.isdecimal() and int(port) and (first := seen.setdefault(address, at)) != at:
            raise refuse(at, f"{'.'.join(first)} is the same address: give one of them another.")


def _check_address(server: ServerSettings, refuse: Callable[[_Path, str], ConfigError]) -> None:
    at = ("server", "address")
    if server.address == "unix" or (server.address.startswith("unix:") and len(server.address) > 5):
        return
    host, colon, port = server.address.removeprefix("tcp://").rpartition(":")
    if not (
        server.address.startswith("tcp://")
        and colon
        and host
        and port.isdecimal()
        and int(port) <= 65535
    ):
        raise refuse(at, "expected 'unix', 'unix:PATH' or 'tcp://HOST:PORT' (port 0 to 65535).")
    if not is_loopback(host) and not (server.token or server.insecure):
        raise refuse(at, "other hosts could dial in. Set server.token, or server.insecure = true.")
