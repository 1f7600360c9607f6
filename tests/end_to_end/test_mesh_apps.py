"""Applications with models of the mesh: loaded by queries, combined with others, counted as missing
when they cannot be loaded."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, InvalidInput, StillLinked, UnknownModel, UnknownVersion
from tests.memory_container import wait_until

MODELS = """
def one(rows): return [1] * len(rows)
def two(rows): return [2] * len(rows)
def total(rows): return rows.sum(axis=1)
"""
QUICK = {
    "enabled": True,
    "publish_s": 0.05,
    "rate_s": 0.1,
    "failure_s": 3600.0,
    "tries": 1,
    "drain_s": 2.0,
    "lease_s": 60.0,
}
ROW = np.arange(3.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    place = tmp_path_factory.mktemp("models")
    (place / "models.py").write_text(MODELS)
    (place / "broken.py").write_text("def one(")
    return str(place)


def registered(server: clipper.ClipperServer, folder: str) -> None:
    for id in ("one", "two", "total"):
        server.register_model(id, f"models.py:{id}", key=folder, input="f64[3]")
    server.register_model("broken", "broken.py:one", key=folder, input="f64[3]")


@pytest.fixture(scope="module")
def server(folder: str) -> Iterator[clipper.ClipperServer]:
    with clipper.start(mesh=QUICK, drain_s=1.0) as started:
        registered(started, folder)
        started.deploy("here", lambda rows: [2] * len(rows), input="f64[3]")
        yield started


@pytest.fixture
def own_server(folder: str) -> Iterator[clipper.ClipperServer]:
    """Yield a separate server, for tests of parts that start threads at their first use."""
    with clipper.start(mesh=QUICK, drain_s=1.0, http="127.0.0.1:0") as started:
        registered(started, folder)
        yield started


@pytest.fixture(autouse=True)
def nothing_is_loaded_or_queried(server: clipper.ClipperServer) -> Iterator[None]:
    yield
    for name in tuple(server.catalog.view.applications):
        server.remove_app(name)

    def is_quiet() -> bool:
        # one whose load just ends is said to be loaded a moment before it can go
        for id in tuple(server.mesh.joined.loader.held):
            server.mesh._loop.run(server.mesh.joined.loader.evict(id, "the test is over"))
        return not server.mesh.joined.copies._searches and not any(
            route.served for route in server.mesh.router
        )

    wait_until(is_quiet)


def test_named_tensors(own_server: clipper.ClipperServer, tmp_path: Path) -> None:
    text = (
        "def score(batch):\n"
        "    ids = batch['ids']\n"
        "    return {'label': [int(row.sum()) for row in ids], 'n': [len(row) for row in ids]}"
    )
    (tmp_path / "scores.py").write_text(text)
    own_server.register_model(
        "score",
        "scores.py:score",
        key=str(tmp_path),
        input={"ids": "i64[*]"},
        output={"label": "i64", "n": "i32"},
    )
    answer = own_server.predict("score", {"ids": [1, 2, 3]}, slo_ms=20_000).result(30)
    assert answer.output == {"label": 6, "n": 3}
    app = own_server.app("scored", models=["score"], output="label", slo_ms=20_000)
    assert app.predict({"ids": [4]}).result(30).output == 4
    with pytest.raises(InvalidInput, match="tensor 'ids' is missing"):
        app.predict({})
    own_server.register_model("unknown", "scores.py:score", key=str(tmp_path))
    with pytest.raises(InvalidInput, match="not known yet: deploy or register"):
        own_server.predict("unknown", {"ids": [1]})


def evict(server: clipper.ClipperServer, id: str) -> None:
    assert server.mesh._loop.run(server.mesh.joined.loader.evict(id, "the test says so"))
    wait_until(lambda: not any(route.served for route in server.mesh.router if route.id == id))


def test_a_model_is_loaded_by_an_applications_query_each_time_it_was_evicted(
    server: clipper.ClipperServer,
) -> None:
    app = server.app("sums", models=["total"], slo_ms=20_000)
    assert server.mesh.status("total").status == "NOT_LOADED", "to be asked is not to be loaded"
    for n in range(3):
        assert app.predict(ROW + n).result(30).output == 3.0 + 3 * n
        assert server.mesh.status("total").status == "LOADED"
        evict(server, "total")
    assert app.predict_many(np.ones((100, 3))).result(30).outputs.tolist() == [3.0] * 100


def test_several_with_one_of_the_catalog(server: clipper.ClipperServer) -> None:
    app = server.app("votes", models=["one", "two", "here"], slo_ms=20_000)
    answer = app.predict(ROW).result(30)
    assert (answer.output, answer.missing, answer.agreement) == (2, (), pytest.approx(2 / 3))
    assert {str(model) for model in answer.models} == {"one:1", "two:1", "here:1"}


def test_candidates_may_be_of_the_mesh(server: clipper.ClipperServer) -> None:
    request = clipper.PredictionRequest(ROW, candidate_models=("two", "here"), slo_ms=20_000)
    answer = server.schedule_prediction(request).result(30)
    assert (answer.output, answer.agreement) == (2, 1.0)


def test_one_that_cannot_be_loaded_is_missing_at_once(server: clipper.ClipperServer) -> None:
    both = server.app("both", models=["broken", "here"], slo_ms=60_000)
    answer = both.predict(ROW).result(30)
    assert (answer.output, [str(model) for model in answer.missing]) == (2, ["broken:1"])
    alone = server.app("alone", models=["broken"], slo_ms=60_000, default=7)
    answer = alone.predict(ROW).result(30)
    assert (answer.output, answer.is_default) == (7, True)
    assert answer.reason.startswith("broken: it could not be loaded: ")
    many = alone.predict_many(np.ones((3, 3))).result(30)
    assert [reason.startswith("broken: it could not") for reason in many.reasons] == [True]


def test_what_is_not_loaded_by_the_deadline_is_reported(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    waits = f"import os, time\nwhile not os.path.exists({str(gate)!r}):\n    time.sleep(.01)\n"
    (tmp_path / "slow.py").write_text(f"{waits}def f(rows): return [5] * len(rows)")
    server.register_model("slow", "slow.py:f", key=str(tmp_path), input="f64[3]")
    app = server.app("late", models=["slow"], slo_ms=50)
    answer = app.predict(ROW).result(30)
    assert answer.is_default
    assert answer.reason.startswith("slow: it was not loaded by the deadline: ")
    gate.touch()
    wait_until(lambda: app.predict(ROW).result(30).output == 5)


@pytest.mark.parametrize("decider", ["first", "majority", "hedged"])
def test_with_a_decider(server: clipper.ClipperServer, decider: str) -> None:
    app = server.app("decided", models=["two", "here"], slo_ms=20_000, decider=decider)
    for _ in range(20):
        assert app.predict(ROW).result(30).output == 2
    # asked on: a load that did not come about is not tried again for queries that others have
    # answered
    wait_until(
        lambda: (
            app.predict(ROW).result(30).output == 2 and server.mesh.status("two").status == "LOADED"
        )
    )


def test_a_policy_learns_of_them(own_server: clipper.ClipperServer) -> None:
    app = own_server.app(
        "learned", models=["one", "two"], slo_ms=20_000, policy="exp4(eta=0.5)", default=0
    )
    for n in range(30):
        answer = app.predict(ROW + n).result(30)
        assert not answer.is_default, answer.reason
        app.feedback(answer, label=2)
    assert app.predict(ROW - 1).result(30).output == 2


def test_a_shadow_is_loaded_too(server: clipper.ClipperServer) -> None:
    app = server.app("shadowed", models=["here", "one"], slo_ms=20_000, roles={"one": "shadow"})
    assert app.predict(ROW).result(30).output == 2
    wait_until(lambda: server.mesh.status("one").status == "LOADED")


def test_over_http_every_query_counts_as_a_use(own_server: clipper.ClipperServer) -> None:
    server = own_server
    server.app("web", models=["total"], slo_ms=20_000)
    url = f"http://{server.http_address}"
    for n in range(3):
        body = json.dumps({"input": [1.0, 2.0, float(n)]}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{url}/api/web/predict", body)
        ) as response:
            assert json.load(response)["output"] == 3.0 + n
        evict(server, "total")
    with urllib.request.urlopen(f"{url}/v2/models/web") as response:
        assert json.load(response)["inputs"][0]["shape"] == [-1, 3]
    with urllib.request.urlopen(f"{url}/v2/models/web/ready") as response:
        assert response.status == 200


def test_one_that_is_queried_cannot_be_unregistered(
    server: clipper.ClipperServer, folder: str
) -> None:
    server.register_model("kept", "models.py:one", key=folder, input="f64[3]")
    server.app("keeps", models=["kept"], slo_ms=20_000)
    with pytest.raises(StillLinked, match="keeps"):
        server.mesh.unregister("kept")
    server.remove_app("keeps")
    server.mesh.unregister("kept")
    assert server.mesh.status("kept").status == "NOT_FOUND"


def test_one_of_the_catalog_goes_though_some_of_the_mesh_came_before_it(
    own_server: clipper.ClipperServer,
) -> None:
    own_server.predict("one", ROW).result(60)
    own_server.deploy("late", lambda rows: [7] * len(rows), input="f64[3]")
    assert (
        own_server.app("hedged", models=["late", "two"], slo_ms=20_000, decider="hedged")
        .predict(ROW)
        .result(30)
        .output
        == 7
    )
    own_server.remove_app("hedged")
    own_server.retire("late")
    assert own_server.predict("one", ROW).result(60).output == 1


def test_one_whose_record_goes_and_comes_back_is_queried_again(
    server: clipper.ClipperServer, folder: str
) -> None:
    """The record is deleted and restored, as by another node that does not know the application."""
    server.register_model("fickle", "models.py:one", key=folder, input="f64[3]")
    app = server.app("asks", models=["fickle", "here"], slo_ms=20_000)
    for _ in range(2):
        wait_until(lambda: len(app.predict(ROW).result(30).models) == 2)
        server.mesh.joined.registry.unregister("fickle")
        wait_until(
            lambda: [str(model) for model in app.predict(ROW).result(30).models] == ["here:1"]
        )
        assert app.predict(ROW).result(30).missing == ()
        server.register_model("fickle", "models.py:two", key=folder, input="f64[3]")
    wait_until(lambda: app.predict(ROW).result(30).agreement == 1.0)
    assert app.predict(ROW).result(30).output == 2


def test_models_are_freed_after_an_application_unlinks_them(
    server: clipper.ClipperServer, folder: str
) -> None:
    unlisted = lambda: server._engines.snapshot()["unlisted"]  # noqa: E731
    wait_until(lambda: unlisted() == len(server.mesh.router))
    before = unlisted()
    server.register_model("brief", "models.py:one", key=folder, input="f64[3]")
    assert (
        server.app("asks", models=["brief", "here"], slo_ms=20_000).predict(ROW).result(30).missing
        == ()
    )
    server.remove_app("asks")
    server.mesh.unregister("brief")
    wait_until(lambda: unlisted() == before)


def test_what_there_is_not(server: clipper.ClipperServer) -> None:
    server.mesh.set_vmodel("name", "one")
    for links, error in (
        (["nobody"], UnknownModel),
        (["one:2"], UnknownVersion),
        (["name"], UnknownModel),
    ):
        with pytest.raises(error):
            server.app("none", models=links)
    server.mesh.delete_vmodel("name")
    with pytest.raises(ClipperError, match=r"f64\[3\]"):
        server.app("other", models=["one"], input="f64[4]")
    assert "none" not in server.catalog.view.applications


def test_after_a_restart_on_the_same_state(tmp_path: Path, folder: str) -> None:
    for n in range(2):
        with clipper.start(mesh={**QUICK, "name": "a"}, state=str(tmp_path / "state")) as server:
            if n == 0:
                registered(server, folder)
                server.app("sums", models=["total"], slo_ms=20_000)
            answer: Any = server.app("sums").predict(ROW).result(30)
            assert (answer.output, answer.reason) == (3.0, "")
