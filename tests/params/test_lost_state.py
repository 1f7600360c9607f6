"""A shard that starts without its state: trained rows are not taken for untrained ones, and it
continues only after a command."""

from typing import Any

import numpy as np
import pytest

from clipper.errors import StateLost
from clipper.params import TableSpec
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, ones, until

PLAIN = TableSpec(
    "plain", 1, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
)


def trained(shards: Shards, **settings: Any) -> Any:
    """Return a client of two shards, of which the second came back with nothing."""
    client = shards.up(2, recover_s=0.0, **settings).client()
    client.create(PLAIN)
    client.push_model({"w": ones(3), "v": ones(3), "u": ones(2), "b": ones(1)})
    client.push("plain", [1, 2], -ones((2, 1)))
    shards.lose(1)
    shards.begin(1)
    until(lambda: shards.servers[1].shard.core.state_lost)
    return client


def test_shard_that_lost_its_rows_refuses_until_an_operator_decides(shards: Shards) -> None:
    client = trained(shards)
    for request in (
        lambda: client.pull("plain", [1]),
        lambda: client.push("plain", [1], -ones((1, 1))),
        lambda: client.pull_variables(),
        lambda: client.create(PLAIN),
        lambda: client.push_gradients(rows={"plain": ([1], -ones((1, 1)))}),
        lambda: shards.client().pull("plain", [1]),
    ):
        with pytest.raises(StateLost, match="shard 1"):
            request()
    with Tables(shards.addresses, token=TOKEN) as tables:
        with pytest.raises(StateLost, match="begin-anew"):
            tables.pull("plain", [1])
        assert tables.pull("plain", [2])[0, 0] == 1, "the other shard serves"
        assert client.begin_anew(dry_run=True) == [1]
        assert client.begin_anew() == [1]
        assert tables.pull("plain", [1, 2]).ravel().tolist() == [0, 1]
    assert client.begin_anew() == []
    client.push("plain", [1], -ones((1, 1)))
    assert client.pull("plain", [1, 2]).ravel().tolist() == [1, 1]


def test_a_shard_that_an_operator_reset_starts_again(shards: Shards) -> None:
    client = trained(shards)
    client.call(1, "begin_anew")
    shards.lose(1)
    assert shards.begin(1).ready.wait(60)
    client.create(PLAIN)
    assert client.pull("plain", [1])[0, 0] == 0


def test_a_new_shard_starts_empty(shards: Shards) -> None:
    client = shards.up(1, recover_s=0.0).client()
    shards.lose(0)
    shards.begin(0)
    client.create(PLAIN)
    assert client.pull("plain", [1])[0, 0] == 0


def test_shard_with_a_snapshot_has_lost_nothing(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(PLAIN)
    client.push("plain", [1], -ones((1, 1)))
    shards.end(0)
    shards.begin(0)
    assert client.pull("plain", [1])[0, 0] == 1


def test_worker_pushes_its_model_to_a_shard_that_lost_it(shards: Shards) -> None:
    torch = pytest.importorskip("torch", reason="no torch here: pip install torch")
    from clipper.params.torch import Embedding, Worker

    client = shards.up(2, recover_s=0.0).client()
    torch.manual_seed(0)
    module = torch.nn.Sequential(
        Embedding(client, PLAIN), torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    )
    worker = Worker(client, module)
    loss_of = lambda model: model(torch.tensor([1, 2])).sum()  # noqa: E731
    worker.step(loss_of)
    worker.pull()
    before = {name: one.detach().numpy().copy() for name, one in module.named_parameters()}
    shards.lose(1)
    shards.begin(1)
    until(lambda: shards.servers[1].shard.core.state_lost)
    worker.pull()
    assert worker.restored == 1
    _, after = client.pull_variables()
    assert after.keys() == before.keys()
    assert all((np.ravel(after[name]) == np.ravel(before[name])).all() for name in before)
    worker.step(loss_of)
    assert worker.steps == 2
