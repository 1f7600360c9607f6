"""The code and the files of one version of a model, from deployment to retirement."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

import clipper
from clipper.errors import DeployFailed, PackagingError, StoreError
from clipper.types import Model
from tests.memory_container import wait_until

PATIENCE_S = 60.0


@pytest.fixture
def started(tmp_path: Path) -> Iterator[clipper.ClipperServer]:
    with clipper.start(state=str(tmp_path / "state"), restart_ms_min=10, warmup=False) as server:
        yield server


def files(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "state" / "models").iterdir())


def pids(server: clipper.ClipperServer, name: str) -> list[int]:
    rows = server.stats()["models"].get(name, {}).get("replicas", [])
    return [int(row["pid"]) for row in rows if row["state"] == "ready"]


def test_a_restarted_container_runs_the_code_of_its_version(
    started: clipper.ClipperServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "home"
    home.mkdir()
    module, near = home / "edited_here.py", home / "near_here.py"
    near.write_text("K = 2.0\n")
    module.write_text("from near_here import K\ndef f(rows): return rows[:, 0] * K\n")
    monkeypatch.syspath_prepend(str(home))
    started.deploy("m", "edited_here:f", input="f64[1]", cache=False)
    near.write_text("K = 3.0\n")
    started.deploy("m", "edited_here:f", input="f64[1]", cache=False)
    module.write_text("def (\n")
    for version, expected in ((1, 14.0), (2, 21.0)):
        (pid,) = pids(started, f"m:{version}")
        os.kill(pid, signal.SIGKILL)
        wait_until(
            lambda name=f"m:{version}", pid=pid: pids(started, name) not in ([], [pid]),
            "it is restarted",
            PATIENCE_S,
        )
        assert started.model(f"m:{version}").predict([7.0], slo_ms=30_000).result(60) == expected
    assert len(files(tmp_path)) == 2
    started.retire("m:1")
    assert [name[:4] for name in files(tmp_path)] == ["m-2-"]


def test_files_of_retired_and_failed_versions_are_removed(tmp_path: Path) -> None:
    with clipper.start(state=str(tmp_path / "state"), warmup=False, restarts_max=0) as server:
        for _ in range(3):
            server.deploy("m", lambda rows: rows[:, 0], input="f64[1]")
        assert len(files(tmp_path)) == 3
        server.retire("m:1")
        assert [name[:4] for name in files(tmp_path)] == ["m-2-", "m-3-"]

        class Broken:
            def load(self) -> None:
                raise RuntimeError("it does not load")

            def predict_batch(self, rows: object) -> object:
                return rows

        with pytest.raises(DeployFailed):
            server.deploy("broken", Broken(), input="f64[1]")
        assert [name[:4] for name in files(tmp_path)] == ["m-2-", "m-3-"]
        state = msgspec.json.encode(server.manage.export_state())
    (tmp_path / "state" / "models" / ".left.tmp").touch()
    with clipper.start(state=str(tmp_path / "state"), warmup=False) as server:
        assert [name[:4] for name in files(tmp_path)] == ["m-2-", "m-3-"]
        assert server.model("m:2").predict([4.0], slo_ms=30_000).result(60) == 4.0
    with clipper.start(state=str(tmp_path / "other"), warmup=False) as server:
        server.manage.import_state(state)
        server.wait_ready()
        assert server.model("m:3").predict([5.0], slo_ms=30_000).result(60) == 5.0


def test_files_of_a_version_that_may_be_registered_stay_until_that_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = str(tmp_path / "state")

    def fails(*record: object, **named: object) -> None:
        raise StoreError("the store did not answer in time")

    def registers_and_fails(record: Model, **named: bool) -> None:
        registered(record, **named)
        fails()

    with clipper.start(state=state, warmup=False) as server:
        registered = server.catalog.register
        for name, register in (("lost", fails), ("kept", registers_and_fails)):
            monkeypatch.setattr(server.catalog, "register", register)
            with pytest.raises(StoreError):
                server.deploy(name, lambda rows: rows[:, 0], input="f64[1]", replicas=0)
        assert len(files(tmp_path)) == 4  # and a mark of each
    with clipper.start(state=state, warmup=False) as server:
        assert [name[:5] for name in files(tmp_path)] == ["kept-"]
        assert [str(model.id) for model in server.catalog.models()] == ["kept:1"]


@pytest.mark.parametrize("name", ["a/b", "../up", "", ".hidden", "Upper", "a" * 129])
def test_a_name_that_cannot_be_is_refused_before_anything_is_written(
    started: clipper.ClipperServer, tmp_path: Path, name: str
) -> None:
    with pytest.raises(PackagingError, match="is not a model name"):
        started.deploy(name, lambda rows: rows[:, 0], input="f64[1]")
    assert not (tmp_path / "state" / "models").exists()


def test_unlinking_the_last_model_warns(started: clipper.ClipperServer) -> None:
    for name in ("one", "two"):
        started.deploy(name, lambda rows: rows[:, 0], input="f64[1]")
    started.app("a", ["one", "two"])
    assert started.manage.unlink("a", "one").warning == ""
    assert "application a has no model now" in started.manage.unlink("a", "two").warning
