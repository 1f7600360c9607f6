"""A shard that is kept running: what an actor on Ray does, without Ray."""

import os
import signal
from pathlib import Path

import numpy as np
import pytest

from clipper.deploy.ray.nodes import NodeProcess
from clipper.deploy.ray.shards import RayShards, shard_command
from clipper.params import Client, TableSpec
from clipper.params.local.address_file import prepare, running_shards
from clipper.settings.params import ParamsSettings
from tests.params.conftest import until

PATIENCE_S = 60.0


@pytest.mark.slow
def test_a_shard_is_started_again_and_found_where_it_is_then(tmp_path: Path) -> None:
    prepare(ParamsSettings(folder=str(tmp_path), shards=2, replicas=1, snapshot_s=0.0), "ray")
    both = [
        NodeProcess(
            f"params-{number}", shard_command(f"params-{number}", str(tmp_path), "127.0.0.1")
        )
        for number in range(2)
    ]
    try:
        until(lambda: all(one.status()["state"] == "ready" for one in both))
        with Client(tmp_path, patience_s=PATIENCE_S) as client:
            client.create(
                TableSpec(
                    "t", 2, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
                )
            )
            client.push("t", range(10), -np.ones((10, 2)))
            until(lambda: not any(client.call(shard, "stats")["exposed"] for shard in range(2)))
            os.kill(both[1].status()["pid"], signal.SIGKILL)
            client.push("t", range(10), -np.ones((10, 2)))
            assert (client.pull("t", range(10)) == 2).all()
        found = both[1].status()
        assert found["starts"] == 2
        assert "exited: killed (SIGKILL)" in found["lines"]
        assert [one.stop(PATIENCE_S)["state"] for one in both] == ["ended", "ended"]
        assert running_shards(tmp_path) == []
        assert sorted(path.name for path in tmp_path.glob("snapshots/*/shard-*")) == [
            "shard-0-of-2",
            "shard-1-of-2",
        ]
    finally:
        for one in both:
            one.stop(0.1)


def test_names() -> None:
    assert RayShards("/share/shop", 3, "shop").names() == ["shop-0", "shop-1", "shop-2"]
