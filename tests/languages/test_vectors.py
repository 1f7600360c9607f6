"""The decoders of the C++ and Java SDKs: the golden frames, those that must be rejected, and
damaged ones, compared with the Python SDK, which reads the same bytes."""

import json
import random
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest

from clipper_container.schema import Tensors
from clipper_container.wire import frames as wire
from clipper_container.wire import version1
from clipper_container.wire.frames import BadFrame, Flag, Kind
from clipper_container.worker.feedback_queue import open_feedback
from clipper_container.worker.handshake import Welcome
from tests.languages.compiled import CPP, JAVA, SANITIZERS, cpp, java, java_command

VECTORS = Path(__file__).parents[1] / "vectors"
LANGUAGES = ("cpp", "java")
FIELDS = ("kind", "dtype", "rows", "id", "time_us", "payload_crc", "shape", "text")
PARTS = ("values", "sessions", "confidence", "qualifiers", "status", "runs", "region")
PARTS += ("region_rows", "row_bytes", "learned", "failed", "accuracy")
DAMAGED = 4000


@pytest.fixture(scope="session", params=LANGUAGES)
def reader(request):
    """Return a function that has a program read frames: from (version, bytes) pairs to their
    meanings."""
    if request.param == "cpp":
        command = [str(cpp(CPP / "tests" / "vectors.cpp", *SANITIZERS))]
    else:
        command = java_command(java(JAVA / "tests"), "clipper.container.Vectors")

    def read(frames):
        lines = "".join(
            " ".join((str(version), data.hex(), *schema)) + "\n"
            for version, data, *schema in frames
        )
        ran = subprocess.run(command, input=lines.encode(), capture_output=True, timeout=120)
        assert ran.returncode == 0, ran.stderr[-4000:]
        text = ran.stdout.decode("utf-8", "replace")  # damaged strings need not be UTF-8
        found = [json.loads(line) for line in text.removesuffix("\n").split("\n")]
        assert len(found) == len(frames)
        return found

    return read


def vectors(file):
    return json.loads((VECTORS / file).read_text())


def bytes_of(vectors):
    return [(vector["version"], bytes.fromhex(vector["hex"])) for vector in vectors]


def test_golden_frames_mean_what_their_descriptions_state(reader):
    golden = vectors("frames.json")
    for vector, found in zip(golden, reader(bytes_of(golden)), strict=True):
        meaning, name = vector["meaning"], vector["name"]
        assert "error" not in found, (name, found)
        for field in (*FIELDS, *PARTS):
            if field in meaning and (vector["version"] == 2 or field == "values"):
                np.testing.assert_equal(found.get(field), meaning[field], f"{name}: {field}")
        if "flags" in meaning:
            flags = [flag.name for flag in Flag if found["flags"] & flag]
            assert flags == meaning["flags"], name
        if meaning.get("kind") == "FEEDBACK":
            assert found["inputs"] == meaning["inputs"]["values"], name
            assert found["labels"] == meaning["labels"]["values"], name
            assert found["sessions"] == meaning["inputs"]["sessions"], name
        if "again" in found:
            assert found["again"] == vector["hex"], name


def test_replies_and_control_frames_are_encoded_again(reader):
    kinds = {"REPLY", "HELLO", "WELCOME", "REFUSE", "FAILURE", "HEARTBEAT", "GOODBYE", "ACCURACY"}
    golden = [v for v in vectors("frames.json") if v["meaning"].get("kind") in kinds]
    found = reader(bytes_of(golden))
    again = {v["name"] for v, got in zip(golden, found, strict=True) if "again" in got}
    unsaid = {v["name"] for v in golden if {"ROW_STATUS", "PARTIAL"} & {*v["meaning"]["flags"]}}
    assert again == {v["name"] for v in golden} - unsaid


def test_invalid_frames_are_rejected(reader):
    refused = vectors("refused.json")
    for vector, found in zip(refused, reader(bytes_of(refused)), strict=True):
        assert "error" in found, (vector["name"], vector["why"], found)


def test_every_truncation_and_every_changed_header_bit_is_rejected(reader):
    frames = []
    for version, data in bytes_of(vectors("frames.json")):
        ends = {*range(0, min(len(data), 200), 7), len(data) - 1, max(0, len(data) - 9)}
        frames += [(version, data[:end]) for end in sorted(ends)]
        if version == 2:
            bits = range(0, 512, 5)
            frames += [(2, _flipped(data, bit)) for bit in bits]
    for (version, data), found in zip(frames, reader(frames), strict=True):
        assert "error" in found, (version, data.hex())


def test_damaged_frames_are_read_as_the_python_sdk_reads_them(reader):
    """A changed field, length or byte, with both checksums made right again. Frames about calls are
    the Python SDK's alone."""
    golden = [v for v in vectors("frames.json") if "PARTIAL" not in v["meaning"].get("flags", ())]
    seeds, numbers = bytes_of(golden), random.Random(7)
    frames = [_damaged(numbers.choice(seeds), numbers) for _ in range(DAMAGED)]
    agreed = 0
    for (version, data), found in zip(frames, reader(frames), strict=True):
        # of maps only the keys count
        others = (Kind.HELLO, Kind.WELCOME, Kind.CALL, Kind.ANSWER)
        if version == 1 or data[5] not in others:
            rejected = _is_rejected(version, data)
            assert ("error" in found) == rejected, (version, data.hex(), found)
        agreed += "error" not in found
    assert DAMAGED / 20 < agreed < DAMAGED * 0.95


def _flipped(data, bit):
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def _damaged(seed, numbers):
    version, data = seed
    changed = bytearray(data)
    first = 64 if version == 2 else 0
    for _ in range(numbers.randint(1, 3)):
        step = numbers.random()
        if step < 0.3 and version == 2:
            changed[numbers.choice((5, 6, 7, 8, 12, 24, 40, numbers.randrange(60)))] = (
                numbers.choice((0, 1, 2, 8, 16, 64, 127, 255))
            )
        elif step < 0.8 and len(changed) > first:
            changed[numbers.randrange(first, len(changed))] = numbers.choice((0, 1, 8, 255))
        elif step < 0.9 and len(changed) > first:
            del changed[numbers.randrange(first, len(changed)) :]
        else:
            changed += bytes(numbers.choice((1, 4, 8, 16)))
    if version == 1:
        return version, bytes(changed)
    payload = bytes(changed[64:])
    if numbers.random() < 0.7:
        changed[40:48] = len(payload).to_bytes(8, "little")
    checked = changed[8] & Flag.CHECKED
    changed[56:60] = (zlib.crc32(payload) if checked else 0).to_bytes(4, "little")
    changed[60:64] = zlib.crc32(changed[:60]).to_bytes(4, "little")
    return version, bytes(changed)


def _is_rejected(version, data):
    try:
        (_read_v1 if version == 1 else _read_v2)(data)
    except BadFrame:
        return True
    return False


def _read_v1(data):
    if len(data) < 9 or version1.v1_content_bytes(data[:9]) != len(data) - 9:
        raise BadFrame("another length")
    version1.v1_open(data[:9], np.frombuffer(data[9:], np.uint8))


def _read_v2(data):
    if len(data) < 64:
        raise BadFrame("too short")
    header, payload = wire.decode_header(data[:64]), np.frombuffer(data[64:], np.uint8)
    if header.payload_bytes != payload.size:
        raise BadFrame("another length")
    if header.flags & Flag.SHARED:
        wire.open_runs(header, payload)
    elif header.kind in (Kind.PREDICT, Kind.REPLY):
        wire.open_rows(header, payload)
    else:
        wire.check_payload(header, payload)
    if header.kind == Kind.REGION:
        wire.open_region(payload)
    elif header.kind == Kind.ACCURACY:
        np.frombuffer(payload[:16], "<u8", 2)
        if not all(0 <= one <= 1 for one in np.frombuffer(payload[16:], "<f8").tolist()):
            raise BadFrame("an accuracy")
    elif header.kind == Kind.FEEDBACK:
        open_feedback(payload, wire.PAYLOAD_BYTES_MAX)
    elif header.kind == Kind.HELLO:
        wire.unpack_map(payload)
    elif header.kind == Kind.WELCOME:
        Welcome.read(wire.unpack_map(payload))


# -- records of named tensors


def records(file="records.json"):
    return [
        (vector, schema_text(vector), bytes.fromhex(record))
        for vector in vectors(file)
        for record in vector["records"]
    ]


def schema_text(vector):
    return json.dumps(vector["schema"])


def test_records_mean_what_their_descriptions_state(reader):
    good = [one for one in records() if "values" in one[0]]
    found = reader([("r", data, schema) for _, schema, data in good])
    place = {}
    for (vector, _, data), got in zip(good, found, strict=True):
        name = vector["name"]
        i = place[name] = place.get(name, -1) + 1
        assert "error" not in got, (name, got)
        assert got["again"] == data.hex(), name
        expected = {tensor: values[i] for tensor, values in vector["values"].items()}
        np.testing.assert_equal(got["values"], expected, name)


def test_invalid_records_are_rejected(reader):
    bad = [one for one in records() if "why" in one[0]]
    found = reader([("r", data, schema) for _, schema, data in bad])
    for (vector, _, _), got in zip(bad, found, strict=True):
        assert "error" in got, (vector["name"], vector["why"])


def test_damaged_records_are_read_as_the_python_sdk_reads_them(reader):
    seeds, numbers = records(), random.Random(11)
    damaged = []
    for _ in range(DAMAGED // 2):
        vector, schema, data = numbers.choice(seeds)
        changed = bytearray(data)
        for _ in range(numbers.randint(1, 2)):
            if changed and numbers.random() < 0.8:
                changed[numbers.randrange(len(changed))] = numbers.choice((0, 1, 2, 8, 128, 255))
            elif changed and numbers.random() < 0.5:
                del changed[numbers.randrange(len(changed)) :]
            else:
                changed += bytes(8)
        damaged.append((vector, schema, bytes(changed)))
    found = reader([("r", data, schema) for _, schema, data in damaged])
    accepted = 0
    for (vector, schema, data), got in zip(damaged, found, strict=True):
        rejected = _is_damaged(Tensors.parse(vector["schema"]), data)
        assert ("error" in got) == rejected, (schema, data.hex(), got)
        accepted += not rejected
    assert DAMAGED / 40 < accepted < DAMAGED / 2.1


def _is_damaged(tensors, data):
    try:
        row = np.frombuffer(data, np.uint8) if tensors.is_fixed else data
        tensors.unpack(row)
    except ValueError:
        return True
    return False
