"""Rows in shared memory: blocks, compared with a simple model, and pulls, compared with those over
the socket."""

import gc
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.params import Client, TableSpec
from clipper_container.params import connection, shared_rows
from clipper_container.params.shared_rows import (
    BLOCK_BYTES_MIN,
    SharedRows,
    SharedRowsAllocator,
    block_bytes,
)
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, until

N = 300
DIM = 64


@pytest.fixture(autouse=True)
def all_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "SHARED_BYTES_MIN", 1)


# -- blocks


@settings(deadline=None)
@given(st.integers(1, 1 << 30))
def test_a_block_is_large_enough_and_not_much_larger(nbytes: int) -> None:
    size = block_bytes(nbytes)
    assert size >= nbytes
    assert size % BLOCK_BYTES_MIN == 0
    assert size <= max(nbytes * 1.25 + 1, nbytes + BLOCK_BYTES_MIN)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20_000)), max_size=60))
def test_a_held_block_is_not_given_out_again(steps: list[tuple[int, int]]) -> None:
    rows, held = SharedRows(1 << 16), []
    for kind, nbytes in steps:
        if kind and held:
            held.pop(nbytes % len(held))
            continue
        taken = rows.take(nbytes)
        if taken is None:
            assert (
                sum(block_bytes(len(array)) for array, _ in held) + block_bytes(nbytes) > 1 << 14
            ), "there was room"
            continue
        offset, array = taken
        assert len(array) == nbytes
        assert offset % 64 == 0
        stamp = len(held) + nbytes % 251
        array[:] = stamp % 251
        held.append((array[nbytes // 3 :].view(), stamp % 251))
        assert rows.are_lent()
        del array, taken
    for array, stamp in held:
        assert (array == stamp).all()
    held.clear()
    array = None
    assert not rows.are_lent()
    rows.close()


def test_a_block_is_returned_with_its_last_array() -> None:
    rows = SharedRows(1 << 16)
    taken = rows.take(5000)
    assert taken is not None
    offset, array = taken
    del taken
    part = array[16:80].view(np.float32).reshape(4, 4)
    del array
    other = rows.take(5000)
    assert other is not None
    assert other[0] != offset
    del part
    again = rows.take(5000)
    assert again is not None
    assert again[0] == offset
    rows.close()


def test_free_small_blocks_are_joined_for_a_large_one() -> None:
    rows = SharedRows(1 << 16)
    for _ in range(3):
        held = [rows.take(4096) for _ in range(16)]
        assert all(held)
        assert rows.take(4096) is None
        held.clear()
        assert rows.take(1 << 16) is not None
    rows.close()


def test_memory_grows_up_to_what_the_shard_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "BYTES_MIN", 1 << 14)
    sharing, kept, fds = SharedRowsAllocator(), [], []
    assert sharing.place(100) is None, "not before it has begun"
    sharing.enable(1 << 17)
    for _ in range(100):
        placed = sharing.place(4096)
        if placed is None:
            break
        kept.append(placed[1])
        fds.append(placed[2] is not None)
    assert fds.count(True) == 4, "16, 32, 64 and 128 KB"
    assert len(kept) == 4 + 8 + 16 + 32
    kept.clear()
    assert sharing.place(1 << 16) is not None
    assert sharing.place(1 << 18) is None
    sharing.disable()
    assert sharing.place(100) is None


# -- over shards


def both(shards: Shards) -> tuple[Client, Client]:
    client = shards.client()
    client.create(TableSpec("users", DIM))
    ids = np.arange(-N, N)
    client.push(
        "users", ids, np.random.default_rng(5).standard_normal((2 * N, DIM)).astype(np.float32)
    )
    return client, shards.client(shared=False)


def shared_bytes(shards: Shards) -> list[int]:
    return [server.shard.core.stats()["shared_bytes"] for server in shards.servers.values()]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_shared_rows_equal_rows_from_the_socket(shards: Shards, count: int, dtype: str) -> None:
    shared, plain = both(shards.up(count))
    with Tables(shards.addresses, token=TOKEN) as mine:
        for n in (1, 2, 7, 100, N):
            ids = np.random.default_rng(n).integers(-2 * N, 2 * N, n)
            expected = plain.pull("users", ids, dtype)
            found = shared.pull("users", ids, dtype)
            assert found.dtype == expected.dtype
            assert (found == expected).all()
            assert (shared.prefetch("users", ids, dtype).result() == expected).all()
            if dtype != "bf16":
                assert (mine.pull("users", ids, dtype) == expected.astype(np.float32)).all()
        assert min(shared_bytes(shards)) == 2 * shared_bytes(shards)[0] // 2 > 0
        assert mine.pull("users", np.empty(0, np.int64)).shape == (0, DIM)
        assert shared.pull("users", []).shape == (0, DIM)


def test_held_rows_do_not_change(shards: Shards, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rows, "BYTES_MIN", 1 << 18)
    shared, plain = both(shards.up(1))
    draw, kept = np.random.default_rng(9), []
    for i in range(60):
        ids = draw.integers(-N, N, int(draw.integers(1, N)))
        pending = shared.prefetch("users", ids)
        shared.push("users", ids[:1], np.ones((1, DIM), np.float32))
        found = pending.result()
        kept.append((found, found.copy()))
        if i % 7 == 0:
            kept = kept[::2]
        assert all((array == copy).all() for array, copy in kept)
    found, expected = shared.pull("users", np.arange(N)), plain.pull("users", np.arange(N))
    assert (found == expected).all()
    found[:] = 7  # the caller's own
    assert (plain.pull("users", np.arange(N)) == expected).all()


def test_rows_outlive_the_connection_and_the_shard(shards: Shards) -> None:
    shared, plain = both(shards.up(2, replicas=1))
    with Tables(shards.addresses, token=TOKEN, patience_s=20) as mine:
        ids = np.arange(0, N, 2)
        expected = plain.pull("users", ids)
        kept = [shared.pull("users", ids), mine.pull("users", ids)]
        shards.lose(0)
        shards.begin(0).ready.wait(60)
        kept += [shared.pull("users", ids), mine.pull("users", ids)]
        shared.close()
    assert all((one == expected).all() for one in kept)


def test_a_shard_that_shares_nothing_sends_rows(shards: Shards) -> None:
    shared, plain = both(shards.up(1, shared_bytes_max=0))
    with Tables(shards.addresses, token=TOKEN) as mine:
        expected = plain.pull("users", np.arange(N))
        assert (shared.pull("users", np.arange(N)) == expected).all()
        assert (mine.pull("users", np.arange(N)) == expected).all()
    assert shared_bytes(shards) == [0]


def test_a_shard_without_free_shared_memory_sends_rows(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_rows, "BYTES_MIN", 1 << 19)
    shared, plain = both(shards.up(1, shared_bytes_max=1 << 19))
    expected = plain.pull("users", np.arange(N))
    others: list[Any] = [Tables(shards.addresses, token=TOKEN), shards.client()]
    assert (shared.pull("users", np.arange(N)) == expected).all()
    for other in others:
        for _ in range(3):
            assert (other.pull("users", np.arange(N)) == expected).all()
    late = [others[1].prefetch("users", np.arange(N)) for _ in range(3)]
    assert all((one.result() == expected).all() for one in late)
    assert shared_bytes(shards) == [1 << 19]
    for other in others:
        other.close()


def shared_maps() -> int:
    """Count the mappings of this process; rows of an engine count too."""
    return Path("/proc/self/maps").read_text().count("memfd:clipper-rows")


def shared_files() -> int:
    """Return the descriptors of shared memory that are open in this process."""
    paths = [os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd")]
    return sum("clipper-rows" in os.readlink(path) for path in paths if os.path.islink(path))


def test_only_the_descriptor_of_the_mapping_stays_open(shards: Shards) -> None:
    shared, _ = both(shards.up(1))
    gc.collect()
    before = shared_files()
    with Tables(shards.addresses, token=TOKEN) as mine:
        mine.pull("users", np.arange(N))
        shared.pull("users", np.arange(N))
        assert shared_bytes(shards)[0] > 0
        assert shared_files() <= before + 2, "one of each client's; the shard keeps none"


def test_shared_memory_is_freed_with_its_client(shards: Shards) -> None:
    shared, _ = both(shards.up(1))
    gc.collect()
    files, maps = len(os.listdir("/proc/self/fd")), shared_maps()
    for _ in range(5):
        with Tables(shards.addresses, token=TOKEN) as mine:
            mine.pull("users", np.arange(N))
    shared.pull("users", np.arange(N))
    gc.collect()
    until(lambda: shared_maps() <= maps + 2)  # its own, and the shard's of it
    until(lambda: len(os.listdir("/proc/self/fd")) <= files + 3)


def test_abandoned_prefetches_change_no_later_pull(shards: Shards) -> None:
    shared, plain = both(shards.up(1))
    expected: Any = plain.pull("users", np.arange(N))
    for _ in range(20):
        shared.prefetch("users", np.arange(N))  # and forgotten
        found = shared.pull("users", np.arange(N)[::-1])
        shared.prefetch("users", np.arange(-N, 0))
        assert (found == expected[::-1]).all()
