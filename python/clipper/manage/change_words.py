"""Changes of records in words: for commands, the history and the dashboard."""

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Final

import msgspec

_VALUE_CHARS_MAX: Final = 60
# fields that a person has no use for; moments other than `retired_us`, too
_UNSAID: Final = ("schema", "upto")
_RETIRED: Final = "retired_us"


def lines_of(changed: Iterable[Mapping[str, object]]) -> list[str]:
    """Return a line for each thing that records say otherwise than before.

    changed: mappings with `key`, `before` and `after`, as in a ChangeResult.
    """
    known = list(changed)
    made = {subject_of(str(one["key"])) for one in known if _kind(one) == "model"}
    found: list[str] = []
    for one in known:
        subject = subject_of(str(one["key"]))
        is_said = _kind(one) == "scale" and one["before"] is None and subject in made
        if not is_said:
            found += _lines(subject, one["before"], one["after"])
    return found


def subject_of(key: str) -> str:
    """Return what a record is about, by its key: `model sums:2` for `scale/sums/2`."""
    kind, _, name = key.partition("/")
    if kind in ("model", "scale"):
        return f"model {name.replace('/', ':')}"
    words = {
        "promoted": f"the latest version of {name}",
        "application": f"application {name}",
        "rollout": f"the rollout in {name}",
        "stream": f"stream {name}",
        "tables": f"table {name}",
        "mesh": f"mesh {name.replace('/', ' ', 1)}",
    }
    return words.get(kind, key)


def _kind(one: Mapping[str, object]) -> str:
    return str(one["key"]).partition("/")[0]


def _lines(subject: str, before: object, after: object) -> Iterator[str]:
    if isinstance(before, dict) and isinstance(after, dict):
        for name in {**before, **after}:
            old, new = before.get(name), after.get(name)
            if _text(old) != _text(new):
                yield from _field(subject, name, old, new)
    elif subject.startswith("the latest") and isinstance(after, dict):
        yield f"{subject} is {after.get('version')}"
    else:
        yield f"{subject} is {'new' if before is None else 'gone' if after is None else 'changed'}"


def _field(subject: str, name: str, old: object, new: object) -> Iterator[str]:
    if name == _RETIRED and isinstance(new, int) and new:
        yield f"{subject} is retired since {moment_of(new)}"
    elif name == "version" and subject.startswith("the latest"):
        yield f"{subject} is {new} instead of {old}"
    elif name not in _UNSAID and not name.endswith("_us"):
        yield f"{subject}: {name} {value_of(old)} -> {value_of(new)}"


def moment_of(time_us: int) -> str:
    """Return a moment in local time. time_us: microseconds since 1970."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time_us / 1e6))


def value_of(value: object) -> str:
    """Return a value of a record in words, cut at 60 characters."""
    text = _text(value)
    return text if len(text) <= _VALUE_CHARS_MAX else f"{text[: _VALUE_CHARS_MAX - 3]}..."


def _text(value: object) -> str:
    if value is None or value in ([], {}, ""):
        return "none"
    if isinstance(value, list):
        return ", ".join(map(_text, value))
    if isinstance(value, dict) and set(value) == {"name", "version"}:
        name, version = value["name"], value["version"]
        return str(name) if version is None else f"{name}:{version}"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(one)}" for name, one in value.items())
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
