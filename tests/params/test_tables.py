"""The container SDK's `Tables` over shards, beside `Client`."""

import socket
import threading
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from clipper.errors import Forbidden, InvalidInput, ShardAway, TypeConflict, UnknownTable
from clipper.params import Client, TableSpec
from clipper_container.params.connection import ShardConnection, ShardRequest, call
from clipper_container.params.frames import Head
from clipper_container.params.rows import as_ids
from clipper_container.tables import SETTINGS, Tables
from tests.params.conftest import TOKEN, Shards, ones
from tests.threads import join

JOIN_S = 30.0  # for a thread to end
IDS = np.array([-(1 << 63), -7, -1, 0, 1, 5, 6, 5, 1 << 40, (1 << 63) - 1])


def tables(shards: Shards, **options: Any) -> Tables:
    return Tables(shards.addresses, **{"token": TOKEN, "patience_s": 20.0, **options})


def test_settings_of_a_table_are_those_of_its_specification() -> None:
    assert {*SETTINGS, "name", "dim"} == {field.name for field in msgspec.structs.fields(TableSpec)}


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
    assert sum(server.shard.core.version for server in shards.servers.values()) == 10 * count


def test_a_folder_has_the_addresses_of_shards(shards: Shards) -> None:
    shards.up(2)
    text = msgspec.json.encode({"addresses": shards.addresses, "token": TOKEN})
    (shards.root / "shards.json").write_bytes(text)
    with Tables(shards.root, patience_s=20) as mine:
        mine.create("users", 2)
        assert mine.pull("users", [1, 2]).shape == (2, 2)
    with pytest.raises(ValueError, match="clipper params up"):
        Tables(shards.root / "nowhere")


def test_invalid_requests_are_rejected(shards: Shards) -> None:
    shards.up(1)
    with tables(shards) as mine:
        mine.create("users", 2)
        with pytest.raises(TypeConflict, match="dim 2 and 3"):
            mine.create("users", 3)
        with pytest.raises(TypeError, match="no keyword 'optimiser' - did you mean 'optimizer'"):
            mine.create("users", 2, optimiser="sgd")
        with pytest.raises(UnknownTable, match="no table 'user'"):
            mine.pull("user", [1])
        with pytest.raises(InvalidInput, match="id 7 holds NaN"):
            mine.push("users", [3, 7], [[1, 1], [1, np.nan]])
        with pytest.raises(ValueError, match=r"f32\[1, 2\], not \[1, 3\]"):
            mine.push("users", [3], [[1, 1, 1]])
        with pytest.raises(ValueError, match="whole numbers"):
            mine.pull("users", [1.5])
        with pytest.raises(ValueError, match="no dtype"):
            mine.pull("users", [1], "f64")
        assert (mine.pull("users", [3, 7]) == mine.pull("users", [3, 7])).all(), "and goes on"
        assert shards.servers[0].shard.core.version == 0
    with tables(shards, token="wrong") as unauthorized, pytest.raises(Forbidden, match="token"):
        unauthorized.pull("users", [1])
    with pytest.raises(ValueError, match="a set of no shards"):
        Tables([])


def test_a_push_continues_after_a_restart_of_the_shard(shards: Shards) -> None:
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
        join(again)
        assert (mine.pull("users", [0, 1]) == -2).all(), "each was applied once"


def test_a_table_is_created_again_on_a_shard_that_lost_its_state(shards: Shards) -> None:
    shards.up(1)
    with tables(shards) as mine, tables(shards) as other:
        mine.create("users", 2, initializer="zeros")
        mine.push("users", [5], ones((1, 2)))
        shards.lose(0)
        shards.begin(0, shards.root / "another").ready.wait(60)
        other.create("else", 2, initializer="uniform")  # has the number that users had
        assert (mine.pull("users", [5]) == 0).all()
        mine.push("users", [5], ones((1, 2)))
        assert (other.pull("users", [5]) != 0).all()


def test_requests_wait_for_an_unavailable_shard_for_a_bounded_time(shards: Shards) -> None:
    shards.up(1)
    with tables(shards, patience_s=0.1) as mine:
        mine.create("users", 2)
        shards.lose(0)
        start = time.monotonic()
        with pytest.raises(ShardAway, match="clipper params ps"):
            mine.pull("users", [5])
        assert time.monotonic() - start < 20


def test_a_restarted_worker_continues_its_sequence(shards: Shards) -> None:
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
    """The answer to a request that was given up, as by Ctrl-C, is not taken for the next one's."""
    shards.up(1)
    with tables(shards) as mine:
        mine.create("users", 2, initializer="zeros")
        connection = mine._shards.connections[0]
        connection.send(call("stats"))
        assert connection._socket is not None
        connection._socket.recv(1, socket.MSG_PEEK)  # its answer is there, before the next is asked
        assert mine.pull("users", [1, 2]).tolist() == [[0, 0], [0, 0]]


def test_a_hung_shard_0_does_not_delay_requests_to_other_shards(tmp_path: Path) -> None:
    """Shard 1 is stopped, and shard 0 does not answer whether the set has moved."""
    failed = list[ShardAway]()
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "0.sock"))
        silent.listen()
        addresses = [f"unix:{tmp_path}/{shard}.sock" for shard in range(2)]
        client = Client(addresses, patience_s=0.1, answer_s=10 * JOIN_S)

        def work() -> None:
            try:
                client.call(1, "tables")
            except ShardAway as error:
                failed.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(JOIN_S)
        assert [error.message.partition(" at ")[0] for error in failed] == ["shard 1"]
        client.close()


def test_a_push_whose_answer_is_lost_is_applied_once(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.up(2)
    with tables(shards) as mine:
        mine.create(
            "users", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
        )
        mine.push("users", [0, 1], ones((2, 2)))
        wait, lost = ShardConnection.wait, []

        def lose(connection: ShardConnection, request: ShardRequest) -> Head:
            head = wait(connection, request)
            if connection.number == 1 and not lost:
                lost.append(head)
                connection.close()
                raise ConnectionError("gone")
            return head

        monkeypatch.setattr(ShardConnection, "wait", lose)
        mine.push("users", [0, 1], ones((2, 2)))
        assert lost
        assert (mine.pull("users", [0, 1]) == -2).all()
