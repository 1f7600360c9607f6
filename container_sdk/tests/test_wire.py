"""Frames: what is written is read back, damaged ones are refused, and the golden frames have the
meaning that the vectors state."""

import math
import socket
import struct
import zlib

import lz4.block
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper_container.wire import frames as wire
from clipper_container.wire import version1
from clipper_container.wire.frames import BadFrame, DType, FrameTooLarge, Header, Kind, Rows
from clipper_container.wire.transport import (
    Disconnected,
    FrameConnection,
    Stopping,
    StopSwitch,
    connect,
    parse_address,
    set_timeouts,
)
from container_sdk.tests import fake_server as fake


def split(data):
    return data[:64], np.frombuffer(data[64:], np.uint8)


def opened(data, limit=1 << 20):
    head, payload = split(data)
    header = wire.decode_header(head, limit)
    return wire.open_rows(header, payload, limit)


SOUND = {
    "fixed": fake.fixed(np.arange(6.0).reshape(2, 3), flags=fake.CHECKED),
    "variable": fake.variable([b"ab", b"", b"c"], fake.BYTES),
    "hello": fake.frame(fake.HELLO, wire.pack_map({"name": "a"}), flags=fake.CHECKED),
    "heartbeat": fake.frame(fake.HEARTBEAT),
}


def read(data):
    head, payload = split(data)
    header = wire.decode_header(head, 1 << 20)
    if payload.size != header.payload_bytes:
        raise BadFrame("length")
    if header.kind in (Kind.PREDICT, Kind.REPLY):
        return wire.row_values(wire.open_rows(header, payload, 1 << 20))
    wire.check_payload(header, payload)
    return payload.tobytes()


@pytest.mark.parametrize("name", SOUND)
def test_any_flipped_bit_of_a_header_is_noticed(name):
    data = SOUND[name]
    read(data)
    for bit in range(64 * 8):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFrame):
            read(bytes(damaged))


@given(st.integers(64, len(SOUND["fixed"]) - 1), st.integers(1, 255))
def test_a_changed_byte_of_a_checked_payload_is_noticed(at, change):
    damaged = bytearray(SOUND["fixed"])
    damaged[at] ^= change
    with pytest.raises(BadFrame, match="CRC"):
        read(bytes(damaged))


@given(st.data())
def test_hostile_headers_are_refused_or_fit_their_payload(data):
    """Headers have a right CRC and random fields: rows are read only if they fill the payload
    exactly."""
    draw = data.draw
    size = draw(st.integers(0, 64))
    head = struct.pack(
        "<4sBBBBHHIQ4IQQI",
        b"CLPR",
        2,
        draw(st.integers(0, 9)),
        draw(st.integers(0, 15)),
        draw(st.integers(0, 5)),
        draw(st.integers(0, 33)),
        0,
        draw(st.one_of(st.integers(0, 9), st.integers(0, 2**32 - 1))),
        1,
        *(draw(st.one_of(st.integers(0, 4), st.integers(0, 2**32 - 1))) for _ in range(4)),
        size,
        0,
        0,
    )
    payload = np.array(
        draw(st.lists(st.sampled_from([0, 1, 2, 255]), min_size=size, max_size=size)), np.uint8
    )
    try:
        header = wire.decode_header(head + struct.pack("<I", zlib.crc32(head)), 1 << 10, 1 << 10)
        if header.kind not in (Kind.PREDICT, Kind.REPLY):
            return
        rows = wire.open_rows(header, payload, 1 << 10)
    except BadFrame:
        return
    used = rows.data.nbytes + (rows.lengths.nbytes if rows.lengths is not None else 0)
    assert len(rows.data) == (rows.n if rows.lengths is None else int(rows.lengths.sum()))
    assert used <= size or header.flags & fake.COMPRESSED


@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": 0, "dims": (1,), "rows": 1},
        {"dtype": 15, "dims": (1,), "rows": 1},
        {"dtype": fake.STR, "dims": (1,), "rows": 1},
        {"dtype": 12, "dims": (1,), "rows": 0},
        {"dtype": 12, "dims": (1,), "rows": 1, "rank": 5},
        {"dtype": 12, "dims": (1, 1), "rows": 1, "rank": 1},
        {"dtype": 12, "dims": (1,), "rows": 1, "flags": fake.VARIABLE},
        {"dtype": 12, "dims": (0,), "rows": 1, "flags": fake.VARIABLE | fake.COMPRESSED},
        {"dtype": 12, "dims": (1,), "rows": 1, "flags": 32},
        {"dtype": 12, "dims": (2**32 - 1,) * 4, "rows": 1 << 20},
        {"dtype": 12, "dims": (1,), "rows": 2**32 - 1},
        {"dtype": 12, "dims": (0, 2**32 - 1, 2**32 - 1), "rows": 3},
    ],
)
def test_headers_that_contradict_themselves(fields):
    with pytest.raises(BadFrame):
        opened(fake.frame(fake.PREDICT, bytes(8), **fields))


def test_an_older_or_newer_version_is_named():
    data = bytearray(SOUND["heartbeat"])
    data[4] = 3
    with pytest.raises(BadFrame, match="wire version 3, this container 2"):
        wire.decode_header(bytes(data))


def test_limits_hold_before_anything_is_reserved():
    with pytest.raises(FrameTooLarge):
        wire.decode_header(wire.encode_header(Header(Kind.HELLO, payload_bytes=1 << 40)))
    bomb = lz4.block.compress(bytes(1 << 24), store_size=False)
    payload = fake.padded(struct.pack("<I", 1 << 24)) + fake.padded(
        struct.pack("<Q", len(bomb)) + bomb
    )
    flags = fake.VARIABLE | fake.COMPRESSED
    with pytest.raises(FrameTooLarge):
        opened(fake.frame(fake.PREDICT, payload, dtype=fake.STR, dims=(0,), flags=flags, rows=1))
    small = fake.padded(struct.pack("<I", 5)) + fake.padded(struct.pack("<Q", len(bomb)) + bomb)
    with pytest.raises(BadFrame, match="LZ4"):
        opened(fake.frame(fake.PREDICT, small, dtype=fake.STR, dims=(0,), flags=flags, rows=1))


@given(
    n=st.integers(1, 6),
    dtype=st.sampled_from([*wire.NUMPY_TYPES]),
    variable=st.booleans(),
    parts=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    seed=st.integers(0, 99),
)
def test_rows_are_read_as_they_were_written(n, dtype, variable, parts, seed):
    random = np.random.default_rng(seed)
    kind = wire.NUMPY_TYPES[dtype]
    if variable or dtype >= DType.STR:
        lengths = random.integers(0, 5, n).astype(np.uint32)
        rows = Rows(dtype, n, random.integers(0, 2, int(lengths.sum())).astype(kind), lengths)
    else:
        rows = Rows(
            dtype, n, random.integers(0, 2, (n, *random.integers(1, 3, seed % 5))).astype(kind)
        )
    confidence, status, checked = parts
    if confidence:
        rows.confidence = random.random(n, np.float32)
    if status:
        rows.status, rows.text = random.integers(0, 2, n).astype(np.uint8), "näh" * (seed % 3)
    header, pieces = wire.encode_rows(Kind.REPLY, rows, id=2**63, time_us=5, checked=checked)
    head, payload = split(wire.encode_header(header) + b"".join(pieces))
    got_header = wire.decode_header(head)
    assert got_header == header
    got = wire.open_rows(got_header, payload)
    for field in ("data", "lengths", "confidence", "status"):
        mine, theirs = getattr(rows, field), getattr(got, field)
        assert (mine is None) == (theirs is None)
        if mine is not None:
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            np.testing.assert_array_equal(mine, theirs)
    assert got.text == rows.text
    # a payload that is shorter, whose header says so, does not fit its rows
    for cut in range(min(len(payload), 40)):
        if not checked and not status:
            got_header.payload_bytes = len(payload) - cut - 1
            with pytest.raises(BadFrame):
                wire.open_rows(got_header, payload[: len(payload) - cut - 1])


@pytest.mark.parametrize(
    "head",
    [
        (0, 1, 1),
        (8, 1, 1),
        (2, 0, 1),
        (2, 2**32 - 1, 1),
        (2, 1 << 20, 2**32 - 1),
        (5, 1, 2**32 - 1),
    ],
)
def test_version_1_heads_that_are_refused(head):
    with pytest.raises(BadFrame):
        version1.v1_content_bytes(struct.pack("<BII", *head))


@pytest.mark.parametrize(
    ("kind", "n", "content"),
    [
        (5, 1, struct.pack("<I", 2) + bytes(8)),
        (5, 1, struct.pack("<I", 1) + bytes(9)),
        (5, 1, struct.pack("<I", 2**32 - 1) + bytes(8)),
        (5, 9, struct.pack("<I", 0)),
        (7, 1, struct.pack("<i", -1)),
        (7, 1, struct.pack("<i", 3) + b"\xff\xff"),
        (7, 1, struct.pack("<i", 2**31 - 1)),
        (7, 2, struct.pack("<i", 3)),
        (7, 2, struct.pack("<ii", -1, 2) + lz4.block.compress(b"x", store_size=False)),
    ],
)
def test_version_1_contents_that_are_refused(kind, n, content):
    head = struct.pack("<BII", kind, n, len(content))
    assert version1.v1_content_bytes(head) == len(content)
    with pytest.raises(BadFrame):
        version1.v1_open(head, np.frombuffer(content, np.uint8))


@given(
    st.lists(st.lists(st.integers(0, 255), max_size=5), min_size=1, max_size=5),
    st.sampled_from(["<i4", "<f8", "u1"]),
)
def test_version_1_rows_of_many_lengths(rows, name):
    kind = {"<i4": 4, "<f8": 5, "u1": 6}[name]
    content = b"".join(struct.pack("<I", len(row)) + np.array(row, name).tobytes() for row in rows)
    head = struct.pack("<BII", kind, len(rows), len(content))
    got = wire.row_values(version1.v1_open(head, np.frombuffer(content, np.uint8)))
    assert [row.tolist() for row in got] == rows


# -- the connection's buffer


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    stop = StopSwitch()
    connection = FrameConnection(ours, stop, 1 << 20, float("inf"))
    yield connection, theirs, stop
    connection.close()
    theirs.close()
    stop.close()


def test_a_batch_is_a_view_of_the_receive_buffer(pair):
    connection, theirs, _ = pair
    before = connection.buffer.bytes
    rows = np.arange(300.0).reshape(100, 3)
    for _ in range(3):
        theirs.sendall(fake.fixed(rows))
        connection.next_message()
        header = wire.decode_header(connection.take(64))
        inputs = wire.row_values(wire.open_rows(header, connection.take(header.payload_bytes)))
        assert np.shares_memory(inputs, before)
        assert inputs.ctypes.data % 64 == 0
        np.testing.assert_array_equal(inputs, rows)
        del inputs
    assert connection.buffer.bytes is before


def test_a_kept_view_gets_the_buffer_for_itself(pair):
    connection, theirs, _ = pair
    kept = []
    for value in range(3):
        theirs.sendall(fake.fixed(np.full((2, 2), float(value))))
        connection.next_message()
        header = wire.decode_header(connection.take(64))
        kept.append(wire.row_values(wire.open_rows(header, connection.take(header.payload_bytes))))
    assert [view[0, 0] for view in kept] == [0.0, 1.0, 2.0]


def test_the_buffer_grows_to_its_bound_and_no_further(pair):
    connection, theirs, _ = pair
    connection.begin_size = connection.buffer.size
    theirs.sendall(bytes(100))
    connection.next_message()
    with pytest.raises(BadFrame, match="the limit is"):
        connection.take((1 << 20) + 65)
    assert connection.buffer.size == connection.begin_size


def test_a_connection_that_ends_within_a_frame(pair):
    connection, theirs, stop = pair
    theirs.sendall(bytes(63))
    connection.next_message()
    theirs.close()
    with pytest.raises(Disconnected):
        connection.take(64)
    stop.request()
    with pytest.raises(Stopping):
        stop.wait(60)


def test_a_message_is_sent_whole_however_little_the_socket_takes(pair):
    class Dribble(socket.socket):
        calls = 0

        def sendmsg(self, buffers):
            self.calls += 1
            # each send costs the socket's queue some hundred bytes, and nobody reads yet
            if self.calls > 50:
                return super().sendmsg(buffers)
            return (
                super().sendmsg(buffers[:2])
                if len(buffers[0]) < 3
                else super().send(buffers[0][:3])
            )

    ours, theirs = socket.socketpair()
    pieces = [
        b"",
        b"0123456789",
        memoryview(b"ab"),
        np.arange(7, dtype=np.uint8).data,
        *[b"%d" % i for i in range(600)],
    ]
    connection = FrameConnection(Dribble(fileno=ours.detach()), pair[2], 1 << 20, float("inf"))
    connection.send(pieces)
    connection.close()
    with theirs, theirs.makefile("rb") as file:
        assert file.read() == b"".join(pieces)


def test_addresses():
    assert parse_address("tcp://127.0.0.1:9") == parse_address("tcp:127.0.0.1:9")
    for bad in ("unix:", "tcp:host", "tcp::1", "tcp:host:port", "http://x", ""):
        with pytest.raises(ValueError, match="unix:/path or tcp:host:port"):
            connect(bad, 1)


@pytest.mark.parametrize(("seconds", "limit"), [(math.inf, (0, 0)), (1.5, (1, 500_000))])
def test_a_socket_has_the_timeouts_that_it_was_given(seconds, limit):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for each in (9.0, seconds):
            set_timeouts(ours, each)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            assert struct.unpack("ll", ours.getsockopt(socket.SOL_SOCKET, option, 16)) == limit
