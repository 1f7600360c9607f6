"""Rows in shared memory, with real memfds and sockets: views, copies, rows that a model keeps, and
a hostile server."""

import array
import contextlib
import fcntl
import gc
import os
import socket
import struct
import textwrap
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from clipper_container.wire import frames as wire
from clipper_container.wire.frames import BadFrame, DType, FrameTooLarge, Header, Kind
from clipper_container.wire.regions import LEAVES_MAX, REGIONS_MAX, CannotShare, Regions
from clipper_container.wire.transport import FrameConnection, StopSwitch
from container_sdk.tests import fake_server as fake
from container_sdk.tests.test_serving import serving

REGION, SHARED = 9, 32
ROWS, WIDTH = 64, 200  # f32: 800 bytes a row, so runs begin anywhere in a page
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW

MODELS = """
import numpy as np

kept = []

def total(inputs):
    return inputs.sum(axis=1)

def facts(inputs):
    return [repr((inputs.shape, inputs.flags.writeable, inputs.flags.owndata,
    inputs.flags.aligned))] * len(inputs)

def same(inputs):
    return inputs

def keeper(inputs):
    kept.append(inputs)
    return np.array([sum(float(x.sum()) for x in kept)] * len(inputs))
"""


class Memory:
    """A memfd that a server shares with a container."""

    def __init__(self, rows=ROWS, width=WIDTH, seals=SEALS):
        self.fd = os.memfd_create("clipper-rows", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        self.rows, self.row_bytes = rows, 4 * width
        os.ftruncate(self.fd, rows * self.row_bytes)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)

    def put(self, first, values):
        os.pwrite(self.fd, np.ascontiguousarray(values, "<f4").tobytes(), first * self.row_bytes)

    def region_frame(self, number=3, rows=None, row_bytes=None):
        rows, row_bytes = rows or self.rows, row_bytes or self.row_bytes
        return fake.frame(REGION, struct.pack("<QQQ", number, rows, row_bytes))

    def close(self):
        os.close(self.fd)


@pytest.fixture
def memory():
    made = Memory()
    yield made
    made.close()


def predict(*runs, id=1, width=WIDTH, rows=None, flags=SHARED, dtype=11):
    """Return a PREDICT frame for rows in shared memory. runs: (region, first, count) each."""
    payload = b"".join(struct.pack("<IIQ", number, count, first) for number, first, count in runs)
    rows = sum(run[2] for run in runs) if rows is None else rows
    return fake.frame(
        fake.PREDICT, payload, dtype=dtype, dims=(width,), flags=flags, rows=rows, id=id
    )


def values(first, count):
    return np.arange(first, first + count, dtype="f4")[:, None] + np.zeros(WIDTH, "f4")


# -- regions by themselves


def header_of(data):
    return wire.decode_header(data[:64]), np.frombuffer(data[64:], np.uint8)


@pytest.fixture
def regions(memory):
    memory.put(0, values(0, ROWS))
    made = Regions(1 << 20)
    made.add(header_of(memory.region_frame())[1], os.dup(memory.fd))
    yield made
    made.close()


def test_one_run_is_a_view(regions, memory):
    rows = regions.open(*header_of(predict((3, 5, 4))))
    assert np.array_equal(rows.data, values(5, 4))
    assert not rows.data.flags.writeable
    memory.put(5, values(50, 1))
    assert rows.data[0, 0] == 50.0
    assert regions.are_lent()
    del rows
    assert not regions.are_lent()


def test_several_runs_are_joined_in_order(regions):
    rows = regions.open(*header_of(predict((3, 60, 4), (3, 0, 2), (3, 7, 1))))
    assert rows.data[:, 0].tolist() == [60, 61, 62, 63, 0, 1, 7]
    assert not regions.are_lent()


HOSTILE = {
    "beyond": predict((3, ROWS - 1, 2)),
    "first beyond": predict((3, ROWS, 1)),
    "sum wraps": predict((3, 2**64 - 1, 2)),
    "product wraps": predict((3, 2**63, 1)),
    "second run beyond": predict((3, 0, 1), (3, ROWS, 1)),
    "unknown": predict((4, 0, 1)),
    "other width": predict((3, 0, 1), width=WIDTH - 1),
    "wider": predict((3, 0, 1), width=2**32 - 1),
    "other type": predict((3, 0, 1), dtype=12),
    "too few": predict((3, 0, 2), rows=3),
    "too many": predict((3, 0, 2), rows=1),
    "none": fake.frame(fake.PREDICT, b"", dtype=11, dims=(WIDTH,), flags=SHARED, rows=1, id=1),
    "half a run": fake.frame(
        fake.PREDICT, bytes(24), dtype=11, dims=(WIDTH,), flags=SHARED, rows=1, id=1
    ),
    "empty run": predict((3, 0, 0), (3, 0, 1)),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_run_is_refused(regions, name):
    with pytest.raises(BadFrame):
        regions.open(*header_of(HOSTILE[name]))


def test_a_damaged_run_is_noticed(regions):
    data = bytearray(predict((3, 5, 4), flags=SHARED | fake.CHECKED))
    regions.open(*header_of(bytes(data)))
    data[64 + 8] ^= 1
    with pytest.raises(BadFrame, match="CRC"):
        regions.open(*header_of(bytes(data)))


def test_more_than_a_payload_may_be_is_refused(memory):
    regions = Regions(10 * 4 * WIDTH)
    regions.add(header_of(memory.region_frame())[1], os.dup(memory.fd))
    regions.open(*header_of(predict((3, 0, 10))))
    with pytest.raises(FrameTooLarge):
        regions.open(*header_of(predict((3, 0, 11))))
    regions.close()


@pytest.mark.parametrize(
    "fields", [(3, 0, 8), (3, 8, 0), (2**32, 8, 8), (4, ROWS + 100, 4 * WIDTH), (4, 2**40, 2**40)]
)
def test_a_hostile_region_is_refused_and_its_descriptor_closed(regions, memory, fields):
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(BadFrame):
        regions.add(np.frombuffer(struct.pack("<QQQ", *fields), np.uint8), os.dup(memory.fd))
    assert len(os.listdir("/proc/self/fd")) == before


def test_memory_that_could_shrink_is_refused(regions):
    loose = Memory(seals=fcntl.F_SEAL_GROW)
    with pytest.raises(BadFrame, match="shrink"):
        regions.add(header_of(loose.region_frame(4))[1], loose.fd)


def test_what_is_no_memory_file_is_refused(regions):
    with pytest.raises(CannotShare):
        regions.add(
            np.frombuffer(struct.pack("<QQQ", 4, 8, 8), np.uint8), os.open("/dev/null", os.O_RDONLY)
        )


def test_regions_are_announced_once_and_are_bounded(regions, memory):
    with pytest.raises(BadFrame):
        regions.add(header_of(memory.region_frame(3))[1], os.dup(memory.fd))
    for number in range(100, 100 + REGIONS_MAX - 1):
        regions.add(header_of(memory.region_frame(number))[1], os.dup(memory.fd))
    with pytest.raises(BadFrame):
        regions.add(header_of(memory.region_frame(99))[1], os.dup(memory.fd))


def test_what_is_kept_stays_as_it_was(regions, memory):
    header, payload = header_of(predict((3, 5, 40)))
    kept = regions.open(header, payload).data
    regions.leave(header, payload)
    memory.put(0, values(1000, ROWS))
    assert np.array_equal(kept, values(5, 40))
    assert not regions.are_lent()
    assert np.array_equal(regions.open(header, payload).data, values(1005, 40))


def test_a_model_that_keeps_its_inputs_repeatedly_gets_copies(regions, memory):
    header, payload = header_of(predict((3, 5, 4)))
    kept = []
    for turn in range(LEAVES_MAX + 3):
        memory.put(5, values(100 * turn, 4))
        kept.append(regions.open(header, payload).data)
        assert regions.are_lent() == (turn < LEAVES_MAX)
        if regions.are_lent():
            regions.leave(header, payload)
    assert [x[0, 0] for x in kept] == [100 * turn for turn in range(LEAVES_MAX + 3)]


def mapped():
    gc.collect()
    return Path("/proc/self/maps").read_text().count("clipper-rows"), len(
        os.listdir("/proc/self/fd")
    )


def test_nothing_is_left_of_a_connection(memory):
    before = mapped()
    regions = Regions(1 << 20)
    for number in range(5):
        regions.add(header_of(memory.region_frame(number))[1], os.dup(memory.fd))
    assert mapped()[0] == before[0] + 5
    regions.close()
    assert mapped() == before


# -- descriptors on a socket


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    stop = StopSwitch()
    connection = FrameConnection(ours, stop, 1 << 20, 5.0)
    connection.take_descriptors()
    yield connection, theirs
    connection.close()
    theirs.close()
    stop.close()


def take_frame(connection):
    connection.next_message()
    header = wire.decode_header(connection.take(64))
    return header, connection.take(header.payload_bytes).copy()


def test_descriptors_come_with_their_frames(pair, memory):
    connection, theirs = pair
    other = Memory(rows=8)
    socket.send_fds(theirs, [fake.frame(fake.HEARTBEAT) + memory.region_frame(1)], [memory.fd])
    socket.send_fds(theirs, [other.region_frame(2)], [other.fd])
    assert take_frame(connection)[0].kind == Kind.HEARTBEAT
    for wanted in (memory, other):
        assert take_frame(connection)[0].kind == Kind.REGION
        fd = connection.descriptor()
        assert os.fstat(fd).st_ino == os.fstat(wanted.fd).st_ino
        assert not os.get_inheritable(fd)
        os.close(fd)
    assert connection.descriptor() is None
    other.close()


def test_too_many_descriptors_are_refused_and_closed(pair, memory):
    connection, theirs = pair
    before = len(os.listdir("/proc/self/fd"))
    # more than there is room for: truncated
    socket.send_fds(theirs, [fake.frame(fake.HEARTBEAT)], [memory.fd] * 20)
    with pytest.raises(BadFrame):
        connection.next_message()
    connection.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_descriptors_without_frames_pile_up_to_a_bound(pair, memory):
    connection, theirs = pair
    for _ in range(4):
        socket.send_fds(theirs, [fake.frame(fake.HEARTBEAT)], [memory.fd])
        take_frame(connection)
    socket.send_fds(theirs, [fake.frame(fake.HEARTBEAT)], [memory.fd])
    with pytest.raises(BadFrame):
        take_frame(connection)


def test_other_ancillary_data_is_nothing(pair):
    connection, theirs = pair
    connection._sock.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
    theirs.sendall(fake.frame(fake.HEARTBEAT))
    # credentials fill the room for descriptors: refused, or passed over
    with contextlib.suppress(BadFrame):
        assert take_frame(connection)[0].kind == Kind.HEARTBEAT
    assert connection.descriptor() is None


def test_polling_for_a_moment_receives_what_comes_and_ends(pair):
    connection, theirs = pair
    connection._spins = True
    for _ in range(3):
        theirs.sendall(fake.frame(fake.HEARTBEAT))
        take_frame(connection)
    assert connection._spin_score == 3
    for _ in range(6):
        waiter = threading.Thread(target=take_frame, args=(connection,))
        score = connection._spin_score
        waiter.start()
        give_up = time.monotonic() + fake.PATIENCE_S
        while connection._spin_score == score and score >= 0:
            assert time.monotonic() < give_up
        theirs.sendall(fake.frame(fake.HEARTBEAT))
        fake.join(waiter)
    assert connection._spin_score == -1


# -- the container process


@pytest.fixture(scope="module")
def code(tmp_path_factory):
    directory = tmp_path_factory.mktemp("code")
    (directory / "models.py").write_text(textwrap.dedent(MODELS))
    return directory


@contextlib.contextmanager
def sharing(tmp_path, code, target, memory, **options):
    memory.put(0, values(0, ROWS))
    with serving(tmp_path, code, target, welcome={"shared": True}, **options) as peer:
        assert peer.greeting["shared"] is True
        socket.send_fds(peer.sock, [memory.region_frame()], [memory.fd])
        yield peer


def test_a_model_is_given_a_view(tmp_path, code, memory):
    with sharing(tmp_path, code, "models:facts", memory) as peer:
        one = peer.request(predict((3, 5, 4), id=1)).parts()["rows"]
        two = peer.request(predict((3, 62, 2), (3, 0, 2), id=2)).parts()["rows"]
        over = peer.request(fake.fixed(np.zeros((4, WIDTH), "f4"), id=3)).parts()["rows"]
    assert one == two == over == [repr(((4, WIDTH), False, False, True))] * 4


def test_answers_are_right_over_many_batches(tmp_path, code, memory):
    rng = np.random.default_rng(3)
    with sharing(tmp_path, code, "models:total", memory) as peer:
        for i in range(200):
            first = int(rng.integers(0, ROWS - 8))
            rows = rng.integers(0, 100, (8, WIDTH))
            memory.put(first, rows)
            runs = [(3, first, 8)] if i % 3 else [(3, first, 3), (3, first + 3, 5)]
            reply = peer.request(predict(*runs, id=i + 1))
            assert reply.id == i + 1
            assert np.array_equal(reply.parts()["rows"], rows.sum(axis=1))


def test_outputs_that_are_the_inputs_are_sent_before_they_change(tmp_path, code, memory):
    with sharing(tmp_path, code, "models:same", memory) as peer:
        assert np.array_equal(peer.request(predict((3, 1, 9))).parts()["rows"], values(1, 9))


def test_a_model_may_keep_its_inputs(tmp_path, code, memory):
    total = 0.0
    with sharing(tmp_path, code, "models:keeper", memory) as peer:
        for i in range(LEAVES_MAX + 4):
            memory.put(0, np.full((4, WIDTH), i + 1.0))
            total += 4 * WIDTH * (i + 1.0)
            assert (
                peer.request(predict((3, 0, 4), id=i + 1)).parts()["rows"].tolist() == [total] * 4
            )


@pytest.mark.parametrize("name", HOSTILE)
def test_a_container_hangs_up_on_a_hostile_run_and_dials_again(tmp_path, code, memory, name):
    with sharing(tmp_path, code, "models:total", memory) as peer:
        peer.sock.sendall(HOSTILE[name])
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.frame()
        with contextlib.closing(peer.server.accept()) as again:
            assert again.welcome(shared=True)["shared"] is True
            socket.send_fds(again.sock, [memory.region_frame()], [memory.fd])
            assert again.request(predict((3, 2, 1))).parts()["rows"].tolist() == [2.0 * WIDTH]


def test_a_region_without_its_descriptor_ends_sharing_and_not_the_container(tmp_path, code):
    with serving(tmp_path, code, "models:total", welcome={"shared": True}) as peer:
        peer.sock.sendall(fake.frame(REGION, struct.pack("<QQQ", 3, 8, 800)))
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.frame()
        with contextlib.closing(peer.server.accept()) as again:
            assert again.welcome(shared=True)["shared"] is False
            assert (
                again.request(fake.fixed(np.ones((2, WIDTH), "f4"))).parts()["rows"].tolist()
                == [WIDTH] * 2
            )


@pytest.mark.parametrize(
    "what", [predict((3, 0, 1)), fake.frame(REGION, struct.pack("<QQQ", 3, 8, 800))]
)
def test_what_was_not_agreed_on_is_no_frame(tmp_path, code, what):
    with serving(tmp_path, code, "models:total") as peer:
        peer.sock.sendall(what)
        with pytest.raises((EOFError, ConnectionResetError)):
            peer.frame()


def test_a_container_unmaps_the_memory_of_a_closed_connection(tmp_path, code, memory):
    def maps(process):
        return Path(f"/proc/{process.pid}/maps").read_text().count("clipper-rows")

    with sharing(tmp_path, code, "models:total", memory) as peer:
        peer.request(predict((3, 0, 1)))
        assert maps(peer.process) == 1
        peer.close()
        with contextlib.closing(peer.server.accept()) as again:
            again.welcome(shared=True)
            again.request(fake.fixed(np.ones((2, WIDTH), "f4")))
            assert maps(peer.process) == 0


def test_over_tcp_nothing_is_requested(tmp_path, code):
    with serving(tmp_path, code, "models:total", tcp=True) as peer:
        assert peer.greeting["shared"] is False


def test_the_page_and_the_code_agree() -> None:
    assert (Kind.REGION, wire.Flag.SHARED) == (REGION, SHARED)
    assert Header(Kind.REGION).payload_bytes == 0
    assert array.array("i").itemsize == 4
    assert DType.F32 == 11
