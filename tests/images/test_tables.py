"""A model in a container of an engine reads and trains tables of parameters, over TCP."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import DoesNotFit
from clipper_container import Model
from clipper_container.params.connection import addresses_in
from tests.images.engines import PATIENCE_S, QUICK, Engine
from tests.processes import free_ports

TASTE = {
    "taste": {
        "dim": 2,
        "optimizer": "sgd",
        "optimizer_settings": {"rate": 1.0},
        "initializer": "constant",
        "initializer_settings": {"value": 1.0},
    }
}


class Taste(Model):
    input = "i64[2]"
    tables: Any = TASTE

    def predict_batch(self, inputs: Any) -> Any:
        return self.tables.pull("taste", inputs.ravel()).reshape(len(inputs), 4).sum(axis=1)


def settings(engine: Engine, folder: Path) -> dict[str, Any]:
    return {
        "deployer": engine.kind,
        "docker": engine.settings,
        "load_s": PATIENCE_S,
        **QUICK,
        "server": {"params": str(folder)},
    }


@pytest.fixture(scope="module")
def server(
    engine: Engine, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[clipper.ClipperServer]:
    server_settings = settings(engine, tmp_path_factory.mktemp("tables") / "set")
    shards = {"address": f"127.0.0.1:{free_ports(2)[0]}", "shards": 2, "snapshot_s": 0.0}
    with clipper.start(**server_settings, address="tcp://127.0.0.1:0", params=shards) as started:
        # its threads are there from now on
        started.retire(started.deploy("first", Taste, reads={"taste": 0}).name)
        yield started


def test_a_container_reads_what_others_train(server: clipper.ClipperServer, engine: Engine) -> None:
    handle = server.deploy("taste", Taste, reads={"taste": [0, 1]})
    assert handle.predict(np.array([1, 2])).result(PATIENCE_S) == 4.0
    server.params.push("taste", [5], np.array([[-1.0, -2.0]], np.float32))
    assert handle.predict(np.array([5, 2])).result(PATIENCE_S) == 7.0
    token = addresses_in(server.config.server.params)[1]
    (container,) = engine.containers(handle.name)
    assert token not in engine.run("inspect", container)
    assert token not in engine.run("logs", container)
    server.retire(handle.name)


def test_what_cannot_be_reached_is_refused(
    server: clipper.ClipperServer, engine: Engine, tmp_path: Path
) -> None:
    with (
        clipper.start(**settings(engine, tmp_path / "set")) as other,
        pytest.raises(DoesNotFit, match="listen at unix sockets"),
    ):
        other.deploy("taste", Taste)
    server_settings = settings(engine, Path(server.config.server.params))
    with (
        clipper.start(**server_settings) as other,
        pytest.raises(DoesNotFit, match="it has no network"),
    ):
        other.deploy("taste", Taste)
