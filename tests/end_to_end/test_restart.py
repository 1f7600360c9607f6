"""A server that stops, or is killed, and comes back from its folder with all it had."""

import json
import os
import signal
import sys
import textwrap

import numpy as np
import pytest

import clipper
from clipper.errors import AlreadyExists, StoreError, UnknownModel
from tests.memory_container import wait_until
from tests.processes import Program
from tests.signals import has_ended

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


def served(app):
    """Return the first answer that is not a default: the container is back."""
    return wait_until(
        lambda: (answer := app.predict(ROW).result(20)).is_default is False and answer
    )


@pytest.mark.parametrize("state", ["{}/state", "sqlite:{}/catalog.db"])
def test_everything_comes_back(tmp_path, state):
    state = state.format(tmp_path)
    with clipper.start(state=state) as server:
        server.deploy("m", lambda xs: xs[:, 0] * 0 + 1, input="f64[4]")
        server.deploy("m", total, input="f64[4]", replicas=2, cache=False, batching="static")
        server.deploy("old", total, input="f64[4]")
        server.retire("old")
        server.app(
            "a", models=["m"], slo_ms=300, default=[1, b"x", float("nan")], confidence_min=0.25
        )
        server.scale("m:1", 0)
        before = server.catalog.view
        assert served(server.app("a")).output == 6.0
    with clipper.start(state=state) as server:
        assert server.catalog.view.versions == before.versions
        assert repr(server.catalog.view.applications) == repr(before.applications)
        answer = served(server.app("a"))
        assert (answer.output, str(answer.models[0])) == (6.0, "m:2")
        wait_until(lambda: len(server.stats()["models"]["m:2"]["replicas"]) == 2)
        assert server.stats()["models"]["m:1"]["replicas"] == []
        with pytest.raises(UnknownModel):
            server.model("old")
        with pytest.raises(AlreadyExists):
            server.deploy("old", total, version=1)
        server.deploy("m", lambda xs: xs[:, 0] * 0 + 3, input="f64[4]")
        assert server.app("a").predict(ROW, slo_ms=20_000).result().output == 3
        assert server.model("m").name == "m:3"


def test_without_a_folder_nothing_is_kept(tmp_path):
    with clipper.start() as server:
        server.deploy("m", total, input="f64[4]")
    with clipper.start() as server:
        assert not server.catalog.models()


SERVER = """
import json, sys, clipper
server = clipper.start(state=sys.argv[1])
if sys.argv[2] == "first":
    server.deploy("m", lambda xs: xs.sum(axis=1), input="f64[4]", replicas=2)
    server.app("a", models=["m"], slo_ms=200, default=-1)
rows = []
while len([row for row in rows if row["state"] == "ready"]) < 2:
    rows = server.stats()["models"]["m:1"]["replicas"]
answer = server.app("a").predict([0, 1, 2, 3], slo_ms=5000).result()
print(json.dumps({"pids": [row["pid"] for row in rows], "answer": float(answer.output)}), flush=True)
sys.stdin.read()
"""  # noqa: E501


def test_killed_with_kill_9_it_comes_back_and_leaves_no_orphans(tmp_path):
    everyone = []
    for life in ("first", "second", "third"):
        words = [sys.executable, "-c", SERVER, tmp_path / "state", life]
        with Program(*words, apart=True) as process:
            report = json.loads(process.line())
            assert report["answer"] == 6.0
            assert all(not has_ended(pid) for pid in report["pids"])
            os.kill(process.pid, signal.SIGKILL)
            wait_until(
                lambda pids=report["pids"]: all(has_ended(pid) for pid in pids),
                "its containers die with it",
            )
        everyone += report["pids"]
    assert len(set(everyone)) == 6
    with clipper.start(state=str(tmp_path / "state")) as server:
        assert served(server.app("a")).output == 6.0


def test_killed_in_the_middle_of_deploys(tmp_path):
    """Each reported deployment is there after the kill, and each deployment that is there can be
    served."""
    script = textwrap.dedent("""
        import sys, clipper
        server = clipper.start(state=sys.argv[1])
        for i in range(100):
            server.deploy("m", lambda xs, i=i: xs[:, 0] * 0 + i, input="f64[4]", replicas=0)
            print(i + 1, flush=True)
        """)
    with Program(sys.executable, "-c", script, tmp_path / "s", apart=True) as process:
        process.until("7\n")
    reported = max(map(int, process.lines))
    with clipper.start(state=str(tmp_path / "s")) as server:
        versions = [model.version for model in server.catalog.models()]
        assert versions == list(range(1, len(versions) + 1))
        assert len(versions) >= reported
        server.scale("m:3", 1)
        assert server.model("m:3").predict(ROW, slo_ms=15_000).result(20) == 2


def test_a_packed_model_that_was_changed_is_not_loaded(tmp_path):
    with clipper.start(state=str(tmp_path)) as server:
        server.deploy("m", total, input="f64[4]", replicas=0)
        (packed,) = (tmp_path / "models").glob("m-1-*")
        packed.write_bytes(packed.read_bytes().replace(b"total", b"eviL!"))
        server.scale("m", 1)
        wait_until(
            lambda: any("256" in line for line in server.logs("m")), "the container says why"
        )
        assert (
            server.app("a", models=["m"], slo_ms=50, default=-1).predict(ROW).result(60).is_default
        )


def test_a_damaged_catalog_is_reported(tmp_path):
    with clipper.start(state=str(tmp_path)) as server:
        server.deploy("m", total, input="f64[4]", replicas=0)
    for file in tmp_path.glob("*.db"):
        file.write_bytes(b"this is no database" * 1000)
    with pytest.raises(StoreError):
        clipper.start(state=str(tmp_path))
    fds = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError):
        clipper.start(
            state=str(tmp_path)
        )  # and not "in use": the first try has let go of the folder
    assert len(os.listdir("/proc/self/fd")) <= len(fds) + 1
