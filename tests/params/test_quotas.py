"""Quotas of rows and bytes: what would exceed one is refused as a whole, and changes nothing."""

from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput, QuotaExceeded
from clipper.params import Client, TableSpec
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_streams import assert_copied, streams
from tests.params.test_table_changes import SGD

BYTES = 4 * 2 + 24  # of a row of 2 floats


def rows(client: Client, table: str) -> int:
    return sum(int(answer["tables"][table]["rows"]) for _, answer in client.call_all("stats"))


@pytest.mark.parametrize("quota", [{"quota_rows": 10}, {"quota_bytes": 10 * BYTES}])
def test_table_has_no_more_rows_than_its_quota(shards: Shards, quota: dict[str, int]) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(TableSpec("t", 2, **SGD, **quota))
    client.create(TableSpec("free", 2, **SGD))
    until(lambda: streams(shards))
    client.push("t", range(0, 16, 2), -ones((8, 2)))  # all on shard 0
    container = Tables(shards.addresses, token=TOKEN)
    version = client.versions[0]
    for act in (
        lambda: client.push("t", [0, 20, 22, 24], ones((4, 2))),
        lambda: client.push_gradients(
            rows={"free": ([0], ones((1, 2))), "t": ([20, 22, 24], ones((3, 2)))}
        ),
        lambda: client.write("t", [20, 22, 24], ones((3, 2))),
        lambda: container.push("t", [20, 22, 24], ones((3, 2))),
    ):
        with pytest.raises(QuotaExceeded, match="quota"):
            act()
    container.close()
    assert (rows(client, "t"), rows(client, "free")) == (8, 0)
    assert client.versions[0] == version
    assert client.pull("t", [0, 20]).tolist() == [[1, 1], [0, 0]]
    client.push("t", [0, 0, 2, 20, 22, 20], ones((6, 2)))  # two rows are new
    client.push("t", [*range(0, 16, 2), 20, 22], ones((10, 2)))
    assert rows(client, "t") == 10
    with pytest.raises(QuotaExceeded):
        client.push("t", [26], ones((1, 2)))
    client.push("t", [1, 3], ones((2, 2)))  # the other shard has room
    client.erase("t", [0])
    client.push("t", [26], ones((1, 2)))
    client.alter("t", quota_rows=11, quota_bytes=0)
    client.push("t", [28], ones((1, 2)))
    assert_copied(shards)
    shards.wait_for_copies()
    shards.lose(0)
    assert shards.begin(0).ready.wait(60)
    with pytest.raises(QuotaExceeded):
        client.push("t", [30], ones((1, 2)))


@pytest.mark.parametrize("quota", [{"quota_rows": 10}, {"quota_bytes": 10 * BYTES}])
@pytest.mark.parametrize("mode", ["async", "sync"])
def test_shard_has_no_more_rows_than_its_quota(
    shards: Shards, quota: dict[str, int], mode: str
) -> None:
    client = shards.up(1, mode=mode, **quota).client()

    def push(**parts: Any) -> None:
        client.push_gradients(rows={k: (ids, ones((len(ids), 2))) for k, ids in parts.items()})

    for name in ("a", "b"):
        client.create(TableSpec(name, 2, **SGD))
    push(a=[1, 2, 3, 4], b=[1, 2])
    with pytest.raises(QuotaExceeded):
        push(a=[5, 6, 7, 8, 9])
    if mode == "async":
        with pytest.raises(QuotaExceeded):
            push(a=[5, 6], b=[3, 4, 5])
    assert (rows(client, "a"), rows(client, "b")) == (4, 2)
    push(a=[1, 5, 6], b=[3, 4])
    with pytest.raises(QuotaExceeded, match=r"of (10|320)\."):
        client.create(TableSpec("c", 2, **SGD))
    client.create(TableSpec("a", 2, **SGD))  # it is there
    client.drop("b")
    client.create(TableSpec("c", 2, **SGD))
    push(c=[1, 2, 3, 4])
    assert rows(client, "c") == 4


def test_table_that_evicts_stays_within_its_limit(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(TableSpec("t", 2, **SGD, rows_max=5, evicts=True, quota_rows=5))
    for first in range(0, 40, 4):
        client.push("t", np.arange(first, first + 4), ones((4, 2)))
    assert rows(client, "t") == 5
    with pytest.raises(InvalidInput, match="quota"):
        client.create(TableSpec("u", 2, quota_rows=-1))
