"""PyTorch with a parameter server: embeddings whose rows live on shards, and a training worker.

Rows are pulled in the forward pass, as leaves of the graph. Their gradients are pushed after the
backward pass, and the shards apply the optimizer. No table is kept in this process, so workers may
start and stop at any time.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, StalePush, StateLost, UnknownTable
from clipper.params.client.client import Client, Pending, StepResult
from clipper.spec.table import TableSpec
from clipper.types import UserValue
from clipper_core.params.row_parts import combine, distinct

try:
    import torch
    from torch import Tensor, nn
except ImportError as error:
    raise ImportError("clipper.params.torch needs torch: pip install torch") from error

Ids = npt.NDArray[np.int64]
RowGradients = tuple[Ids, npt.NDArray[np.float32]]  # ids, and f32[n, dim]
Batch = UserValue  # whatever the caller trains by
Pulled = dict[str, npt.NDArray[np.float32]]
T = TypeVar("T")
Combiner = Literal["", "sum", "mean", "sqrtn"]
TRIES = 64  # of one batch, if its gradients are refused as too old


class PulledRows:
    """The rows that a module has pulled for its next forward passes, and those whose gradients it
    has not pushed yet. Threads: as the client's.

    tables: the names of the module's tables.
    """

    def __init__(self, client: Client, tables: Sequence[str]) -> None:
        self._client, self._tables = client, tables
        self._requested: list[tuple[str, Ids, Tensor]] = []
        # distinct ids; their rows, to come
        self._ahead: tuple[dict[str, Ids], Pending[Pulled]] | None = None

    def prefetch(self, ids: Mapping[str, Ids]) -> None:
        """Request the rows of distinct ids by table, for the next call of `rows`."""
        self._ahead = (dict(ids), self._client.prefetch_tables(ids))

    def rows(self, ids: Mapping[str, Ids], keep: bool) -> dict[str, Tensor]:
        """Return the rows of distinct ids by table, prefetched if they were requested.

        keep: their gradients will be taken.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is None or ahead[0].keys() != ids.keys():
            return self._leaves(ids, self._client.pull_tables(ids), keep)
        if not all(np.array_equal(ahead[0][name], each) for name, each in ids.items()):
            return self._leaves(ids, self._client.pull_tables(ids), keep)
        return self._leaves(ids, ahead[1].result(), keep)

    def _leaves(self, ids: Mapping[str, Ids], pulled: Pulled, keep: bool) -> dict[str, Tensor]:
        found = {name: torch.from_numpy(rows) for name, rows in pulled.items()}
        if keep:
            for name, rows in found.items():
                rows.requires_grad_(True)
                self._requested.append((name, ids[name], rows))
        return found

    def take_gradients(self, without: int | None = None) -> dict[str, RowGradients]:
        """Return (ids, each once; f32[n, dim]) by table of what was pulled since the last call.

        without: an id that learns nothing.
        """
        requested, self._requested = self._requested, []
        found = {}
        for name in self._tables:
            parts = [
                (ids, rows.grad.numpy())
                for table, ids, rows in requested
                if table == name and rows.grad is not None
            ]
            if len(parts) == 1:
                each, gradients = parts[0]
            elif parts:
                each, gradients = combine(*map(np.concatenate, zip(*parts, strict=True)))
            else:
                continue
            if without is not None:
                stored = each != without
                each, gradients = each[stored], gradients[stored]
            if each.size:
                found[name] = (each, gradients)
        return found


class Embedding(nn.Module):  # type: ignore[misc]  # torch is not known to the type checker everywhere
    """`nn.Embedding` for 64-bit ids without bounds, whose rows live on the shards of a client.

    forward(ids i64[...]) -> f32[..., dim]; with a combiner, of ids i64[..., bag]: f32[..., dim],
    the sum, mean, or sum over the square root of how many, of each bag. padding: an id that stands
    for nothing: its row is zeros, and learns nothing. While training, call `push` after the
    backward pass (Worker does): gradients of an id that is looked up several times are summed.
    Threads: as the client's.
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
        self._rows = PulledRows(client, (spec.name,))

    def extra_repr(self) -> str:
        """Return the table and its width, as `print(module)` shows them."""
        return f"{self.spec.name!r}, dim={self.spec.dim}" + (
            f", combiner={self.combiner!r}" if self.combiner else ""
        )

    def prefetch(self, ids: Tensor) -> None:
        """Request the rows of the ids of the next forward pass, and do not wait for them.

        They are as they were before pushes that follow this request.
        """
        self._rows.prefetch({self.spec.name: _distinct(ids)[0]})

    def forward(self, ids: Tensor) -> Tensor:
        """Pull the rows of these ids, and combine them if the module has a combiner."""
        each, where = _distinct(ids)
        rows = self._rows.rows({self.spec.name: each}, self.training and torch.is_grad_enabled())
        found = nn.functional.embedding(
            torch.from_numpy(where).reshape(ids.shape), rows[self.spec.name]
        ).to(ids.device)
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

    @property
    def specs(self) -> tuple[TableSpec, ...]:
        """The module's table."""
        return (self.spec,)

    def take_gradients(self) -> dict[str, RowGradients]:
        """Return {table: (ids i64[n], each once; f32[n, dim])} of the ids looked up since the last
        call; nothing if nothing has a gradient."""
        return self._rows.take_gradients(self.padding)

    def push(self, scale: float = 1.0) -> None:
        """Push the gradients of the ids looked up since the last push to the shards."""
        for table, found in self.take_gradients().items():
            self._client.push(table, *found, scale=scale)


class EmbeddingCollection(nn.Module):  # type: ignore[misc]  # as Embedding
    """Several tables, whose rows are pulled in one message for each shard.

    forward({table: ids i64[...]}) -> {table: f32[..., dim]}. Train it with a Worker, which pushes
    the gradients of all tables in one message. Threads: as the client's.
    """

    def __init__(self, client: Client, specs: Sequence[TableSpec]) -> None:
        super().__init__()
        for spec in specs:
            client.create(spec)
        self.specs = tuple(specs)
        self._rows = PulledRows(client, tuple(spec.name for spec in specs))

    def extra_repr(self) -> str:
        """Return the tables and their widths, as `print(module)` shows them."""
        return ", ".join(f"{spec.name!r}, dim={spec.dim}" for spec in self.specs)

    def prefetch(self, ids: Mapping[str, Tensor]) -> None:
        """Request the rows of the ids of the next forward pass, and do not wait for them.

        They are as they were before pushes that follow this request.
        """
        self._rows.prefetch({table: _distinct(each)[0] for table, each in ids.items()})

    def forward(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Pull the rows of these ids. Raises UnknownTable for a table that is not the module's."""
        known = [spec.name for spec in self.specs]
        for table in ids:
            if table not in known:
                raise UnknownTable.named(table, known)
        each = {table: _distinct(given) for table, given in ids.items()}
        rows = self._rows.rows(
            {table: once for table, (once, _) in each.items()},
            self.training and torch.is_grad_enabled(),
        )
        return {
            table: nn.functional.embedding(
                torch.from_numpy(where).reshape(ids[table].shape), rows[table]
            ).to(ids[table].device)
            for table, (_, where) in each.items()
        }

    def take_gradients(self) -> dict[str, RowGradients]:
        """Return {table: (ids i64[n], each once; f32[n, dim])} of the ids looked up since the last
        call."""
        return self._rows.take_gradients()


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
        self._embeddings = [
            one for one in module.modules() if isinstance(one, Embedding | EmbeddingCollection)
        ]
        self._dense = {name: one for name, one in module.named_parameters() if one.requires_grad}
        self._versions = [-1] * len(client)
        self.restored = 0  # shards that lost their state and got the model again
        self._optimizer, self._settings = optimizer, settings or {}
        # dense variables of the next step
        self._ahead: Pending[tuple[list[int], Pulled]] | None = None
        self._restored(self._push_model)

    def _push_model(self) -> None:
        self.client.push_model(
            {name: one.detach().numpy() for name, one in self._dense.items()},
            tables=[spec for one in self._embeddings for spec in one.specs],
            optimizer=self._optimizer,
            optimizer_settings=self._settings,
        )

    def _restored(self, request: Callable[[], T]) -> T:
        """Send a request to the shards. Those that have lost their state get the model as it is
        here, and the request again."""
        try:
            return request()
        except StateLost:
            self.restored += len(self.client.begin_anew())
            self._push_model()
            return request()

    def pull(self) -> None:
        """Pull the dense variables that have changed since; push the model as it is here to a shard
        that has lost its own."""
        ahead, self._ahead = self._ahead, None
        versions, found = self._restored(
            ahead.result
            if ahead is not None
            else lambda: self.client.pull_variables(self._versions)
        )
        with torch.no_grad():
            for name, value in found.items():
                if name in self._dense:
                    self._dense[name].copy_(
                        torch.from_numpy(np.array(value)).reshape(self._dense[name].shape)
                    )
        self._versions = versions

    def step(
        self,
        loss_of: Callable[[nn.Module], Tensor],
        *,
        scale: float = 1.0,
        sequence: int = 0,
        prefetch: Callable[[nn.Module], None] | None = None,
    ) -> float:
        """Train on one batch (pull, forward, backward, push) and return the loss. loss_of: returns
        a scalar for the module.

        A push that is refused as too old is computed anew from newer parameters, up to 64 times;
        shards that have taken it do not take it again. sequence: that of ShardAway or StalePush, to
        do the same batch again: alike. prefetch: called when the gradients are on their way; what
        it requests, and the dense variables, come with the answer to them. Raises StalePush, and
        what the client raises.
        """
        self.module.train()
        for turn in range(TRIES):
            if turn or self.steps % self.pull_every == 0:
                self.pull()
            self.module.zero_grad(set_to_none=True)
            loss = loss_of(self.module)
            loss.backward()
            pending = self._push(scale, sequence)
            if prefetch is not None:
                if (self.steps + 1) % self.pull_every == 0:
                    self._ahead = self.client.prefetch_variables(self._versions)
                prefetch(self.module)
            pushed = pending.result()
            self.no_room += pushed["no_room"]
            if pushed["accepted"]:
                self.steps += 1
                return float(loss.detach())
            self.refused += 1
            self._ahead = None
            sequence = pushed["sequence"]
        why = f"a batch was refused {TRIES} times: others are that much faster."
        raise StalePush(why, hint="Use fewer workers, or a larger lag_max.", sequence=sequence)

    def _push(self, scale: float, sequence: int) -> Pending[StepResult]:
        dense = {
            name: one.grad.numpy() for name, one in self._dense.items() if one.grad is not None
        }
        rows: dict[str, RowGradients] = {}
        for one in self._embeddings:
            for table, found in one.take_gradients().items():
                before = rows.get(table)
                rows[table] = found if before is None else _joined(before, found)
        versions = [max(0, version) for version in self._versions]
        return self.client.start_push_gradients(
            dense, rows, versions=versions, scale=scale, sequence=sequence
        )

    def fit(
        self,
        batches: Iterable[Batch],
        loss_of: Callable[[nn.Module, Batch], Tensor],
        *,
        prefetch: Callable[[nn.Module, Batch], None] | None = None,
        overlap: bool = False,
    ) -> Iterator[float]:
        """Yield the loss of each batch, as it is trained. loss_of: returns a scalar for the module
        and a batch.

        prefetch: (module, batch), called with the next batch when the gradients of this one are on
        their way; it calls `prefetch` of the module's embeddings. What a step needs comes in one
        round trip then, and has this worker's last push. overlap: call it before the backward pass
        instead, so that rows come while the step is computed; they lack the last push.
        """
        each = iter(batches)
        batch = next(each, _END)
        while batch is not _END:
            following = next(each, _END)
            step = functools.partial(_of_batch, loss_of, batch)
            ahead = None
            if prefetch is not None and following is not _END:
                ahead = functools.partial(_of_batch, prefetch, following)
                if overlap:
                    step, ahead = functools.partial(_with_prefetch, step, ahead), None
            yield self.step(step, prefetch=ahead)
            batch = following


_END: Batch = object()


def _with_prefetch(
    step: Callable[[nn.Module], Tensor], prefetch: Callable[[nn.Module], None], module: nn.Module
) -> Tensor:
    loss = step(module)
    prefetch(module)
    return loss


def _distinct(ids: Tensor) -> tuple[Ids, Ids]:
    return distinct(ids.detach().cpu().numpy().astype(np.int64, copy=False).reshape(-1))


def _of_batch(run: Callable[[nn.Module, Batch], T], batch: Batch, module: nn.Module) -> T:
    return run(module, batch)


def _joined(one: RowGradients, other: RowGradients) -> RowGradients:
    """Join the gradients of one table from two modules; the shards sum those of equal ids."""
    return np.concatenate([one[0], other[0]]), np.concatenate([one[1], other[1]])
