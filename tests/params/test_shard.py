"""Shards as workers see them: tables and dense variables over sockets, compared with the same ones
in this process."""

import math
import socket
from contextlib import closing
from typing import Any

import numpy as np
import pytest

from clipper.config import load
from clipper.errors import (
    ClipperError,
    Forbidden,
    InvalidInput,
    StalePush,
    TypeConflict,
    UnknownTable,
    UnknownVariable,
)
from clipper.params import TableSpec
from clipper_container.params.frames import (
    Head,
    MessageKind,
    RefusalCode,
    packed,
    read_head,
    unpacked,
)
from clipper_container.tables import Tables
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer
from tests.params.conftest import TOKEN, Shards, full, ones, zeros

USERS = TableSpec("users", 6, optimizer="adam", seed=4)


def gradients(draw: np.random.Generator, n: int, dim: int = 6) -> Any:
    return draw.standard_normal((n, dim)).astype(np.float32)


@pytest.mark.parametrize("count", [1, 3])
def test_tables_on_shards_are_one_table(shards: Shards, count: int) -> None:
    client, draw = shards.up(count).client(), np.random.default_rng(1)
    client.create(USERS)
    expected = Table("users", 6, optimizer=Optimizer("adam"), seed=4)
    every = np.array([-(1 << 63), -7, -1, 0, 1, 5, 6, 1 << 40, (1 << 63) - 1])
    assert (client.pull("users", every) == expected.pull(every)).all(), (
        "a row begins the same wherever it is"
    )
    for _ in range(30):
        ids = draw.choice(every, int(draw.integers(0, 12)))
        given = gradients(draw, len(ids))
        client.push("users", ids, given)
        if ids.size:
            expected.push(ids, given)
    assert (client.pull("users", every) == expected.pull(every)).all()


def test_a_table_is_created_once(shards: Shards) -> None:
    client, other = shards.up(2).client(), shards.client()
    client.create(USERS)
    client.push("users", [1, 2], ones((2, 6)))
    other.create(USERS)
    assert (other.pull("users", [1, 2]) == client.pull("users", [1, 2])).all()
    with pytest.raises(TypeConflict, match="dim 6 and 7"):
        other.create(TableSpec("users", 7, optimizer="adam", seed=4))
    with pytest.raises(UnknownTable, match="did you mean 'users'"):
        client.pull("user", [1])
    assert other.spec("users") == USERS


def test_the_token_is_read_from_the_settings(
    shards: Shards, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards.up(1)
    monkeypatch.setenv("CLIPPER_PARAMS__TOKEN", TOKEN)
    assert load().params.token == TOKEN
    assert shards.client(token="").call(0, "stats")
    with closing(Tables(shards.addresses)) as tables:
        tables.create("t", 2)
        assert tables.pull("t", [1]).shape == (1, 2)
    monkeypatch.setenv("CLIPPER_PARAMS__TOKEN", "another")
    with pytest.raises(Forbidden, match="CLIPPER_PARAMS__TOKEN"):
        shards.client(token="").call(0, "stats")


def test_values_of_the_first_worker_are_kept(shards: Shards) -> None:
    client, other = shards.up(3).client(), shards.client()
    with pytest.raises(InvalidInput, match="no variables yet"):
        client.pull_variables()
    values = {f"w{i}": full((2, i + 1), i, np.float32) for i in range(6)}
    client.push_model(values, optimizer="momentum")
    other.push_model({name: value + 9 for name, value in values.items()})
    versions, found = other.pull_variables()
    assert found.keys() == values.keys()
    assert all((found[name] == values[name]).all() for name in values)
    assert other.pull_variables(versions)[1] == {}, "an equal version sends nothing"
    step = Optimizer("momentum")
    for _ in range(3):
        client.push_gradients({"w5": ones((2, 6), np.float32)})
    later, news = other.pull_variables(versions)
    assert list(news) == ["w5"]
    weights, state = values["w5"].reshape(-1).copy(), step.state(12)
    for t in range(1, 4):
        step.step(weights, state, ones(12, np.float32), t)
    assert (news["w5"].reshape(-1) == weights).all()
    assert [a - b for a, b in zip(later, versions, strict=True)] == [3, 3, 3], (
        "a push of a model is one version on every shard"
    )


def test_a_step_of_the_model_is_atomic(shards: Shards) -> None:
    client = shards.up(1).client()
    client.create(USERS)
    client.push_model({"w": zeros(3)})
    ids = np.array([1, 2])
    before, version = client.pull("users", ids), client.pull_variables()[0]
    good = {"ids": ids, "gradients": ones((2, 6), np.float32)}
    nan = good["gradients"].copy()
    nan[1, 3] = math.nan
    wrong: list[tuple[dict[str, Any], dict[str, Any], type[ClipperError], str]] = [
        ({"w": ones(4)}, {"users": good}, InvalidInput, r"its gradient is \[4\], and it is \[3\]"),
        ({"v": ones(3)}, {"users": good}, UnknownVariable, "no variable 'v'"),
        ({"w": np.array([1, math.inf, 2])}, {"users": good}, InvalidInput, "NaN or infinity"),
        ({"w": ones(3)}, {"items": good}, UnknownTable, "no table 'items'"),
        (
            {"w": ones(3)},
            {"users": {**good, "gradients": nan}},
            InvalidInput,
            "gradient of id 2 holds NaN",
        ),
        (
            {"w": ones(3)},
            {"users": {**good, "gradients": nan[:, :5]}},
            InvalidInput,
            r"f32\[2, 6\], not \[2, 5\]",
        ),
        (
            {"w": ones(3)},
            {"users": {**good, "ids": ids.astype(np.float32)}},
            InvalidInput,
            "ids are i64",
        ),
        ({"w": ones(3)}, {"users": {"ids": ids}}, InvalidInput, "a map of ids and gradients"),
        ({"w": "nonsense"}, {}, InvalidInput, "could not convert"),
    ]
    for number, (variables, rows, error, text) in enumerate(wrong, 1):
        with pytest.raises(error, match=text):
            client.call(
                0, "push_gradients", variables=variables, rows=rows, worker=3, sequence=number
            )
    for scale in (-1.0, math.nan, math.inf):
        with pytest.raises(InvalidInput, match="scale"):
            client.call(
                0, "push_gradients", variables={"w": ones(3)}, worker=3, sequence=99, scale=scale
            )
    assert (client.pull("users", ids) == before).all()
    assert client.pull_variables()[0] == version
    reply = client.call(
        0, "push_gradients", variables={"w": ones(3)}, rows={"users": good}, worker=3, sequence=1
    )
    assert reply["version"] == version[0] + 1, "a refused push is not remembered as seen"


def test_a_push_of_a_model_is_applied_once(shards: Shards) -> None:
    client = shards.up(1).client()
    client.push_model({"w": zeros(2)})
    fields = {"variables": {"w": ones(2)}, "worker": 8, "sequence": 5}
    assert "repeated" not in client.call(0, "push_gradients", **fields)
    after = client.pull_variables()[1]["w"]
    assert client.call(0, "push_gradients", **fields)["repeated"] is True
    assert (client.pull_variables()[1]["w"] == after).all()
    client.call(0, "push_gradients", variables={}, worker=8, sequence=5000)
    with pytest.raises(StalePush, match="too old to know"):
        client.call(0, "push_gradients", **{**fields, "sequence": 6})


def test_stale_gradients_are_refused_or_slowed(shards: Shards) -> None:
    client = shards.up(1, lag_max=2, lag_slows=True).client()
    client.push_model({"w": zeros(2)}, optimizer="sgd")
    before = [client.pull_variables()[1]["w"][0]]
    for lag in (0, 1, 2):
        version = client.pull_variables()[0][0] - lag
        if version:
            result = client.push_gradients({"w": ones(2)}, versions=[version])
            assert result["accepted"]
        before.append(client.pull_variables()[1]["w"][0])
    now = client.pull_variables()[0][0]
    for _ in range(3):
        client.push_gradients({"w": ones(2)})
    held = client.pull_variables()[1]["w"].copy()
    reply = client.push_gradients({"w": ones(2)}, versions=[now])
    assert not reply["accepted"]
    assert "3 versions old" in reply["why"][0]
    assert (client.pull_variables()[1]["w"] == held).all()


def test_a_stale_gradient_counts_for_less(shards: Shards) -> None:
    client = shards.up(1, lag_slows=True).client()
    client.push_model({"w": zeros(1)}, optimizer="sgd")
    version = client.pull_variables()[0]
    steps = [0.0]
    for _ in range(4):
        client.push_gradients({"w": ones(1)}, versions=version)
        steps.append(float(client.pull_variables()[1]["w"][0]))
    full = steps[1]
    assert np.allclose(np.diff(steps), [full, full, full / 2, full / 3])


def test_clients_without_the_token_get_nothing(shards: Shards) -> None:
    shards.up(1)
    with pytest.raises(Forbidden, match="token"):
        shards.client(token="another").pull("users", [1])
    with socket.socket(socket.AF_UNIX) as line:
        line.connect(shards.addresses[0].removeprefix("unix:"))
        for number, name in enumerate(["stats", "tables", "replica", "synchronize", "nonsense"]):
            body = packed({"call": name})
            line.sendall(Head(MessageKind.CALL, id=number, payload_bytes=len(body)).packed() + body)
            head = read_head(line.recv(64))
            assert (head.kind, head.rows, head.id) == (
                MessageKind.REFUSED,
                RefusalCode.NOT_ADMITTED,
                number,
            )


def test_invalid_arguments_of_a_call_are_reported(shards: Shards) -> None:
    client = shards.up(1).client()
    for name, fields, text in (
        ("nothing", {}, "no call 'nothing'"),
        ("create", {"spec": {"name": "t"}}, "missing required field `dim`"),
        ("create", {"spec": {"name": "t", "dim": 0}}, "`int` >= 1"),
        (
            "create",
            {"spec": {"name": "t", "dim": 3, "optimizer": "newton"}},
            "no optimizer 'newton'",
        ),
        ("push_model", {"variables": [1]}, "are maps"),
        (
            "push_model",
            {"variables": {"w": ones(2)}, "optimizer": "newton"},
            "no optimizer 'newton'",
        ),
        ("push_model", {"variables": {"": ones(2)}}, "a variable's name"),
        ("pull_variables", {"since": "yesterday"}, "since is a version"),
        ("push_gradients", {"worker": -1}, "worker is a whole number"),
        ("push_gradients", {"variables": [1]}, "maps by name"),
    ):
        with pytest.raises(InvalidInput, match=text):
            client.call(0, name, **fields)
    assert not client.call(0, "stats")["initialized"]
    assert client.call(0, "tables")["numbers"] == {}


def test_unused_rows_expire(shards: Shards) -> None:
    shard = shards.up(1).servers[0].shard
    client = shards.client()
    client.create(TableSpec("short", 2, expire_s=60))
    client.create(TableSpec("long", 2))
    for table in ("short", "long"):
        client.push(table, [1, 2, 3], ones((3, 2)))
    client.push("short", [9], ones((1, 2)))
    now = shard.core.stamp
    first = shard.parameters.tables[0]
    _, rows, _ = first.read([1, 2])
    first.write([1, 2], rows, [now - 61, now - 60])
    shard.core.follow(5)
    shard.post(shard.expire)
    while len(first) == 4:
        client.call(0, "stats")
    assert {name: reply["rows"] for name, reply in client.call(0, "stats")["tables"].items()} == {
        "short": 3,
        "long": 3,
    }
    assert first.read([1, 2, 3, 9])[0].tolist() == [False, True, True, True]
    _, changed, _ = shard.core.changed(5)  # what replicas and snapshots are told
    assert {table: ids.tolist() for table, ids in changed.items()} == {0: [1]}
    shard.core.unfollow(5)


def test_a_shard_reports_its_statistics(shards: Shards) -> None:
    client = shards.up(2, replicas=1).client()
    client.create(USERS)
    client.push("users", range(10), ones((10, 6)))
    for number, (_, reply) in enumerate(client.call_all("stats")):
        assert reply["shard"] == number
        assert reply["tables"]["users"]["rows"] == 5
        assert reply["server"]["pushes"] == 1
        assert reply["followers"][0]["shard"] == 1 - number
        assert reply["ready"]
        assert not reply["exposed"]


def test_a_large_map_is_read_as_it_was_written() -> None:
    reply: dict[Any, Any] = {
        "a": np.arange(6, dtype=np.int64).reshape(2, 3),
        "b": [{"c": np.float32(2.5)}],
        7: b"x",
    }
    found: dict[Any, Any] = unpacked(packed(reply))
    assert (found["a"] == reply["a"]).all()
    assert found["b"] == [{"c": 2.5}]
    assert found[7] == b"x"


def test_a_call_posted_to_an_ended_shard_is_not_run(shards: Shards) -> None:
    server = shards.up(1).servers[0]
    shards.lose(0)
    server.shard.post(lambda: pytest.fail("nobody is there to do it"))
    server.end("again")
