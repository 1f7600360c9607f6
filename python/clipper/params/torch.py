"""PyTorch with a parameter server: embeddings whose rows live on shards, and a training worker.

Rows are pulled in the forward pass, as leaves of the graph. Their gradients are pushed after the
backward pass, and the shards apply the optimizer. No table is kept in this process, so workers may
start and stop at any time.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import numpy as np

from clipper.errors import InvalidInput, StalePush, StateLost
from clipper.params.client.client import Client
from clipper.params.tables import TableSpec

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise ImportError("clipper.params.torch needs torch: pip install torch") from error

Combiner = Literal["", "sum", "mean", "sqrtn"]
TRIES = 64  # of one batch, if its gradients are refused as too old


class Embedding(nn.Module):  # type: ignore[misc]  # torch is not known to the type checker everywhere
    """`nn.Embedding` for 64-bit ids without bounds, whose rows live on the shards of a client.

    forward(ids i64[...]) -> f32[..., dim]; with a combiner, of ids i64[..., bag]: f32[..., dim],
    the sum, mean, or sum over the square root of how many, of each bag. padding: an id that stands
    for nothing: its row is zeros, and learns nothing. While training, call `push` after the
    backward pass (Worker does): gradients of an id asked several times are summed. Threads: as the
    client's.
    """

    def __init__(
        self,
        client: Client,
        spec: TableSpec,
        *,
        combiner: Combiner = "",
        padding: int | None = None,
    ) -> None:
        super().__init__()
        if combiner not in ("", "sum", "mean", "sqrtn"):
            raise InvalidInput(f"no combiner {combiner!r}: sum, mean or sqrtn.")
        client.create(spec)
        self.spec, self.combiner, self.padding = spec, combiner, padding
        self._client = client
        self._asked: list[tuple[Any, Tensor]] = []

    def extra_repr(self) -> str:
        """Return the table and its width, as `print(module)` shows them."""
        return f"{self.spec.name!r}, dim={self.spec.dim}" + (
            f", combiner={self.combiner!r}" if self.combiner else ""
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Pull the rows of these ids, and combine them if the module has a combiner."""
        each, where = np.unique(
            ids.detach().cpu().numpy().astype(np.int64, copy=False).reshape(-1), return_inverse=True
        )
        rows = torch.from_numpy(self._client.pull(self.spec.name, each))
        if self.training and torch.is_grad_enabled():
            rows.requires_grad_(True)
            self._asked.append((each, rows))
        found = nn.functional.embedding(torch.from_numpy(where).reshape(ids.shape), rows).to(
            ids.device
        )
        there = None
        if self.padding is not None:
            there = (ids != self.padding).unsqueeze(-1)
            found = found * there
        return self._combined(found, there) if self.combiner else found

    def _combined(self, rows: Tensor, there: Tensor | None) -> Tensor:
        total = rows.sum(-2)
        if self.combiner == "sum":
            return total
        count = (
            torch.tensor(float(rows.shape[-2]))
            if there is None
            else there.sum(-2).clamp(min=1).to(rows.dtype)
        )
        return total / (count if self.combiner == "mean" else count.sqrt())

    def take_gradients(self) -> tuple[Any, Any] | None:
        """(ids i64[n], each once; f32[n, dim]) of what was asked since the last call; None when
        nothing has a gradient."""
        asked, self._asked = self._asked, []
        parts = [(ids, rows.grad.numpy()) for ids, rows in asked if rows.grad is not None]
        if not parts:
            return None
        ids, where = np.unique(np.concatenate([one for one, _ in parts]), return_inverse=True)
        gradients = np.zeros((ids.size, self.spec.dim), np.float32)
        np.add.at(gradients, where, np.concatenate([one for _, one in parts]))
        if self.padding is not None:
            kept = ids != self.padding
            ids, gradients = ids[kept], gradients[kept]
        return (ids, gradients) if ids.size else None

    def push(self, scale: float = 1.0) -> None:
        """The gradients of what was asked since the last push, to the shards."""
        found = self.take_gradients()
        if found is not None:
            self._client.push(self.spec.name, *found, scale=scale)


class Worker:
    """Trains a module with the parameters of a set of shards: its parameters are dense variables,
    its Embeddings tables.

    The first worker's initial values win; the others take theirs from the shards. pull_every: dense
    variables are pulled anew before each so-many-th step, and kept as they were in between.
    optimizer, settings: of the dense variables, as TableSpec has them. Threads: one.
    """

    def __init__(
        self,
        client: Client,
        module: nn.Module,
        *,
        optimizer: str = "sgd",
        settings: dict[str, float] | None = None,
        pull_every: int = 1,
    ) -> None:
        self.client, self.module, self.pull_every = client, module, max(1, pull_every)
        self.steps = self.refused = 0
        self.no_room = 0  # ids whose gradients were dropped, because their table is full
        self._embeddings = [one for one in module.modules() if isinstance(one, Embedding)]
        self._dense = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._versions = [-1] * len(client)
        self.restored = 0  # shards that lost their state and got the model again
        self._optimizer, self._settings = optimizer, settings or {}
        self._restored(self._push_model)

    def _push_model(self) -> None:
        self.client.push_model(
            {name: one.detach().numpy() for name, one in self._dense.items()},
            tables=[one.spec for one in self._embeddings],
            optimizer=self._optimizer,
            optimizer_settings=self._settings,
        )

    def _restored(self, ask: Callable[[], Any]) -> Any:
        """What is asked of the shards; those that have lost all they had get the model as it is
        here, and are asked again."""
        try:
            return ask()
        except StateLost:
            self.restored += len(self.client.begin_anew())
            self._push_model()
            return ask()

    def pull(self) -> None:
        """Dense variables that have changed since; a shard that has lost its own is pushed the
        model as it is here."""
        versions, found = self._restored(lambda: self.client.pull_variables(self._versions))
        with torch.no_grad():
            for name, value in found.items():
                if name in self._dense:
                    self._dense[name].copy_(
                        torch.from_numpy(np.array(value)).reshape(self._dense[name].shape)
                    )
        self._versions = versions

    def step(
        self, loss_of: Callable[[nn.Module], Tensor], *, scale: float = 1.0, sequence: int = 0
    ) -> float:
        """One batch: pull, forward, backward, push. loss_of: (module) -> a scalar. -> the loss.

        A push that is refused as too old is computed anew from newer parameters, up to 64 times;
        shards that have taken it do not take it again. sequence: that of ShardAway or StalePush, to
        do the same batch again: alike. Raises StalePush, and what the client raises.
        """
        self.module.train()
        for turn in range(TRIES):
            if turn or self.steps % self.pull_every == 0:
                self.pull()
            self.module.zero_grad(set_to_none=True)
            loss = loss_of(self.module)
            loss.backward()
            pushed = self._push(scale, sequence)
            self.no_room += pushed["no_room"]
            if pushed["accepted"]:
                self.steps += 1
                return float(loss.detach())
            self.refused += 1
            sequence = pushed["sequence"]
        why = f"a batch was refused {TRIES} times: others are that much faster."
        raise StalePush(why, hint="Use fewer workers, or a larger lag_max.", sequence=sequence)

    def _push(self, scale: float, sequence: int) -> dict[str, Any]:
        dense = {
            name: one.grad.numpy() for name, one in self._dense.items() if one.grad is not None
        }
        rows: dict[str, tuple[Any, Any]] = {}
        for one in self._embeddings:
            found = one.take_gradients()
            if found is not None:
                before = rows.get(one.spec.name)
                rows[one.spec.name] = found if before is None else _joined(before, found)
        versions = [max(0, version) for version in self._versions]
        return self.client.push_gradients(
            dense, rows, versions=versions, scale=scale, sequence=sequence
        )

    def fit(
        self, batches: Iterable[Any], loss_of: Callable[[nn.Module, Any], Tensor]
    ) -> Iterator[float]:
        """The loss of each batch, as it is trained. loss_of: (module, batch) -> a scalar."""
        for batch in batches:
            yield self.step(functools.partial(_of_batch, loss_of, batch))


def _of_batch(loss_of: Callable[[nn.Module, Any], Tensor], batch: Any, module: nn.Module) -> Tensor:
    return loss_of(module, batch)


def _joined(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[Any, Any]:
    """Join the gradients of one table from two layers; the shards sum those of equal ids."""
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
