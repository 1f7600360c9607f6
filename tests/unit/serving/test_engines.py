"""Placement of models on engines, and the statistics of all engines together."""

import numpy as np
import pytest

from clipper.config import Config, load
from clipper.serving.models import engines as module
from clipper.serving.models.engines import Engines
from clipper_core.engine.model import Model, predict_all


@pytest.fixture(autouse=True)
def cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_cores", lambda: 4)


def config(engines: int, **limits: int) -> Config:
    return load(env={}, engines=engines, limits={"cache_bytes_max": 4 << 20, **limits})


def test_each_name_goes_where_the_fewest_are_and_stays() -> None:
    engines = Engines(config(3))
    names = [f"m{i}" for i in range(7)]
    placed = [engines.of(name) for name in names]
    assert placed == [list(engines)[i % 3] for i in range(7)]
    assert [engines.of(name) for name in reversed(names)] == placed[::-1]


def test_one_engine_serves_all() -> None:
    engines = Engines(config(1))
    assert len(engines) == 1
    assert engines.of("a") is engines.of("b")


@pytest.mark.parametrize(("requested", "started"), [(1, 1), (4, 4), (5, 4), (64, 4)])
def test_at_most_one_a_core(requested: int, started: int, caplog: pytest.LogCaptureFixture) -> None:
    assert len(Engines(config(requested))) == started
    assert (f"server.engines = {requested}, but there are 4 cores" in caplog.text) == (
        requested > started
    )


def test_all_have_met() -> None:
    engines = Engines(config(4))
    models = tuple(Model(engine, "m", 1, "f64", (2,)) for engine in engines)
    future = predict_all(models, np.zeros(2))
    assert engines.in_flight()
    assert engines.snapshot()["issued"] == 4
    assert future.cancel()
    assert not engines.in_flight()


def test_a_snapshot_is_of_all_of_them() -> None:
    engines = Engines(config(2))
    cores = [
        Model(engine, f"m{i}", i + 1, "f64", (2,)) for i, engine in enumerate([*engines, *engines])
    ]
    for i, core in enumerate(cores):
        core.put(np.full(2, i), 1.0)
        assert core.predict(np.full(2, i)).result(0) == 1.0
    cores[0].predict(np.full(2, 9.0)).cancel()
    snapshot = engines.snapshot()
    assert snapshot["issued"] == snapshot["answered"] == 1
    assert snapshot["cache"]["entries"] == 4
    rows = {(row["engine"], row["index"]): row for row in snapshot["models"]}
    assert sorted(rows) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert [rows[engines.place_of(core)]["uid"] for core in cores] == [1, 2, 3, 4]
    assert [rows[engines.place_of(core)]["hits"] for core in cores] == [1, 1, 1, 1]


def test_bounds_of_the_server_are_shared_out() -> None:
    alone, four = Engines(config(1, connections_max=10)), Engines(config(4, connections_max=10))
    whole = alone.snapshot()["cache"]["bytes"]
    assert whole / 2 < four.snapshot()["cache"]["bytes"] <= whole
    assert [engine.limits["connections_max"] for engine in four] == [2, 2, 2, 2]
    assert [engine.limits["tasks_max"] for engine in four] == [1 << 14] * 4


def test_models_of_the_mesh_have_room_beside_those_of_the_server() -> None:
    limits, mesh = {"cache_bytes_max": 4 << 20, "models_max": 20}, {"models_max": 3}
    for enabled, room in ((False, 20), (True, 23)):
        (engine,) = Engines(load(env={}, mesh={"enabled": enabled, **mesh}, limits=limits))
        assert engine.limits["models_max"] == room


def test_closing_refuses_everywhere() -> None:
    engines = Engines(config(2))
    models = [Model(engine, "m", 1, "f64", (2,)) for engine in engines]
    engines.refuse_new()
    assert all(model.predict(np.zeros(2)).status().name == "CLOSED" for model in models)
