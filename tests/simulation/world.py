"""A small world by seed: one engine, simulated containers and a network that cuts bytes anywhere,
all on one virtual clock.

Containers are Python objects that speak frames. Each answers a function of the input in which the
model's number is written, so that an answer tells whose it is. What goes wrong is drawn per batch
from the container's list of faults.

The clock moves to the next event or to the time at which the engine asked to be stepped, whichever
is first: if the engine asks too late, a deadline is missed and the run says so. To see a run again:
`python -m pytest -k "test_name and seed"`.
"""

import heapq
import itertools
import mmap
import os
import struct
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
from clipper_core.results.future import Future
from clipper_core.runtime.status import Status
from clipper_core.scheduling.scheduler import EngineEvent
from clipper_core.wire.codec import (
    Flag,
    Kind,
    decode_header,
    decode_v1,
    encode_frame,
    encode_rows,
    message_bytes_v1,
    open_rows,
    open_runs,
)

TICK_US = 64
HEARTBEAT_MS = 50
NUMPY = {"f64": "f8", "f32": "f4", "i32": "i4"}
WAYS_TO_END = {
    Status.OK,
    Status.DEADLINE,
    Status.DROPPED,
    Status.NO_REPLICA,
    Status.MODEL_ERROR,
    Status.BAD_OUTPUT,
    Status.REPLICA_LOST,
    Status.CANCELLED,
    Status.FULL,
}


@dataclass
class Kin:
    """A simulated model: the rows that it takes, and its output for them."""

    name: str
    dtype: str
    shape: tuple[int, ...] = ()
    number: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def row(self, k: int) -> Any:
        if self.dtype == "str":
            return f"{k}:" + "x" * (k % 41)
        if self.dtype == "bytes":
            return f"{k}:".encode() + b"\xff" * (k % 23)
        if self.shape == (-1,):
            return np.full(1 + k % 7, k, NUMPY[self.dtype])
        row = np.zeros(self.shape, NUMPY[self.dtype])
        row.flat[0], row.flat[-1] = k, k % 13
        return row

    def key(self, row: Any) -> int:
        """Return the k of which the row was made; check the whole row."""
        if isinstance(row, (bytes, str)):
            k = int(row.partition(":" if isinstance(row, str) else b":")[0])  # type: ignore[arg-type]
        else:
            k = int(np.ravel(row)[0])
        wanted = self.row(k)
        assert np.array_equal(row, wanted) if isinstance(wanted, np.ndarray) else row == wanted, (
            "a row was damaged"
        )
        return k

    def output(self, k: int) -> float:
        return float(k * 64 + self.number)


@dataclass(frozen=True)
class Query:
    kin: Kin
    keys: tuple[int, ...]
    future: Future
    deadline_us: int


class World:
    def __init__(self, seed: int, **limits: Any) -> None:
        self.seed, self.rng = seed, Random(seed)
        options = {
            "cache_bytes_max": 1 << 20,
            "tasks_max": 1 << 14,
            "heartbeat_ms": HEARTBEAT_MS,
            "hello_ms": 400,
        } | limits
        self.engine = Engine(manual_clock=True, seed=seed, **options)
        self.now_us = 0
        self.wake_us = 0
        self.events: list[tuple[int, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.containers: list[Container] = []
        self.ends: dict[int, Container] = {}  # those that are connected, by connection
        self.models: list[tuple[Kin, Model]] = []
        self.queries: list[Query] = []
        self.evaluations: Counter[tuple[int, int]] = Counter()
        self.frames: Counter[str] = Counter()
        self.ended_status: list[Status] = []
        self.dropped_us: dict[int, int] = {}

    # -- time

    def at(self, when_us: float, what: Callable[[], None]) -> None:
        heapq.heappush(self.events, (max(int(when_us), self.now_us), next(self.order), what))

    def after(self, us: float, what: Callable[[], None]) -> None:
        self.at(self.now_us + us, what)

    def run(self, until_us: int) -> None:
        """Run until this time."""
        while True:
            next_us = min(self.events[0][0], self.wake_us) if self.events else self.wake_us
            if next_us > until_us:
                break
            self.now_us = max(self.now_us, next_us)
            while self.events and self.events[0][0] <= self.now_us:
                heapq.heappop(self.events)[2]()
            self.step()
        self.now_us = until_us

    def pass_us(self, us: int) -> None:
        self.run(self.now_us + us)

    def step(self) -> None:
        self.wake_us = self.engine.step(self.now_us)
        assert self.wake_us > self.now_us, f"seed {self.seed}: the loop would spin"
        for kind, conn, _, status, _ in self.engine.events():
            if kind == EngineEvent.HELLO_RECEIVED and conn in self.ends:
                self.ends[conn].say_welcome()
            elif kind == EngineEvent.DISCONNECTED:
                self.ended_status.append(status)
        for container in list(self.ends.values()):
            container.flush()

    # -- models and queries

    def model(
        self, name: str, dtype: str = "f64", shape: tuple[int, ...] = (4,), **options: Any
    ) -> Kin:
        kin = Kin(name, dtype, () if dtype in ("str", "bytes") else shape, len(self.models))
        kin.options = options
        model = Model(self.engine, name, len(self.models) + 1, dtype, kin.shape, **options)
        self.models.append((kin, model))
        return kin

    def submit(self, kin: Kin, keys: int | list[int], slo_us: int, salt: int = 0) -> Query:
        model = self.models[kin.number][1]
        if self.engine.now_us() != self.now_us:
            self.step()  # or the engine would reckon the deadline from its last step
        if isinstance(keys, int):
            future = model.predict(kin.row(keys), slo_us / 1000, salt)
            keys = [keys]
        else:
            rows: Any = [kin.row(k) for k in keys]
            future = model.predict_many(
                np.array(rows) if kin.shape and kin.shape != (-1,) else rows, slo_us / 1000, salt
            )
        query = Query(kin, tuple(keys), future, self.now_us + slo_us)
        self.queries.append(query)
        self.wake_us = self.now_us  # a submitter wakes the loop
        self.at(query.deadline_us + TICK_US + 1, lambda: self._is_over(query))
        return query

    def _is_over(self, query: Query) -> None:
        assert query.future.done(), (
            f"seed {self.seed}: a query due at {query.deadline_us} is open at {self.now_us} us"
        )

    def snapshot(self, kin: Kin) -> dict[str, Any]:
        found: dict[str, Any] = self.engine.snapshot()["models"][kin.number]
        return found

    # -- judgement

    def check(self) -> Counter[Status]:
        """Check that each query has ended once, with a known status, and that delivered outputs are
        right. Return how they ended."""
        ended: Counter[Status] = Counter()
        for query in self.queries:
            assert query.future.done(), f"seed {self.seed}: a future never ended"
            for i, k in enumerate(query.keys):
                status = query.future.status(i)
                ended[status] += 1
                assert status in WAYS_TO_END, f"seed {self.seed}: {status!r}"
                if status == Status.OK:
                    assert query.future.output(i) == query.kin.output(k), (
                        f"seed {self.seed}: a wrong value for {k}"
                    )
        snapshot = self.engine.snapshot()
        assert snapshot["issued"] == snapshot["answered"], f"seed {self.seed}"
        return ended

    def check_rest(self) -> None:
        """Check that nothing is left once all queries have ended: no row is queued, and every cell
        takes a row again."""
        for container in self.containers:
            container.comes_back = False
            container.close()
        self.pass_us(30_000)
        for kin, model in self.models:
            assert self.snapshot(kin)["queued"] == 0, (
                f"seed {self.seed}: rows are queued at the end"
            )
            capacity = kin.options.get("lane_rows", 16384)
            if capacity <= 1024:
                futures = [
                    model.predict(kin.row(10_000_000 + i), 1, salt=self.seed + 7)
                    for i in range(capacity)
                ]
                assert not any(future.done() for future in futures), (
                    f"seed {self.seed}: a cell of {kin.name} is lost"
                )
                assert model.predict(kin.row(1), 1, salt=self.seed + 8).status() == Status.FULL
                self.pass_us(30_000)
                assert {future.status() for future in futures} == {Status.NO_REPLICA}
        snapshot = self.engine.snapshot()
        assert snapshot["issued"] == snapshot["answered"]
        assert snapshot["queue_bytes"] == 0, f"seed {self.seed}: row memory leaked"


FAULTS = [
    "die_before",
    "die_half",
    "die_after",
    "hang",
    "stuck",
    "slow",
    "raise",
    "bad_rows",
    "too_few",
    "too_many",
]
FAULTS += [
    "wrong_dtype",
    "twice",
    "old_id",
    "future_id",
    "skip",
    "flip_header",
    "flip_payload",
    "truncate",
    "huge",
    "goodbye",
]
FAULTS_V1 = ["die_before", "die_half", "die_after", "hang", "slow"]


class Container:
    """A simulated container process: it connects, sends HELLO, evaluates batches one after another,
    and misbehaves as set."""

    def __init__(
        self,
        world: World,
        kin: Kin,
        *,
        a_us: float = 300,
        b_us: float = 10,
        faults: list[str] | None = None,
        fault_share: float = 0.0,
        protocol: int = 2,
        checked: bool = True,
        comes_back: bool = True,
        hello_after_us: int = 0,
        latency_us: int = 50,
        chunk_max: int = 1 << 20,
        shares: bool = False,
        **attach: Any,
    ) -> None:
        self.world, self.kin, self.rng = world, kin, Random(world.rng.random())
        self.a_us, self.b_us, self.faults, self.fault_share = a_us, b_us, faults or [], fault_share
        self.protocol, self.checked, self.comes_back, self.hello_after_us = (
            protocol,
            checked,
            comes_back,
            hello_after_us,
        )
        self.latency_us, self.chunk_max, self.attach, self.shares = (
            latency_us,
            chunk_max,
            attach,
            shares,
        )
        self.passed: list[int] = []
        self.regions: dict[int, tuple[mmap.mmap, int, int]] = {}
        self.batches: list[int] = []
        self.sent_us: list[int] = []
        self.late_rows = 0
        self.conn = 0
        self.life = 0
        world.containers.append(self)
        self.dial()

    # -- the connection

    def dial(self) -> None:
        world = self.world
        self.life += 1
        self.inbox, self.outbox_us, self.free_us = b"", 0, world.now_us
        self.welcomed, self.hung_until_us, self.skipped = False, 0, 0
        self.blocked = False
        self.conn = world.engine.open(world.now_us, passes=self.shares)
        if self.conn == 0:
            self._come_back()
            return
        world.ends[self.conn] = self
        life = self.life
        world.after(
            self.hello_after_us,
            lambda: self._if_alive(life, lambda: self.transmit(encode_frame(Kind.HELLO, b"{}"))),
        )
        self._beat(life)

    def _if_alive(self, life: int, what: Callable[[], None]) -> None:
        if self.life == life and self.conn:
            what()

    def _beat(self, life: int) -> None:
        def beat() -> None:
            if self.welcomed and self.protocol == 2 and self.world.now_us >= self.hung_until_us:
                self.transmit(encode_frame(Kind.HEARTBEAT))
            self._beat(life)

        self.world.after(HEARTBEAT_MS * 1000, lambda: self._if_alive(life, beat))

    def say_welcome(self) -> None:
        """Attach the connection and send WELCOME, as the control thread does."""
        self.world.engine.attach(
            self.conn,
            self.kin.number,
            b"welcome",
            protocol=self.protocol,
            checked=self.checked,
            shared=self.shares,
            **self.attach,
        )
        self.world.wake_us = self.world.now_us

    def transmit(self, data: bytes) -> None:
        """Send bytes to the engine, cut anywhere, in order, each piece a little later."""
        life, at = self.life, 0
        when = max(self.world.now_us + self.latency_us, self.outbox_us)
        while at < len(data):
            n = self.rng.randint(1, self.chunk_max) if len(data) - at > 1 else 1
            piece = data[at : at + n]
            self.world.at(
                when, lambda piece=piece: self._if_alive(life, lambda: self._arrive(piece))
            )  # type: ignore[misc]
            at += n
            when += self.rng.randint(0, 20)
        self.outbox_us = when

    def _arrive(self, piece: bytes) -> None:
        if not self.world.engine.receive(self.conn, piece, self.world.now_us):
            self.world.frames["refused"] += 1
            self.close()

    def close(self) -> None:
        """Close the connection at both ends."""
        if self.conn:
            del self.world.ends[self.conn]
            self.world.engine.lost(self.conn, self.world.now_us)
            self.conn = 0
            self.life += 1
            self._unmap()
            self._come_back()

    def _unmap(self) -> None:
        while self.passed:
            os.close(self.passed.pop())
        for memory, _, _ in self.regions.values():
            memory.close()
        self.regions.clear()

    def _come_back(self) -> None:
        def dial() -> None:
            if self.comes_back and not self.conn:
                self.dial()

        self.world.after(self.rng.randint(100, 20_000), dial)

    def reset_after(self, us: float) -> None:
        life = self.life
        self.world.after(us, lambda: self._if_alive(life, self.close))

    def flush(self) -> None:
        """Read what the engine has to send, unless the socket is full; close what it wants
        closed."""
        if self.blocked:
            return
        engine = self.world.engine
        data = engine.outgoing(self.conn, self.world.now_us, self.passed)
        if data:
            self.sent_us.append(self.world.now_us)
            life = self.life
            self.world.after(
                self.latency_us, lambda: self._if_alive(life, lambda: self.receive(data))
            )
        if engine.wants_close(self.conn):
            self.close()

    # -- batches

    def receive(self, data: bytes) -> None:
        self.inbox += data
        while self.conn and self._one():
            pass

    def _one(self) -> bool:
        if self.welcomed and self.protocol == 1:
            return self._one_v1()
        header = decode_header(self.inbox)
        if header is None or len(self.inbox) < 64 + header.payload_bytes:
            return False
        payload, self.inbox = (
            self.inbox[64 : 64 + header.payload_bytes],
            self.inbox[64 + header.payload_bytes :],
        )
        self.world.frames[Kind(header.kind).name] += 1
        if header.kind == Kind.WELCOME:
            self.welcomed = True
        elif header.kind == Kind.REGION:
            self._map(payload)
        elif header.kind == Kind.PREDICT and header.flags & Flag.SHARED:
            self.world.frames["SHARED"] += 1
            runs = open_runs(header, payload)
            self._take(
                [self.kin.key(row) for row in self._rows_of(runs)], header.id, header.time_us, runs
            )
        elif header.kind == Kind.PREDICT:
            rows = open_rows(header, payload)
            data: Any = rows.data
            if rows.lengths is not None:
                ends = np.cumsum(rows.lengths).tolist()
                data = [
                    rows.data[end - n : end]
                    for end, n in zip(ends, rows.lengths.tolist(), strict=True)
                ]
                if self.kin.dtype in ("str", "bytes"):
                    data = [
                        row.tobytes().decode() if self.kin.dtype == "str" else row.tobytes()
                        for row in data
                    ]
            self._take([self.kin.key(row) for row in data], header.id, header.time_us)
        elif header.kind == Kind.GOODBYE:
            self.close()
        return True

    def _map(self, payload: bytes) -> None:
        number, rows, row_bytes = struct.unpack("<QQQ", payload)
        fd = self.passed.pop(0)
        self.regions[number] = mmap.mmap(fd, rows * row_bytes, prot=mmap.PROT_READ), rows, row_bytes
        os.close(fd)

    def _rows_of(self, runs: list[tuple[int, int, int]]) -> list[Any]:
        """Return the rows that are there now."""
        found: list[Any] = []
        for number, first, count in runs:
            memory, rows, row_bytes = self.regions[number]
            assert first + count <= rows
            part = np.frombuffer(
                memory[first * row_bytes : (first + count) * row_bytes], NUMPY[self.kin.dtype]
            )
            found += list(part.reshape(count, *self.kin.shape))
        return found

    def _one_v1(self) -> bool:
        if len(self.inbox) < 9:
            return False
        n = message_bytes_v1(self.inbox[:9])
        if len(self.inbox) < n:
            return False
        message, self.inbox = self.inbox[:n], self.inbox[n:]
        self._take([self.kin.key(row) for row in decode_v1(message)], 0, 0)
        return True

    def _take(self, keys: list[int], batch_id: int, left_us: int, runs: Any = None) -> None:
        """Receive a batch. It is evaluated after those before it."""
        self.batches.append(len(keys))
        for k in keys:
            self.world.evaluations[self.kin.number, k] += 1
        fault = (
            self.rng.choice(self.faults)
            if self.faults and self.rng.random() < self.fault_share
            else ""
        )
        took = (
            (self.a_us + self.b_us * len(keys))
            * self.rng.uniform(0.95, 1.05)
            * (10 if fault == "slow" else 1)
        )
        if fault == "die_before":
            self.reset_after(0)
        if fault == "hang":
            self.hung_until_us = self.world.now_us + self.rng.choice([20_000, 120_000, 400_000])
        if fault == "stuck":
            took += self.rng.choice([20_000, 120_000, 400_000])
        begun = max(self.free_us, self.world.now_us)
        self.free_us = max(begun + int(took), self.hung_until_us)
        if (
            left_us
            and self.free_us + self.latency_us > self.world.now_us - self.latency_us + left_us
        ):
            self.late_rows += len(keys)
        life = self.life
        self.world.at(
            self.free_us,
            lambda: self._if_alive(life, lambda: self._answer(keys, batch_id, fault, runs)),
        )

    def _answer(self, keys: list[int], batch_id: int, fault: str, runs: Any) -> None:
        if runs is not None:
            # a model that reads its inputs last: if rows have changed meanwhile, its outputs are of
            # those
            seen = [self.kin.key(row) for row in self._rows_of(runs)]
            self.world.frames["rows changed"] += sum(
                a != b for a, b in zip(keys, seen, strict=True)
            )
            keys = seen
        if self.protocol == 1:
            frame = np.array([self.kin.output(k) for k in keys], "<f8").tobytes()
        else:
            frame = self._frame(keys, batch_id, fault)
        if fault == "die_half":
            frame = frame[: len(frame) // 2]
        self.transmit(frame)
        if fault in ("die_half", "die_after"):
            self.reset_after(self.outbox_us - self.world.now_us + 1)

    def _frame(self, keys: list[int], batch_id: int, fault: str) -> bytes:
        outputs = np.array([self.kin.output(k) for k in keys])

        def reply(values: Any = outputs, number: int = batch_id, **more: Any) -> bytes:
            return encode_rows(Kind.REPLY, values, id=number, checked=self.checked, **more)

        whole = reply()
        if fault == "raise":
            return encode_frame(Kind.FAILURE, b"Traceback: boom", id=batch_id, checked=self.checked)
        if fault == "bad_rows":
            bad = [self.rng.random() < 0.3 for _ in keys]
            return reply(
                np.where(bad, 0.0, outputs), status=np.array(bad, "u1"), text="some rows are bad"
            )
        if fault == "too_few":
            return (
                reply(outputs[:-1])
                if len(keys) > 1
                else encode_frame(Kind.REPLY, id=batch_id, dtype=12, rows=0)
            )
        if fault == "too_many":
            return reply(np.append(outputs, 1.0))
        if fault == "wrong_dtype":
            return reply(outputs.astype("f4"))
        if fault == "goodbye":
            return whole + encode_frame(Kind.GOODBYE)
        return self._malformed(whole, reply, batch_id, fault)

    def _malformed(
        self, whole: bytes, reply: Callable[..., bytes], batch_id: int, fault: str
    ) -> bytes:
        """Send frames that no correct container sends, or in an order that none uses."""
        wrong = -np.ones(3)
        if fault == "twice":
            return whole + whole
        if fault == "old_id":
            return (
                reply(wrong, number=self.rng.randrange(batch_id)) if batch_id > 1 else b""
            ) + whole
        if fault == "future_id":
            return reply(wrong, number=batch_id + self.rng.choice([2, 3, 1 << 40])) + whole
        if fault == "skip":
            return b""
        if fault in ("flip_header", "flip_payload"):
            low, high = (
                (0, 64) if fault == "flip_header" else (64, len(whole)) if self.checked else (0, 64)
            )
            at = self.rng.randrange(low, high)
            return whole[:at] + bytes([whole[at] ^ (1 << self.rng.randrange(8))]) + whole[at + 1 :]
        if fault == "truncate" and self.checked:
            return whole[: self.rng.randrange(1, len(whole))] + encode_frame(Kind.HEARTBEAT) * 2
        if fault == "huge":
            return huge_frame(batch_id)
        return whole


def huge_frame(batch_id: int) -> bytes:
    """Return a valid header that declares 16 TB."""
    head = struct.pack(
        "<4sBBBBHHIQ4IQQI",
        b"CLPR",
        2,
        Kind.REPLY,
        12,
        0,
        0,
        0,
        1,
        batch_id,
        0,
        0,
        0,
        0,
        1 << 44,
        0,
        0,
    )
    return head + struct.pack("<I", zlib.crc32(head))
