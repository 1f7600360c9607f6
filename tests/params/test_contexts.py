"""Users' rows as contexts: which row a query gets, and that a query neither waits long nor fails if
the row is unavailable."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clipper.errors import DoesNotFit, UnknownTable
from clipper.params import TableSpec
from clipper.params.client.user_rows import UserRows, check_context_table
from clipper.serving.feedback.online_learning import session_of
from tests.memory_container import wait_until
from tests.params.conftest import TOKEN, Shards
from tests.threads import join


@pytest.fixture
def two(shards: Shards) -> Shards:
    """Return two shards whose folder has their addresses; the rows of table `users` differ."""
    shards.up(2)
    write_addresses(shards.root, *shards.addresses)
    shards.client().create(TableSpec("users", 3, initializer="normal"))
    return shards


def write_addresses(folder: Path, *addresses: str) -> None:
    (folder / "shards.json").write_text(json.dumps({"addresses": addresses, "token": TOKEN}))


@pytest.fixture
def rows(two: Shards) -> Iterator[UserRows]:
    found = UserRows(two.root, "users", answer_s=60.0, pause_s=0.0)
    yield found
    found.close()


def test_the_context_is_the_row_of_the_users_session(two: Shards, rows: UserRows) -> None:
    users = [f"u{i}" for i in range(20)]
    pulled = two.client().pull("users", np.array([session_of(user) for user in users], np.uint64))
    assert [rows(user) for user in users] == [tuple(row.tolist()) for row in pulled]
    assert rows.stats() == {"table": "users", "pulled": 20, "away": 0, "unusable": 0}


def test_the_next_query_uses_a_pushed_row(two: Shards, rows: UserRows) -> None:
    before = rows("u1")
    two.client().push("users", np.array([session_of("u1")], np.uint64), np.ones((1, 3), np.float32))
    assert rows("u1") != before


def test_a_query_has_no_context_while_its_shard_is_unavailable(two: Shards, rows: UserRows) -> None:
    whose = {session_of(user) % 2: user for user in ("u1", "u2", "u3", "u4", "u5")}
    assert len(whose) == 2
    assert rows(whose[0])
    assert rows(whose[1])
    two.lose(1)
    assert rows(whose[1]) is None
    assert rows(whose[0]), "the other shard is asked"
    two.begin(1)
    client = two.client()
    wait_until(lambda: client.begin_anew() == [1], "it has come back without what it had")
    client.create(TableSpec("users", 3, initializer="normal"))
    wait_until(lambda: rows(whose[1]), "it is back")
    assert rows.stats()["away"] >= 1


def test_after_a_timeout_no_query_waits_for_a_while(two: Shards) -> None:
    rows = UserRows(two.root, "users", answer_s=60.0, pause_s=3600.0)
    assert rows("u1")
    two.down(snapshot=False)
    assert rows("u1") is None
    write_addresses(two.root)  # a client that reads the address would miss it now
    assert [rows(f"u{i}") for i in range(5)] == [None] * 5
    assert rows.stats()["away"] == 6
    rows.close()


def test_a_hung_shard_delays_queries_for_a_bounded_time(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "0.sock"))
        silent.listen()
        write_addresses(tmp_path, f"unix:{tmp_path}/0.sock")
        rows = UserRows(tmp_path, "users", answer_s=0.02, pause_s=0.0)
        threads = [threading.Thread(target=rows, args=(f"u{i}",)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            join(thread)
        assert rows.stats() == {"table": "users", "pulled": 0, "away": 8, "unusable": 0}
        rows.close()


def test_a_row_with_too_large_numbers_is_not_used_as_context(two: Shards) -> None:
    two.client().create(
        TableSpec("huge", 1, initializer="constant", initializer_settings={"value": 1e9})
    )
    rows = UserRows(two.root, "huge", answer_s=60.0)
    assert rows("u1") is None
    assert rows("u2") is None
    assert rows.stats() == {"table": "huge", "pulled": 0, "away": 0, "unusable": 2}
    rows.close()


def test_a_table_of_contexts_has_at_most_32_numbers_per_row(two: Shards) -> None:
    client = two.client()
    client.create(TableSpec("fits", 32))
    client.create(TableSpec("broad", 33))
    check_context_table("app", "fits", client)
    with pytest.raises(DoesNotFit, match="32 at most"):
        check_context_table("app", "broad", client)
    with pytest.raises(UnknownTable):
        check_context_table("app", "none", client)
