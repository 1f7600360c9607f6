"""Tables that are dropped: everywhere, for good, and their names are free at once."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from clipper.cli.params.shards import params
from clipper.errors import StoreError, UnknownTable
from clipper.params import TableSpec
from clipper.params.shard.durability import dropped_tables
from clipper.params.shard.parameters import Parameters
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_streams import assert_copied, streams
from tests.params.test_table_changes import PLAIN, SGD, trained_tables
from tests.threads import join

WIDE = TableSpec("plain", 5, **SGD)


def names(shards: Shards) -> list[list[str]]:
    """Return the names of the tables on each shard, and in each copy of a shard."""
    found = [server.shard.parameters for server in shards.servers.values()]
    for server in shards.servers.values():
        found += [one.replica.parameters for one in server.shard.copies.values() if one.replica]
    return [sorted(one.numbers()) for one in found]


def test_dropped_table_is_removed_and_its_name_is_free(shards: Shards) -> None:
    client = trained_tables(shards, replicas=1)
    others, container = shards.client(), Tables(shards.addresses, token=TOKEN)
    until(lambda: streams(shards))
    assert others.pull("plain", [1]).shape == container.pull("plain", [1]).shape == (1, 3)
    assert client.drop("plain") == 30
    for act in (
        lambda: others.pull("plain", [1, 2]),
        lambda: others.push("plain", [1], ones((1, 3))),
        lambda: others.push_gradients(rows={"plain": ([1], ones((1, 3)))}),
        lambda: others.pull_tables({"adam": [1], "plain": [1]}),
        lambda: others.erase("plain", [1]),
        lambda: client.alter("plain", evicts=True),
        lambda: client.drop("plain"),
        lambda: list(client.walk("plain")),
    ):
        with pytest.raises(UnknownTable, match="plain"):
            act()
    assert others.pull("adam", [1, 2]).any(), "the other table is there"
    client.create(WIDE)
    with pytest.raises(UnknownTable, match="dropped"):
        container.pull("plain", [1, 2])
    client.push("plain", [1, 2], -ones((2, 5)))
    client.push("adam", [1, 2], ones((2, 2)))
    until(lambda: streams(shards))
    assert_copied(shards)  # a pull marks rows on the primary alone, until they are pushed
    for one in (client, others, container):
        assert one.pull("plain", [1, 2, 3]).tolist() == [[1] * 5] * 2 + [[0] * 5]
    container.close()
    assert names(shards) == [["adam", "plain"]] * 4


def test_a_disconnected_client_notices_that_a_table_was_created_again(shards: Shards) -> None:
    client = trained_tables(shards)
    container = Tables(shards.addresses, token=TOKEN)
    other = shards.client()
    for one in (other, container):
        one.pull("plain", [0, 1])
    client.drop("plain")
    client.create(WIDE)
    other.close()
    container.close()
    with pytest.raises(UnknownTable, match="dropped"):
        other.pull("plain", [0, 1])
    with pytest.raises(UnknownTable, match="dropped"):
        container.pull("plain", [0, 1])
    for one in (other, container):
        assert one.pull("plain", [0, 1]).shape == (2, 5)
    container.close()


@pytest.mark.parametrize(
    ("settings", "again"), [({}, False), ({"replicas": 1}, True), ({"durability": "disk"}, True)]
)
def test_dropped_table_does_not_return_after_a_kill(
    shards: Shards, settings: dict[str, Any], again: bool
) -> None:
    client = trained_tables(shards, **settings)
    client.call_all("snapshot", whole=True)
    client.drop("plain")
    if again:
        client.create(WIDE)
        client.push("plain", range(8), -ones((8, 5)))
    for shard in (0, 1):
        shards.lose(shard)
        assert shards.begin(shard).ready.wait(60)
        client.push("adam", [0, 1], ones((2, 2)))  # when it is answered, the copies are there
        if settings.get("replicas"):
            shards.wait_for_copies()
    other = shards.client()
    assert (other.pull("adam", range(20)) != 0).all()
    if again:
        assert other.pull("plain", [7]).tolist() == [[1] * 5]
    else:
        with pytest.raises(UnknownTable):
            other.pull("plain", [7])
    if not again:
        other.create(TableSpec("plain", 2, **SGD))
    shards.down()
    for shard in (0, 1):
        assert shards.begin(shard).ready.wait(60)
    dim = 5 if again else 2
    assert shards.client().pull("plain", [7]).shape == (1, dim)


def test_set_of_another_size_has_the_tables_that_were_not_dropped(shards: Shards) -> None:
    client = trained_tables(shards)
    client.drop("plain")
    client.create(TableSpec("other", 2, **SGD))
    client.create(WIDE)
    client.push("plain", range(8), -ones((8, 5)))
    shards.down()
    client = shards.up(3).client()
    assert client.pull("plain", range(8)).tolist() == [[1] * 5] * 8
    assert sum(len(ids) for ids, _ in client.walk("adam")) == 30
    assert names(shards) == [["adam", "other", "plain"]] * 3


def test_a_drop_that_cannot_be_recorded_changes_nothing(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = trained_tables(shards)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(dropped_tables, "write_atomically", full)
    with pytest.raises(StoreError, match="No space"):
        client.drop("plain")
    assert shards.client().pull("plain", [1]).tolist() == [[3] * 3]
    assert client.push("plain", [1], ones((1, 3))).applied == 1


def test_restored_snapshot_from_before_has_the_table(tmp_path: Path, shards: Shards) -> None:
    from clipper.params.local.local_set import restore

    client = trained_tables(shards)
    client.call_all("snapshot", whole=True, number=1)
    client.drop("plain")
    shards.down()
    address_file = {"addresses": list(shards.addresses), "token": TOKEN}
    (tmp_path / "shards.json").write_text(json.dumps(address_file))
    assert restore(tmp_path, tmp_path, 1) == 1
    for shard in (0, 1):
        assert shards.begin(shard).ready.wait(60)
    assert shards.client().pull("plain", [1]).tolist() == [[3] * 3]


def test_table_places_are_reused_and_table_numbers_are_not() -> None:
    one, copy, seen = Parameters(), Parameters(), set()
    draw = np.random.default_rng(5)
    early = dict(one.shape())
    for step in range(800):
        there = one.numbers()
        if there and draw.integers(2):
            one.drop(one.place(str(draw.choice(sorted(there)))))
        else:
            place, is_new = one.create(TableSpec(f"t{step % 40}", 1 + step % 5))
            number = one.table_numbers[place]
            assert (number in seen) != is_new
            seen.add(number)
        if step % 50 == 0:
            copy.take(one.shape())
            copy.take(early)  # what is older changes nothing
            assert (copy.specs, copy.numbers()) == (one.specs, one.numbers())
            early = one.shape()
    assert len(one.specs) < 60


def test_tables_are_dropped_while_others_train(shards: Shards) -> None:
    client = trained_tables(shards, replicas=1)
    stop, failed = threading.Event(), list[Exception]()

    def trains() -> None:
        worker = shards.client()
        while not stop.is_set():
            try:
                worker.push("adam", range(50), ones((50, 2)))
                worker.push("plain", range(50), ones((50, 3)))
                worker.pull("plain", range(50))
            except UnknownTable:
                continue
            except Exception as error:
                failed.append(error)
                return

    threads = [threading.Thread(target=trains) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(15):
        client.drop("plain")
        client.create(PLAIN)
    stop.set()
    for thread in threads:
        join(thread)
    assert not failed
    client.push("plain", range(50), ones((50, 3)))  # marks the rows that pulls marked here alone
    shards.wait_for_copies()
    until(lambda: streams(shards))
    assert_copied(shards)


def test_command_line(shards: Shards, tmp_path: Path) -> None:
    trained_tables(shards)
    address_file = {"addresses": list(shards.addresses), "token": TOKEN}
    (tmp_path / "shards.json").write_text(json.dumps(address_file))
    found = CliRunner().invoke(params, ["drop", "plain", "--folder", str(tmp_path)])
    assert (found.exit_code, found.output) == (0, "table plain is dropped, with 30 rows\n")
