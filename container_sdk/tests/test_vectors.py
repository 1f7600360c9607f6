"""The golden frames of tests/vectors: this SDK reads each with the meaning stated there, and
refuses the invalid ones."""

import json
from pathlib import Path

import msgpack
import numpy as np
import pytest

from clipper_container.wire import frames as wire
from clipper_container.wire import version1
from clipper_container.wire.call_values import pack_call, unpack_call
from clipper_container.wire.frames import BadFrame, DType, Flag, Kind, Rows
from clipper_container.worker.feedback_queue import open_feedback, pack_accuracy

VECTORS = Path(__file__).parents[2] / "tests" / "vectors"
LIMIT = 64 << 20


def vectors(file, version):
    if not (VECTORS / file).exists():
        return []  # an SDK that was unpacked by itself
    return [
        pytest.param(v, id=v["name"])
        for v in json.loads((VECTORS / file).read_text())
        if v["version"] == version
    ]


def part_vectors(key):
    """Return the frames of answers in parts that have this key: a meaning, or why not."""
    return [one for one in vectors("parts.json", 2) if key in one.values[0]]


def call_vectors(key):
    """Return the payloads of calls that have this key: a map, or why they are refused."""
    if not (VECTORS / "calls.json").exists():
        return []  # an SDK that was unpacked by itself
    found = json.loads((VECTORS / "calls.json").read_text())
    return [pytest.param(one, id=one["name"]) for one in found if key in one]


def shown(value):
    """Return a value with arrays as the vectors have them."""
    if isinstance(value, np.ndarray):
        number = int(wire.DTYPE_OF[value.dtype])
        return {"dtype": number, "shape": [*value.shape], "values": value.reshape(-1).tolist()}
    return {key: shown(one) for key, one in value.items()} if isinstance(value, dict) else value


@pytest.mark.parametrize("vector", call_vectors("map"))
def test_payloads_of_calls(vector):
    found = unpack_call(bytes.fromhex(vector["hex"]))
    assert shown(found) == vector["map"]
    assert shown(unpack_call(pack_call(found))) == vector["map"]


@pytest.mark.parametrize("vector", call_vectors("why"))
def test_payloads_of_calls_that_are_refused(vector):
    with pytest.raises(BadFrame):
        unpack_call(bytes.fromhex(vector["hex"]))


def read(data):
    """Decode a version 2 frame; return its header, and its rows or its payload."""
    header = wire.decode_header(data[:64], LIMIT)
    payload = np.frombuffer(data[64:], np.uint8)
    if header.flags & Flag.SHARED:
        return header, wire.open_runs(header, payload)
    if header.kind in (Kind.PREDICT, Kind.REPLY) or (header.kind == Kind.PART and header.rows):
        return header, wire.open_rows(header, payload, LIMIT)
    wire.check_payload(header, payload)
    opened = {Kind.REGION: wire.open_region, Kind.ACCURACY: open_accuracy, Kind.FEEDBACK: both}
    return header, opened.get(header.kind, lambda payload: payload.tobytes())(payload)


def open_accuracy(payload):
    """Return (rows learned, rows failed, accuracy or None)."""
    learned, failed = np.frombuffer(payload[:16], "<u8").tolist()
    accuracy = np.frombuffer(payload[16:], "<f8").tolist()
    if not all(0 <= one <= 1 for one in accuracy):
        raise BadFrame("an accuracy")
    return learned, failed, accuracy[0] if accuracy else None


def both(payload):
    return open_feedback(payload, LIMIT)


def read_v1(data):
    head, content = data[:9], np.frombuffer(data[9:], np.uint8)
    if version1.v1_content_bytes(head, LIMIT) != content.size:
        raise BadFrame("there is less, or more, than announced")
    return version1.v1_open(head, content, LIMIT)


def values(rows):
    """Return the rows as values of JSON."""
    got = wire.row_values(rows)
    if rows.dtype == DType.BYTES:
        return [row.hex() for row in got]
    return got if rows.dtype == DType.STR else [row.tolist() for row in got]


@pytest.mark.parametrize("vector", vectors("frames.json", 2) + part_vectors("meaning"))
def test_a_frame_means_what_its_description_states(vector):
    data, meaning = bytes.fromhex(vector["hex"]), vector["meaning"]
    header, content = read(data)
    assert Kind(header.kind).name == meaning["kind"]
    assert DType(header.dtype).name.lower() == meaning["dtype"]
    assert [flag.name for flag in Flag if header.flags & flag] == meaning["flags"]
    assert list(header.shape) == meaning["shape"]
    for field in ("rows", "id", "time_us", "payload_bytes", "payload_crc"):
        assert getattr(header, field) == meaning[field]
    if header.flags & Flag.SHARED:
        assert [list(run) for run in content] == meaning["runs"]
        return
    if header.kind == Kind.ACCURACY:
        assert content == (meaning["learned"], meaning["failed"], meaning["accuracy"])
        assert pack_accuracy(*content) == data[64:]
        return
    if header.kind == Kind.FEEDBACK:
        for rows, part in zip(content, (meaning["inputs"], meaning["labels"]), strict=True):
            np.testing.assert_equal(values(rows), part["values"])
            assert (None if rows.sessions is None else rows.sessions.tolist()) == part.get(
                "sessions"
            )
        return
    if header.kind == Kind.REGION:
        assert content == (meaning["region"], meaning["region_rows"], meaning["row_bytes"])
        return
    if not isinstance(content, Rows):
        expected = (
            msgpack.packb(meaning["map"]) if "map" in meaning else meaning.get("text", "").encode()
        )
        if "allowed" in meaning:
            expected = np.uint64(meaning["allowed"]).tobytes()
        assert content == expected
        assert (
            b"".join(
                wire.control_frame(
                    header.kind, content, header.id, bool(header.flags & Flag.CHECKED)
                )
            )
            == data
        )
        return
    np.testing.assert_equal(values(content), meaning["values"])
    for part in ("confidence", "status", "sessions"):
        got = getattr(content, part)
        assert (None if got is None else got.tolist()) == meaning.get(part)
    qualifiers = content.qualifiers
    assert (None if qualifiers is None else [each.hex() for each in qualifiers]) == meaning.get(
        "qualifiers"
    )
    assert content.text == meaning.get("text", "")
    if not header.flags & Flag.COMPRESSED:
        checked = bool(header.flags & Flag.CHECKED)
        again, pieces = wire.encode_rows(
            Kind(header.kind), content, header.id, header.time_us, checked
        )
        # rows do not say whether others follow, or how they are answered
        again.flags |= header.flags & (Flag.PARTIAL | Flag.PARTS)
        assert wire.encode_header(again) + b"".join(pieces) == data


@pytest.mark.parametrize("vector", vectors("frames.json", 1))
def test_a_version_1_batch_means_what_its_description_states(vector):
    assert values(read_v1(bytes.fromhex(vector["hex"]))) == vector["meaning"]["values"]


@pytest.mark.parametrize("vector", vectors("refused.json", 2) + part_vectors("why"))
def test_what_must_be_refused_is(vector):
    with pytest.raises(BadFrame):
        read(bytes.fromhex(vector["hex"]))


@pytest.mark.parametrize("vector", vectors("refused.json", 1))
def test_what_must_be_refused_of_version_1_is(vector):
    with pytest.raises(BadFrame):
        read_v1(bytes.fromhex(vector["hex"]))
