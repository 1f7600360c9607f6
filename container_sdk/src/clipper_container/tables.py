"""`Tables`: a model's rows on the shards of a parameter server, to read and to train
(docs/params.md).

    class Recommender(Model):
        tables = {"users": {"dim": 16, "optimizer": "adagrad"}}

        def predict_batch(self, inputs):
            return self.tables.pull("users", inputs[:, 0]) @ self.weights

Numpy and msgpack are all it needs: it speaks the shards' messages itself, in any environment a
model runs in.
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

from clipper_container.push_identity import PushIdentity, renew_after_fork
from clipper_container.shards import (
    DTYPES,
    PULL,
    PUSH,
    Ask,
    Head,
    ShardAway,
    ShardLine,
    ShardRefused,
    addresses_in,
    call,
    padding,
    unpacked,
)  # fmt: skip

TOKEN_VARIABLE = "CLIPPER_PARAMS__TOKEN"
SETTINGS = (
    "optimizer", "optimizer_settings", "initializer", "initializer_settings", "seed",
    "rows_max", "evicts", "admit_after", "expire_s",
)  # fmt: skip
PUSHED = struct.Struct("<4I")  # payload of the answer to a push
_ELEMENT_BYTES = {"f32": 4, "f16": 2, "bf16": 2, "i8": 1}
Floats = NDArray[np.float32]
Ids = NDArray[np.int64]
Places = NDArray[np.intp] | None  # None: all


class Pushed(NamedTuple):
    """What became of a push. sequence: its number.  applied: distinct ids whose rows were changed.

    unadmitted: ids not seen often enough for a row.  no_room: ids that found their table full:
    nothing is kept of their gradients.  evicted: rows that had to go for others. A shard that had
    applied the push before does not say it again.
    """

    sequence: int
    applied: int = 0
    unadmitted: int = 0
    no_room: int = 0
    evicted: int = 0


class Tables:
    """Threads: any; those that ask the same shard wait for each other, a shard that does not answer
    delays only who asks it. A forked child may use it: it has connections and a worker number of
    its own there.

    shards: the folder of a set on this host, or the addresses of all shards in order (`unix:/path`,
    `tcp:host:port`). worker: its number: a push is told from its repetition by it; made up when 0.
    While a client lives, another of the same number is refused (`already-exists`). patience_s: how
    long a request waits for a shard that is away or recovers.  answer_s: for one answer.
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
            raise ValueError("a set of no shards: give the addresses of all of them, in order")
        self._addresses = addresses
        self.patience_s, self._answer_s = patience_s, answer_s
        self._specs: dict[str, dict[str, Any]] = {}
        self._token = token or known or os.environ.get(TOKEN_VARIABLE, "")
        self._identity = PushIdentity(worker)
        self._lines = self._new_lines()
        renew_after_fork(self)

    def _new_lines(self) -> list[ShardLine]:
        shards = range(len(self._addresses))
        return [
            ShardLine(i, self._address, self._token, self._identity, self._answer_s) for i in shards
        ]

    def forked(self) -> None:
        """In a forked child, before anything else: its connections are the parent's, and so is its
        number."""
        parents = self._lines
        self._identity = PushIdentity()
        self._lines = self._new_lines()
        for line in parents:
            line.close()

    @property
    def worker(self) -> int:
        """Its number, as shards know it."""
        return self._identity.worker

    def close(self) -> None:
        for line in self._lines:
            with line.lock:
                line.close()

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def create(self, name: str, dim: int, **spec: Any) -> None:
        """Make a table f32[dim] by a 64-bit id on every shard that does not have it.

        spec: optimizer, optimizer_settings, initializer, initializer_settings, seed, rows_max,
        evicts, admit_after, expire_s. Raises: TypeError for another word; ShardRefused
        (`type-conflict`: it is there, and another); ShardAway.
        """
        strange = sorted(set(spec) - set(SETTINGS))
        if strange:
            raise TypeError(
                f"table {name!r}: no setting {strange[0]!r}; there are {', '.join(SETTINGS)}"
            )
        whole = {"name": name, "dim": int(dim), **spec}
        asks = [(line, call("create", spec=whole)) for line in self._lines]
        self._settle(asks)
        for line, ask in asks:
            line.tables[name] = int(unpacked(ask.body)["number"])
        self._specs[name] = whole

    def pull(self, name: str, ids: ArrayLike, dtype: str = "f32") -> Floats:
        """f32[n, dim]: the rows of ids i64[n] or u64[n], in their order; of one without a row, what
        it would begin as.

        dtype: how they travel: f32, f16, bf16, or i8 with a scale for each row. Raises:
        ShardRefused, ShardAway, ValueError.
        """
        each = as_ids(ids)
        if dtype not in DTYPES:
            raise ValueError(f"no dtype {dtype!r} of rows: {', '.join(DTYPES)}")
        dim = self._dim(name)

        def ask(mine: Ids, at: Places) -> Ask:
            return Ask(
                Head(PULL, dtype=DTYPES[dtype], rows=mine.size),
                (mine,),
                name,
                answer_bytes(mine.size, dim, dtype),
            )

        parts = self._ask_of_rows(name, each, ask)
        if len(parts) == 1:
            return rows_in(parts[0][0].body, each.size, dim, dtype)
        out: Floats = np.empty((each.size, dim), np.float32)
        for one, at in parts:
            out[at] = rows_in(one.body, one.head.rows, dim, dtype)
        return out

    def push(self, name: str, ids: ArrayLike, gradients: ArrayLike, *, sequence: int = 0) -> Pushed:
        """One step of the table's optimizer for each distinct id, by the sum of its gradients
        f32[n, dim].

        Applied once, also when a shard is relaunched meanwhile and it is sent again. sequence: that
        of ShardAway, to send again a push that some shards may have applied: they do not apply it
        twice; 0: a new push. Raises: ShardRefused (`invalid-input`: NaN or infinity; nothing was
        changed on that shard), ShardAway, ValueError.
        """
        each, rows = as_ids(ids), np.ascontiguousarray(gradients, np.float32)
        dim = self._dim(name)
        if rows.shape != (each.size, dim):
            raise ValueError(
                f"table {name!r}: gradients are f32[{each.size}, {dim}], not {list(rows.shape)}"
            )
        sequence = sequence or self._new_sequence()

        def ask(mine: Ids, at: Places) -> Ask:
            part = rows if at is None else rows[at]
            head = Head(PUSH, rows=mine.size, worker=self.worker, sequence=sequence)
            return Ask(head, (mine, part.reshape(-1), padding(part.nbytes)), name)

        try:
            parts = self._ask_of_rows(name, each, ask)
        except ShardAway as error:
            raise ShardAway(str(error), sequence) from error
        counts = [PUSHED.unpack(one.body) for one, _ in parts if len(one.body) == PUSHED.size]
        return Pushed(sequence, *(sum(each) for each in zip(*counts, strict=True)))

    # -- inside

    def _address(self, shard: int) -> str:
        if self._folder:
            self._addresses, _ = addresses_in(self._folder)
        return self._addresses[shard]

    def _call(self, line: ShardLine, name: str, **fields: Any) -> dict[str, Any]:
        ask = call(name, **fields)
        self._settle([(line, ask)])
        return unpacked(ask.body)

    def _settle(self, asks: Sequence[tuple[ShardLine, Ask]]) -> None:
        """All are sent before the first is waited for. One that is too large is refused before
        anything is sent."""
        until = time.monotonic() + self.patience_s
        for line, ask in asks:
            line.check(ask)
        for line, ask in asks:
            try:
                with self._asking(line, until):
                    line.send(ask)
            except OSError:
                ask.id = 0  # `settle` sends it again
        for line, ask in asks:
            with self._asking(line, until):
                line.settle(ask, until)

    @contextlib.contextmanager
    def _asking(self, line: ShardLine, until: float) -> Iterator[None]:
        """Wait for other threads that ask the same shard. Raises: ShardAway."""
        if not line.lock.acquire(timeout=max(0.0, until - time.monotonic()) + self._answer_s):
            raise ShardAway(f"{line.name}: it does not answer others of this client")
        try:
            yield
        finally:
            line.lock.release()

    def _ask_of_rows(
        self, name: str, ids: Ids, ask: Callable[[Ids, Places], Ask]
    ) -> list[tuple[Ask, Places]]:
        """Each shard for those that are its. One that came back with nothing is told of the table,
        and asked again."""
        parts = list(self._parted(ids))
        for _ in range(2):
            asks = [(self._knowing(shard, name), ask(mine, at)) for shard, mine, at in parts]
            try:
                self._settle(asks)
                break
            except ShardRefused as error:
                if error.slug != "unknown-table":
                    raise
        else:
            raise ShardRefused(f"table {name!r} goes as often as it is made", "unknown-table")
        return [(one, at) for (_, one), (_, _, at) in zip(asks, parts, strict=True)]

    def _parted(self, ids: Ids) -> Iterator[tuple[int, Ids, Places]]:
        """(shard, its ids, their places) of each shard that has some: id mod shards."""
        shards = len(self._lines)
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
            self._specs.update(self._call(self._lines[0], "tables")["tables"])
            if name not in self._specs:
                raise ShardRefused(
                    f"no table {name!r}; there are {', '.join(sorted(self._specs)) or 'none'}",
                    "unknown-table",
                )
        return int(self._specs[name]["dim"])

    def _knowing(self, shard: int, name: str) -> ShardLine:
        """A shard that has the table: one that came back with nothing is told of it anew."""
        line = self._lines[shard]
        if name not in line.tables:
            spec = {
                key: value
                for key, value in self._specs[name].items()
                if key in ("name", "dim", *SETTINGS)
            }
            line.tables[name] = int(self._call(line, "create", spec=spec)["number"])
        return line

    def _new_sequence(self) -> int:
        """Above all that shards know of this worker: its number may have been another process's
        before."""
        if not self._identity.has_pushed:
            self._settle([(line, call("tables")) for line in self._lines])  # every shard has said
            self._identity.begin(max(line.sequence for line in self._lines))
        return self._identity.next()


def answer_bytes(n: int, dim: int, dtype: str) -> int:
    """Of the payload that has n rows."""
    scales = 4 * n + -4 * n % 8 if dtype == "i8" else 0
    rows = n * dim * _ELEMENT_BYTES[dtype]
    return rows + -rows % 8 + scales


def rows_in(body: memoryview, n: int, dim: int, dtype: str) -> Floats:
    """The rows of an answer, f32[n, dim]."""
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
    """i64[n]; u64 as the same bits. Raises: ValueError."""
    array = np.asarray(ids)
    if array.dtype == np.uint64:
        array = array.view(np.int64)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise ValueError(f"ids are whole numbers [n], not {array.dtype}{list(array.shape)}")
    return np.ascontiguousarray(array, np.int64)
