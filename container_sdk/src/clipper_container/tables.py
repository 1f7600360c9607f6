"""`Tables`: read and train a model's rows on the shards of a parameter server (docs/params.md).

    class Recommender(Model):
        tables = {"users": {"dim": 16, "optimizer": "adagrad"}}

        def predict_batch(self, inputs):
            return self.tables.pull("users", inputs[:, 0]) @ self.weights

It needs numpy and msgpack only, so it runs in any environment of a model.
"""

from __future__ import annotations

import contextlib
import os
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from clipper_container.params.push_identity import PushIdentity, renew_after_fork
from clipper_container.params.shard_client import (
    DROPPED,
    DTYPES,
    PULL,
    PUSH,
    ShardAway,
    ShardClient,
    ShardHeader,
    ShardRefused,
    ShardRequest,
    addresses_in,
    call,
    padding,
    unpacked,
)  # fmt: skip

TOKEN_VARIABLE = "CLIPPER_PARAMS__TOKEN"
SETTINGS = (
    "optimizer", "optimizer_settings", "initializer", "initializer_settings", "seed",
    "rows_max", "evicts", "admit_after", "expire_s", "quota_rows", "quota_bytes",
)  # fmt: skip
PUSHED = struct.Struct("<4I")  # payload of the answer to a push: the counts of `Pushed`
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Positions = NDArray[np.intp] | None  # None: all


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
        addresses: list[str]
        self._folder, known = "", ""
        if isinstance(shards, str) and shards.startswith(("unix:", "tcp:")):
            addresses = [shards]
        elif isinstance(shards, str | os.PathLike):
            self._folder = os.fspath(shards)
            addresses, known = addresses_in(self._folder)
        else:
            addresses = list(shards)
        if not addresses:
            raise ValueError("no shards: give the addresses of all shards, in order")
        self._addresses = addresses
        self.patience_s, self._answer_s = patience_s, answer_s
        self._specs: dict[str, dict[str, Any]] = {}
        self._token = token or known or os.environ.get(TOKEN_VARIABLE, "")
        self._identity = PushIdentity(worker)
        self._clients = self._new_clients()
        renew_after_fork(self)

    def _new_clients(self) -> list[ShardClient]:
        shards = range(len(self._addresses))
        return [
            ShardClient(i, self._address, self._token, self._identity, self._answer_s)
            for i in shards
        ]

    def forked(self) -> None:
        """Renew connections and worker number in a forked child; the old ones belong to the
        parent.
        """
        parents = self._clients
        self._identity = PushIdentity()
        self._clients = self._new_clients()
        for client in parents:
            client.close()

    @property
    def worker(self) -> int:
        """Return the worker number."""
        return self._identity.worker

    def close(self) -> None:
        """Close all connections."""
        for client in self._clients:
            with client.lock:
                client.close()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create(self, name: str, dim: int, **spec: Any) -> None:
        """Create the table f32[dim], keyed by 64-bit ids, on every shard that does not have it.

        spec: optimizer, optimizer_settings, initializer, initializer_settings, seed, rows_max,
        evicts, admit_after, expire_s, quota_rows, quota_bytes.

        Raises: TypeError for another setting; ShardRefused (`type-conflict`: the table exists with
        other settings); ShardAway.
        """
        strange = sorted(set(spec) - set(SETTINGS))
        if strange:
            raise TypeError(
                f"table {name!r}: unknown setting {strange[0]!r}; known: {', '.join(SETTINGS)}"
            )
        whole = {"name": name, "dim": int(dim), **spec}
        requests = [(client, call("create", spec=whole)) for client in self._clients]
        self._settle(requests)
        for client, request in requests:
            client.tables[name] = int(unpacked(request.body)["number"])
        self._specs[name] = whole

    def pull(self, name: str, ids: ArrayLike, dtype: str = "f32") -> Floats:
        """Return f32[n, dim]: the rows of ids i64[n] or u64[n], in their order. An id without a row
        gets its initial value.

        dtype: encoding on the wire: f32, f16, bf16, or i8 with a scale per row.

        Raises: ShardRefused, ShardAway, ValueError.
        """
        each = as_ids(ids)
        if dtype not in DTYPES:
            raise ValueError(f"unknown dtype {dtype!r} of rows; known: {', '.join(DTYPES)}")
        dim = self._dim(name)

        def request(mine: Ids, at: Positions) -> ShardRequest:
            return ShardRequest(
                ShardHeader(PULL, dtype=DTYPES[dtype], rows=mine.size),
                (mine,),
                name,
                answer_bytes(mine.size, dim, dtype),
            )

        parts = self._request_rows(name, each, request)
        if len(parts) == 1:
            return rows_in(parts[0][0].body, each.size, dim, dtype)
        out: Floats = np.empty((each.size, dim), np.float32)
        for one, at in parts:
            out[at] = rows_in(one.body, one.head.rows, dim, dtype)
        return out

    def push(self, name: str, ids: ArrayLike, gradients: ArrayLike, *, sequence: int = 0) -> Pushed:
        """Apply one optimizer step per distinct id, with the sum of its gradients f32[n, dim].

        A push is applied once, even if a shard restarts and the push is sent again. sequence: from
        ShardAway, to repeat a push that some shards may have applied; 0 for a new push.

        Raises: ShardRefused (`invalid-input`: NaN or infinity; that shard changed nothing),
        ShardAway, ValueError.
        """
        each, rows = as_ids(ids), np.ascontiguousarray(gradients, np.float32)
        dim = self._dim(name)
        if rows.shape != (each.size, dim):
            raise ValueError(
                f"table {name!r}: gradients are f32[{each.size}, {dim}], not {list(rows.shape)}"
            )
        sequence = sequence or self._new_sequence()

        def request(mine: Ids, at: Positions) -> ShardRequest:
            part = rows if at is None else rows[at]
            head = ShardHeader(PUSH, rows=mine.size, worker=self.worker, sequence=sequence)
            return ShardRequest(head, (mine, part.reshape(-1), padding(part.nbytes)), name)

        try:
            parts = self._request_rows(name, each, request)
        except ShardAway as error:
            raise ShardAway(str(error), sequence) from error
        counts = [PUSHED.unpack(one.body) for one, _ in parts if len(one.body) == PUSHED.size]
        return Pushed(sequence, *(sum(each) for each in zip(*counts, strict=True)))

    # -- inside

    def _address(self, shard: int) -> str:
        if self._folder:
            self._addresses, _ = addresses_in(self._folder)
        return self._addresses[shard]

    def _call(self, client: ShardClient, name: str, **fields: Any) -> dict[str, Any]:
        request = call(name, **fields)
        self._settle([(client, request)])
        return unpacked(request.body)

    def _settle(self, requests: Sequence[tuple[ShardClient, ShardRequest]]) -> None:
        """Send all requests, then wait for their answers. A request that is too large is refused
        before any is sent.
        """
        until = time.monotonic() + self.patience_s
        for client, request in requests:
            client.check(request)
        for client, request in requests:
            try:
                with self._locked(client, until):
                    client.send(request)
            except OSError:
                request.id = 0  # `settle` sends it again
        for client, request in requests:
            with self._locked(client, until):
                client.settle(request, until)

    @contextlib.contextmanager
    def _locked(self, client: ShardClient, until: float) -> Iterator[None]:
        """Wait for other threads that use the same shard. Raises: ShardAway."""
        if not client.lock.acquire(timeout=max(0.0, until - time.monotonic()) + self._answer_s):
            raise ShardAway(f"{client.name}: it does not answer other threads of this client")
        try:
            yield
        finally:
            client.lock.release()

    def _request_rows(
        self, name: str, ids: Ids, request: Callable[[Ids, Positions], ShardRequest]
    ) -> list[tuple[ShardRequest, Positions]]:
        """Send each shard the request for its ids. A shard that lost the table gets it created
        again, once.
        """
        parts = list(self._parted(ids))
        for _ in range(2):
            requests = [
                (self._knowing(shard, name), request(mine, at)) for shard, mine, at in parts
            ]
            try:
                self._settle(requests)
                break
            except ShardRefused as error:
                if error.slug == DROPPED:  # what is known of tables is not true any more
                    error.slug = "unknown-table"
                    self._specs.clear()
                    for client in self._clients:
                        client.forget_tables()
                    raise
                if error.slug != "unknown-table":
                    raise
        else:
            raise ShardRefused(f"table {name!r} was created, and is missing again", "unknown-table")
        return [(one, at) for (_, one), (_, _, at) in zip(requests, parts, strict=True)]

    def _parted(self, ids: Ids) -> Iterator[tuple[int, Ids, Positions]]:
        """Yield (shard, its ids, their positions) for each shard that has some: id mod shards."""
        shards = len(self._clients)
        if shards == 1:
            if ids.size:
                yield 0, ids, None
            return
        whose = np.mod(ids, shards)
        for shard in range(shards):
            at = np.flatnonzero(whose == shard)
            if at.size:
                yield shard, ids[at], at

    def _dim(self, name: str) -> int:
        if name not in self._specs:
            self._specs.update(self._call(self._clients[0], "tables")["tables"])
            if name not in self._specs:
                raise ShardRefused(
                    f"no table {name!r}; tables: {', '.join(sorted(self._specs)) or 'none'}",
                    "unknown-table",
                )
        return int(self._specs[name]["dim"])

    def _knowing(self, shard: int, name: str) -> ShardClient:
        """Return the client of a shard, creating the table there if the shard does not have it."""
        client = self._clients[shard]
        if name not in client.tables:
            self._dim(name)
            spec = {
                key: value
                for key, value in self._specs[name].items()
                if key in ("name", "dim", *SETTINGS)
            }
            client.tables[name] = int(self._call(client, "create", spec=spec)["number"])
        return client

    def _new_sequence(self) -> int:
        """Return a sequence above all that the shards know of this worker; the number may have
        been used before.
        """
        if not self._identity.has_pushed:
            self._settle(
                [(client, call("tables")) for client in self._clients]
            )  # every shard has said
            self._identity.start_after(max(client.sequence for client in self._clients))
        return self._identity.next()


def answer_bytes(n: int, dim: int, dtype: str) -> int:
    """Return the payload bytes of n rows."""
    scales = 4 * n + -4 * n % 8 if dtype == "i8" else 0
    rows = n * dim * _ELEMENT_BYTES[dtype]
    return rows + -rows % 8 + scales


def rows_in(body: memoryview, n: int, dim: int, dtype: str) -> Floats:
    """Decode the rows of an answer as f32[n, dim]."""
    if dtype == "i8":
        scales = np.frombuffer(body, np.float32, n, n * dim + len(padding(n * dim)))
        scaled: Floats = np.frombuffer(body, np.int8, n * dim).reshape(n, dim) * scales[:, None]
        return scaled
    if dtype == "bf16":
        return (
            (np.frombuffer(body, np.uint16, n * dim).astype(np.uint32) << 16)
            .view(np.float32)
            .reshape(n, dim)
        )
    kind = np.float16 if dtype == "f16" else np.float32
    return np.frombuffer(body, kind, n * dim).reshape(n, dim).astype(np.float32, copy=False)


def as_ids(ids: ArrayLike) -> Ids:
    """Return ids as i64[n]; u64 keeps its bits. Raises: ValueError."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids must be integers of shape [n], not {array.dtype}{list(array.shape)}")
    return np.ascontiguousarray(array, np.int64)
