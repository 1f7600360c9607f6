"""Batches by cost, from `deploy` to the statistics."""

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

import clipper
from clipper.cli.catalog.specification import _batching
from clipper.config import load
from clipper.errors import ConfigError, InvalidInput
from clipper.metrics.collect import of_model
from clipper.serving.models.batch_cost import cost_limit, row_cost, rows_limit, with_costs
from clipper.types import Batching, InputType
from clipper_core.engine.model import Model
from tests.frontend.conftest import QUICK, ask

Deploy = Callable[..., Model]


def lengths(rows: Any) -> Any:
    return np.array([len(row) for row in rows], np.float64)


def cost(x: Any) -> float:
    if len(x) == 13:
        raise ValueError("no thirteen")
    return float(len(x)) ** 2


def test_padded_batches_are_measured(server: clipper.ClipperServer, deploy: Deploy) -> None:
    batching = {"cost": "length", "padded": True, "cost_max": 640}
    model = deploy(lengths, input="i64[*]", cache=False, batching=batching, warmup=True)
    rows = [np.zeros(n, np.int64) for n in (3, 100, 4, 101, 5, 99, 700)]
    futures = [model.predict(x, 5000) for x in rows]
    assert [future.result(60) for future in futures] == [3, 100, 4, 101, 5, 99, 700]
    row = server.stats()["models"][model.name]
    assert row["cost"] == sum(map(len, rows)) <= row["cost_padded"]
    (replica,) = row["replicas"]
    assert replica["limit_cost"] <= 640
    assert replica["profile"], "the warm-up has seeded it"
    name = model.name.partition(":")[0]
    (shown,) = (one for one in server.manage.ps() if one["name"] == name)
    assert "cost length" in shown["why"]
    assert "% padding" in shown["why"]
    assert "clipper_batch_cost_padded_total" in {
        family.name for family, _ in of_model(row, (name, "1"))
    }


def test_a_function_given_at_deployment(server: clipper.ClipperServer, deploy: Deploy) -> None:
    model = deploy(lengths, input="i64[*]", batching={"cost": cost, "cost_max": 100})
    assert model.predict(np.zeros(12, np.int64), 5000).result(60) == 12
    with pytest.raises(InvalidInput, match=r"cost function of .* raised ValueError: no thirteen"):
        model.predict(np.zeros(13, np.int64))
    local = deploy(lengths, input="i64[*]", batching=Batching(cost=lambda x: len(x)))  # type: ignore[arg-type]
    assert local.predict(np.zeros(13, np.int64), 5000).result(60) == 13


def test_the_length_of_a_named_tensor(server: clipper.ClipperServer, deploy: Deploy) -> None:
    batching = {"cost": "length:ids", "padded": True}
    model = deploy(
        lambda x: {"n": np.array([len(one) for one in x["ids"]], np.int64)},
        inputs={"ids": "i64[*]", "at": "f32[2]"},
        outputs={"n": "i64"},
        batching=batching,
    )
    rows = [{"ids": np.zeros(n, np.int64), "at": np.zeros(2, np.float32)} for n in (3, 40, 5)]
    futures = [model.predict(x, 5000) for x in rows]
    assert [int(future.result(60)["n"]) for future in futures] == [3, 40, 5]
    assert server.stats()["models"][model.name]["cost"] == 48


@pytest.mark.parametrize(("dtype", "value"), [("str", "né"), ("bytes", b"abc"), ("str[*]", "xyz")])
def test_the_length_of_strings(
    server: clipper.ClipperServer, deploy: Deploy, dtype: str, value: Any
) -> None:
    """The length of a string is its bytes; that of an array of them is their number."""
    model = deploy(
        lambda x: np.zeros(len(x["s"])), inputs={"s": dtype}, batching={"cost": "length:s"}
    )
    row = {"s": [*value] if "*" in dtype else value}
    model.predict(row, 5000).result(60)
    assert server.stats()["models"][model.name]["cost"] == 3


def test_a_tensor_that_is_not_there_has_no_length(deploy: Deploy) -> None:
    model = deploy(lengths, inputs={"ids": "i64[*]"}, batching={"cost": "length:words"})
    for query in (model.predict, lambda row: model.predict_many([row] * 40)):
        with pytest.raises(InvalidInput, match="the length of tensor 'words', which its input"):
            query({"ids": [1]})


class Costs:
    """A cost function that takes all rows at once, and counts its calls."""

    __qualname__ = "<Costs>"  # it is in no module
    takes_rows = True

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, rows: Any) -> Any:
        rows = rows["ids"] if isinstance(rows, dict) else rows
        self.sizes.append(len(rows))
        costs = np.array([np.sum(row) for row in rows], np.float64)
        return costs if 13 not in costs else costs[1:]


@pytest.mark.parametrize(
    ("types", "make"),
    [
        ({"input": "f64[2]"}, lambda n: np.full((n, 2), 1.5)),
        ({"input": "i64[*]"}, lambda n: [np.full(i % 3, 4) for i in range(n)]),
        (
            {"inputs": {"ids": "i64[*]", "name": "str"}},
            lambda n: {"ids": [[i % 3] for i in range(n)], "name": ["x"] * n},
        ),
        ({"inputs": {"ids": "f32[2]"}}, lambda n: {"ids": np.full((n, 2), 0.5)}),
    ],
)
@pytest.mark.parametrize("n", [4, 60])
def test_an_array_is_costed_by_one_call(
    server: clipper.ClipperServer, deploy: Deploy, types: Any, make: Any, n: int
) -> None:
    costs, rows = Costs(), make(n)
    model = deploy(
        lambda x: np.zeros(len(next(iter(x.values())) if isinstance(x, dict) else x)),
        **types,
        cache=False,
        batching=Batching(cost=costs),  # type: ignore[arg-type]
        warmup=False,
    )
    first = {k: v[0] for k, v in rows.items()} if isinstance(rows, dict) else rows[0]
    assert len(model.predict_many(rows).result(20)) == n
    assert costs.sizes == [n]
    wanted = costs(rows if not isinstance(rows, dict) else {"ids": rows["ids"]})
    assert server.stats()["models"][model.name]["cost"] == pytest.approx(
        np.maximum(wanted, 0.001).sum()
    )
    model.predict(first).result(20)
    assert costs.sizes[2:] == [1]


def test_a_function_of_rows_returns_a_number_for_each(deploy: Deploy) -> None:
    model = deploy(lengths, input="i64[*]", batching=Batching(cost=Costs()))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match=r"takes 2 rows, and returned a ndarray of shape \(1,\)"):
        model.predict_many([[6, 7], [1]])
    with pytest.raises(InvalidInput, match=r"returned -1\.0; it returns a number from 0"):
        model.predict_many([[1], [-1]])


@pytest.mark.parametrize("returned", [[[1], [1, 2]], [10**400, 1], ["x", "y"], {1: 2}])
def test_costs_that_are_no_numbers_are_refused(deploy: Deploy, returned: Any) -> None:
    def costs(_: Any) -> Any:
        return returned

    costs.takes_rows = True  # type: ignore[attr-defined]
    model = deploy(lengths, input="i64[*]", batching=Batching(cost=costs))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="takes 2 rows, and returned a"):
        model.predict_many([[6, 7], [1]])


def test_a_cost_function_gets_rows_of_the_type_of_the_model(deploy: Deploy) -> None:
    seen: list[Any] = []

    def costs(rows: Any) -> Any:
        seen.extend(rows)
        return np.ones(len(rows))

    costs.takes_rows = True  # type: ignore[attr-defined]
    model = deploy(lengths, input="f32[*]", batching=Batching(cost=costs))  # type: ignore[arg-type]
    model.predict_many([[6, 7], np.ones(1), ()]).result(60)
    assert [(type(row), row.dtype) for row in seen] == [(np.ndarray, np.float32)] * 3


def test_over_http_too_a_tensor_without_a_name_has_no_length() -> None:
    with clipper.start(**QUICK, http="127.0.0.1:0") as server:
        model = server.deploy("m", lengths, input="i64[*]", batching={"cost": "length:ids"})
        server.app("a", ["m"], default=-1.0, slo_ms=5000)
        with pytest.raises(InvalidInput, match="the length of tensor 'ids'"):
            model.predict([1])
        refused = ask(server.http_address, "POST", "/api/a/predict", {"input": [1]})
        assert refused.status == 400
        assert "the length of tensor 'ids'" in str(refused.json)


def test_over_http_the_error_is_of_that_query() -> None:
    with clipper.start(**QUICK, http="127.0.0.1:0") as server:
        server.deploy("m", lengths, input="i64[*]", batching={"cost": cost})
        server.app("a", ["m"], default=-1.0, slo_ms=5000)

        def post(n: int) -> Any:
            return ask(server.http_address, "POST", "/api/a/predict", {"input": [0] * n})

        assert post(3).json["output"] == 3
        refused = post(13)
        assert refused.status == 400
        assert "no thirteen" in str(refused.json)
        assert post(4).json["output"] == 4


@pytest.mark.parametrize(
    ("batching", "why"),
    [
        ({"cost": "width"}, "'width': it is bytes, length, length:TENSOR or module:function"),
        ({"padded": True}, "padded is given, but no cost"),
        ({"cost_max": 5}, "cost_max is given, but no cost"),
        ({"cost": "bytes", "mode": "static"}, "needs cost_max"),
        (
            {"cost": "bytes", "cost_max": 9, "mode": "static", "pad": True},
            "does not go with a cost",
        ),
        ({"cost": "no.such:thing"}, "cannot be imported"),
        ({"cost": "length", "cost_max": -1}, "cost_max"),
    ],
)
def test_what_does_not_fit_together_is_refused(
    server: clipper.ClipperServer, batching: dict[str, Any], why: str
) -> None:
    with pytest.raises((InvalidInput, ConfigError), match=why):
        server.deploy("refused", lengths, input="i64[*]", batching=batching)
    assert "refused" not in server.catalog.view.versions


def test_the_file_and_the_command_line() -> None:
    assert _batching("--batching", "fit") == "fit"
    assert _batching("--batching", "cost=length,padded=true,cost_max=4096") == {
        "cost": "length",
        "padded": True,
        "cost_max": 4096,
    }
    config = load(env={}, batching={"cost": "length", "padded": True})
    assert config.batching == Batching(cost="length", padded=True)
    with pytest.raises(ConfigError, match="padded is given, but no cost"):
        load(env={}, batching={"padded": True})


def test_rows_of_one_shape_all_cost_the_same() -> None:
    batching = Batching(cost="bytes", cost_max=4096, size_max=64)
    fixed, free = InputType.parse("f32[100]"), InputType.parse("f32[*]")
    assert row_cost(batching, fixed) == ""
    assert rows_limit(batching, fixed) == 10
    assert row_cost(batching, free) == "bytes"
    assert (rows_limit(batching, free), cost_limit(batching)) == (64, 4096)
    assert cost_limit(msgspec.structs.replace(batching, cost="m:f")) == 4_096_000


def test_the_cost_of_a_warm_up() -> None:
    timings, given = ((1, 50), (2, 60), (4, 80)), (3, 5)
    text = InputType.parse("i64[*]")
    assert with_costs(timings, given, Batching(cost="length"), text) == [
        (1, 50, 3),
        (2, 60, 8),
        (4, 80, 16),
    ]
    padded = with_costs(timings, given, Batching(cost="bytes", padded=True), text)
    assert [one[2] for one in padded] == [24, 80, 160]
    assert [one[2] for one in with_costs(timings, given, Batching(cost="m:f"), text)] == [0, 0, 0]
