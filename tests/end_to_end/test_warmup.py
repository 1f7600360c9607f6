"""A container warms its model up before it is ready, and is quiet without queries."""

import json
import os
import signal
import threading
import urllib.request
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import clipper
from bench.system.load.first_burst import loop_faults
from clipper.errors import DeployFailed, InvalidInput, ModelWarning
from clipper_core.engine.model import Model
from tests.memory_container import wait_until

Deploy = Callable[..., Model]


def counting() -> Any:
    """A model whose output is the number of its calls."""
    calls: list[int] = []

    def count(rows: Any) -> Any:
        calls.append(len(rows))
        return np.full(len(rows), len(calls), np.int64)

    return count


def test_a_replica_has_run_before_it_is_ready(
    server: clipper.ClipperServer, deploy: Deploy
) -> None:
    model = deploy(counting(), input="f64[2]", warmup=True)
    row = server.stats()["models"][model.name]
    (replica,) = row["replicas"]
    assert row["output"] == "i64", "told by what came out"
    assert replica["profile"], "its latency fit is seeded"
    assert replica["limit"] > 1
    assert model.predict(np.zeros(2)).result(60) > 3


def test_the_loop_has_its_memory_before_the_first_burst() -> None:
    """The first burst writes to no new pages of the cache and of the table of evaluations; without
    the warm-up there were 1500."""
    with clipper.start() as started:
        model = started.deploy("first", lambda rows: rows[:, 0], input="f64[4]")
        wait_until(lambda: all(thread.name != "clipper-memory" for thread in threading.enumerate()))
        rows = np.random.default_rng(1).random((5000, 4))
        before = loop_faults()
        futures = [model.predict(row, slo_ms=60_000) for row in rows]
        assert [future.result(60) for future in futures] == list(rows[:, 0])
        assert loop_faults() - before < 1000


def test_the_warm_up_can_be_turned_off(server: clipper.ClipperServer, deploy: Deploy) -> None:
    model = deploy(counting(), input="f64[2]", warmup=False)
    assert model.predict(np.zeros(2)).result(60) == 1
    assert server.stats()["models"][model.name]["output"] == "any"


def test_a_model_that_fails_on_made_up_rows_is_ready_with_a_warning(
    server: clipper.ClipperServer, deploy: Deploy
) -> None:
    def numbers(texts: Any) -> Any:
        return [int(text) for text in texts]

    with pytest.warns(ModelWarning, match="made-up rows of type str.*ValueError"):
        model = deploy(numbers, input="str", warmup=True)
    (row,) = [one for one in server.manage.ps() if f"{one['name']}:{one['version']}" == model.name]
    assert row["state"] == "warm-up failed"
    assert "made-up rows" in str(row["error"])
    assert model.predict("7").result(60) == 7
    (row,) = [one for one in server.manage.ps() if f"{one['name']}:{one['version']}" == model.name]
    assert (row["state"], row["error"]) == ("ready", "")
    wait_until(lambda: any("warmup" in line for line in server.logs(model.name)))
    given = deploy(numbers, input="str", warmup=["12", "34"])
    assert not any("warmup" in line for line in server.logs(given.name))
    assert server.stats()["models"][given.name]["output"] == "i64"


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda rows: rows[:, 0].sum(), "returned"),
        (lambda rows: [1.0], "got a batch of 2 and returned 1 value"),
        (lambda rows: eval("not_here"), "name 'not_here' is not defined"),
    ],
)
def test_a_model_that_fails_on_every_batch_is_not_deployed(
    server: clipper.ClipperServer, names: Any, function: Any, error: str
) -> None:
    name = next(names)
    with pytest.raises(DeployFailed) as caught:
        server.deploy(name, function, input="f64[2]", warmup=True)
    assert error in str(caught.value)
    assert name not in server.catalog.view.versions
    assert name not in {one["name"] for one in server.manage.ps()}
    kept = "\n".join(server.logs(name))
    assert error in kept
    assert server.logs(f"{name}:1") == server.logs(name)
    server.deploy(name, lambda rows: rows[:, 0], input="f64[2]")
    assert error not in "\n".join(server.logs(name))
    assert server.model(name).predict([4.0, 1.0]).result(60) == 4.0


@pytest.mark.parametrize(
    "warmup", ["text", [], 3, [object()], [float("nan")], np.zeros((1, 1 << 16))]
)
def test_rows_that_cannot_be_kept_are_refused(
    server: clipper.ClipperServer, names: Any, warmup: Any
) -> None:
    name = next(names)
    with pytest.raises(InvalidInput, match="warmup"):
        server.deploy(name, counting(), input="f64[2]", warmup=warmup)
    assert name not in {model.name for model in server.catalog.models()}


def test_metadata_of_the_open_inference_protocol_lists_the_output() -> None:
    with clipper.start(http="127.0.0.1:0") as started:
        started.deploy("sum", lambda rows: rows.sum(axis=1), input="f32[3]")
        started.app("total", models=["sum"])
        with urllib.request.urlopen(
            f"http://{started.http_address}/v2/models/sum", timeout=10
        ) as response:
            found = json.load(response)
    assert [(tensor["datatype"], tensor["shape"]) for tensor in found["outputs"]] == [
        ("FP32", [-1])
    ]


def test_an_idle_container_of_this_host_is_quiet_and_its_death_is_noticed(
    server: clipper.ClipperServer, deploy: Deploy
) -> None:
    model = deploy(counting(), input="f64[2]", warmup=True)
    containers = server._deployment.containers
    id_ = server.catalog.view.model(model.name).id
    (replica,) = containers.of(id_)
    assert replica.hello.quiet
    os.kill(replica.hello.pid, signal.SIGKILL)
    assert containers.wait_for(
        id_, 1, 30, lambda: [one.hello.pid for one in containers.of(id_)] != [replica.hello.pid]
    )
    assert containers.wait_for(id_, 1, 30)
    assert model.predict(np.zeros(2), slo_ms=10_000).result(60) >= 1
