"""`Tables`: read and train a model's rows on the shards of a parameter server (docs/params.md).

    class Recommender(Model):
        tables = {"users": {"dim": 16, "optimizer": "adagrad"}}

        def predict_batch(self, inputs):
            return self.tables.pull("users", inputs[:, 0]) @ self.weights

It needs numpy and msgpack only, so it runs in any environment of a model.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clipper_container.errors import TableLost, refuse_unknown
from clipper_container.model import UserValue
from clipper_container.params.frames import PUSHED
from clipper_container.params.rows import as_ids, check_gradients
from clipper_container.params.shard_set import ShardSet

SETTINGS = (
    "optimizer", "optimizer_settings", "initializer", "initializer_settings", "seed",
    "rows_max", "evicts", "admit_after", "expire_s", "quota_rows", "quota_bytes",
    "dtype",
)  # fmt: skip
Floats = NDArray[np.float32]
Result = TypeVar("Result")


class Pushed(NamedTuple):
    """The result of a push.

    sequence: its number. applied: distinct ids whose rows changed. unadmitted: ids not seen often
    enough to get a row. no_room: ids whose table was full; their gradients are lost. evicted: rows
    removed for others. A repeated push that was already applied returns zeros.
    """

    sequence: int
    applied: int = 0
    unadmitted: int = 0
    no_room: int = 0
    evicted: int = 0


class Tables:
    """Client of a set of shards.

    shards: the folder of a set on this host, or the addresses of all shards in order (`unix:/path`,
    `tcp:host:port`). worker: number by which shards recognise a repeated push; random when 0. A
    second live client with the same number is refused (`already-exists`). patience_s: how long a
    request waits for an unavailable shard. answer_s: timeout of one answer.

    Threads: any. Requests to one shard wait for each other; a slow shard delays only requests to
    it. A forked child may use the object: it gets its own connections and worker number.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str],
        *,
        token: str = "",
        worker: int = 0,
        patience_s: float = 10.0,
        answer_s: float = 10.0,
    ) -> None:
        self._shards: ShardSet[Mapping[str, UserValue]] = ShardSet(
            shards, dict, token=token, worker=worker, patience_s=patience_s, answer_s=answer_s
        )

    @property
    def worker(self) -> int:
        """Return the worker number."""
        return self._shards.identity.worker

    def close(self) -> None:
        """Close all connections."""
        self._shards.close()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create(self, name: str, dim: int, **spec: object) -> None:
        """Create the table f32[dim], keyed by 64-bit ids, on every shard that does not have it.

        spec: optimizer, optimizer_settings, initializer, initializer_settings, seed, rows_max,
        evicts, admit_after, expire_s, quota_rows, quota_bytes, dtype (of the stored rows: f32, f16,
        bf16, i8).

        Raises: UnknownKeyword for another setting; TypeConflict (the table exists with other
        settings); InvalidInput; ShardAway.
        """
        refuse_unknown("create", sorted(set(spec) - set(SETTINGS)), SETTINGS)
        whole = {"name": name, "dim": int(dim), **spec}
        self._shards.create(whole, whole)

    def pull(self, name: str, ids: ArrayLike, dtype: str = "f32") -> Floats:
        """Return f32[n, dim]: the rows of ids i64[n] or u64[n], in their order. An id without a row
        gets its initial value.

        dtype: encoding on the wire: f32, f16, bf16, or i8 with a scale per row.

        Raises: UnknownTable, InvalidInput, ShardAway.
        """
        each, dim = as_ids(ids), self._dim(name)
        rows = self._with_table(name, lambda: self._shards.pulling(name, dim, each, dtype)())
        if dtype == "bf16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32, copy=False)

    def push(self, name: str, ids: ArrayLike, gradients: ArrayLike, *, sequence: int = 0) -> Pushed:
        """Apply one optimizer step per distinct id, with the sum of its gradients f32[n, dim].

        A push is applied once, even if a shard restarts and the push is sent again. sequence: from
        ShardAway, to repeat a push that some shards may have applied; 0 for a new push.

        Raises: UnknownTable; InvalidInput (NaN or infinity; that shard changed nothing); TooLarge;
        StalePush; ShardAway.
        """
        each, rows = as_ids(ids), np.ascontiguousarray(gradients, np.float32)
        check_gradients(name, each.size, self._dim(name), rows)

        def push(number: int) -> Pushed:
            answers = self._with_table(name, lambda: self._shards.push(name, each, rows, number))
            counts = [PUSHED.unpack(body) for _, _, body in answers if len(body) == PUSHED.size]
            return Pushed(number, *(sum(each) for each in zip(*counts, strict=True)))

        return self._shards.pushing(sequence, lambda number: partial(push, number))()

    def _dim(self, name: str) -> int:
        return int(self._shards.spec(name)["dim"])

    def _with_table(self, name: str, request: Callable[[], Result]) -> Result:
        """Make a request. If a shard has lost the table, create it there, and make the request
        again."""
        try:
            return request()
        except TableLost:
            spec = self._shards.spec(name)
            known = {key: value for key, value in spec.items() if key in ("name", "dim", *SETTINGS)}
            self._shards.create(spec, known)
            return request()
