"""Model hosts that end, hang, or are ended by a model: what the other models notice, and what is
remembered."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.mesh.loading import isolation
from tests.end_to_end.test_mesh_nodes import QUICK, ROW, predict
from tests.memory_container import wait_until
from tests.signals import freeze

MODELS = """
import ctypes, os, pathlib, time

def double(rows):
    return rows * 2

def pid(rows):
    return [os.getpid()] * len(rows)

def ends(rows):
    if rows[0][0] == 666:
        ctypes.string_at(0)
    return rows

def waits(rows):
    gate = pathlib.Path(__file__).with_name("gate")
    gate.with_name("waiting").touch()
    while not gate.exists():
        time.sleep(0.01)
    return rows
"""
ENDS_AT_LOAD = "import os\nos.abort()\ndef f(rows): ..."
FATAL = np.array([666.0, 0.0, 0.0])
Start = Callable[..., clipper.ClipperServer]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(MODELS)
    (tmp_path / "fatal.py").write_text(ENDS_AT_LOAD)
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Yield a function that starts a node in this process."""
    with contextlib.ExitStack() as nodes:

        def do(name: str = "a", **mesh: Any) -> clipper.ClipperServer:
            settings = {**QUICK, "name": name, "drain_s": 0.0, **mesh}
            node = clipper.start(
                state=f"sqlite:{folder}/mesh.db",
                folder=str(folder / name),
                mesh=settings,
                drain_s=0.5,
            )
            nodes.callback(node.close, drain_s=0)
            return node

        yield do


def register(node: clipper.ClipperServer, folder: Path, *functions: str) -> None:
    for name in functions:
        node.register_model(name, f"models.py:{name}", key=str(folder), input="f64[3]")


@pytest.mark.slow
def test_model_that_ends_its_process_at_a_query_is_queried_once_more_alone_and_then_has_failed(
    start: Start, folder: Path
) -> None:
    one, other = start("a", failure_s=3600.0), start("b", failure_s=3600.0)
    register(one, folder, "ends", "double")
    assert predict(one, "double", ROW)[1] == 2.0
    assert predict(one, "ends", ROW)[1] == 1.0
    answer = one.predict("ends", FATAL, slo_ms=30_000).result(40)
    assert answer.is_default
    wait_until(lambda: one.mesh.status("ends").status == "LOADING_FAILED")
    assert "where it was alone" in one.mesh.status("ends").errors[0]
    for node in (one, other):
        wait_until(lambda node=node: node.mesh.joined.registry.models["ends"].failures)
        again = node.predict("ends", FATAL, slo_ms=30_000).result(40)
        assert "where it was alone" in again.reason
        assert predict(node, "double", ROW + 1)[1] == 4.0
    ends = [host.starts for node in (one, other) for host in node.mesh.joined.hosts]
    assert sorted(ends) == [1, 2]


@pytest.mark.slow
def test_model_that_ends_its_process_at_its_load_ends_one_host_of_one_node(
    start: Start, folder: Path
) -> None:
    nodes = [start(name, failure_s=3600.0) for name in "ab"]
    nodes[0].register_model("fatal", "fatal.py:f", key=str(folder), input="f64[3]")
    for node in nodes:
        wait_until(lambda node=node: "fatal" in node.mesh.joined.registry.models)
        # due before the next try, 60 s after the failure
        answer = node.predict("fatal", ROW, slo_ms=30_000).result(40)
        assert "where it was alone" in answer.reason
    assert nodes[0].mesh.status("fatal").status == "LOADING_FAILED"
    assert sorted(host.starts for node in nodes for host in node.mesh.joined.hosts) == [1, 2]


@pytest.mark.slow
def test_model_that_was_only_beside_it_is_held_alone_for_a_while_and_loses_no_query(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(isolation, "PROBATION_S", 2.0)
    node = start()
    register(node, folder, "ends", "waits")
    predict(node, "ends", ROW)
    beside = node.predict("waits", ROW, slo_ms=60_000)
    wait_until((folder / "waiting").exists)
    node.predict("ends", FATAL, slo_ms=30_000)
    wait_until(lambda: node.mesh.joined.isolation.is_suspect("waits"))
    (folder / "gate").touch()
    assert not beside.result(70).is_default
    wait_until(
        lambda: (
            getattr(node.mesh.joined.loader.held.get("waits"), "host", None)
            is node.mesh.joined.hosts[0]
        )
    )
    assert not node.mesh.joined.isolation.is_suspect("waits")
    assert not node.mesh.joined.registry.models["waits"].failures
    assert predict(node, "waits", ROW + 1)[0] == 1.0
    assert node.mesh.joined.hosts[0].starts == 2


@pytest.mark.slow
def test_host_that_hangs_is_replaced_and_its_queries_are_answered(
    start: Start, folder: Path
) -> None:
    node = start(host_silence_s=1.0)
    register(node, folder, "pid")
    before = predict(node, "pid")
    freeze(node.mesh.joined.hosts[0].pid)
    assert predict(node, "pid", ROW + 1) != before
    assert node.mesh.joined.hosts[0].starts == 2


@pytest.mark.slow
def test_host_that_reports_failing_is_replaced(start: Start, folder: Path) -> None:
    """Three loads have exceeded their time limit and cannot be cancelled."""
    node = start(load_s=0.3, loading_max=4, tries=1)
    (folder / "stuck.py").write_text("import time\ntime.sleep(60)\ndef f(rows): ...")
    for n in range(3):
        node.register_model(f"stuck{n}", "stuck.py:f", key=str(folder), input="f64[3]")
        node.predict(f"stuck{n}", ROW, slo_ms=20_000)
    wait_until(lambda: node.mesh.joined.hosts[0].starts == 2)


def test_models_are_spread_over_hosts_by_their_ids(start: Start, folder: Path) -> None:
    node = start(hosts=2)
    for n in range(6):
        node.register_model(f"p{n}", "models.py:pid", key=str(folder), input="f64[3]")
    futures = [node.predict(f"p{n}", ROW, slo_ms=20_000) for n in range(6)]
    assert {answer.result(30).output for answer in futures} == {
        host.pid for host in node.mesh.joined.hosts
    }
