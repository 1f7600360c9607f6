"""A set of shards as real processes: killed at random times by a seed, stopped and started again,
and used by the commands of a person."""

import http.client
import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.system.faults import params_kills
from clipper.cli import main
from clipper.errors import AlreadyExists, ConfigError, DoesNotFit, InvalidInput
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet, reshard, restore, supervisor_of
from clipper.settings.params import ParamsSettings
from tests.params.conftest import ones, until, zeros
from tests.processes import Program
from tests.signals import freeze

PATIENCE_S = 60.0


def settings(folder: Path, shards: int = 2, **given: Any) -> ParamsSettings:
    return ParamsSettings(folder=str(folder), shards=shards, **{"snapshot_s": 0.0, **given})


@pytest.mark.slow
def test_no_acknowledged_push_is_lost_to_kills(stress: int) -> None:
    found = params_kills.life(5 * stress, 11)
    assert not found.wrong
    assert len(found.pulls_s) == 5 * stress
    assert found.acknowledged > 0


@pytest.mark.slow
def test_a_hung_shard_is_restarted(tmp_path: Path) -> None:
    local = LocalSet(settings(tmp_path, replicas=1, hung_s=1.0)).start()
    try:
        local.wait_ready(PATIENCE_S)
        with Client(tmp_path, patience_s=PATIENCE_S, answer_s=2.0) as client:
            client.create(
                TableSpec(
                    "t", 1, optimizer="sgd", optimizer_settings={"rate": 1.0}, initializer="zeros"
                )
            )
            client.push("t", [0, 1], -ones((2, 1)))
            until(lambda: not any(client.call(i, "stats")["exposed"] for i in range(2)))
            freeze(local.pids()[0])
            assert client.pull("t", [0, 1]).ravel().tolist() == [1, 1]
            client.push("t", [0, 1], -ones((2, 1)))
            assert client.pull("t", [0, 1]).ravel().tolist() == [2, 2]
        assert local.restarts == 1
    finally:
        local.stop(snapshot=False)


@pytest.mark.slow
def test_a_set_is_stopped_and_started_again(tmp_path: Path) -> None:
    local = LocalSet(settings(tmp_path)).start()
    local.wait_ready(PATIENCE_S)
    assert supervisor_of(tmp_path) == os.getpid()
    with pytest.raises(AlreadyExists, match="a set of shards runs"):
        LocalSet(settings(tmp_path))
    with pytest.raises(DoesNotFit, match="runs"):
        reshard(tmp_path, 3)
    with Client(tmp_path) as client:
        client.create(TableSpec("t", 3))
        client.push_model({"w": zeros(4)})
        client.push("t", range(20), ones((20, 3)))
        first = client.pull("t", range(20))
    local.stop()
    assert supervisor_of(tmp_path) == 0
    with pytest.raises(DoesNotFit, match="has 2 shards, not 3"):
        LocalSet(settings(tmp_path, 3))
    assert reshard(tmp_path, 3) == 1
    local = LocalSet(settings(tmp_path, 3)).start()
    local.wait_ready(PATIENCE_S)
    with Client(tmp_path) as client:
        assert (client.pull("t", range(20)) == first).all()
        client.push("t", range(20), ones((20, 3)))
        assert not (client.pull("t", range(20)) == first).all()
        assert client.pull_variables()[1]["w"].tolist() == [0, 0, 0, 0]
    local.stop()
    assert restore(tmp_path, tmp_path / "snapshots", 1) == 1
    local = LocalSet(settings(tmp_path, 3)).start()
    local.wait_ready(PATIENCE_S)
    with Client(tmp_path) as client:
        assert (client.pull("t", range(20)) == first).all(), "it went back"
    local.stop(snapshot=False)


def test_invalid_settings_of_a_set_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="fewer than"):
        LocalSet(settings(tmp_path, 2, replicas=2))
    with pytest.raises(ConfigError, match="too long"):
        LocalSet(settings(tmp_path / ("x" * 100)))
    with pytest.raises(ConfigError, match="HOST:PORT"):
        LocalSet(settings(tmp_path, address="nowhere"))
    with pytest.raises(InvalidInput, match=r"shards\.json"):
        Client(tmp_path / "empty")
    with pytest.raises(InvalidInput, match="no complete snapshot"):
        restore(tmp_path, tmp_path)


def clipper(*words: str) -> Any:
    done = CliRunner().invoke(main, ["params", *words, "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.output)


@pytest.mark.slow
def test_a_set_is_started_and_stopped_from_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = 'shards = 2\nreplicas = 1\nfolder = "set"\nsnapshot_s = 0\nmetrics = "127.0.0.1:0"\n'
    (tmp_path / "clipper.toml").write_text(f"[params]\n{said}")
    assert len(clipper("up", "--dry-run")["addresses"]) == 2
    assert not (tmp_path / "set").exists()
    words = [sys.executable, "-m", "clipper", "params", "up"]
    with Program(*words, until="2 shards serve") as up:
        said = next(line for line in up.lines if "2 shards serve" in line)
        with Client("set") as client:
            client.create(TableSpec("t", 2, initializer="zeros", optimizer="sgd"))
            client.push("t", [4, 5], -ones((2, 2)))
        found = clipper("ps")
        assert [one["tables"]["t"]["rows"] for one in found["shards"]] == [1, 1]
        assert "serves" in CliRunner().invoke(main, ["params", "ps"]).output
        assert np.allclose(clipper("pull", "t", "5", "4")["5"], 0.01)
        changes: tuple[tuple[str, ...], ...] = (
            ("create", "u", "4"),
            ("alter", "t", "--set", "rate=0.5"),
            ("copy", "t", "u"),
            ("erase", "t", "5"),
            ("drop", "t"),
        )
        for words in changes:
            clipper(*words, "--dry-run")
        assert np.allclose(clipper("pull", "t", "5", "4")["5"], 0.01)
        assert [[*one["tables"]] for one in clipper("ps")["shards"]] == [["t"], ["t"]]
        page = http.client.HTTPConnection(
            said.rpartition("http://")[2].partition("/")[0], timeout=20
        )
        page.request("GET", "/metrics")
        assert b'clipper_params_rows{table="t",shard="1"} 1' in page.getresponse().read()
        page.close()
        assert clipper("snapshot", "--whole", "--dry-run") == {
            "number": 1,
            "rows": 2,
            "nbytes": 0,
            "parts": [{"rows": 1, "nbytes": 0}] * 2,
        }
        assert clipper("snapshot", "--whole")["number"] == 1
        assert clipper("begin-anew", "--dry-run") == {"begun": []}
        assert clipper("reshard", "--shards", "3", "--dry-run") == {"shards": 3}
        assert clipper("ps")["resharding"] is None
        refused = CliRunner().invoke(main, ["params", "up", "--dry-run"])
        assert "a set of shards runs in" in refused.stderr
        assert clipper("down", "--dry-run")["pid"] == up.pid
        assert clipper("ps")["shards"][0]["tables"]["t"]["rows"] == 1
        assert clipper("down")["pid"] == up.pid
        assert up.wait() == 0
        found = clipper("ps")
        assert found["snapshots"][-1]["complete"]
        assert all("away" in one for one in found["shards"])
        assert clipper("reshard", "--shards", "3", "--dry-run")["shards"] == 3
        assert len(clipper("up", "--dry-run")["addresses"]) == 2
        assert clipper("reshard", "--shards", "3")["shards"] == 3
        assert clipper("restore", "--number", "1", "--dry-run")["number"] == 1
        assert clipper("restore", "--number", "1")["number"] == 1
    done = CliRunner().invoke(main, ["params", "down"])
    assert done.exit_code == 1
    assert "no set of shards runs" in done.output
