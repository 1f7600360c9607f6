"""Reads and replaces a string in a protobuf message by a path of field numbers, without a schema.

Fields that are not on the path are skipped by their lengths, without a look at them; the message is
copied only when it changes. The path (5, 1) is field 1 of the message in field 5. As in protobuf,
the last one of repeated fields counts, repeated messages are merged, and a field with another wire
type is ignored. Not known without the schema: a `oneof` that a later member has cleared, and
whether a field is repeated (its last value is used). Source: protobuf.dev, "Encoding"; model-mesh's
`idExtractionPath` and `idInjectionPath`.
"""

from collections.abc import Iterator, Sequence
from typing import Final

from clipper.errors import InvalidInput

_VARINT, _I64, _LEN, _GROUP, _END, _I32 = range(6)
_VARINT_BYTES_MAX: Final = 10
_FIELD_MAX: Final = (1 << 29) - 1
_PATH_MAX: Final = 16
_GROUPS_MAX: Final = 100
_Bytes = bytes | bytearray | memoryview
_Span = tuple[int, int, int]  # positions of a field's length, its value, and its end


def field_path(numbers: Sequence[int]) -> tuple[int, ...]:
    """Check a path of field numbers and return it. InvalidInput."""
    path = tuple(numbers)
    known = all(
        isinstance(one, int) and not isinstance(one, bool) and 1 <= one <= _FIELD_MAX
        for one in path
    )
    if not path or len(path) > _PATH_MAX or not known:
        hint = (
            f"1 to {_PATH_MAX} numbers, each from 1 to {_FIELD_MAX}: [5, 1] is field 1 of the"
            " message in field 5."
        )
        raise InvalidInput(f"{list(path)[:20]} is not a path of protobuf fields.", hint=hint)
    return path


def extract(message: _Bytes, path: Sequence[int]) -> str | None:
    """Return the string at `path`; None if there is none.

    InvalidInput for bytes that are no message, or no UTF-8.
    """
    found = _last(message, 0, len(message), path)
    if found is None:
        return None
    _, start, end = found[-1]
    try:
        return str(message[start:end], "utf-8")
    except UnicodeDecodeError:
        raise InvalidInput(f"field {_shown(path)} of the message is no UTF-8.") from None


def inject(message: _Bytes, path: Sequence[int], value: str) -> bytes:
    """Return the message with `value` at `path`; missing messages on the path are added.

    InvalidInput for bytes that are no message.
    """
    text, view = value.encode(), memoryview(message)
    found = _last(message, 0, len(message), path)
    if found is not None:
        *around, (at, _, end) = found
        new = varint(len(text)) + text
    else:
        around = _innermost(message, path[:-1])
        at = end = around[-1][2] if around else len(message)
        new = _nested(path[len(around) :], text)
    heads = _lengths(around, len(new) - (end - at))
    pieces: list[_Bytes] = []
    copied = 0
    for (length_at, value_at, _), head in zip(around, heads, strict=True):
        pieces += (view[copied:length_at], head)
        copied = value_at
    return b"".join((*pieces, view[copied:at], new, view[end:]))


def _lengths(around: Sequence[_Span], grown: int) -> list[bytes]:
    """Return new length prefixes of messages, outermost first, when the innermost has grown."""
    heads = []
    for length_at, value_at, end in reversed(around):
        head = varint(end - value_at + grown)
        grown += len(head) - (value_at - length_at)
        heads.append(head)
    return heads[::-1]


def _nested(path: Sequence[int], text: bytes) -> bytes:
    for number in reversed(path):
        text = varint(number << 3 | _LEN) + varint(len(text)) + text
    return text


def _last(message: _Bytes, at: int, end: int, path: Sequence[int]) -> list[_Span] | None:
    """Return the last field at `path`, after the messages around it; None if there is none."""
    last: list[_Span] | None = None
    for span in _fields(message, at, end, path[0]):
        if len(path) == 1:
            last = [span]
        elif (within := _last(message, span[1], span[2], path[1:])) is not None:
            last = [span, *within]
    return last


def _innermost(message: _Bytes, path: Sequence[int]) -> list[_Span]:
    """Return the existing messages along `path`, the last one of each number."""
    found: list[_Span] = []
    at, end = 0, len(message)
    for number in path:
        last = None
        for last in _fields(message, at, end, number):  # noqa: B007  # only the last one is needed
            pass
        if last is None:
            break
        found.append(last)
        _, at, end = last
    return found


def _fields(message: _Bytes, at: int, end: int, number: int) -> Iterator[_Span]:
    """Yield the length-delimited fields of a number, and check message[at:end] to its end."""
    groups: list[int] = []
    while at < end:
        tag, at = _read(message, at, end)
        field, kind = tag >> 3, tag & 7
        if not 1 <= field <= _FIELD_MAX:
            raise _broken(f"a field with the number {field}", at)
        if kind == _LEN:
            size, start = _read(message, at, end)
            if size > end - start:
                raise _broken(f"a field of {size} bytes where {end - start} are left", at)
            if field == number and not groups:
                yield at, start, start + size
            at = start + size
        elif kind == _VARINT:
            _, at = _read(message, at, end)
        elif kind in (_I64, _I32):
            at += 8 if kind == _I64 else 4
            if at > end:
                raise _broken("a number that is cut off", end)
        else:
            _turn(groups, field, kind, at)
    if groups:
        raise _broken(f"a group {groups[-1]} without an end", at)


def _turn(groups: list[int], field: int, kind: int, at: int) -> None:
    """Enter or leave a group."""
    if kind == _GROUP and len(groups) < _GROUPS_MAX:
        groups.append(field)
    elif kind != _END or not groups or groups.pop() != field:
        raise _broken(f"a field of kind {kind} that cannot be there", at)


def _read(message: _Bytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and the position after it."""
    value = shift = 0
    for here in range(at, min(end, at + _VARINT_BYTES_MAX)):
        byte = message[here]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, here + 1
        shift += 7
    raise _broken("a number without an end", at)


def varint(value: int) -> bytes:
    """Return a number from 0 as protobuf writes it: seven bits in a byte, the lowest first."""
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _shown(path: Sequence[int]) -> str:
    return ".".join(map(str, path))


def _broken(what: str, at: int) -> InvalidInput:
    return InvalidInput(f"the bytes are no protobuf message: {what}, at byte {at}.")
