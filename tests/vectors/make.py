"""Writes the golden frames: frames.json, which every reader must understand, refused.json, which
none may, records.json, the rows of models with named tensors, parts.json, the frames of answers in
parts, and calls.json, the payloads of calls.

An independent witness of docs/wire.md: struct, zlib and numpy only, nothing of ours, so that an
error of the codec cannot be copied into the vectors. `python tests/vectors/make.py` writes
them anew; `--check` says by its exit status whether they differ.
"""

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
HELLO, WELCOME, REFUSE, PREDICT, REPLY, FAILURE, HEARTBEAT, GOODBYE, REGION, FEEDBACK, ACCURACY = (
    range(1, 12)
)
KINDS = (
    "",
    "HELLO",
    "WELCOME",
    "REFUSE",
    "PREDICT",
    "REPLY",
    "FAILURE",
    "HEARTBEAT",
    "GOODBYE",
    "REGION",
    "FEEDBACK",
    "ACCURACY",
    "",
    "",
    "PART",
    "CANCEL",
    "CALL",
    "ANSWER",
)
PART, CANCEL, CALL, ANSWER = 14, 15, 16, 17
VARIABLE = 1
CONFIDENCE = 2
ROW_STATUS = 4
COMPRESSED = 8
CHECKED = 16
SHARED = 32
SESSIONS = 64
QUALIFIERS = 128
PARTIAL = 256
PARTS = 512
FLAGS = {
    1: "VARIABLE",
    2: "CONFIDENCE",
    4: "ROW_STATUS",
    8: "COMPRESSED",
    16: "CHECKED",
    32: "SHARED",
    64: "SESSIONS",
    128: "QUALIFIERS",
    256: "PARTIAL",
    512: "PARTS",
}
DTYPES = (
    "any",
    "bool",
    "u8",
    "i8",
    "u16",
    "i16",
    "u32",
    "i32",
    "u64",
    "i64",
    "f16",
    "f32",
    "f64",
    "str",
    "bytes",
)
CODES = ("?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8")
NUMPY = dict(zip(DTYPES[1:13], CODES, strict=True))
Vector = dict[str, Any]


def pad(part: bytes) -> bytes:
    return part + bytes(-len(part) % 8)


def header(
    kind: int = PREDICT,
    *,
    magic: bytes = b"CLPR",
    version: int = 2,
    dtype: str = "any",
    dims: tuple[int, ...] = (),
    rank: int | None = None,
    flags: int = 0,
    reserved: int = 0,
    rows: int = 0,
    id: int = 0,
    payload_bytes: int = 0,
    time_us: int = 0,
    payload_crc: int = 0,
) -> bytes:
    all_dims = (*dims, 0, 0, 0, 0)[:4]
    number = DTYPES.index(dtype) if dtype in DTYPES else int(dtype)
    rank = len(dims) if rank is None else rank
    front = magic + struct.pack("<BBBBHHIQ", version, kind, number, rank, flags, reserved, rows, id)
    front += struct.pack("<4IQQI", *all_dims, payload_bytes, time_us, payload_crc)
    return front + struct.pack("<I", zlib.crc32(front))


def frame(
    name: str, kind: int, payload: bytes = b"", *, meaning: Vector | None = None, **fields: Any
) -> Vector:
    flags = fields.get("flags", 0)
    crc = zlib.crc32(payload) if flags & CHECKED else 0
    head = header(kind, payload_bytes=len(payload), payload_crc=crc, **fields)
    said: Vector = {
        "kind": KINDS[kind],
        "dtype": fields.get("dtype", "any"),
        "shape": list(fields.get("dims", ())),
        "flags": [text for bit, text in FLAGS.items() if flags & bit],
        "rows": fields.get("rows", 0),
        "id": fields.get("id", 0),
        "time_us": fields.get("time_us", 0),
        "payload_bytes": len(payload),
        "payload_crc": crc,
    }
    return {
        "name": name,
        "version": 2,
        "hex": (head + payload).hex(),
        "meaning": said | (meaning or {}),
    }


# -- batches


def tail(
    confidence: list[float] | None,
    status: list[int] | None,
    text: str,
    sessions: list[int] | None = None,
    qualifiers: list[str] | None = None,
) -> tuple[int, bytes, Vector]:
    """Return what follows the data: its flags, its bytes, its meaning."""
    flags, part = 0, b""
    meaning: Vector = {}
    if sessions is not None:
        flags, part = SESSIONS, struct.pack(f"<{len(sessions)}Q", *sessions)
        meaning["sessions"] = sessions
    if confidence is not None:
        flags, part = flags | CONFIDENCE, part + pad(np.array(confidence, "<f4").tobytes())
        meaning["confidence"] = confidence
    if qualifiers is not None:
        maps = [bytes.fromhex(text) for text in qualifiers]
        part += pad(np.array([len(each) for each in maps], "<u4").tobytes()) + pad(b"".join(maps))
        flags, meaning["qualifiers"] = flags | QUALIFIERS, qualifiers
    if status is not None:
        flags, part = flags | ROW_STATUS, part + pad(bytes(status)) + text.encode()
        meaning |= {"status": status, "text": text}
    return flags, part, meaning


def fixed(
    name: str,
    kind: int,
    dtype: str,
    values: Any,
    confidence: list[float] | None = None,
    status: list[int] | None = None,
    text: str = "",
    flags: int = 0,
    sessions: list[int] | None = None,
    qualifiers: list[str] | None = None,
    **fields: Any,
) -> Vector:
    array = np.array(values, NUMPY[dtype])
    more, rest, meaning = tail(confidence, status, text, sessions, qualifiers)
    meaning = {"values": array.tolist()} | meaning
    fields |= {"rows": len(values), "dims": array.shape[1:], "flags": flags | more, "dtype": dtype}
    return frame(name, kind, pad(array.tobytes()) + rest, meaning=meaning, **fields)


def variable(
    name: str,
    kind: int,
    dtype: str,
    values: list[Any],
    confidence: list[float] | None = None,
    status: list[int] | None = None,
    text: str = "",
    flags: int = 0,
    sessions: list[int] | None = None,
    qualifiers: list[str] | None = None,
    **fields: Any,
) -> Vector:
    """Return a frame of rows of variable length. values: lists of numbers, str, or (for bytes)
    hexadecimal str."""
    if dtype == "str":
        rows = [value.encode() for value in values]
    elif dtype == "bytes":
        rows = [bytes.fromhex(value) for value in values]
    else:
        rows = [np.array(value, NUMPY[dtype]).tobytes() for value in values]
    item = np.dtype(NUMPY.get(dtype, "u1")).itemsize
    lengths = pad(np.array([len(row) // item for row in rows], "<u4").tobytes())
    data = b"".join(rows)
    if flags & COMPRESSED:
        block = literals(data)
        data = struct.pack("<Q", len(block)) + block
    more, rest, meaning = tail(confidence, status, text, sessions, qualifiers)
    fields |= {"rows": len(values), "dims": (0,), "flags": flags | more | VARIABLE, "dtype": dtype}
    return frame(
        name, kind, lengths + pad(data) + rest, meaning={"values": values} | meaning, **fields
    )


def region(name: str, number: int, rows: int, row_bytes: int, **fields: Any) -> Vector:
    meaning = {"region": number, "region_rows": rows, "row_bytes": row_bytes}
    return frame(
        name, REGION, struct.pack("<QQQ", number, rows, row_bytes), meaning=meaning, **fields
    )


def shared(
    name: str,
    dtype: str,
    dims: tuple[int, ...],
    runs: list[list[int]],
    flags: int = 0,
    **fields: Any,
) -> Vector:
    """Return a frame whose rows are in shared memory. runs: [region, first row, rows] each."""
    payload = b"".join(struct.pack("<IIQ", number, count, first) for number, first, count in runs)
    fields |= {
        "dtype": dtype,
        "dims": dims,
        "rows": sum(run[2] for run in runs),
        "flags": flags | SHARED,
    }
    return frame(name, PREDICT, payload, meaning={"runs": runs}, **fields)


def feedback(name: str, inputs: Vector, labels: Vector, flags: int = 0) -> Vector:
    """Return a FEEDBACK frame, whose payload is two frames: PREDICT with sessions, and REPLY."""
    payload = bytes.fromhex(inputs["hex"] + labels["hex"])
    meaning = {"inputs": inputs["meaning"], "labels": labels["meaning"]}
    return frame(name, FEEDBACK, payload, flags=flags, meaning=meaning)


def accuracy(
    name: str, learned: int, failed: int, value: float | None = None, **fields: Any
) -> Vector:
    payload = struct.pack("<QQ", learned, failed) + (
        b"" if value is None else struct.pack("<d", value)
    )
    return frame(
        name,
        ACCURACY,
        payload,
        meaning={"learned": learned, "failed": failed, "accuracy": value},
        **fields,
    )


def literals(data: bytes) -> bytes:
    """Return an LZ4 block without matches."""
    n = len(data)
    if n < 15:
        return bytes([n << 4]) + data
    return bytes([0xF0]) + b"\xff" * ((n - 15) // 255) + bytes([(n - 15) % 255]) + data


def pack(value: Any) -> bytes:
    """Encode maps, str, bool and int from 0 to 2**32 - 1 as msgpack, in the shortest form."""
    if isinstance(value, dict):
        return bytes([0x80 | len(value)]) + b"".join(
            pack(part) for pair in value.items() for part in pair
        )
    if isinstance(value, str):
        raw = value.encode()
        return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else bytes([0xD9, len(raw)])) + raw
    if isinstance(value, bool):
        return b"\xc3" if value else b"\xc2"
    for mark, code, bound in (
        (None, "B", 1 << 7),
        (0xCC, "B", 1 << 8),
        (0xCD, ">H", 1 << 16),
        (0xCE, ">I", 1 << 32),
    ):
        if value < bound:
            return (b"" if mark is None else bytes([mark])) + struct.pack(code, value)
    raise ValueError(value)


def version2() -> list[Vector]:
    hello = {
        "name": "svm",
        "version": 3,
        "replica": 0,
        "input": "f64[64]",
        "output": "any",
        "batch_max": 0,
        "protocol": 2,
        "token": "0123456789abcdef0123456789abcdef01",
        "pid": 4121,
        "sdk": "clipper-container 0.2.0.dev0",
        "shared": True,
    }
    welcome = {
        "conn": 17,
        "heartbeat_ms": 500,
        "payload_bytes_max": 64 << 20,
        "crc": True,
        "shared": True,
    }
    refused = "no model 'svn' is expected here: the token is unknown"
    traceback = (
        'Traceback (most recent call last):\n  File "model.py", line 7\nValueError: größer als 3'
    )
    return [
        frame("hello", HELLO, pack(hello), meaning={"map": hello}),
        frame("welcome", WELCOME, pack(welcome), meaning={"map": welcome}),
        frame("welcome_checked", WELCOME, pack(welcome), flags=CHECKED, meaning={"map": welcome}),
        frame("refuse", REFUSE, refused.encode(), meaning={"text": refused}),
        frame("failure", FAILURE, traceback.encode(), id=9, meaning={"text": traceback}),
        frame("heartbeat", HEARTBEAT),
        frame("goodbye", GOODBYE),
        fixed(
            "predict_f64_vectors",
            PREDICT,
            "f64",
            [[1.0, -2.5, 0.1], [0.0, 1e300, -0.0]],
            id=1,
            time_us=18500,
        ),
        fixed("predict_f32_padded", PREDICT, "f32", [[0.5], [1.5], [-2.0]], id=2, time_us=1),
        fixed(
            "predict_f32_checked",
            PREDICT,
            "f32",
            [[0.5, 0.25], [1.5, 8.0]],
            id=2**63 + 5,
            flags=CHECKED,
        ),
        fixed(
            "predict_f16_image", PREDICT, "f16", np.arange(24).reshape(2, 3, 2, 2).tolist(), id=3
        ),
        fixed(
            "predict_u8_rank4", PREDICT, "u8", np.arange(16).reshape(1, 2, 2, 2, 2).tolist(), id=4
        ),
        fixed("predict_i64_scalars", PREDICT, "i64", [-1, 0, 2**53], id=5),
        fixed("predict_no_elements", PREDICT, "f32", [[], []], id=6),
        variable("predict_str", PREDICT, "str", ["", "a", "Grüße", "日本語"], id=7, time_us=20000),
        variable(
            "predict_str_compressed", PREDICT, "str", ["ab" * 200, "", "ü"], id=8, flags=COMPRESSED
        ),
        variable("predict_bytes", PREDICT, "bytes", ["", "00ff10", "80"], id=9),
        variable("predict_f32_variable", PREDICT, "f32", [[1.0], [], [2.0, 3.0, 4.5]], id=10),
        variable(
            "predict_i16_variable_checked", PREDICT, "i16", [[-1], [5, 6]], id=11, flags=CHECKED
        ),
        region("region", 3, 8192, 3136),
        region("region_checked", 2**32 - 1, 16, 512, flags=CHECKED),
        shared("predict_shared", "f32", (784,), [[3, 17, 256]], id=12, time_us=18500),
        shared(
            "predict_shared_runs",
            "f64",
            (8, 8),
            [[3, 8190, 2], [3, 0, 5], [7, 2**40, 1]],
            id=13,
            flags=CHECKED,
        ),
        fixed("reply_f64_scalars", REPLY, "f64", [0.5, 2.0], id=1, time_us=1234),
        fixed("reply_bool", REPLY, "bool", [True, False, True], id=2),
        *(
            fixed(f"reply_{dtype}", REPLY, dtype, [[0, 1], [2, 3]], id=3)
            for dtype in list(NUMPY)[1:]
        ),
        fixed("reply_u8_confidence", REPLY, "u8", [7, 3, 9], confidence=[0.5, 0.25, 1.0], id=4),
        fixed(
            "reply_row_failed",
            REPLY,
            "f32",
            [[1.0, 2.0], [0.0, 0.0]],
            status=[0, 1],
            text="größer",
            id=5,
        ),
        variable(
            "reply_str_all_parts",
            REPLY,
            "str",
            ["cat", "", "dog"],
            confidence=[0.75, 0.0, 0.5],
            status=[0, 1, 0],
            text="row 1",
            flags=CHECKED,
            id=6,
            time_us=42,
        ),
        variable("reply_bytes", REPLY, "bytes", ["cafe"], id=7),
        fixed("reply_status_no_text", REPLY, "i32", [1], status=[0], id=8),
        fixed(
            "reply_f64_qualifiers",
            REPLY,
            "f64",
            [0.5, 2.0, 7.0],
            id=9,
            qualifiers=["82a77175616c69747903a46d6f6465a466617374", "", "81a2696ec3"],
        ),
        variable(
            "reply_str_qualifiers_all_parts",
            REPLY,
            "str",
            ["cat", "", "dog"],
            confidence=[0.75, 0.0, 0.5],
            status=[0, 1, 0],
            text="row 1",
            flags=CHECKED,
            id=10,
            qualifiers=["81a171cb3fe8000000000000", "", "81a17102"],
        ),
        fixed("reply_partial", REPLY, "f64", [0.5, 2.0], id=9, flags=PARTIAL),
        variable("reply_str_partial", REPLY, "str", ["cat"], id=9, flags=PARTIAL | CHECKED),
        fixed(
            "predict_sessions",
            PREDICT,
            "f32",
            [[0.5], [1.5], [-2.0]],
            sessions=[7, 0, 2**64 - 1],
            id=14,
        ),
        variable(
            "predict_str_sessions",
            PREDICT,
            "str",
            ["a", "Grüße"],
            sessions=[1, 2],
            flags=CHECKED,
            id=15,
        ),
        feedback(
            "feedback_digits",
            fixed("", PREDICT, "f64", [[0.5, 1.0], [2.0, -3.0]], sessions=[0, 99]),
            fixed("", REPLY, "i64", [4, 7]),
        ),
        feedback(
            "feedback_str_checked",
            variable("", PREDICT, "str", ["snow", "goal"], sessions=[1, 1]),
            variable("", REPLY, "str", ["weather", "sport"]),
            flags=CHECKED,
        ),
        accuracy("accuracy", 1200, 3, 0.9375),
        accuracy("accuracy_unsaid", 64, 0, flags=CHECKED),
    ]


# -- version 1


def v1(name: str, kind: int, values: list[Any], body: bytes, block: str | None = None) -> Vector:
    meaning = {"format": kind, "values": values} | ({} if block is None else {"block": block})
    return {
        "name": name,
        "version": 1,
        "hex": (struct.pack("<BI", kind, len(values)) + body).hex(),
        "meaning": meaning,
    }


def v1_fixed(name: str, kind: int, values: list[Any]) -> Vector:
    array = np.array(values, ("<i4", "<f8", "u1")[kind - 1])
    return v1(name, kind, values, struct.pack("<I", array.shape[1]) + array.tobytes())


def v1_variable(name: str, kind: int, values: list[Any]) -> Vector:
    dtype = ("<i4", "<f8", "u1")[kind - 4]
    content = b"".join(
        struct.pack("<I", len(value)) + np.array(value, dtype).tobytes() for value in values
    )
    return v1(name, kind, values, struct.pack("<I", len(content)) + content)


def v1_strings(name: str, values: list[str], block: bytes | None = None) -> Vector:
    rows = [value.encode() for value in values]
    content = struct.pack(f"<{len(rows)}i", *map(len, rows)) + (
        literals(b"".join(rows)) if block is None else block
    )
    body = struct.pack("<I", len(content)) + content
    return v1(name, 7, values, body, "literals" if block is None else "matches")


def version1() -> list[Vector]:
    # 3 literals "abc", then a match of 4 + 15 + 6 bytes from 3 back: it overlaps itself; then 5
    # literals
    matches = b"\x3fabc\x03\x00\x06" + b"\x50vwxyz"
    return [
        v1_fixed("v1_i32", 1, [[1, -2, 3], [2**31 - 1, 0, -(2**31)]]),
        v1_fixed("v1_f64", 2, [[0.5], [-1e300]]),
        v1_fixed("v1_u8", 3, [[0, 255, 7, 1, 2]]),
        v1_variable("v1_variable_i32", 4, [[1], [], [-1, -2]]),
        v1_variable("v1_variable_f64", 5, [[0.1, 0.2], [], [3.0]]),
        v1_variable("v1_variable_u8", 6, [[], [255], [1, 2, 3]]),
        v1_strings("v1_strings", ["", "a", "Grüße", "日本語"]),
        v1_strings("v1_strings_empty", ["", ""]),
        v1_strings("v1_strings_14", ["x" * 14]),
        v1_strings("v1_strings_15", ["x" * 15]),
        v1_strings("v1_strings_270", ["y" * 269, "z"]),
        v1_strings("v1_strings_matches", ["abcabcabc", "abcabcabcabcabcabcavwxyz"], matches),
    ]


# -- what must be refused


def refused() -> list[Vector]:
    """Return frames that are well-formed except for the error that `why` names. CRCs are right
    unless the CRC is that error."""
    found: list[Vector] = []

    def add(name: str, why: str, data: bytes, version: int = 2) -> None:
        found.append({"name": name, "version": version, "hex": data.hex(), "why": why})

    row: Vector = {"dtype": "f64", "rows": 1}
    scalar = struct.pack("<d", 1.0)
    good = header(**row, payload_bytes=8)
    add("magic", "magic is not CLPR", header(**row, payload_bytes=8, magic=b"CLPS") + scalar)
    add("version", "version is not 2", header(**row, payload_bytes=8, version=3) + scalar)
    add("header_crc", "header CRC is wrong", good[:60] + bytes([good[60] ^ 1]) + good[61:] + scalar)
    add("kind_0", "kind 0 is unknown", header(0, **row, payload_bytes=8) + scalar)
    add("kind_12", "kind 12 is unknown", header(12, **row, payload_bytes=8) + scalar)
    add("dtype_0", "a batch has an element type", header(rows=1, payload_bytes=8) + scalar)
    add("dtype_15", "dtype 15 is unknown", header(rows=1, dtype="15", payload_bytes=8) + scalar)
    add(
        "rank_5", "rank above 4", header(**row, rank=5, dims=(1, 1, 1, 1), payload_bytes=8) + scalar
    )
    add(
        "dims_unused",
        "a dimension beyond the rank",
        header(**row, rank=0, dims=(1,), payload_bytes=8) + scalar,
    )
    add("flags_unknown", "flag 256 is unknown", header(**row, flags=256, payload_bytes=8) + scalar)
    add("reserved", "reserved is not 0", header(**row, reserved=1, payload_bytes=8) + scalar)
    add(
        "crc_unchecked",
        "payload_crc without CHECKED",
        header(**row, payload_crc=1, payload_bytes=8) + scalar,
    )
    wrong = header(**row, flags=CHECKED, payload_crc=zlib.crc32(scalar) ^ 1, payload_bytes=8)
    add("payload_crc", "payload CRC is wrong", wrong + scalar)
    add("rows_0", "a batch has at least one row", header(dtype="f64", payload_bytes=0))
    add(
        "str_fixed",
        "str rows are always VARIABLE",
        header(dtype="str", rows=1, payload_bytes=8) + scalar,
    )
    flat: Vector = {"dtype": "u8", "rows": 1, "flags": VARIABLE}
    lengths = pad(struct.pack("<I", 3)) + pad(b"abc")
    add(
        "variable_dims",
        "VARIABLE rows have dims 0",
        header(**flat, dims=(3,), payload_bytes=16) + lengths,
    )
    add(
        "variable_rank",
        "VARIABLE rows have rank 1",
        header(**flat, rank=0, payload_bytes=16) + lengths,
    )
    add(
        "payload_short",
        "the data is longer than the payload",
        header(dtype="f64", rows=2, payload_bytes=8) + scalar,
    )
    add(
        "payload_long",
        "the payload is longer than its parts",
        header(**row, payload_bytes=16) + 2 * scalar,
    )
    add(
        "padding",
        "padding is not 0",
        header(dtype="u8", rows=1, payload_bytes=8) + b"\0\0\0\0\0\0\0\1",
    )
    add(
        "padding_missing",
        "the data is not padded",
        header(dtype="u8", rows=1, payload_bytes=1) + b"\0",
    )
    add(
        "dims_overflow",
        "dims multiply beyond 64 bits",
        header(**row, dims=(2**32 - 1,) * 4, payload_bytes=8) + scalar,
    )
    empty = header(dtype="f64", rows=1, dims=(2**32 - 1, 2**32 - 1, 0))
    add("dims_overflow_empty", "dims but for the 0 multiply beyond 63 bits", empty)
    long = pad(struct.pack("<I", 2**32 - 1)) + pad(b"abc")
    add(
        "length_hostile",
        "a length beyond the payload",
        header(**flat, dims=(0,), payload_bytes=16) + long,
    )
    many = struct.pack("<2I", 2**32 - 1, 2**32 - 1) + pad(b"abc")
    add(
        "lengths_sum",
        "lengths beyond the payload",
        header(dtype="u8", rows=2, flags=VARIABLE, dims=(0,), payload_bytes=16) + many,
    )
    add(
        "bool_2",
        "a bool is 0 or 1",
        header(REPLY, dtype="bool", rows=1, payload_bytes=8) + pad(b"\2"),
    )
    status = header(REPLY, **row, flags=ROW_STATUS, payload_bytes=16) + scalar + pad(b"\2")
    add("status_2", "a row's status is 0 or 1", status)
    packed = pad(struct.pack("<I", 3)) + struct.pack("<Q", 4) + pad(b"\x30abc")
    text: Vector = {"dtype": "str", "rows": 1, "flags": VARIABLE | COMPRESSED, "dims": (0,)}
    add(
        "reply_compressed",
        "only a PREDICT may be COMPRESSED",
        header(REPLY, **text, payload_bytes=24) + packed,
    )
    octets = text | {"dtype": "bytes"}
    add(
        "bytes_compressed",
        "only str rows may be COMPRESSED",
        header(**octets, payload_bytes=24) + packed,
    )
    bomb = pad(struct.pack("<I", 60 << 20)) + packed[8:]
    add("bomb", "a block cannot grow 255-fold", header(**text, payload_bytes=24) + bomb)
    other = pad(struct.pack("<I", 4)) + packed[8:]
    add("block_size", "the block holds 3 bytes, not 4", header(**text, payload_bytes=24) + other)
    add("heartbeat_payload", "HEARTBEAT is empty", header(HEARTBEAT, payload_bytes=8) + scalar)
    add("hello_rows", "HELLO carries no rows", header(HELLO, rows=1, payload_bytes=8) + scalar)
    refused_sharing(add, row)
    refused_learning(add)
    add("v1_format_0", "format 0 is unknown", struct.pack("<BII", 0, 1, 1) + b"\0", 1)
    add("v1_format_8", "format 8 is unknown", struct.pack("<BII", 8, 1, 1) + b"\0", 1)
    add("v1_rows_0", "a batch has at least one row", struct.pack("<BII", 3, 0, 0), 1)
    add(
        "v1_count_hostile",
        "more rows than bytes",
        struct.pack("<BII", 3, 2**32 - 1, 2**32 - 1) + b"\0",
        1,
    )
    add(
        "v1_length_hostile",
        "a length beyond the content",
        struct.pack("<BIII", 6, 1, 5, 2**32 - 1) + b"\0",
        1,
    )
    add("v1_content_long", "content beyond the rows", struct.pack("<BIII", 6, 1, 6, 1) + b"\0\0", 1)
    add("v1_negative", "a negative length", struct.pack("<BIIi", 7, 1, 5, -1) + b"\0", 1)
    add(
        "v1_offset_0",
        "a match 0 bytes back",
        struct.pack("<BIIi", 7, 1, 13, 9) + b"\x14a\0\0\x00" + bytes(4),
        1,
    )
    add(
        "v1_offset_far",
        "a match before the start",
        struct.pack("<BIIi", 7, 1, 10, 6) + b"\x10a\x02\x00\x10b",
        1,
    )
    return found


def refused_sharing(add: Any, row: Vector) -> None:
    """Add frames of REGION and SHARED whose errors can be found without any mapped memory."""
    run, two = struct.pack("<IIQ", 3, 1, 5), row | {"rows": 2}
    add("region_short", "REGION is told in 24 bytes", header(REGION, payload_bytes=16) + run)
    add(
        "region_rows",
        "REGION carries no rows",
        header(REGION, rows=1, payload_bytes=24) + bytes(24),
    )
    add(
        "region_number",
        "a region's number has 32 bits",
        header(REGION, payload_bytes=24) + struct.pack("<QQQ", 2**32, 1, 8),
    )
    add(
        "region_empty",
        "a region has rows",
        header(REGION, payload_bytes=24) + struct.pack("<QQQ", 1, 0, 8),
    )
    add(
        "region_thin",
        "a region's rows have bytes",
        header(REGION, payload_bytes=24) + struct.pack("<QQQ", 1, 8, 0),
    )
    add("shared_no_runs", "a SHARED batch has a run", header(**row, flags=SHARED))
    add(
        "shared_cut",
        "a run has 16 bytes",
        header(**row, flags=SHARED, payload_bytes=24) + run + bytes(8),
    )
    add("shared_few", "runs of 1 row for 2", header(**two, flags=SHARED, payload_bytes=16) + run)
    add(
        "shared_many",
        "runs of 2 rows for 1",
        header(**row, flags=SHARED, payload_bytes=32) + 2 * run,
    )
    nothing = struct.pack("<IIQ", 3, 0, 5)
    add(
        "shared_empty_run",
        "a run has rows",
        header(**row, flags=SHARED, payload_bytes=32) + run + nothing,
    )
    add(
        "shared_reply",
        "only a PREDICT may be SHARED",
        header(REPLY, **row, flags=SHARED, payload_bytes=16) + run,
    )
    add(
        "shared_status",
        "nothing beside SHARED rows",
        header(**row, flags=SHARED | ROW_STATUS, payload_bytes=16) + run,
    )
    add(
        "shared_variable",
        "SHARED rows are of one shape",
        header(dtype="u8", rows=1, dims=(0,), flags=SHARED | VARIABLE, payload_bytes=16) + run,
    )


def refused_learning(add: Any) -> None:
    """Add invalid frames with SESSIONS, FEEDBACK and ACCURACY."""
    row: Vector = {"dtype": "f64", "rows": 1}
    one, two = struct.pack("<d", 1.0), struct.pack("<dd", 1.0, 2.0)
    told: Vector = row | {"flags": QUALIFIERS}
    add(
        "qualifiers_predict",
        "a PREDICT has no qualifiers",
        header(**told, payload_bytes=16) + bytes(8) + bytes(8),
    )
    add(
        "partial_predict",
        "only a REPLY is PARTIAL",
        header(**(row | {"flags": PARTIAL}), payload_bytes=8) + one,
    )
    add("qualifiers_missing", "a length a row", header(REPLY, **told, payload_bytes=8) + bytes(8))
    add(
        "qualifiers_cut",
        "qualifiers beyond the payload",
        header(REPLY, **told, payload_bytes=24) + bytes(8) + pad(struct.pack("<I", 9)) + bytes(8),
    )
    add(
        "qualifiers_long",
        "at most 1024 bytes beside a row",
        header(REPLY, **told, payload_bytes=16 + 1032)
        + bytes(8)
        + pad(struct.pack("<I", 1025))
        + bytes(1032),
    )
    add(
        "qualifiers_padding",
        "padding is not 0",
        header(REPLY, **told, payload_bytes=24)
        + bytes(8)
        + pad(struct.pack("<I", 1))
        + b"\x80"
        + bytes(6)
        + b"\1",
    )
    add("sessions_missing", "a session a row", header(**row, flags=SESSIONS, payload_bytes=8) + one)
    add(
        "sessions_reply",
        "a REPLY has no sessions",
        header(REPLY, **row, flags=SESSIONS, payload_bytes=16) + two,
    )
    add(
        "sessions_shared",
        "nothing beside SHARED rows",
        header(**row, flags=SHARED | SESSIONS, payload_bytes=16) + struct.pack("<IIQ", 3, 1, 5),
    )
    add("accuracy_short", "ACCURACY has 16 or 24 bytes", header(ACCURACY, payload_bytes=8) + one)
    add(
        "accuracy_rows",
        "ACCURACY carries no rows",
        header(ACCURACY, rows=1, payload_bytes=16) + bytes(16),
    )
    for name, value in (
        ("above", 1.0000001),
        ("below", -0.5),
        ("nan", float("nan")),
        ("infinite", float("inf")),
    ):
        payload = struct.pack("<QQd", 1, 0, value)
        add(
            f"accuracy_{name}",
            "an accuracy lies from 0 to 1",
            header(ACCURACY, payload_bytes=24) + payload,
        )
    inputs = header(**row, flags=SESSIONS, payload_bytes=16) + two
    bare = header(**row, payload_bytes=8) + one
    label = header(REPLY, **row, payload_bytes=8) + one
    labels = header(REPLY, **(row | {"rows": 2}), payload_bytes=16) + two
    for name, why, payload in (
        ("empty", "feedback has inputs", b""),
        ("inputs_only", "feedback has labels", inputs),
        ("swapped", "the inputs come first", label + inputs),
        ("no_sessions", "a session a row", bare + label),
        ("counts", "as many labels as inputs", inputs + labels),
        ("cut", "a frame within is cut", (inputs + label)[:-8]),
        ("long", "nothing behind the labels", inputs + label + one),
    ):
        add(f"feedback_{name}", why, header(FEEDBACK, payload_bytes=len(payload)) + payload)


def shape_of(type: str) -> tuple[str, list[str]]:
    dtype, _, sizes = type.rstrip("]").partition("[")
    return dtype, sizes.split(",") if sizes else []


def record(schema: dict[str, str], row: dict[str, Any]) -> bytes:
    """Return the tensors of one row, encoded as in docs/wire.md."""
    numbers, parts = b"", b""
    for name, type in schema.items():
        dtype, sizes = shape_of(type)
        array = np.array(row[name], object if dtype in ("str", "bytes") else NUMPY[dtype])
        if array.ndim < len(sizes):  # no rows: [] of any shape
            array = array.reshape([0 if size == "*" else int(size) for size in sizes])
        for size, here in zip(sizes, array.shape, strict=True):
            numbers += struct.pack("<I", here) if size == "*" else b""
        data = array.tobytes()
        if dtype in ("str", "bytes"):
            items = [
                item.encode() if dtype == "str" else bytes.fromhex(item) for item in array.flat
            ]
            lengths = struct.pack(f"<{len(items)}I", *map(len, items)) if sizes else b""
            data = lengths + b"".join(items)
            numbers += struct.pack("<I", len(data))
        parts += pad(data)
    return pad(numbers) + parts


def records() -> list[Vector]:
    """Return schemas with rows, and damaged records."""
    sound: list[tuple[str, dict[str, str], list[dict[str, Any]]]] = [
        ("one", {"x": "f64"}, [{"x": 0.5}, {"x": -1.0}]),
        (
            "fixed",
            {"a": "f32[2]", "b": "u8[3]", "c": "bool", "d": "i16[2,2]"},
            [
                {"a": [0.5, -2.0], "b": [1, 2, 255], "c": True, "d": [[1, -2], [3, 4]]},
                {"a": [0.0, 1.0], "b": [0, 0, 0], "c": False, "d": [[0, 0], [0, -1]]},
            ],
        ),
        (
            "ragged",
            {"ids": "i64[*]", "mask": "i64[*]"},
            [{"ids": [7, 9], "mask": [1, 1]}, {"ids": [5], "mask": [1]}, {"ids": [], "mask": []}],
        ),
        (
            "ragged_and_fixed",
            {"x": "f32[*,2]", "k": "u8[3]", "y": "i32[*]"},
            [{"x": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "k": [1, 2, 3], "y": [-1]}],
        ),
        (
            "strings",
            {"ids": "i64[*]", "name": "str"},
            [
                {"ids": [7, 9], "name": "ab"},
                {"ids": [], "name": ""},
                {"ids": [1], "name": "Zürich"},
            ],
        ),
        (
            "lists_of_strings",
            {"names": "str[*]", "pair": "bytes[2]", "n": "u16"},
            [
                {"names": ["ab", "", "cde"], "pair": ["00ff", ""], "n": 65535},
                {"names": [], "pair": ["", "61"], "n": 0},
            ],
        ),
    ]
    all: list[Vector] = [
        {
            "name": name,
            "schema": schema,
            "row": f"u8[{len(record(schema, rows[0]))}]" if name in ("one", "fixed") else "bytes",
            "records": [record(schema, row).hex() for row in rows],
            "values": {tensor: [row[tensor] for row in rows] for tensor in schema},
        }
        for name, schema, rows in sound
    ]
    ids, texts = {"ids": "i64[*]", "s": "str"}, {"s": "str[2]"}
    good = record(ids, {"ids": [7, 9], "s": "ab"})
    for name, schema, why, data in (
        ("cut_numbers", ids, "the sizes are cut", good[:7]),
        ("empty", ids, "there is no record", b""),
        ("cut_data", ids, "the data is cut", good[:-8]),
        ("long", ids, "bytes behind the last tensor", good + bytes(8)),
        ("huge", ids, "more elements than bytes", struct.pack("<II", 2**32 - 1, 2) + good[8:]),
        ("huge_string", ids, "more bytes than there are", struct.pack("<II", 2, 2**31) + good[8:]),
        ("not_utf8", ids, "str is UTF-8", struct.pack("<II", 0, 2) + pad(b"\xff\xfe")),
        (
            "lengths_short",
            texts,
            "the lengths do not fill the part",
            pad(struct.pack("<I", 11)) + pad(struct.pack("<II", 1, 1) + b"abc"),
        ),
        (
            "lengths_long",
            texts,
            "the lengths go beyond the part",
            pad(struct.pack("<I", 11)) + pad(struct.pack("<II", 1, 2**32 - 1) + b"abc"),
        ),
        (
            "lengths_cut",
            texts,
            "no room for the lengths",
            pad(struct.pack("<I", 4)) + pad(struct.pack("<I", 0)),
        ),
        ("bool", {"x": "bool[2]"}, "a bool is 0 or 1", bytes([1, 2, 0, 0, 0, 0, 0, 0])),
        ("fixed_short", {"x": "f64[2]"}, "a record has 16 bytes", bytes(8)),
    ):
        all.append({"name": name, "schema": schema, "records": [data.hex()], "why": why})
    return all


def lines(vectors: list[Vector]) -> str:
    return (
        "[\n" + ",\n".join(json.dumps(vector, ensure_ascii=False) for vector in vectors) + "\n]\n"
    )


def parts() -> list[Vector]:
    """Return the frames of answers in parts."""
    query = 7 << 16 | 3
    return [
        variable("parts_query_str", PREDICT, "str", ["tell me"], flags=PARTS, id=query, time_us=9),
        fixed(
            "parts_query_f64_session",
            PREDICT,
            "f64",
            [[1.0, -2.5]],
            flags=PARTS | CHECKED,
            sessions=[5],
            id=query,
        ),
        variable("part_str", PART, "str", ["Once "], id=query),
        fixed("part_f64_confidence", PART, "f64", [0.5], [0.75], flags=CHECKED, id=query),
        fixed("part_f32_vector", PART, "f32", [[1.0, 2.0, 3.0]], qualifiers=["80"], id=query),
        frame("part_end", PART, id=query, meaning={"text": ""}),
        frame("part_failed", PART, b"ValueError: no", id=query, meaning={"text": "ValueError: no"}),
        frame("part_allowance", PART, struct.pack("<Q", 16), id=query, meaning={"allowed": 16}),
        frame("cancel", CANCEL, id=query),
    ]


def refused_parts() -> list[Vector]:
    """Return frames of answers in parts that must be rejected."""
    found: list[Vector] = []

    def add(name: str, why: str, data: bytes) -> None:
        found.append({"name": name, "version": 2, "hex": data.hex(), "why": why})

    scalar, two = pad(struct.pack("<d", 1.0)), struct.pack("<2d", 1.0, 2.0)
    row: Vector = {"dtype": "f64", "rows": 1, "payload_bytes": 8}
    rows: Vector = {"dtype": "f64", "rows": 2, "payload_bytes": 16}
    add("query_of_two_rows", "PARTS of two rows", header(PREDICT, flags=PARTS, **rows) + two)
    add("reply_parts", "a REPLY with PARTS", header(REPLY, flags=PARTS, **row) + scalar)
    add("part_parts", "a PART with PARTS", header(PART, flags=PARTS, **row) + scalar)
    add("part_two_rows", "a PART of two rows", header(PART, **rows) + two)
    add("part_partial", "a PART that is PARTIAL", header(PART, flags=PARTIAL, **row) + scalar)
    add(
        "part_status",
        "a PART with a status",
        header(PART, dtype="f64", rows=1, flags=ROW_STATUS, payload_bytes=16) + scalar + bytes(8),
    )
    add("part_sessions", "a PART with a session", header(PART, flags=SESSIONS, **row) + scalar)
    add("part_end_dtype", "a PART without rows has no dtype", header(PART, dtype="f64"))
    add("cancel_payload", "CANCEL has no payload", header(CANCEL, payload_bytes=8) + bytes(8))
    add("cancel_rows", "CANCEL has no rows", header(CANCEL, **row) + scalar)
    return found


def array_extension(number: int, shape: list[int], data: bytes) -> bytes:
    """Return an array of at most 255 bytes as a value of msgpack."""
    body = struct.pack("<BBH", number, len(shape), 0) + struct.pack(f"<{len(shape)}I", *shape)
    return bytes([0xC7, len(body + data), 1]) + body + data


def with_rows(fields: Vector, key: str, value: bytes) -> bytes:
    """Return a map with one more key, whose value is encoded."""
    packed = pack(fields)
    return bytes([packed[0] + 1]) + packed[1:] + pack(key) + value


def calls() -> list[Vector]:
    """Return the payloads of CALL and ANSWER, and damaged ones."""
    asked = {"to": "model:embed", "many": True, "left_us": 18500}
    numbers = struct.pack("<3f", 1.0, -2.5, 0.5)
    row = {"dtype": 11, "shape": [1, 3], "values": [1.0, -2.5, 0.5]}
    text = {"to": "app:digits", "rows": "seven", "left_us": 9, "user": "ann"}
    failed = {"error": "no model 'm'.", "code": "model-not-found"}
    one = {"output": "a", "is_default": False, "id": "7"}
    found: list[Vector] = [
        {"name": "call_text", "hex": pack(text).hex(), "map": text},
        {
            "name": "call_array",
            "hex": with_rows(asked, "rows", array_extension(11, [1, 3], numbers)).hex(),
            "map": asked | {"rows": row},
        },
        {
            "name": "answer_array",
            "hex": with_rows(
                {}, "outputs", array_extension(7, [2], struct.pack("<2i", 4, -1))
            ).hex(),
            "map": {"outputs": {"dtype": 7, "shape": [2], "values": [4, -1]}},
        },
        {
            "name": "answer_of_an_application",
            "hex": pack({"outputs": one, "app": True}).hex(),
            "map": {"outputs": one, "app": True},
        },
        {"name": "answer_error", "hex": pack(failed).hex(), "map": failed},
    ]
    for name, why, value in (
        ("array_cut", "fewer bytes than its shape", array_extension(11, [1, 3], numbers[:-1])),
        ("array_long", "more bytes than its shape", array_extension(11, [3], numbers + b"\0")),
        ("array_huge", "more elements than bytes", array_extension(11, [2**32 - 1] * 3, numbers)),
        ("array_of_text", "str has no form as an array", array_extension(13, [3], b"abc")),
        ("array_dtype", "dtype 15 is unknown", array_extension(15, [3], b"abc")),
        ("array_head", "the dimensions are cut", bytes([0xC7, 4, 1, 11, 2, 0, 0])),
        ("extension_2", "extension 2 is unknown", bytes([0xC7, 1, 2, 0])),
    ):
        data = with_rows({"to": "model:m"}, "rows", value)
        found.append({"name": name, "hex": data.hex(), "why": why})
    found.append({"name": "no_map", "hex": pack("text").hex(), "why": "it is no map"})
    found.append({"name": "map_cut", "hex": pack(text)[:-1].hex(), "why": "the map is cut"})
    return found


def main(check: bool) -> int:
    files = {
        "frames.json": lines(version2() + version1()),
        "refused.json": lines(refused()),
        "records.json": lines(records()),
        "parts.json": lines(parts() + refused_parts()),
        "calls.json": lines(calls()),
    }
    if check:
        return int(any((HERE / name).read_text() != text for name, text in files.items()))
    for name, text in files.items():
        (HERE / name).write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
