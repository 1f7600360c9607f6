"""clipper.params.torch beside the same modules with tables of their own."""

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="no torch: python tools/fetch.py torch")

from clipper.errors import InvalidInput, StalePush, UnknownTable  # noqa: E402
from clipper.params import TableSpec  # noqa: E402
from clipper.params.torch import TRIES, Embedding, EmbeddingCollection, Worker  # noqa: E402
from tests.params.conftest import Shards  # noqa: E402

Tensors = Any  # torch may be absent
SGD = {"optimizer": "sgd", "optimizer_settings": {"rate": 0.1}}
USERS = TableSpec("users", 6, initializer="normal", seed=3, **SGD)  # type: ignore[arg-type]
IDS = torch.tensor([[5, -7, 5], [2**40, 9, 9]])


def local(embedding: Embedding, ids: Any) -> tuple[Any, Any]:
    """Return an nn.Embedding with the rows of these ids, and the ids' positions in it."""
    each, where = np.unique(ids.numpy(), return_inverse=True)
    rows = torch.from_numpy(embedding._client.pull(embedding.spec.name, each))
    return torch.nn.Embedding.from_pretrained(rows.clone(), freeze=False), torch.from_numpy(
        where
    ).reshape(ids.shape)


@pytest.mark.parametrize("count", [1, 3])
def test_rows_are_those_of_the_shards(shards: Shards, count: int) -> None:
    client = shards.up(count).client()
    found = Embedding(client, USERS)(IDS)
    assert found.shape == (2, 3, 6)
    assert (
        found.detach().numpy().reshape(-1, 6) == client.pull("users", IDS.numpy().reshape(-1))
    ).all()


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_bags_are_combined_and_padding_is_ignored(shards: Shards, combiner: Any) -> None:
    embedding = Embedding(shards.up(1).client(), USERS, combiner=combiner, padding=9)
    twin, where = local(embedding, IDS)
    rows = twin(where).detach().numpy() * (IDS.numpy() != 9)[..., None]
    by = {"sum": [1, 1], "mean": [3, 1], "sqrtn": [np.sqrt(3), 1]}[combiner]
    expected = rows.sum(1) / np.array(by)[:, None]
    np.testing.assert_allclose(embedding(IDS).detach().numpy(), expected, rtol=1e-5, atol=1e-6)
    embedding(IDS).sum().backward()
    ids, _ = embedding.take_gradients()["users"]
    assert 9 not in ids.tolist()


def test_an_unknown_combiner_is_refused(shards: Shards) -> None:
    with pytest.raises(InvalidInput, match="sum, mean or sqrtn"):
        Embedding(shards.up(1).client(), USERS, combiner="max")  # type: ignore[arg-type]


def test_a_push_equals_a_step_of_a_local_table(shards: Shards) -> None:
    client = shards.up(2).client()
    embedding = Embedding(client, USERS)
    twin, where = local(embedding, IDS)
    for one, ids in ((embedding, IDS), (twin, where)):
        (one(ids) ** 2).sum().backward()
        one(ids).sum().backward()  # called twice: both count
    embedding.push()
    with torch.no_grad():
        expected = twin.weight - 0.1 * twin.weight.grad
    np.testing.assert_allclose(
        client.pull("users", np.unique(IDS.numpy())), expected.numpy(), rtol=1e-5, atol=1e-6
    )
    embedding.push()
    assert embedding.take_gradients() == {}, "they are pushed once"


def test_evaluation_pulls_without_gradients(shards: Shards) -> None:
    embedding = Embedding(shards.up(1).client(), USERS)
    embedding.eval()
    embedding(IDS)
    with torch.no_grad():
        embedding.train()(IDS)
    assert embedding.take_gradients() == {}


class Model(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A model that applies a linear layer to the mean of a bag's rows."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.line = embedding, torch.nn.Linear(6, 1)

    def forward(self, ids: Any) -> Any:
        return self.line(self.rows(ids).mean(-2)).squeeze(-1)


def loss_of(model: Any, batch: Any) -> Any:
    ids, y = batch
    return ((model(ids) - y) ** 2).mean()


def batches(count: int) -> list[Any]:
    draw = np.random.default_rng(1)
    found = []
    for _ in range(count):
        ids = draw.integers(0, 40, (16, 3))
        found.append(
            (torch.from_numpy(ids), torch.from_numpy(np.sin(ids).sum(1).astype(np.float32)))
        )
    return found


def check_losses(losses: list[float], given: list[Any], twin: Any, steps: Any) -> None:
    """Check that local training of `twin` has the same losses."""
    for i, batch in enumerate(given):
        steps.zero_grad()
        loss = loss_of(twin, batch)
        loss.backward()
        steps.step()
        assert losses[i] == pytest.approx(float(loss.detach()), rel=1e-3)


@pytest.mark.parametrize("prefetch", [None, lambda model, batch: model.rows.prefetch(batch[0])])
def test_training_through_shards_equals_local_training(shards: Shards, prefetch: Any) -> None:
    client = shards.up(3).client()
    model = Model(Embedding(client, USERS))
    worker = Worker(client, model, optimizer="sgd", settings={"rate": 0.1})
    every = torch.arange(40)
    twin = Model(
        torch.nn.Embedding.from_pretrained(
            torch.from_numpy(client.pull("users", every.numpy())), freeze=False
        )
    )
    steps = torch.optim.SGD(twin.parameters(), lr=0.1)
    losses = list(worker.fit(batches(60), loss_of, prefetch=prefetch))
    check_losses(losses, batches(60), twin, steps)


def test_a_second_worker_starts_with_the_values_of_the_first(shards: Shards) -> None:
    client = shards.up(2).client()
    first = Worker(client, Model(Embedding(client, USERS)), settings={"rate": 0.1})
    list(first.fit(batches(5), loss_of))
    other = shards.client()
    model = Model(Embedding(other, USERS))
    with torch.no_grad():
        model.line.weight.zero_()
    second = Worker(other, model, settings={"rate": 0.1})
    second.pull()
    first.pull()
    assert (model.line.weight == first.module.line.weight).all()


def test_a_batch_that_is_too_late_is_computed_anew(shards: Shards) -> None:
    client = shards.up(1, lag_max=1).client()
    model = Model(Embedding(client, USERS))
    worker = Worker(client, model, settings={"rate": 0.01})
    other = shards.client()
    worker.pull()
    turns = []

    def late(module: Any, times: int) -> Any:
        turns.append(1)
        for _ in range(3 if len(turns) <= times else 0):  # somebody else is faster
            other.push("users", [1], np.ones((1, 6), np.float32))
        return loss_of(module, batches(1)[0])

    worker.step(lambda module: late(module, 0))
    turns.clear()
    worker.step(lambda module: late(module, 2))
    assert (len(turns), worker.refused, worker.steps) == (3, 2, 2)
    turns.clear()
    with pytest.raises(StalePush, match="64 times"):
        worker.step(lambda module: late(module, TRIES))


def test_step_that_one_shard_refused_moves_the_rows_of_the_other_once(shards: Shards) -> None:
    client = shards.up(2, lag_max=2).client()
    rate: Any = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}, "initializer": "zeros"}
    embedding = Embedding(client, TableSpec("moved", 1, **rate))
    module = torch.nn.Sequential(embedding)
    worker = Worker(client, module)
    other = shards.client()

    def loss_of(model: Any) -> Any:
        if not worker.refused:
            for _ in range(4):
                # shard 1 goes ahead while the loss is computed
                other.push("moved", [101], np.zeros((1, 1), np.float32))
        return -model(torch.tensor([1, 2])).sum()

    worker.step(loss_of)
    worker.step(loss_of)
    assert worker.refused == 1
    assert client.pull("moved", [1, 2]).ravel().tolist() == [2, 2]


class Pair(torch.nn.Module):  # type: ignore[name-defined,misc]
    """A model that applies a linear layer to the product of two rows."""

    def __init__(self, rows: Tensors) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.rows, self.line = rows, torch.nn.Linear(6, 1)

    def forward(self, ids: Tensors) -> Tensors:
        rows = self.rows({"users": ids[:, 0], "items": ids[:, 1]})
        return self.line(rows["users"] * rows["items"]).squeeze(-1)


@pytest.mark.parametrize("count", [1, 3])
def test_collection_trains_as_tables_of_torch_do(shards: Shards, count: int) -> None:
    client = shards.up(count).client()
    specs = [TableSpec(name, 6, initializer="normal", **SGD) for name in ("users", "items")]  # type: ignore[arg-type]
    worker = Worker(client, Pair(EmbeddingCollection(client, specs)), settings={"rate": 0.1})
    every = np.arange(40)
    tables = {
        name: torch.nn.Embedding.from_pretrained(
            torch.from_numpy(np.array(client.pull(name, every))), freeze=False
        )
        for name in ("users", "items")
    }
    twin = Pair(lambda ids: {name: tables[name](each) for name, each in ids.items()})
    steps = torch.optim.SGD(
        [*twin.parameters(), *(each.weight for each in tables.values())], lr=0.1
    )
    losses = list(worker.fit(batches(40), loss_of))
    check_losses(losses, batches(40), twin, steps)
    with pytest.raises(UnknownTable, match=r"no table .others."):
        worker.module.rows({"others": torch.arange(2)})


@pytest.mark.parametrize("overlap", [False, True])
def test_steps_with_rows_that_were_prefetched(shards: Shards, overlap: bool) -> None:
    client = shards.up(2).client()
    rows = Embedding(client, USERS)
    worker = Worker(client, Model(rows), settings={"rate": 0.1})
    requested: list[Tensors] = []

    def prefetch(_: Tensors, batch: Tensors) -> None:
        requested.append(batch)
        rows.prefetch(batch[0])

    losses = list(worker.fit(batches(30), loss_of, prefetch=prefetch, overlap=overlap))
    assert (len(losses), len(requested)) == (30, 29)


def test_prefetched_rows_are_those_before_a_later_push(shards: Shards) -> None:
    client = shards.up(2).client()
    rows = Embedding(client, USERS)
    client.push("users", [0], np.zeros((1, 6), np.float32))
    before = client.pull("users", [1])
    rows.prefetch(torch.tensor([1]))
    client.push("users", [1], np.ones((1, 6), np.float32))
    assert (rows(torch.tensor([1])).detach().numpy() == before).all()
    rows.prefetch(torch.tensor([2]))
    assert (rows(torch.tensor([1])).detach().numpy() == before - np.float32(0.1)).all()
    assert (rows(torch.tensor([2])).detach().numpy() == client.pull("users", [2])).all()
