"""Frames: what is written is read back, the golden frames have the stated meaning, and hostile
bytes are refused."""

import json
import math
import random
import re
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_core.runtime.dtype import NAMES, DType
from clipper_core.runtime.status import Status, error_for
from clipper_core.wire.codec import (
    HEADER_BYTES,
    V1,
    Flag,
    FrameHeader,
    Kind,
    OpenRows,
    checksum,
    decode_accuracy,
    decode_feedback,
    decode_header,
    decode_v1,
    encode_frame,
    encode_rows,
    encode_v1,
    message_bytes_v1,
    open_rows,
    open_runs,
)
from clipper_core.wire.lz4 import decode_lz4

VECTORS = Path(__file__).parents[1] / "vectors"
PARTS = json.loads((VECTORS / "parts.json").read_text())
FRAMES = [
    *json.loads((VECTORS / "frames.json").read_text()),
    *(vector for vector in PARTS if "meaning" in vector),
]
REFUSED = [
    *json.loads((VECTORS / "refused.json").read_text()),
    *(vector for vector in PARTS if "why" in vector),
]
VERSION2 = [vector for vector in FRAMES if vector["version"] == 2]
VERSION1 = [vector for vector in FRAMES if vector["version"] == 1]
SHARED = [vector for vector in VERSION2 if "SHARED" in vector["meaning"]["flags"]]
BATCHES = [
    vector
    for vector in VERSION2
    if vector["meaning"]["kind"] in ("PREDICT", "REPLY", "PART")
    and vector["meaning"]["rows"]
    and vector not in SHARED
]
CODES = ["?", "u1", "i1", "<u2", "<i2", "<u4", "<i4", "<u8", "<i8", "<f2", "<f4", "<f8"]
NUMPY = {DType(number): np.dtype(code) for number, code in enumerate(CODES, 1)}
ROW_KINDS = (Kind.PREDICT, Kind.REPLY)
HOSTILE = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    255,
    256,
    2**15,
    2**16,
    2**24,
    2**31 - 1,
    2**31,
    2**32 - 8,
    2**32 - 1,
)


def bad() -> tuple[type[Exception], ...]:
    """Return the classes that BAD_FRAME and TOO_LARGE raise now; other tests bind other ones."""
    return tuple({type(error_for(status, "")) for status in (Status.BAD_FRAME, Status.TOO_LARGE)})


def refused(*statuses: Status) -> Any:
    """Expect an error of one of these statuses, by default BAD_FRAME."""
    statuses = statuses or (Status.BAD_FRAME,)
    classes = tuple({type(error_for(status, "")) for status in statuses})
    return pytest.raises(
        classes, check=lambda error: getattr(error, "status", statuses[0]) in statuses
    )


def opened(frame: bytes, **limits: int) -> tuple[FrameHeader, OpenRows]:
    header = decode_header(frame)
    assert header is not None
    return header, open_rows(header, frame[HEADER_BYTES:], **limits)


def values_of(rows: OpenRows) -> list[Any]:
    """Return the rows as the vectors write them."""
    if rows.lengths is None:
        return rows.data.tolist()  # type: ignore[no-any-return]
    ends = np.concatenate([[0], np.cumsum(rows.lengths, dtype=np.int64)])
    parts = [rows.data[a:b] for a, b in pairwise(ends)]
    if rows.dtype == DType.STR:
        return [part.tobytes().decode() for part in parts]
    return [part.tobytes().hex() if rows.dtype == DType.BYTES else part.tolist() for part in parts]


# -- golden frames


def test_the_vectors_are_what_their_generator_writes() -> None:
    assert subprocess.run([sys.executable, VECTORS / "make.py", "--check"]).returncode == 0


@pytest.mark.parametrize("vector", VERSION2, ids=lambda vector: vector["name"])
def test_golden_headers(vector: dict[str, Any]) -> None:
    frame, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    header = decode_header(frame)
    assert header is not None
    assert Kind(header.kind).name == meaning["kind"]
    assert header.dtype == NAMES.get(meaning["dtype"], DType.ANY)
    assert [flag.name for flag in Flag if header.flags & flag] == meaning["flags"]
    assert list(header.shape) == meaning["shape"]
    for field in ("rows", "id", "time_us", "payload_bytes", "payload_crc"):
        assert getattr(header, field) == meaning[field]
    again = encode_frame(
        header.kind,
        frame[64:],
        dtype=header.dtype,
        shape=header.shape,
        flags=header.flags,
        rows=header.rows,
        id=header.id,
        time_us=header.time_us,
    )
    assert again == frame


@pytest.mark.parametrize("vector", BATCHES, ids=lambda vector: vector["name"])
def test_golden_batches(vector: dict[str, Any]) -> None:
    frame, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    header, rows = opened(frame)
    assert values_of(rows) == meaning["values"]
    assert (rows.confidence is None) == ("confidence" not in meaning)
    assert rows.confidence is None or rows.confidence.tolist() == meaning["confidence"]
    assert (rows.status is None) == ("status" not in meaning)
    assert rows.status is None or rows.status.tolist() == meaning["status"]
    assert rows.text.decode() == meaning.get("text", "")
    assert (None if rows.sessions is None else rows.sessions.tolist()) == meaning.get("sessions")
    assert (
        None if rows.qualifiers is None else [each.hex() for each in rows.qualifiers]
    ) == meaning.get("qualifiers")
    qualifiers = (
        [bytes.fromhex(each) for each in meaning["qualifiers"]] if "qualifiers" in meaning else None
    )
    values: Any = meaning["values"]
    if header.dtype == DType.BYTES:
        values = [bytes.fromhex(value) for value in values]
    elif header.dtype != DType.STR and header.flags & Flag.VARIABLE:
        values = [np.array(value, NUMPY[DType(header.dtype)]) for value in values]
    elif header.dtype != DType.STR:
        values = np.array(values, NUMPY[DType(header.dtype)])
    again = encode_rows(
        header.kind,
        values,
        confidence=meaning.get("confidence"),
        status=meaning.get("status"),
        id=header.id,
        text=meaning.get("text", ""),
        time_us=header.time_us,
        checked=bool(header.flags & Flag.CHECKED),
        compressed=bool(header.flags & Flag.COMPRESSED),
        sessions=meaning.get("sessions"),
        qualifiers=qualifiers,
        partial=bool(header.flags & Flag.PARTIAL),
        parts=bool(header.flags & Flag.PARTS),
    )
    assert again == frame


@pytest.mark.parametrize("vector", SHARED, ids=lambda vector: vector["name"])
def test_golden_runs(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["hex"])
    header = decode_header(frame)
    assert header is not None
    assert [list(run) for run in open_runs(header, frame[HEADER_BYTES:])] == vector["meaning"][
        "runs"
    ]
    with refused():
        open_rows(header, frame[HEADER_BYTES:])
    for end in range(HEADER_BYTES, len(frame)):
        with refused():
            open_runs(header, frame[HEADER_BYTES:end])


@pytest.mark.parametrize("vector", VERSION1, ids=lambda vector: vector["name"])
def test_golden_version_1(vector: dict[str, Any]) -> None:
    message, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    rows = decode_v1(message)
    assert [row if isinstance(row, str) else list(row) for row in rows] == meaning["values"]
    assert message_bytes_v1(message[:9]) == len(message)
    if meaning.get("block") != "matches":
        assert encode_v1(meaning["format"], meaning["values"]) == message


@pytest.mark.parametrize("vector", REFUSED, ids=lambda vector: vector["name"])
def test_what_must_be_refused(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["hex"])
    with refused(Status.BAD_FRAME, Status.TOO_LARGE):
        if vector["version"] == 1:
            decode_v1(frame)
        elif (header := decode_header(frame)) and header.flags & Flag.SHARED:
            open_runs(header, frame[HEADER_BYTES:])
        elif header and header.kind == Kind.FEEDBACK:
            decode_feedback(frame[HEADER_BYTES:])
        elif header and header.kind == Kind.ACCURACY:
            decode_accuracy(frame[HEADER_BYTES:])
        else:
            opened(frame)


def test_the_pages_example_is_a_golden_frame() -> None:
    page = (Path(__file__).parents[2] / "docs" / "wire.md").read_text()
    dumps = re.findall(r"```\n(00  .*?)```", page, re.DOTALL)
    bytes_of = re.compile(r"^[0-9a-f]{2}  ((?:[0-9a-f]{2} ?)+?)(?: {2,}|$)", re.MULTILINE)
    shown = [bytes.fromhex("".join(bytes_of.findall(dump))) for dump in dumps]
    golden = {vector["name"]: bytes.fromhex(vector["hex"]) for vector in FRAMES}
    vectors = json.loads((Path(__file__).parents[1] / "vectors" / "records.json").read_text())
    record = next(vector["records"][0] for vector in vectors if vector["name"] == "strings")
    assert len(shown) == 3
    assert golden["predict_f64_vectors"] in shown
    assert golden["reply_str_all_parts"][HEADER_BYTES:] in shown
    assert bytes.fromhex(record) in shown


# -- damage


@pytest.mark.parametrize("vector", VERSION2, ids=lambda vector: vector["name"])
def test_every_bit_flip_of_a_header_is_refused(vector: dict[str, Any]) -> None:
    head = bytes.fromhex(vector["hex"])[:HEADER_BYTES]
    for bit in range(8 * HEADER_BYTES):
        damaged = bytearray(head)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with refused():
            decode_header(damaged)


@pytest.mark.parametrize("vector", FRAMES, ids=lambda vector: vector["name"])
def test_every_truncation_is_refused(vector: dict[str, Any]) -> None:
    frame = bytes.fromhex(vector["hex"])
    if vector["version"] == 1:
        for end in range(len(frame)):
            with refused():
                decode_v1(frame[:end])
        return
    header = decode_header(frame)
    assert header is not None
    assert all(decode_header(frame[:end]) is None for end in range(HEADER_BYTES))
    for end in range(HEADER_BYTES, len(frame)):
        with refused():
            open_rows(header, frame[HEADER_BYTES:end])


def fits(header: FrameHeader, payload: bytes) -> bool:
    """Return whether the payload consists of exactly the parts that its header names, by a second,
    slow reading of docs/wire.md."""
    parts: list[int] = []
    item = NUMPY[DType(header.dtype)].itemsize if header.dtype in NUMPY else 1
    if header.flags & Flag.VARIABLE:
        if len(payload) < 4 * header.rows:
            return False
        total = sum(struct.unpack_from(f"<{header.rows}I", payload)) * item
        parts = [4 * header.rows, total]
    else:
        parts = [math.prod(header.shape) * item * header.rows]
        if math.prod(size for size in header.shape if size) * item * header.rows >= 2**63:
            return False
        if (
            header.kind == Kind.REPLY
            and 0 in header.shape
            and math.prod(header.shape[: header.shape.index(0)]) > 4096
        ):
            return False
    if header.flags & Flag.SESSIONS:
        parts.append(8 * header.rows)
    if header.flags & Flag.CONFIDENCE:
        parts.append(4 * header.rows)
    if header.flags & Flag.QUALIFIERS:
        at = sum(part + -part % 8 for part in parts)
        if len(payload) - at < 4 * header.rows:
            return False
        lengths = struct.unpack_from(f"<{header.rows}I", payload, at)
        if max(lengths) > 1024:
            return False
        parts += [4 * header.rows, sum(lengths)]
    if header.flags & Flag.ROW_STATUS:
        parts.append(header.rows)
    starts = [0]
    for part in parts:
        starts.append(starts[-1] + part + -part % 8)
    if starts[-1] > len(payload) or (
        starts[-1] < len(payload) and not header.flags & Flag.ROW_STATUS
    ):
        return False
    if any(
        any(payload[a + part : b]) for part, (a, b) in zip(parts, pairwise(starts), strict=True)
    ):
        return False
    data = 1 if header.flags & Flag.VARIABLE else 0
    bools = (
        payload[starts[data] : starts[data] + parts[data]] if header.dtype == DType.BOOL else b""
    )
    status = payload[starts[-2] : starts[-2] + parts[-1]] if header.flags & Flag.ROW_STATUS else b""
    return max(bools + status, default=0) <= 1


def arbitrary_header(rng: random.Random, payload_bytes: int) -> FrameHeader:
    kind = rng.choice(ROW_KINDS)
    flags = rng.choice((0, 0, 1, 1, 2, 3, 4, 5, 6, 7)) | (
        rng.choice((0, 0, 0, 64)) if kind == Kind.PREDICT else 0
    )
    shape: tuple[int, ...] = (0,)
    if flags & Flag.VARIABLE:
        dtype = rng.randrange(1, 15)
    else:
        dtype = rng.randrange(1, 13)
        sizes = HOSTILE if rng.random() < 0.2 else (0, 1, 1, 2, 3)
        shape = tuple(rng.choice(sizes) for _ in range(rng.randrange(5)))
    rows = rng.choice(HOSTILE[1:]) if rng.random() < 0.2 else rng.randrange(1, 5)
    return FrameHeader(kind, dtype, flags, rows, 0, shape, payload_bytes, 0, 0)


@pytest.mark.parametrize("seed", range(8))
def test_arbitrary_payloads_open_exactly_when_they_fit(seed: int) -> None:
    rng = random.Random(seed)
    accepted = 0
    for _ in range(1500):
        choices = HOSTILE if rng.random() < 0.1 else (0, 0, 0, 0, 1, 2, 257)
        payload = struct.pack("<16I", *(rng.choice(choices) for _ in range(16))) + rng.randbytes(
            rng.randrange(9)
        )
        header = arbitrary_header(rng, len(payload))
        if rng.random() < 0.7:  # cut to a length that fits, if there is one
            payload = next(
                (payload[:end] for end in range(len(payload)) if fits(header, payload[:end])),
                payload,
            )
            header = header._replace(payload_bytes=len(payload))
        try:
            rows = open_rows(header, payload, rows_max=2**32 - 1)
        except bad():
            too_large = header.flags & Flag.VARIABLE == 0 and math.prod(header.shape) * 8 > 16 << 20
            assert too_large or not fits(header, payload)
        else:
            accepted += 1
            assert fits(header, payload)
            assert rows.n == header.rows
    assert accepted > 100


@pytest.mark.parametrize("seed", range(4))
def test_headers_with_a_right_crc_and_wrong_fields(seed: int) -> None:
    """Any header is refused, or encodes to the same bytes again."""
    rng = random.Random(seed)
    heads = [bytes.fromhex(vector["hex"])[:60] for vector in VERSION2]
    accepted = 0
    for _ in range(2000):
        head = bytearray(rng.choice(heads))
        for _ in range(rng.randrange(1, 4)):
            head[rng.randrange(4, 60)] = rng.choice((0, 1, 2, 8, 16, 32, 255, rng.randrange(256)))
        frame = bytes(head) + struct.pack("<I", zlib.crc32(head))
        with suppress(*bad()):
            header = decode_header(frame)
            assert header is not None
            assert header.rows <= 1 << 20
            assert header.payload_bytes <= 64 << 20
            accepted += 1
            fields = struct.pack(
                "<BBBH", header.kind, header.dtype, len(header.shape), header.flags
            )
            assert fields == frame[5:10]
            assert struct.pack("<4I", *(*header.shape, 0, 0, 0, 0)[:4]) == frame[24:40]
    assert accepted > 100


@pytest.mark.parametrize("seed", range(4))
def test_random_bytes_never_crash(seed: int) -> None:
    rng = random.Random(seed)
    goods = [bytes.fromhex(vector["hex"]) for vector in FRAMES]
    for _ in range(2000):
        noise = (
            bytearray(rng.choice(goods))
            if rng.random() < 0.7
            else bytearray(rng.randbytes(rng.randrange(200)))
        )
        for _ in range(rng.randrange(6) if noise else 0):
            noise[rng.randrange(len(noise))] = rng.choice((0, 1, 127, 128, 255))
        for read in (decode_v1, opened, lambda data: decode_lz4(data, rng.randrange(4096))):
            with suppress(*bad(), AssertionError):  # opened() asserts that there is a header
                read(bytes(noise))


def test_limits() -> None:
    frame = encode_rows(Kind.REPLY, np.zeros((4, 8), "f8"))
    opened(frame, payload_bytes_max=256, rows_max=4, output_bytes_max=64)
    for limits in ({"payload_bytes_max": 255}, {"rows_max": 3}):
        with refused(Status.TOO_LARGE):
            decode_header(frame, **limits)
    for limits in ({"payload_bytes_max": 255}, {"rows_max": 3}, {"output_bytes_max": 63}):
        with refused(Status.TOO_LARGE):
            opened(frame, **limits)
    inputs = encode_rows(Kind.PREDICT, np.zeros((4, 8), "f8"))
    opened(inputs, output_bytes_max=63)  # the limit is of outputs
    texts = encode_rows(Kind.REPLY, ["a", "1234"])
    opened(texts, output_bytes_max=4)
    with refused(Status.TOO_LARGE):
        opened(texts, output_bytes_max=3)
    block = lz4.block.compress(b"x" * 10_000, store_size=False)
    payload = struct.pack("<IIQ", 10_000, 0, len(block)) + block + bytes(-len(block) % 8)
    flags = Flag.VARIABLE | Flag.COMPRESSED
    packed = encode_frame(Kind.PREDICT, payload, dtype=DType.STR, shape=(0,), flags=flags, rows=1)
    assert values_of(opened(packed, payload_bytes_max=10_000)[1]) == ["x" * 10_000]
    with refused(Status.TOO_LARGE):
        opened(packed, payload_bytes_max=9_999)


@pytest.mark.parametrize(
    "shape", [(2**31, 2**31, 0), (30_000_000, 0), (4097, 0), (64, 65, 0), (5, 2**20, 0, 2**10)]
)
def test_a_reply_of_many_empty_lists_is_refused(shape: tuple[int, ...]) -> None:
    frame = encode_frame(Kind.REPLY, dtype=DType.F64, shape=shape, rows=1)
    with refused(Status.TOO_LARGE, Status.BAD_FRAME):
        opened(frame)


@pytest.mark.parametrize("shape", [(0,), (4096, 0), (0, 30_000_000), (64, 64, 0, 1000)])
def test_a_reply_of_few_empty_lists_is_taken(shape: tuple[int, ...]) -> None:
    rows = opened(encode_frame(Kind.REPLY, dtype=DType.F64, shape=shape, rows=1))[1]
    assert rows.data.shape == (1, *shape)


def test_a_checked_payload_is_checked() -> None:
    frame = encode_rows(Kind.REPLY, np.arange(5, dtype="f4"), checked=True)
    for bit in range(8 * HEADER_BYTES, 8 * len(frame)):
        damaged = bytearray(frame)
        damaged[bit >> 3] ^= 1 << (bit & 7)
        with refused():
            opened(bytes(damaged))


def test_control_frames_have_no_rows() -> None:
    control = [kind for kind in Kind if kind not in ROW_KINDS]
    for kind in (Kind.HEARTBEAT, Kind.GOODBYE):
        with refused():
            decode_header(encode_frame(kind, b"x"))
    for kind in control:
        with refused():
            open_rows(FrameHeader(kind, 0, 0, 0, 0, (), 0, 0, 0), b"")
        for flag in (Flag.VARIABLE, Flag.CONFIDENCE, Flag.ROW_STATUS, Flag.COMPRESSED):
            with refused():
                decode_header(encode_frame(kind, flags=flag))
        for fields in ({"dtype": 1}, {"rows": 1}, {"shape": (0,)}, {"shape": (1,)}):
            with refused():
                decode_header(encode_frame(kind, **fields))


def test_what_cannot_be_encoded() -> None:
    batches: list[Any] = [
        np.array(3.0),
        np.array(["a"]),
        np.zeros((1,) * 6),
        ["a", b"b"],
        [np.zeros(2), np.zeros(2, "f4")],
    ]
    for batch in batches:
        with refused(Status.BAD_INPUT):
            encode_rows(Kind.PREDICT, batch)
    wrong: list[tuple[int, list[Any]]] = [
        (0, [[1]]),
        (8, [[1]]),
        (1, [[1], [1, 2]]),
        (2, [b"1234567"]),
        (7, [b"a"]),
        (6, ["a"]),
    ]
    for number, rows in wrong:
        with refused(Status.BAD_INPUT):
            encode_v1(number, rows)
    with pytest.raises(OverflowError):
        encode_frame(Kind.PREDICT, id=2**64)


# -- round trips

numbers = st.sampled_from(sorted(NUMPY))
shapes = st.lists(st.integers(0, 4), max_size=4)
texts = st.lists(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40), min_size=1, max_size=9
)
octets = st.lists(st.binary(max_size=40), min_size=1, max_size=9)


def array_of(dtype: DType, shape: tuple[int, ...], seed: int) -> np.ndarray[Any, Any]:
    noise = np.random.default_rng(seed).integers(0, 100, shape)
    return (noise & 1 if dtype == DType.BOOL else noise).astype(NUMPY[dtype])


@given(numbers, st.integers(1, 9), shapes, st.integers(0, 99), st.booleans(), st.booleans())
def test_fixed_rows_come_back(
    dtype: DType, n: int, shape: list[int], seed: int, sure: bool, judged: bool
) -> None:
    array = array_of(dtype, (n, *shape), seed)
    confidence = np.linspace(0, 1, n, dtype="f4") if sure else None
    status = np.arange(n) % 2 if judged else None
    frame = encode_rows(
        Kind.REPLY,
        array,
        confidence=confidence,
        status=status,
        text="why" if judged else "",
        id=seed,
    )
    header, rows = opened(frame)
    assert (header.id, header.shape, rows.data.dtype) == (seed, tuple(shape), NUMPY[dtype])
    assert np.array_equal(rows.data, array)
    assert rows.data.flags.aligned
    assert not rows.data.flags.writeable
    assert np.array_equal(rows.confidence, confidence) if sure else rows.confidence is None  # type: ignore[arg-type]
    assert np.array_equal(rows.status, status) if judged else rows.status is None  # type: ignore[arg-type]
    assert rows.text == (b"why" if judged else b"")


@given(numbers, st.lists(st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 99))
def test_variable_rows_come_back(dtype: DType, sizes: list[int], seed: int) -> None:
    arrays = [array_of(dtype, (size,), seed + i) for i, size in enumerate(sizes)]
    rows = opened(encode_rows(Kind.PREDICT, arrays))[1]
    assert values_of(rows) == [array.tolist() for array in arrays]


@given(texts, st.booleans(), st.booleans())
def test_strings_come_back(values: list[str], compressed: bool, checked: bool) -> None:
    frame = encode_rows(Kind.PREDICT, values, compressed=compressed, checked=checked)
    assert values_of(opened(frame)[1]) == values


@given(octets)
def test_bytes_come_back(values: list[bytes]) -> None:
    assert values_of(opened(encode_rows(Kind.REPLY, values))[1]) == [
        value.hex() for value in values
    ]


@given(st.sampled_from(list(V1)), texts, octets, st.integers(1, 5), st.integers(0, 99))
def test_version_1_comes_back(
    number: V1, strings: list[str], raw: list[bytes], width: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rows: list[Any]
    if number == V1.V1_STR:
        rows = strings
    elif number == V1.V1_VAR_U8:
        rows = raw
    elif number == V1.V1_U8:
        rows = [rng.bytes(width) for _ in raw]
    else:
        sizes = [width if number < V1.V1_VAR_I32 else i % width for i in range(len(raw))]
        code = "<i4" if number in (V1.V1_I32, V1.V1_VAR_I32) else "<f8"
        rows = [rng.integers(-99, 99, size).astype(code) for size in sizes]
    message = encode_v1(number, rows)
    assert message_bytes_v1(message[:9]) == len(message)
    back = decode_v1(message)
    assert [np.asarray(row).tolist() for row in back] == [np.asarray(row).tolist() for row in rows]
    for damaged in (message + b"\0", message[:-1]):
        with refused():
            decode_v1(damaged)


def test_version_1_limits() -> None:
    message = encode_v1(V1.V1_STR, ["x" * 100, "y"])
    assert decode_v1(message, bytes_max=len(message), rows_max=2) == ["x" * 100, "y"]
    for limits in ({"rows_max": 1}, {"bytes_max": 100}):
        with refused(Status.TOO_LARGE):
            decode_v1(message, **limits)
    # a bomb: 4 KiB of block for 900 KiB of text, which the limit forbids
    with refused(Status.TOO_LARGE):
        block = lz4.block.compress(bytes(900_000), store_size=False)
        content = struct.pack("<i", 900_000) + block
        decode_v1(struct.pack("<BII", 7, 1, len(content)) + content, bytes_max=100_000)
    with refused():  # negative, not merely large
        decode_v1(struct.pack("<BIIi", 7, 1, 5, -1) + b"\0")
    for number in HOSTILE:
        for kind in range(1, 8):
            for count in (1, 2, 2**32 - 1):
                with refused(Status.BAD_FRAME, Status.TOO_LARGE):
                    decode_v1(
                        struct.pack("<BII", kind, count, number) + b"\xff" * 21, rows_max=2**32 - 1
                    )


# -- CRC


@given(st.binary(max_size=300), st.binary(max_size=40))
def test_checksum_is_zlibs(a: bytes, b: bytes) -> None:
    assert checksum(a) == zlib.crc32(a)
    assert checksum(b, checksum(a)) == zlib.crc32(a + b)
