"""Shared memory of connections in clipper_core.params.shard_state, alone and through a core; no
such memory may end the shard."""

import contextlib
import fcntl
import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.params.shard_state import SharedRegion, calm
from clipper_core.runtime.status import StatusError
from tests.core.test_shard_loop import (
    DIM,
    DTYPES,
    HEAD,
    NOT_ADMITTED,
    PULL,
    REFUSED,
    TOO_LARGE,
    Shard,
    Worker,
)

SHARE, NOT_SHARED, IN_REGION, ANSWER = 6, 107, 2, 4
SIZED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
MAX = 1 << 20
HUGE_TLB = 0x0004


def memory_file(nbytes: int, seals: int = SIZED, flags: int = 0) -> int:
    fd = os.memfd_create("shared-rows", os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, nbytes)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


@contextlib.contextmanager
def opened(fd: int) -> Iterator[int]:
    try:
        yield fd
    finally:
        os.close(fd)


@settings(deadline=None)
@given(st.integers(0, 3000), st.integers(0, 3000))
def test_only_places_inside_are_written(offset: int, n: int) -> None:
    with opened(memory_file(2048)) as fd:
        region, seen = SharedRegion(fd, MAX), mmap.mmap(fd, 2048)
        inside = offset % 64 == 0 and offset + n <= 2048
        assert region.lies_inside(offset, n) == inside
        assert region.write(offset, b"\x07" * n) == inside
        expected = bytearray(2048)
        if inside:
            expected[offset : offset + n] = b"\x07" * n
        assert seen[:] == expected
        del region
        seen.close()


def test_a_place_that_wraps_around_lies_outside() -> None:
    with opened(memory_file(4096)) as fd:
        region = SharedRegion(fd, MAX)
        for offset, n in (
            ((1 << 64) - 64, 64),
            (64, (1 << 64) - 64),
            ((1 << 64) - 64, (1 << 64) - 1),
            (4096, 1),
            (4160, 0),
        ):
            assert not region.lies_inside(offset, n), (offset, n)
        assert region.lies_inside(4096, 0)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_SHRINK, fcntl.F_SEAL_GROW])
def test_memory_whose_size_may_change_is_refused(seals: int) -> None:
    with opened(memory_file(4096, seals)) as fd, pytest.raises(StatusError, match="sealed"):
        SharedRegion(fd, MAX)


def test_what_is_no_memory_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    reads, writes = os.pipe()
    for fd in (
        os.open(path, os.O_RDWR),
        os.open("/dev/zero", os.O_RDWR),
        os.open(tmp_path, os.O_RDONLY),
        reads,
        writes,
    ):
        with opened(fd), pytest.raises(StatusError, match="sealed"):
            SharedRegion(fd, MAX)
    with pytest.raises(StatusError, match="no descriptor"):
        SharedRegion(-1, MAX)
    with opened(memory_file(0)) as fd, pytest.raises(StatusError, match="mapped"):
        SharedRegion(fd, MAX)
    with (
        opened(memory_file(4096, SIZED | fcntl.F_SEAL_WRITE)) as fd,
        pytest.raises(StatusError, match="mapped"),
    ):
        SharedRegion(fd, MAX)
    with opened(memory_file(MAX + 4096)) as fd, pytest.raises(StatusError, match="more than"):
        SharedRegion(fd, MAX)
    with contextlib.suppress(OSError):  # some hosts have no such pages
        huge = memory_file(1 << 21, flags=HUGE_TLB)
        with opened(huge) as fd, pytest.raises(StatusError, match="sealed"):
            SharedRegion(fd, MAX)


def test_a_region_survives_that_its_pages_are_punched_out() -> None:
    with opened(memory_file(8192)) as fd:
        region, seen = SharedRegion(fd, MAX), mmap.mmap(fd, 8192)
        assert region.write(4096, b"x" * 4096)
        seen.madvise(mmap.MADV_REMOVE)
        assert region.write(4096, b"y" * 64)
        assert seen[4096:4161] == b"y" * 64 + b"\0"
        seen.close()


# -- through a core


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Shard]:
    found = Shard(tmp_path, shared_bytes_max=MAX)
    yield found
    found.close()


def share(worker: Worker, *fds: int) -> dict[str, Any]:
    worker.id += 1
    head = HEAD.pack(b"CLPT", 1, SHARE, 0, 0, 0, 0, worker.id, 0, 0, 0, 0, 1.0, 0)
    socket.send_fds(worker.socket, [head], list(fds)) if fds else worker.socket.sendall(head)
    return worker.receive()[0]


def pull(worker: Worker, ids: Any, offset: int, dtype: int = 0) -> tuple[dict[str, Any], bytes]:
    ids = np.asarray(ids, np.int64)
    worker.id += 1
    head = HEAD.pack(
        b"CLPT", 1, PULL, dtype, IN_REGION, 0, ids.size, worker.id, 0, 0, offset, 0, 1.0, ids.nbytes
    )
    worker.socket.sendall(head + ids.tobytes())
    return worker.receive()


def mapped(path: str = "memfd:shared-rows") -> int:
    return Path("/proc/self/maps").read_text().count(path)


@pytest.mark.parametrize("dtype", range(4))
def test_rows_are_written_where_they_are_wanted(shard: Shard, dtype: int) -> None:
    ids = np.arange(-5, 20)
    shard.table.push(ids, np.random.default_rng(2).standard_normal((25, DIM)).astype(np.float32))
    worker = Worker(shard)
    with opened(memory_file(8192)) as fd, mmap.mmap(fd, 8192) as seen:
        assert share(worker, fd)["kind"] == ANSWER
        assert shard.core.stats()["shared_bytes"] == 8192
        worker.send(PULL, ids.tobytes(), rows=25, dtype=dtype)
        plain = worker.receive()[1]
        head, payload = pull(worker, ids, 4096, dtype)
        assert (head["kind"], head["flags"], head["rows"], payload) == (ANSWER, IN_REGION, 25, b"")
        assert seen[4096 : 4096 + len(plain)] == plain
        assert not any(seen[:4096])
        assert not any(seen[4096 + len(plain) :])
        found = np.frombuffer(plain, [np.float32, np.float16, np.uint16, np.int8][dtype], 25 * DIM)
        if DTYPES[dtype] == "f32":
            assert (found.reshape(25, DIM) == shard.table.pull(ids)).all()
    worker.socket.close()


def test_places_outside_are_refused_and_the_connection_goes_on(shard: Shard) -> None:
    worker, ids = Worker(shard), np.arange(10)
    head, about = pull(worker, ids, 0)
    assert (head["kind"], head["rows"], about) == (REFUSED, NOT_SHARED, bytes(8)), (
        "it shares nothing yet"
    )
    with opened(memory_file(4096)) as fd, mmap.mmap(fd, 4096) as seen:
        share(worker, fd)
        for offset in (4096 - 192, 4032, 4096, 1 << 40, (1 << 64) - 64, 1, 32):
            head, about = pull(worker, ids, offset)
            assert (head["kind"], head["rows"], about) == (
                REFUSED,
                NOT_SHARED,
                (4096).to_bytes(8, "little"),
            ), offset
        assert not any(seen[:])
        assert pull(worker, ids, 4096 - 256)[0]["kind"] == ANSWER, "200 bytes"
        assert pull(worker, [], 4096)[0]["kind"] == ANSWER
    worker.socket.close()


def test_memory_is_the_connections(shard: Shard) -> None:
    before, files = mapped(), len(os.listdir("/proc/self/fd"))
    first, second = Worker(shard), Worker(shard)
    fds = [memory_file(size) for size in (MAX // 2, MAX // 2, 4096)]
    assert share(first, fds[0])["kind"] == share(second, fds[1])["kind"] == ANSWER
    assert mapped() == before + 2
    head = share(first, fds[0])
    assert head["kind"] == ANSWER, "its own, anew"
    third = Worker(shard)
    head = share(third, fds[2])
    assert (head["kind"], head["rows"]) == (REFUSED, TOO_LARGE), "all have had their share"
    first.socket.close()
    second.send(PULL)
    second.receive()
    assert pull(second, [1], 0)[0]["kind"] == ANSWER
    head = share(third, fds[2])
    assert head["kind"] == ANSWER
    assert shard.core.stats()["shared_bytes"] == MAX // 2 + 4096
    second.socket.close()
    third.socket.close()
    last = Worker(shard)  # when it is answered, the loop has seen the others go
    assert shard.core.stats()["shared_bytes"] == 0
    assert mapped() == before
    last.socket.close()
    for fd in fds:
        os.close(fd)
    again = Worker(shard)
    again.socket.close()
    assert len(os.listdir("/proc/self/fd")) <= files + 1


def test_descriptors_that_were_not_requested_are_closed(shard: Shard) -> None:
    worker, unadmitted = Worker(shard), Worker(shard, admitted=False)
    assert share(unadmitted)["rows"] == NOT_ADMITTED, "it has been let in, as far as strangers are"
    with opened(memory_file(4096)) as fd:
        files = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            assert share(worker, *[fd] * 4)["kind"] == ANSWER
        for _ in range(5):
            assert share(worker, *[fd] * 40)["kind"] in (ANSWER, REFUSED), (
                "more than it has room for"
            )
        for _ in range(5):
            head = share(unadmitted, fd)
            assert (head["kind"], head["rows"]) == (REFUSED, NOT_ADMITTED)
        assert len(os.listdir("/proc/self/fd")) <= files + 1, "one that a stranger sent may wait"
        assert share(worker)["rows"] == NOT_SHARED
        head, _ = pull(worker, [1], 0)
        assert head["rows"] == NOT_SHARED, "what it shared before is gone with that"
    worker.socket.close()
    unadmitted.socket.close()


def test_nothing_is_shared_over_tcp(tmp_path: Path) -> None:
    shard = Shard(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        shard.core.listen(listener.fileno())
        worker = Worker.__new__(Worker)
        worker.socket, worker.id = socket.create_connection(listener.getsockname()), 0
        worker.socket.settimeout(10)
        worker.send(1 + 2, b"let me!!")
        shard.echo()
        worker.receive()
        head = share(worker)
        assert (head["kind"], head["rows"]) == (REFUSED, NOT_SHARED)
        worker.socket.close()
        shard.close()


def congestion(one: socket.socket) -> str:
    return (
        one.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).partition(b"\0")[0].decode()
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"][: 1 + Path("/proc/net/if_inet6").exists()])
def test_connections_within_a_host_are_calm(host: str) -> None:
    with (
        socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as core,
        socket.create_connection(core.getsockname()[:2]) as ours,
        core.accept()[0] as theirs,
    ):
        for one in (ours, theirs):
            calm(one.fileno())
            assert congestion(one) == "reno"


def test_others_are_as_the_system_has_them() -> None:
    with (
        socket.create_server(("127.0.0.1", 0)) as core,
        socket.create_connection(core.getsockname(), source_address=("127.0.0.2", 0)) as ours,
        core.accept()[0] as theirs,
    ):
        for one in (ours, theirs):
            before = congestion(one)
            calm(one.fileno())
            assert congestion(one) == before
    for one in socket.socketpair():
        with one:
            calm(one.fileno())  # no TCP
    calm(-1)
