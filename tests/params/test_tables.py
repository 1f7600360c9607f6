"""The container SDK's `Tables`: a model's own side of the messages, which knows nothing of this
package, beside `Client`."""

import socket
import threading
import time
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.params import TableSpec, frames
from clipper.params.client import connection as line
from clipper.params.client.client import rows_in as rows_of_client
from clipper_container.params import shard_client as sdk
from clipper_container.params.shard_client import ShardAway, ShardClient, ShardRefused
from clipper_container.tables import SETTINGS, Tables, as_ids, rows_in
from tests.params.conftest import TOKEN, Shards, ones

IDS = np.array([-(1 << 63), -7, -1, 0, 1, 5, 6, 5, 1 << 40, (1 << 63) - 1])


def tables(shards: Shards, **options: Any) -> Tables:
    return Tables(shards.addresses, **{"token": TOKEN, "patience_s": 20.0, **options})


# -- the same messages as the package's


@settings(deadline=None)
@given(
    st.tuples(
        st.integers(1, 5),
        st.integers(0, 3),
        st.integers(0, 255),
        st.integers(0, 2**32 - 1),
        st.integers(0, 2**32 - 1),
    ),
    st.tuples(*[st.integers(0, 2**64 - 1)] * 5),
    st.floats(width=32, allow_nan=False),
    st.integers(0, 2**29 - 1).map(lambda n: 8 * n),
)
def test_heads_are_the_same_bytes(first: Any, long: Any, scale: float, size: int) -> None:
    fields = (*first, *long, scale, size)
    data = frames.Head(*fields).packed()
    assert sdk.packed_head(*fields) == data
    if first[0] in (sdk.ANSWER, sdk.REFUSED):
        assert tuple(sdk.read_head(data)) == tuple(frames.read_head(data)) == fields


@pytest.mark.parametrize("at", [0, 4, 5])
def test_what_is_no_head_is_refused(at: int) -> None:
    data = bytearray(frames.Head(sdk.ANSWER).packed())
    data[at] ^= 0x55
    with pytest.raises(ShardRefused, match="another version"):
        sdk.read_head(data)


def test_numbers_and_names_are_the_same() -> None:
    ours = tuple(frames.MessageKind)[:6]  # the others are of workers that train whole models
    assert ours == (sdk.PULL, sdk.PUSH, sdk.CALL, sdk.ANSWER, sdk.REFUSED, sdk.SHARE)
    assert (frames.IN_REGION, line.SHARED_BYTES_MIN) == (sdk.IN_REGION, sdk.SHARED_BYTES_MIN)
    assert sdk.DTYPES == frames.DTYPES
    assert {*SETTINGS, "name", "dim"} == {field.name for field in msgspec.structs.fields(TableSpec)}
    assert sdk.packed_call("hello", {"token": "t", "worker": 3}) == frames.packed(
        {"call": "hello", "token": "t", "worker": 3}
    )
    named = {
        frames.RefusalCode[name]
        for name in ("NOT_READY", "OTHER_EPOCH", "CALL_FAILED", "NOT_SHARED")
    }
    assert named == {sdk.NOT_READY, sdk.OTHER_EPOCH, sdk.CALL_FAILED, sdk.NOT_SHARED}


@pytest.mark.parametrize("code", [2, 12, 13, 14, 16, 101, 102, 103, 104, 105, 107])
def test_a_refusal_has_the_same_word(code: int) -> None:
    about, head = (
        (-3).to_bytes(8, "little", signed=True),
        frames.Head(frames.MessageKind.REFUSED, rows=code),
    )
    ours = frames.refusal(head, about, "shard 1")
    theirs = sdk.refusal(sdk.ShardHeader(*head), memoryview(about), "shard 1")
    assert theirs.slug == ours.slug
    assert str(theirs).startswith("shard 1: ")
    assert ("-3" in str(theirs)) == ("-3" in str(ours))


@pytest.mark.parametrize("dtype", frames.DTYPES)
def test_rows_are_read_alike(dtype: str) -> None:
    draw = np.random.default_rng(3)
    body = memoryview(draw.integers(0, 100, 400, np.uint8).tobytes())
    ours = rows_of_client(body, 9, 7, dtype)
    if dtype == "bf16":
        ours = (ours.astype(np.uint32) << 16).view(np.float32)
    found = rows_in(body, 9, 7, dtype)
    assert found.dtype == np.float32
    assert (found == ours.astype(np.float32)).all()


@pytest.mark.parametrize("body", [b"", b"\xc1" * 8, b"\x93\x01\x02\x03"])
def test_bytes_that_are_no_map_are_refused(body: bytes) -> None:
    with pytest.raises(ShardRefused):
        sdk.unpacked(memoryview(body))


# -- over shards


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_both_sides_see_the_same_rows(shards: Shards, count: int, dtype: str) -> None:
    client, draw = shards.up(count).client(), np.random.default_rng(1)
    with tables(shards) as mine:
        mine.create("users", 6, optimizer="adam", seed=4)
        client.create(TableSpec("users", 6, optimizer="adam", seed=4))
        for _ in range(5):
            given = draw.standard_normal((len(IDS), 6)).astype(np.float32)
            mine.push("users", IDS, given)
            client.push("users", IDS, given)
            found, expected = mine.pull("users", IDS, dtype), client.pull("users", IDS, dtype)
            if dtype == "bf16":
                expected = (expected.astype(np.uint32) << 16).view(np.float32)
            assert found.shape == (len(IDS), 6)
            assert found.dtype == np.float32
            assert (found == expected.astype(np.float32)).all()
        assert mine.pull("users", []).shape == (0, 6)
    assert sum(server.shard.door.version for server in shards.servers.values()) == 10 * count


def test_a_folder_says_where_shards_are(shards: Shards) -> None:
    shards.up(2)
    text = msgspec.json.encode({"addresses": shards.addresses, "token": TOKEN})
    (shards.root / "shards.json").write_bytes(text)
    with Tables(shards.root, patience_s=20) as mine:
        mine.create("users", 2)
        assert mine.pull("users", [1, 2]).shape == (2, 2)
    with pytest.raises(ValueError, match="clipper params up"):
        Tables(shards.root / "nowhere")


def test_what_cannot_be_is_said(shards: Shards) -> None:
    shards.up(1)
    with tables(shards) as mine:
        mine.create("users", 2)
        with pytest.raises(ShardRefused, match="dim 2 and 3") as conflict:
            mine.create("users", 3)
        assert conflict.value.slug == "type-conflict"
        with pytest.raises(TypeError, match="unknown setting 'optimiser'"):
            mine.create("users", 2, optimiser="sgd")
        with pytest.raises(ShardRefused, match="no table 'user'") as unknown:
            mine.pull("user", [1])
        assert unknown.value.slug == "unknown-table"
        with pytest.raises(ShardRefused, match="id 7 holds NaN") as bad:
            mine.push("users", [3, 7], [[1, 1], [1, np.nan]])
        assert bad.value.slug == "invalid-input"
        with pytest.raises(ValueError, match=r"f32\[1, 2\], not \[1, 3\]"):
            mine.push("users", [3], [[1, 1, 1]])
        with pytest.raises(ValueError, match="must be integers"):
            mine.pull("users", [1.5])
        with pytest.raises(ValueError, match="unknown dtype"):
            mine.pull("users", [1], "f64")
        assert (mine.pull("users", [3, 7]) == mine.pull("users", [3, 7])).all(), "and goes on"
        assert shards.servers[0].shard.door.version == 0
    with (
        tables(shards, token="wrong") as stranger,
        pytest.raises(ShardRefused, match="token") as forbidden,
    ):
        stranger.pull("users", [1])
    assert forbidden.value.slug == "forbidden"
    with pytest.raises(ValueError, match="no shards"):
        Tables([])


def test_a_push_goes_on_over_a_relaunch(shards: Shards) -> None:
    shards.up(2, replicas=1)
    with tables(shards) as mine:
        mine.create(
            "users", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
        )
        mine.push("users", [0, 1], ones((2, 2)))
        shards.lose(1)
        again = threading.Thread(target=shards.begin, args=(1,))
        again.start()
        mine.push("users", [0, 1], ones((2, 2)))
        again.join()
        assert (mine.pull("users", [0, 1]) == -2).all(), "each was applied once"


def test_a_shard_that_lost_all_is_told_of_the_table(shards: Shards) -> None:
    shards.up(1)
    with tables(shards) as mine, tables(shards) as other:
        mine.create("users", 2, initializer="zeros")
        mine.push("users", [5], ones((1, 2)))
        shards.lose(0)
        shards.begin(0, shards.root / "another").ready.wait(10)
        other.create("else", 2, initializer="uniform")  # has the number that users had
        assert (mine.pull("users", [5]) == 0).all()
        mine.push("users", [5], ones((1, 2)))
        assert (other.pull("users", [5]) != 0).all()


def test_a_shard_that_is_away_is_waited_for_so_long(shards: Shards) -> None:
    shards.up(1)
    with tables(shards, patience_s=0.1) as mine:
        mine.create("users", 2)
        shards.lose(0)
        begun = time.monotonic()
        with pytest.raises(ShardAway, match="clipper params ps"):
            mine.pull("users", [5])
        assert time.monotonic() - begun < 20


def test_a_worker_that_comes_back_goes_on_counting(shards: Shards) -> None:
    shards.up(2)
    with tables(shards, worker=77) as first:
        first.create(
            "users", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
        )
        for _ in range(3):
            first.push("users", [1], ones((1, 2)))
    with tables(shards, worker=77) as second:
        second.push("users", [0, 1], ones((2, 2)))
        assert second.pull("users", [0, 1]).tolist() == [[-1, -1], [-4, -4]]


def test_ids_are_64_bits() -> None:
    assert as_ids(np.array([2**64 - 1], np.uint64)).tolist() == [-1]
    assert as_ids([]).dtype == np.int64


def test_a_message_of_another_request_is_dropped(shards: Shards) -> None:
    """What was asked and given up, as by Ctrl-C between question and answer, does not answer the
    next question."""
    shards.up(1)
    with tables(shards) as mine:
        mine.create("users", 2, initializer="zeros")
        line = mine._clients[0]
        line.send(sdk.call("stats"))
        assert line._sock is not None
        line._sock.recv(1, socket.MSG_PEEK)  # its answer is there, before the next is asked
        assert mine.pull("users", [1, 2]).tolist() == [[0, 0], [0, 0]]


def test_a_push_whose_answer_is_lost_is_applied_once(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.up(2)
    with tables(shards) as mine:
        mine.create(
            "users", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
        )
        mine.push("users", [0, 1], ones((2, 2)))
        receive, lost = ShardClient._receive_answer, []

        def lose(line: ShardClient, ask: sdk.ShardRequest) -> sdk.ShardHeader:
            head = receive(line, ask)
            if line.number == 1 and not lost:
                lost.append(head)
                line.close()
                raise ConnectionError("gone")
            return head

        monkeypatch.setattr(ShardClient, "_receive_answer", lose)
        mine.push("users", [0, 1], ones((2, 2)))
        assert lost
        assert (mine.pull("users", [0, 1]) == -2).all()
