"""Rows that a container maps: its messages, its reads, when rows go over the socket instead, and
what remains afterwards."""

import fcntl
import mmap
import os
import resource
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.io_loop import IoLoop
from clipper_core.engine.model import Model
from clipper_core.runtime.ring import WorkRing
from clipper_core.runtime.status import Status
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import (
    Flag,
    Kind,
    decode_header,
    encode_frame,
    encode_rows,
    open_rows,
    open_runs,
)

World = Any  # tests/core/conftest.py
WIDE = 128  # f64: 1 KiB a row
STATIC = 3


class Mapper:
    """A container that shares memory: its frames, the regions announced to it, and its reads
    there."""

    def __init__(
        self, world: World, model: Any, *, passes: bool = True, shared: bool = True, **attach: Any
    ) -> None:
        self.world = world
        self.conn = world.engine.open(world.now_us, passes=passes)
        self.send(encode_frame(Kind.HELLO, b"hello"))
        world.engine.attach(
            self.conn,
            model.index,
            b"welcome",
            shared=shared,
            **({"mode": STATIC, "size_max": 64} | attach),
        )
        self.passed: list[int] = []
        self.regions: dict[int, tuple[mmap.mmap, int, int]] = {}
        self.batches: list[tuple[int, Any]] = []
        self.kinds: list[int] = []
        self.flags: list[int] = []
        world.step()
        self.read()

    def send(self, data: bytes) -> bool:
        taken: bool = self.world.engine.receive(self.conn, data, self.world.now_us)
        return taken

    def read(self) -> None:
        data = self.world.engine.outgoing(self.conn, self.world.now_us, self.passed)
        while data:
            header = decode_header(data)
            assert header is not None
            payload, data = data[64 : 64 + header.payload_bytes], data[64 + header.payload_bytes :]
            self.kinds.append(header.kind)
            if header.kind == Kind.REGION:
                number, rows, row_bytes = struct.unpack("<QQQ", payload)
                fd = self.passed.pop(0)
                self.regions[number] = (
                    mmap.mmap(fd, rows * row_bytes, prot=mmap.PROT_READ),
                    rows,
                    row_bytes,
                )
                os.close(fd)
            elif header.kind == Kind.PREDICT:
                self.flags.append(header.flags)
                shared = header.flags & Flag.SHARED
                self.batches.append(
                    (
                        header.id,
                        open_runs(header, payload) if shared else open_rows(header, payload).data,
                    )
                )
        assert not self.passed

    def rows(self, runs: Any) -> Any:
        """Return a copy of the rows that are there now."""
        if not isinstance(runs, list):
            return runs
        found = []
        for number, first, count in runs:
            memory, rows, row_bytes = self.regions[number]
            assert first + count <= rows
            part = memory[first * row_bytes : (first + count) * row_bytes]
            found.append(np.frombuffer(part, "<f8").reshape(count, -1))
        return np.concatenate(found)

    def reply(self) -> None:
        number, runs = self.batches.pop(0)
        assert self.send(encode_rows(Kind.REPLY, self.rows(runs).sum(axis=1), id=number))

    def close(self) -> None:
        for memory, _, _ in self.regions.values():
            memory.close()


def row(k: int) -> Any:
    return np.full(WIDE, float(k))


def ask(
    world: World, model: Any, mapper: Mapper, keys: list[int], slo_ms: float = 100
) -> list[Any]:
    futures = [model.predict(row(k), slo_ms) for k in keys]
    world.step()
    mapper.read()
    return futures


def wide(world: World, **options: Any) -> Any:
    return world.model("f64", (WIDE,), **options)


@pytest.mark.parametrize("checked", [False, True])
def test_a_batch_is_a_run_of_a_region_that_is_announced_once(world: World, checked: bool) -> None:
    model = wide(world, cached=False)
    mapper = Mapper(world, model, checked=checked)
    for turn in range(3):
        keys = [10 * turn + i for i in range(5)]
        futures = ask(world, model, mapper, keys)
        _, runs = mapper.batches[0]
        assert [(run[1], run[2]) for run in runs] == [(5 * turn, 5)]
        mapper.reply()
        assert [future.result(60) for future in futures] == [k * WIDE for k in keys]
        world.step()
    assert mapper.kinds.count(Kind.REGION) == 1
    assert set(mapper.flags) == {Flag.SHARED | (Flag.CHECKED if checked else 0)}
    ((_, rows, row_bytes),) = mapper.regions.values()
    assert (rows, row_bytes) == (16384, 8 * WIDE)
    mapper.close()


def test_a_batch_around_the_end_of_the_ring_is_two_runs(world: World) -> None:
    model = wide(world, cached=False, lane_rows=16)
    mapper = Mapper(world, model)
    for keys in ([1] * 13, list(range(9))):
        futures = ask(world, model, mapper, keys)
        runs = mapper.batches[0][1]
        mapper.reply()
        assert [future.result(60) for future in futures] == [k * WIDE for k in keys]
        world.step()
    assert [run[1:] for run in runs] == [(13, 3), (0, 6)]
    mapper.close()


def test_a_batch_over_two_lanes_names_two_regions(world: World) -> None:
    model = wide(world, cached=False)
    mapper = Mapper(world, model)
    futures = [
        model.predict(row(k), slo_ms) for k, slo_ms in ((1, 100), (2, 1000), (3, 100), (4, 1000))
    ]
    world.step()
    mapper.read()
    ((_, runs),) = mapper.batches
    assert len({number for number, _, _ in runs}) == 2
    assert mapper.kinds.count(Kind.REGION) == 2
    mapper.reply()
    assert [future.result(60) for future in futures] == [k * WIDE for k in (1, 2, 3, 4)]
    mapper.close()


def test_regions_are_announced_again_to_a_container_that_reconnects(world: World) -> None:
    model = wide(world, cached=False)
    first = Mapper(world, model)
    (future,) = ask(world, model, first, [7])
    world.engine.lost(first.conn, world.now_us)
    second = Mapper(world, model)
    second.reply()
    assert future.result(60) == 7 * WIDE
    assert second.kinds.count(Kind.REGION) == 1
    first.close()
    second.close()


def test_one_that_shares_beside_one_that_does_not(world: World) -> None:
    model = wide(world, cached=False)
    mapper, plain = Mapper(world, model, size_max=2), Mapper(world, model, shared=False, size_max=2)
    futures = [model.predict(row(k)) for k in range(4)]
    world.step()
    for container in (mapper, plain):
        container.read()
        container.reply()
    assert [future.result(60) for future in futures] == [k * WIDE for k in range(4)]
    assert (mapper.flags, plain.flags) == ([Flag.SHARED], [0])
    mapper.close()


@pytest.mark.parametrize("why", ["passes", "shared", "protocol", "small", "variable", "early"])
def test_when_rows_go_over_the_socket(world: World, why: str) -> None:
    if why == "variable":
        model = world.model("f64", (-1,), cached=False)
    else:
        model = (
            world.model("f64", (8,), cached=False) if why == "small" else wide(world, cached=False)
        )
    if why == "early":  # its lane was there before anyone could share
        model.predict(row(0), 100)
    mapper = Mapper(
        world,
        model,
        passes=why != "passes",
        shared=why != "shared",
        protocol=1 if why == "protocol" else 2,
    )
    x = np.full(8, 2.0) if why == "small" else row(2)
    future = model.predict(x, 100)
    world.step()
    if why == "protocol":
        assert len(world.engine.outgoing(mapper.conn, world.now_us)) == 9 + 8 * WIDE
        assert mapper.send(np.array([5.0]).tobytes())
        assert future.result(60) == 5.0
        return
    if why == "variable":
        assert world.engine.outgoing(mapper.conn, world.now_us)[8] == Flag.VARIABLE
        return
    mapper.read()
    while mapper.batches:
        mapper.reply()
        world.step()
        mapper.read()
    assert future.result(60) == x.sum()
    assert set(mapper.flags) == {0}
    assert not mapper.regions


def test_a_late_answer_of_rows_that_lie_there_still_is_kept(world: World) -> None:
    model = wide(world)
    mapper = Mapper(world, model)
    (early,) = ask(world, model, mapper, [5], slo_ms=10)
    world.step(60_000)
    assert early.status() == Status.DEADLINE
    mapper.reply()
    assert model.predict(row(5)).result(60) == 5 * WIDE
    mapper.close()


def test_a_late_answer_of_a_row_written_over_is_not_kept(world: World) -> None:
    """The cell of 5 is claimed again by 16 rows later; the cells after it are not."""
    model = wide(world, lane_rows=16)
    mapper = Mapper(world, model)
    ask(world, model, mapper, [5, 6], slo_ms=10)
    world.step(60_000)
    later = [model.predict(row(100 + k), 10) for k in range(15)]
    world.step()
    seen = mapper.rows(mapper.batches[0][1])
    assert (seen[0, 0], seen[1, 0]) == (114.0, 6.0)
    mapper.reply()
    assert model.cached(row(5)) == (False, None)
    assert model.cached(row(114)) == (False, None)
    assert model.cached(row(6)) == (True, 6 * WIDE)
    world.step(60_000)
    assert {future.status() for future in later} <= {Status.DEADLINE, Status.DROPPED}
    mapper.close()


def test_a_late_answer_over_a_socket_is_kept_whatever_the_cells_hold(world: World) -> None:
    model = wide(world, lane_rows=16)
    mapper = Mapper(world, model, shared=False)
    ask(world, model, mapper, [5], slo_ms=10)
    world.step(60_000)
    later = [model.predict(row(100 + k), 10) for k in range(16)]
    mapper.reply()
    assert model.cached(row(5)) == (True, 5 * WIDE)
    world.step(60_000)
    assert all(future.done() for future in later)


def test_a_region_is_for_reading_and_keeps_its_size(world: World) -> None:
    model = wide(world, cached=False)
    mapper = Mapper(world, model)
    model.predict(row(1), 100)
    world.step()
    world.engine.outgoing(mapper.conn, world.now_us, mapper.passed)
    (fd,) = mapper.passed
    size = os.fstat(fd).st_size
    with pytest.raises(PermissionError):
        mmap.mmap(fd, size)
    for change in (
        lambda: os.ftruncate(fd, 64),
        lambda: os.ftruncate(fd, 2 * size),
        lambda: os.pwrite(fd, b"x", 0),
    ):
        with pytest.raises(PermissionError):
            change()
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SEAL
    os.close(fd)


# -- memory


def mine() -> tuple[int, int]:
    """Return the mappings and descriptors of shared rows in this process."""
    maps = Path("/proc/self/maps").read_text().count("memfd:clipper-rows")
    fds = sum(
        "clipper-rows" in os.readlink(link)
        for link in Path("/proc/self/fd").iterdir()
        if link.is_symlink()
    )
    return maps, fds


def test_nothing_is_left_of_rings() -> None:
    before = mine()
    ring = WorkRing(16, 4096, shared=True)
    assert ring.fd >= 0
    assert mine() == (before[0] + 1, before[1] + 1)
    assert ring.push(b"a" * 4096)
    assert ring.pop() == b"a" * 4096
    del ring
    assert mine() == before
    assert WorkRing(16, 4096).fd == -1


def test_an_engine_takes_its_regions_with_it(new_world: Callable[..., World]) -> None:
    before = mine()
    world = new_world()
    model = wide(world, cached=False)
    mapper = Mapper(world, model)
    ask(world, model, mapper, [1], 100)
    # the ring's, and the mapper's (an mmap keeps a descriptor)
    assert mine() == (before[0] + 2, before[1] + 2)
    mapper.close()
    assert mine() == (before[0] + 1, before[1] + 1)


def test_without_descriptors_to_spare_memory_is_private() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ring = WorkRing(16, 4096, shared=True)
    resource.setrlimit(resource.RLIMIT_NOFILE, (2 * ring.fd, hard))
    try:
        other = WorkRing(16, 4096, shared=True)
        assert other.fd == -1
        assert other.push(b"b" * 4096)
        assert other.pop() == b"b" * 4096
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_cell_is_untouched_until_it_is_claimed_again() -> None:
    ring = WorkRing(4, 8)
    for turn in range(3):
        for i in range(4):
            assert ring.push(bytes(8))
            assert ring.pop() is not None
            assert ring.untouched(4 * turn + i)
            assert turn == 0 or not ring.untouched(4 * (turn - 1) + i)
            assert i == 3 or turn == 0 or ring.untouched(4 * (turn - 1) + i + 1)


# -- a real socket


def frames_of(sock: socket.socket) -> Iterator[tuple[int, bytes, list[int]]]:
    """Return (kind, payload, descriptors that were received with the frame's first byte). A REGION
    has its own, other frames have none.

    The kernel hands a descriptor over with the bytes that it was sent with, and perhaps some before
    them.
    """
    data, fds = b"", list[int]()
    while True:
        while (
            len(data) < 64
            or len(data) < 64 + (decode_header(data) or pytest.fail("no frame")).payload_bytes
        ):
            piece, new, _, _ = socket.recv_fds(sock, 1 << 16, 4)
            if not piece:
                return
            data += piece
            fds += new
        size = 64 + (decode_header(data) or pytest.fail("no frame")).payload_bytes
        frame, data = data[:size], data[size:]
        yield frame[5], frame[64:], [fds.pop(0)] if frame[5] == Kind.REGION else []
        assert data or not fds, "a descriptor came before any byte of its frame"


def test_a_descriptor_comes_with_its_frame_behind_a_full_socket(tmp_path: Path) -> None:
    """A megabyte of rows that cannot be shared fills the socket; the region that follows waits
    behind it."""
    engine = Engine(cache_bytes_max=1 << 20, tasks_max=1 << 12)
    model = Model(
        engine, "wide:1", 1, "f64", (1 << 17,), cached=False, lane_rows=16, lane_bytes_max=1 << 26
    )
    loop = IoLoop(engine)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    loop.listen(listener.detach())
    thread = threading.Thread(target=loop.run)
    thread.start()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(10)
            # its lane is private: nobody shares yet
            early = model.predict(np.full(1 << 17, 1.0), 20_000)
            sock.connect(str(tmp_path / "s"))
            sock.sendall(encode_frame(Kind.HELLO, b"hello"))
            engine.attach(await_hello(engine), 0, b"welcome", shared=True, mode=STATIC, size_max=1)
            frames = frames_of(sock)
            assert next(frames)[0] == Kind.WELCOME
            late = model.predict(np.full(1 << 17, 2.0), 60_000)
            seen = [next(frames) for _ in range(3)]
            assert [(kind, len(fds)) for kind, _, fds in seen] == [
                (Kind.PREDICT, 0),
                (Kind.REGION, 1),
                (Kind.PREDICT, 0),
            ]
            memory = mmap.mmap(seen[1][2][0], 1 << 20, prot=mmap.PROT_READ)
            assert np.frombuffer(memory[:8], "<f8")[0] == 2.0
            memory.close()
            os.close(seen[1][2][0])
            for number in (1, 2):
                sock.sendall(encode_rows(Kind.REPLY, np.array([float(number)]), id=number))
            assert (early.result(60), late.result(60)) == (1.0, 2.0)
    finally:
        loop.stop()
        thread.join()
        loop.close_connections()
        engine.finish()


def await_hello(engine: Engine) -> int:
    while True:
        select.select([engine.events_fd], [], [], 10)
        for kind, conn, *_ in engine.events():
            if kind == EngineEvent.HELLO_RECEIVED:
                return conn
