"""Messages between the clients and the shards of a parameter server: headers, calls, and the
errors of refusals.

A call is a map in msgpack, `{"call": NAME, ...}`, and so is its answer. Arrays in it are maps of
dtype, shape and bytes. docs/params-internals.md describes all fields.
"""

import struct
from enum import IntEnum
from typing import Any, NamedTuple

import msgpack
import numpy as np

from clipper_container import errors
from clipper_container.errors import ClipperError, FrameError

HEAD = struct.Struct("<4s4B2I5QfI")
HEAD_BYTES = HEAD.size
MAGIC, VERSION = b"CLPT", 1
DUPLICATE = 1  # flag of an answer: the push had been applied before
IN_REGION = 2  # flag of a pull and its answer: the rows are in shared memory
# payload of the answer to a push: ids applied, unadmitted, without room, evicted
PUSHED = struct.Struct("<4I")
TABLES_MAX = 1024  # of a shard. A number is a place below it, and a generation times it
PART_BYTES = 8  # one table or variable of a message about several: u32 its number, u32 how many
VARIABLE = 1 << 31  # added to the number of a dense variable
DTYPES = {"f32": 0, "f16": 1, "bf16": 2, "i8": 3}
_ARRAY_DTYPES = {"bool", "float16", "float32", "float64"} | {
    f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)
}
_RANK_MAX = 8


class MessageKind(IntEnum):
    """Kinds of messages."""

    PULL = 1
    PUSH = 2
    CALL = 3
    ANSWER = 4
    REFUSED = 5
    SHARE = 6
    PULL_TABLES = 7
    PUSH_STEP = 8
    PULL_DENSE = 9
    CHANGES = 10
    RECEIVED = 11
    REPLAY = 12


class RefusalCode(IntEnum):
    """Reasons of a refusal. Those below 100 have the numbers of the core's `Status`.

    CALL_FAILED: the payload is a map of slug, message and hint.
    """

    FULL = 2
    BAD_INPUT = 12
    BAD_FRAME = 13
    TOO_LARGE = 14
    NO_MEMORY = 15
    UNKNOWN = 16
    NOT_ADMITTED = 101
    NOT_READY = 102
    OTHER_EPOCH = 103
    TOO_STALE = 104
    TOO_OLD = 105
    CALL_FAILED = 106
    NOT_SHARED = 107
    WORKER_IN_USE = 108
    STATE_LOST = 109
    READS_ONLY = 110
    OVER_QUOTA = 111
    MOVED = 112


class Head(NamedTuple):
    """Header of a message: the fields after magic and version."""

    kind: int
    dtype: int = 0
    flags: int = 0
    table: int = 0
    rows: int = 0
    id: int = 0
    epoch: int = 0
    worker: int = 0
    sequence: int = 0
    model: int = 0
    scale: float = 1.0
    payload_bytes: int = 0

    def packed(self) -> bytes:
        """Return the 64 bytes of the header."""
        return HEAD.pack(MAGIC, VERSION, *self)


def read_head(data: bytes | bytearray | memoryview) -> Head:
    """Parse a header of 64 bytes. Raises FrameError."""
    magic, version, *fields = HEAD.unpack(data)
    head = Head(*fields)
    if magic != MAGIC or version != VERSION or not 1 <= head.kind <= 12 or head.payload_bytes % 8:
        raise FrameError(
            "the shard sent bytes that are not a message of this protocol.",
            hint="Is it a shard of another version of clipper?",
        )
    return head


def padding(nbytes: int) -> bytes:
    """Return the zeros that fill a payload up to a multiple of 8 bytes."""
    return bytes(-nbytes % 8)


def packed(fields: dict[str, object]) -> bytes:
    """Encode a map in msgpack, padded to 8 bytes; arrays in it become maps."""
    body: bytes = msgpack.packb(fields, default=_plain)
    return body + padding(len(body))


def unpacked(body: bytes | bytearray | memoryview) -> dict[str, Any]:
    """Decode the map at the front of a payload. Raises FrameError."""
    reader = msgpack.Unpacker(
        strict_map_key=False, max_buffer_size=max(1, len(body)), object_hook=_array
    )
    try:
        reader.feed(body)
        found = reader.unpack()
    except msgpack.UnpackException:
        raise FrameError("a call that cannot be read: it is no complete msgpack value.") from None
    except (ValueError, TypeError) as error:
        raise FrameError(f"a call that cannot be read: {error}.") from None
    if not isinstance(found, dict):
        raise FrameError(f"a call is a map, not {type(found).__name__}.")
    return found


def _plain(value: object) -> object:
    if isinstance(value, np.ndarray):
        whole = np.ascontiguousarray(value)
        return {"__array__": whole.dtype.name, "shape": list(value.shape), "data": whole.tobytes()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} cannot be encoded")


def _array(fields: dict[str, object]) -> object:
    """Decode a map that stands for an array; it comes from a peer and is checked."""
    dtype = fields.get("__array__")
    if dtype is None:
        return fields
    shape, data = fields.get("shape"), fields.get("data")
    if (
        dtype not in _ARRAY_DTYPES
        or not isinstance(shape, list)
        or len(shape) > _RANK_MAX
        or not isinstance(data, bytes)
    ):
        raise ValueError(f"an array of {dtype!r}, shape {shape!r}")
    if not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"an array of shape {shape!r}")
    return np.frombuffer(data, dtype).reshape(shape)


# -- refusals


def _class_of(slug: str) -> type[ClipperError]:
    """Return the class of errors that defines a slug, or ClipperError."""
    classes = [ClipperError]
    for one in classes:
        if vars(one).get("slug") == slug:
            return one
        classes += one.__subclasses__()
    return ClipperError


def failed(error: Exception) -> bytes:
    """Encode the error of a call. Of an error that is not a ClipperError only type and text are
    sent."""
    if isinstance(error, ClipperError):
        return packed({"slug": error.slug, "message": error.message, "hint": error.hint})
    return packed(
        {
            "slug": "internal",
            "message": f"the shard failed: {type(error).__name__}: {error}",
            "hint": "",
        }
    )


def refusal(head: Head, body: bytes | bytearray | memoryview, what: str) -> ClipperError:
    """Return the error of a REFUSED answer. what: the shard and the request, for the message."""
    if head.rows == RefusalCode.CALL_FAILED:
        answer = unpacked(body)
        kind = _class_of(str(answer.get("slug")))
        return kind(str(answer.get("message", "")), hint=str(answer.get("hint", "")))
    about = int.from_bytes(body[:8], "little", signed=True) if len(body) >= 8 else 0
    kind, text, hint = _REFUSALS.get(head.rows, (ClipperError, "refused with code {code}", ""))
    return kind(f"{what}: {text.format(about=about, code=head.rows)}.", hint=hint)


_REFUSALS: dict[int, tuple[type[ClipperError], str, str]] = {
    RefusalCode.BAD_INPUT: (
        errors.InvalidInput,
        "a gradient of id {about} holds NaN or infinity, or the scale is not a number above 0",
        "Nothing was changed. Clip gradients, or find the batch that makes them.",
    ),
    RefusalCode.BAD_FRAME: (
        errors.FrameError,
        "a payload of {about} bytes does not fit its rows",
        "Is the width the table's?",
    ),
    RefusalCode.TOO_LARGE: (
        errors.TooLarge,
        "more than {about} bytes",
        "Request fewer rows, or raise params.frame_bytes_max.",
    ),
    RefusalCode.FULL: (
        errors.Overloaded,
        "{about} pushes wait for replicas",
        "Is a replica away? See `clipper params ps`.",
    ),
    RefusalCode.UNKNOWN: (
        errors.UnknownTable,
        "no table of number {about}",
        "Create it first: client.create(TableSpec(...)).",
    ),
    RefusalCode.NO_MEMORY: (errors.OutOfMemory, "out of memory", ""),
    RefusalCode.NOT_ADMITTED: (
        errors.Forbidden,
        "the token is missing or wrong",
        "Pass token=, or set CLIPPER_PARAMS__TOKEN.",
    ),
    RefusalCode.OVER_QUOTA: (
        errors.QuotaExceeded,
        "new rows would exceed a quota, of table number {about} (-1: of all tables of the shard)",
        "Nothing was changed. `clipper params alter TABLE --quota-rows N`, or params.quota_rows.",
    ),
    RefusalCode.READS_ONLY: (
        errors.Forbidden,
        "a push needs a token with the role 'train', and this one has 'read'",
        "clipper key NAME --role train --file FILE, of params.tokens_file, makes one.",
    ),
    RefusalCode.MOVED: (
        errors.ShardsMoved,
        "its rows have moved to another set",
        "Connect by the folder of the set, or with the new addresses.",
    ),
    RefusalCode.NOT_READY: (errors.ShardAway, "it recovers", "Try again soon."),
    RefusalCode.OTHER_EPOCH: (
        errors.ShardAway,
        "its epoch is {about}, another was meant",
        "It was relaunched: connect again.",
    ),
    RefusalCode.TOO_STALE: (
        errors.StalePush,
        "the gradient is {about} versions old",
        "Pull again, and compute it again.",
    ),
    RefusalCode.NOT_SHARED: (
        errors.DoesNotFit,
        "a place outside of the {about} bytes of memory that it shares with this worker",
        "",
    ),
    RefusalCode.WORKER_IN_USE: (
        errors.AlreadyExists,
        "worker number {about} is that of another live client",
        "Give each client a number of its own, or none: then one is made up.",
    ),
    RefusalCode.STATE_LOST: (
        errors.StateLost,
        "it restarted without its state: neither replica nor snapshot was found",
        (
            "Restore a snapshot, or let it start empty: `clipper params begin-anew`, or"
            " client.begin_anew()."
        ),
    ),
    RefusalCode.TOO_OLD: (
        errors.StalePush,
        (
            "push {about} is older than the last 1024 of this worker; whether it was applied is not"
            " known"
        ),
        "Do not send it again.",
    ),
}
