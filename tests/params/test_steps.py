"""Several tables and dense variables in one message: pulls, steps, and what is refused."""

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.errors import ClipperError, InvalidInput, UnknownTable, UnknownVariable
from clipper.params import Client, TableSpec
from clipper_container.params.connection import ShardRequest
from clipper_container.params.frames import VARIABLE, Head, MessageKind, RefusalCode
from clipper_core.params.optimizer import Optimizer
from clipper_core.params.row_parts import combine, distinct, put_rows, split_parts
from clipper_core.runtime.status import Status
from tests.params.conftest import Shards, full, ones, zeros

IDS = st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 5), max_size=30)
Given = Any
SGD: Given = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}}
DIMS = {"a": 3, "b": 1, "c": 8}


def created(client: Client, **settings: Given) -> dict[str, Given]:
    """Create tables of three widths, and return ids and gradients of each."""
    draw = np.random.default_rng(5)
    for name, dim in DIMS.items():
        client.create(TableSpec(name, dim, initializer="normal", **settings))
    ids = {name: draw.integers(-20, 20, 40) for name in DIMS}
    return {name: (ids[name], ones((40, DIMS[name]), np.float32)) for name in DIMS}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "i8"])
def test_tables_in_one_message_have_the_rows_of_each(
    shards: Shards, count: int, dtype: str
) -> None:
    client = shards.up(count).client()
    given = created(client)
    client.push_gradients(rows=given)
    ids = {name: each for name, (each, _) in given.items()} | {"b": np.empty(0, np.int64)}
    for found in (client.pull_tables(ids, dtype), client.prefetch_tables(ids, dtype).result()):
        assert found.keys() == ids.keys()
        for name, rows in found.items():
            assert rows.shape == (ids[name].size, DIMS[name])
            assert (rows == client.pull(name, ids[name], dtype)).all()
    assert client.pull_tables({}) == {}


@pytest.mark.parametrize("count", [1, 3])
def test_step_is_what_the_optimizers_compute(shards: Shards, count: int) -> None:
    client, draw = shards.up(count).client(), np.random.default_rng(2)
    rule = Optimizer("adam", rate=0.1)
    dense = {name: draw.standard_normal((4, n)).astype(np.float32) for n, name in enumerate("xyz")}
    client.push_model(dense, optimizer="adam", optimizer_settings={"rate": 0.1})
    rows = created(client, **SGD)
    before = {name: client.pull(name, ids) for name, (ids, _) in rows.items()}
    states = {name: rule.state(value.size) for name, value in dense.items()}
    for turn in range(1, 4):
        gradients = {
            name: draw.standard_normal(v.shape).astype(np.float32) for name, v in dense.items()
        }
        reply = client.push_gradients(gradients, rows if turn == 1 else None)
        assert (reply["accepted"], reply["versions"]) == (True, [turn + 1] * count)
        for name, value in dense.items():
            rule.step(value.reshape(-1), states[name], gradients[name].reshape(-1), t=turn)
    versions, found = client.pull_variables()
    assert versions == [4] * count
    for name, value in dense.items():
        np.testing.assert_array_equal(found[name], value)
    for name, (ids, _) in rows.items():
        times = np.array([(ids == one).sum() for one in ids], np.float32)[:, None]
        np.testing.assert_allclose(
            client.pull(name, ids), before[name] - times, rtol=1e-5, atol=1e-5
        )
    assert client.pull_variables(versions)[1] == {}, "nothing is newer"


def test_step_that_is_sent_again_is_applied_once(shards: Shards) -> None:
    client = shards.up(2).client()
    rows = created(client, **SGD)
    client.push_model({"w": zeros(2)}, optimizer="sgd", optimizer_settings={"rate": 1.0})
    reply = client.push_gradients({"w": ones(2)}, rows)
    before = client.pull_tables({name: ids for name, (ids, _) in rows.items()})
    again = client.push_gradients({"w": ones(2)}, rows, sequence=reply["sequence"])
    assert again["accepted"]
    assert client.pull_variables()[1]["w"].tolist() == [-1, -1]
    for name, (ids, _) in rows.items():
        assert (client.pull(name, ids) == before[name]).all()


@pytest.mark.parametrize(
    "wrong", ["nan row", "nan variable", "width", "shape", "table", "variable"]
)
def test_step_with_one_wrong_part_changes_nothing(shards: Shards, wrong: str) -> None:
    client = shards.up(1).client()
    rows = created(client, **SGD)
    client.push_model({"w": zeros(2)}, optimizer="sgd")
    before = client.pull_tables({name: ids for name, (ids, _) in rows.items()})
    bad = ones((40, 8), np.float32)
    bad[7, 3] = np.nan
    cases: dict[str, tuple[Given, Given, type[ClipperError], str]] = {
        "nan row": ({}, {"c": (rows["c"][0], bad)}, InvalidInput, f"id {rows['c'][0][7]} holds"),
        "nan variable": ({"w": full(2, np.nan)}, {}, InvalidInput, "variable 'w'"),
        "width": ({}, {"c": (rows["c"][0], bad[:, :3])}, InvalidInput, "f32"),
        "shape": ({"w": ones(3)}, {}, InvalidInput, r"\[3\], and it is \[2\]"),
        "table": ({}, {"d": (rows["c"][0], bad)}, UnknownTable, "'d'"),
        "variable": ({"v": ones(2)}, {}, UnknownVariable, "'v'"),
    }
    dense, extra, kind, text = cases[wrong]
    with pytest.raises(kind, match=text):
        client.push_gradients({"w": ones(2), **dense}, {**rows, **extra})
    for name, (ids, _) in rows.items():
        assert (client.pull(name, ids) == before[name]).all()
    assert client.pull_variables()[1]["w"].tolist() == [0, 0]
    assert client.push_gradients({"w": ones(2)}, rows)["versions"] == [2]


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "lion", "rmsprop", "rowwise_adagrad"])
@pytest.mark.parametrize("together", [False, True])
def test_rows_do_not_depend_on_the_number_of_shards(
    tmp_path: Path, optimizer: str, together: bool
) -> None:
    found = []
    for count in (1, 3):
        running, draw = Shards(tmp_path / str(count)), np.random.default_rng(1)
        running.root.mkdir()
        client = running.up(count).client()
        client.create(TableSpec("t", 4, optimizer=optimizer))
        for _ in range(10):
            ids = draw.integers(0, 30, 3)  # often none of some shard
            by = draw.standard_normal((3, 4)).astype(np.float32)
            if together:
                client.push_gradients(rows={"t": (ids, by)})
            else:
                client.push("t", ids, by)
        found.append(client.pull("t", np.arange(30)).tobytes())
        running.close()
    assert found[0] == found[1]


def send(client: Client, kind: int, rows: int, payload: bytes) -> tuple[int, int]:
    """Send a message as it stands. Returns (kind of the answer, why)."""
    connection = client.connections[0]
    request = ShardRequest(Head(kind, rows=rows, payload_bytes=len(payload)), (payload,))
    connection.send(request)
    head = connection.wait(request)
    return head.kind, head.rows


def part(table: int, n: int) -> bytes:
    return struct.pack("<II", table, n)


@pytest.mark.parametrize("kind", [MessageKind.PULL_TABLES, MessageKind.PUSH_STEP])
def test_parts_that_do_not_fit_the_payload_are_refused(shards: Shards, kind: int) -> None:
    client = shards.up(1).client()
    created(client)
    client.push_model({"w": zeros(2)})
    many = 0xFFFFFFFF
    for rows, payload in (
        (1, b""),
        (many, part(0, 1)),
        (1, part(0, 1)),
        (1, part(0, many)),
        (2, part(0, many) + part(0, many) + bytes(64)),
        (1, part(0, 0) + bytes(8)),
        (1, part(1, 1) + bytes(24)),
    ):
        assert send(client, kind, rows, payload) == (MessageKind.REFUSED, Status.BAD_FRAME)
    assert send(client, kind, 1, part(3, 0)) == (MessageKind.REFUSED, Status.UNKNOWN)
    if kind == MessageKind.PUSH_STEP:
        for variable in (part(VARIABLE, 1), part(VARIABLE | 1, 2), part(VARIABLE, many)):
            answer = send(client, kind, 1, variable + bytes(8))
            assert answer == (MessageKind.REFUSED, Status.BAD_FRAME)
    assert len(client.pull("a", [1])) == 1, "the connection goes on"


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_random_parts_are_answered(shared: Client, data: st.DataObject) -> None:
    numbers = st.integers(0, 3) | st.just(VARIABLE) | st.integers(0, 2**32 - 1)
    parts = data.draw(st.lists(st.tuples(numbers, st.integers(0, 40)), max_size=5))
    body = b"".join(part(*one) for one in parts) + bytes(8 * data.draw(st.integers(0, 40)))
    kind = data.draw(st.sampled_from([MessageKind.PULL_TABLES, MessageKind.PUSH_STEP]))
    answer, why = send(shared, kind, data.draw(st.integers(0, 6)), body)
    assert answer == MessageKind.ANSWER or why in (Status.BAD_FRAME, Status.UNKNOWN)
    assert len(shared.pull("a", [1])) == 1


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Given:
    running = Shards(tmp_path_factory.mktemp("set"))
    client = running.up(1).client()
    created(client)
    client.push_model({"w": zeros(2)})
    yield client
    running.close()


def test_synchronous_shards_refuse_a_step_in_one_message(shards: Shards) -> None:
    client = shards.up(1, mode="sync", grads_to_wait=1).client()
    created(client)
    kind, why = send(client, MessageKind.PUSH_STEP, 0, b"")
    assert (kind, why) == (MessageKind.REFUSED, RefusalCode.CALL_FAILED)


# -- ids and rows of a worker


@given(IDS)
def test_distinct_ids_and_their_positions_are_computed(ids: list[int]) -> None:
    each, where = distinct(np.array(ids, np.int64))
    assert each.tolist() == list(dict.fromkeys(ids))
    assert each[where].tolist() == ids


@given(IDS)
def test_gradients_are_summed_by_id(ids: list[int]) -> None:
    gradients = np.arange(2 * len(ids), dtype=np.float32).reshape(-1, 2)
    each, sums = combine(np.array(ids, np.int64), gradients)
    expected: dict[int, Given] = {}
    for one, gradient in zip(ids, gradients, strict=True):
        expected[one] = expected.get(one, 0) + gradient
    assert each.tolist() == list(expected)
    np.testing.assert_array_equal(sums, np.array(list(expected.values())).reshape(-1, 2))


@given(st.lists(IDS, max_size=4), st.integers(1, 5))
def test_parts_are_split_by_shard_and_merged(parts: list[list[int]], shards: int) -> None:
    each = [np.array(part, np.int64) for part in parts]
    back = [full((len(part), 1), np.nan, np.float32) for part in parts]
    for shard, numbers, counts, ids, places in split_parts(each, shards):
        assert all(one % shards == shard for one in ids.tolist())
        at = 0
        for number, count in zip(numbers, counts, strict=True):
            mine = places[at : at + count]
            assert (np.diff(mine) > 0).all()
            assert (each[number][mine] == ids[at : at + count]).all()
            put_rows(back[number], mine, mine.astype(np.float32)[:, None])
            at += count
        assert at == ids.size
    for rows in back:
        assert rows.ravel().tolist() == list(range(len(rows)))


def test_rows_are_not_written_outside_the_array() -> None:
    out, rows = zeros((2, 3), np.float32), ones((1, 3), np.float32)
    for place in (2, -1, 2**62):
        with pytest.raises(InvalidInput, match="outside"):
            put_rows(out, np.array([place]), rows)
    with pytest.raises(InvalidInput, match="fit"):
        put_rows(out, np.array([0, 1]), rows)
