"""Writes YAML of plain values: maps, lists, and scalars, quoted unless they are unambiguous. The
output is deterministic.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Document = dict[str, Any]  # of plain values
_PLAIN = re.compile(r"[A-Za-z/][A-Za-z0-9_./-]*")
_TAKEN = re.compile(r"(?i:true|false|yes|no|on|off|null|y|n|nan|inf)")


def to_yaml(*documents: object) -> str:
    """Format one or several documents of dicts with string keys, lists, str, bool, int, float
    and None.
    """
    return "---\n".join("".join(f"{line}\n" for line in _lines(document)) for document in documents)


def _lines(value: object) -> Iterator[str]:
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _entry(f"{_scalar(key)}:", item)
    elif isinstance(value, Sequence) and not isinstance(value, str) and value:
        for item in value:
            yield from _entry("-", item)
    else:
        yield _scalar(value)


def _entry(head: str, item: object) -> Iterator[str]:
    if not item or not isinstance(item, Mapping | Sequence) or isinstance(item, str):
        yield f"{head} {_scalar(item)}"
        return
    lines = _lines(item)
    if head == "-":
        yield f"- {next(lines)}"
    else:
        yield head
    yield from (f"  {line}" for line in lines)


def _scalar(value: object) -> str:
    if isinstance(value, str):
        return (
            value
            if _PLAIN.fullmatch(value) and not _TAKEN.fullmatch(value)
            else f'"{"".join(map(_escaped, value))}"'
        )
    if isinstance(value, float):
        text = repr(value)
        return text if "." in text or "e" not in text else text.replace("e", ".0e")
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, Mapping | Sequence):
        return "{}" if isinstance(value, Mapping) else "[]"
    return str(value)


def _escaped(character: str) -> str:
    code = ord(character)
    if character in '"\\':
        return f"\\{character}"
    if 0x20 <= code < 0x7F:
        return character
    return (
        f"\\x{code:02x}"
        if code < 0x100
        else f"\\u{code:04x}"
        if code < 0x10000
        else f"\\U{code:08x}"
    )
