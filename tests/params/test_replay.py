"""Pushes that followers apply themselves: a copy equals its primary to the last bit."""

from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError
from clipper.params import TableSpec
from clipper.params.shard.replication import followers as replication
from clipper_container.params.frames import Head, MessageKind
from clipper_core.params.optimizer import Optimizer
from tests.params.conftest import Shards, until, zeros
from tests.params.test_streams import assert_copied, receiver, streams

assert receiver  # a fixture
CLIPPED: Any = {"clip_value": 0.9, "clip_norm": 1.5, "l2": 0.01}
SPECS = (
    *(TableSpec(name, 5, optimizer=name, initializer="normal") for name in Optimizer.SETTINGS),
    *(
        TableSpec(f"clipped-{name}", 3, optimizer=name, optimizer_settings=CLIPPED)
        for name in Optimizer.SETTINGS
    ),
    *(
        TableSpec(f"{dtype}-{name}", 5, optimizer=name, initializer="normal", dtype=dtype)
        for dtype in ("f16", "bf16", "i8")
        for name in ("sgd", "adam", "rowwise_adagrad")
    ),
    TableSpec("admits", 3, admit_after=3),
    TableSpec("evicts", 3, rows_max=40, evicts=True),
    TableSpec("fills", 3, rows_max=40),
)


def replayed(shards: Shards) -> int:
    return sum(server.shard.core.stats()["replayed"] for server in shards.servers.values())


@pytest.mark.parametrize("seed", range(2))
def test_copy_that_replays_equals_its_primary_with_every_optimizer(
    shards: Shards, seed: int
) -> None:
    draw = np.random.default_rng(seed)
    client = shards.up(2, replicas=1, lag_slows=True).client()
    dense = list(Optimizer.SETTINGS)[seed::3][draw.integers(0, 3)]
    client.push_model({"w": zeros(3), "b": zeros((2, 2))}, optimizer=dense)
    for spec in SPECS:
        client.create(spec)
    until(lambda: streams(shards))
    sent = 0
    for turn in range(40):
        each = {}
        for k in draw.choice(len(SPECS), draw.integers(1, 4), replace=False):
            spec, ids = SPECS[k], draw.integers(-60, 60, draw.integers(0, 90))
            size = (ids.size, spec.dim)
            each[spec.name] = ids, (10.0 ** draw.uniform(-6, 4, size)).astype(np.float32)
        variables: Any = {"w": draw.standard_normal(3), "b": draw.standard_normal((2, 2))}
        if turn % 2:
            name, (ids, rows) = next(iter(each.items()))
            old = turn % 3 == 0  # an old gradient has a smaller rate
            client.connections[0].version -= 3 * old
            client.push(name, ids, rows, scale=float(draw.uniform(0.1, 2)), versioned=old)
        else:
            client.push_gradients(variables if turn % 4 else {}, each)
        if turn % 20 == 19:
            assert_copied(shards)
            for shard in (0, 1):  # what is written is sent as rows, between pushes
                client.write("adam", [2 * turn + shard], draw.standard_normal((1, 5)), steps=turn)
            client.erase("adam", [0, 1, 2, 3])
            client.alter("adam", optimizer_settings={"rate": 0.01 * turn})
            sent, _ = replayed(shards), until(lambda: streams(shards))
    assert sent > 10
    assert_copied(shards)


def test_followers_of_another_version_are_sent_rows(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replication, "REPLAYS", float("nan"))  # equal to nobody's
    client = shards.up(2, replicas=1).client()
    client.create(SPECS[0])
    until(lambda: streams(shards))
    client.push(SPECS[0].name, np.arange(20), np.ones((20, 5), np.float32))
    assert replayed(shards) == 0
    assert_copied(shards)


def test_push_that_does_not_fit_the_copy_is_refused_and_not_acknowledged(receiver: Any) -> None:
    ours, one = receiver
    part = np.dtype("<u4, <u4, <u8, <f4, <f4, <f4, <u4")

    def push(table: int, n: int, body: bytes) -> bytes:
        payload = np.array([8, 1], np.uint64).tobytes()  # worker and sequence
        payload += np.array([(table, n, 1, 0.1, 1, 1, 7)], part).tobytes() + body
        head = Head(MessageKind.REPLAY, rows=1, worker=1, sequence=5, payload_bytes=len(payload))
        return head.packed() + payload

    bad = [
        push(0, 1, b""),
        push(0, 1, bytes(24)),
        push(7, 1, bytes(16)),
        push(1 << 31, 1, bytes(8)),
        push(0, 0xFFFFFFFF, bytes(16)),
        push(0, 1, bytes(8) + np.full(2, np.nan, np.float32).tobytes()),
        Head(MessageKind.REPLAY, rows=9, worker=1, payload_bytes=64).packed() + bytes(64),
        Head(MessageKind.REPLAY, worker=9, payload_bytes=16).packed() + bytes(16),
    ]
    ours.settimeout(0.0)
    for data in bad:
        ours.sendall(data)
        assert one.receive(1.0) is not None
        with pytest.raises(ClipperError, match="do not fit"):
            one.apply()
        with pytest.raises(BlockingIOError):
            ours.recv(1)
    ours.sendall(push(0, 1, bytes(16)))
    assert one.receive(1.0).position == 5
    one.apply()
    assert len(ours.recv(100)) == 64
