"""close() ends every part of a server, whatever one of them raises, and frees what it holds."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper import errors
from tests.frontend.conftest import ask

QUICK = {"heartbeat_ms": 100, "warmup": False, "drain_s": 0.2, "stop_grace_s": 1.0}
CLOSED = (  # an attribute of the server, and the method that closes it
    ("_prediction", "close"),
    ("_endpoints", "drain"),
    ("_mesh", "drain"),
    ("_rolling", "stop"),
    ("_deployment", "refuse_new"),
    ("_follower", "stop"),
    ("_engine_memory", "stop"),
    ("_engines", "refuse_new"),
    ("_deployment", "stop"),
    ("_mesh", "close"),
    ("_dispatch", "stop"),
    ("_resolver", "close"),
    ("_endpoints", "stop"),
    ("_decider_threads", "close"),
    ("_parameters", "stop"),
    ("catalog", "close"),
    ("_learning", "close"),
    ("_recorder", "close"),
    ("_store", "close"),
    ("_listener", "remove"),
)


def double(rows: Any) -> Any:
    return rows * 2


@pytest.mark.parametrize(("part", "method"), CLOSED, ids=[".".join(each) for each in CLOSED])
def test_a_part_that_fails_to_close_keeps_no_other_and_no_lock(
    part: str, method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, armed = f"sqlite:{tmp_path}/state", list[object]()
    with clipper.start(state=f"sqlite:{tmp_path}/first", **QUICK) as first:  # type: ignore[arg-type]
        kind = type(getattr(first, part))
    known = getattr(kind, method)

    def fail(self: Any, *words: Any) -> None:
        known(self, *words)
        if armed:
            raise OSError(f"injected in {method}")

    monkeypatch.setattr(kind, method, fail)
    server = clipper.start(state=state, http="127.0.0.1:0", **QUICK)  # type: ignore[arg-type]
    armed.append(server)
    with pytest.raises(ExceptionGroup) as raised:
        server.close()
    assert [str(error) for error in raised.value.exceptions] == [f"injected in {method}"]
    server.close()  # again: nothing is left to do
    armed.clear()
    with clipper.start(state=state, http="127.0.0.1:0", **QUICK) as other:  # type: ignore[arg-type]
        assert ask(other.http_address, "GET", "/v2/health/live").status == 200


@pytest.mark.parametrize(
    "place",
    [
        "clipper.server.Dispatch.start",
        "clipper.server.ParameterSet.start",
        "clipper.server.Deployment.start",
        "clipper.server.MeshMembership.start",
        "clipper.server.Rolling.start",
        "clipper.server.Endpoints.start",
        "clipper.server.Recorder",
        "clipper.server.Deployment",
        "clipper.server.Endpoints",
        "clipper.server.Catalog",
    ],
)
def test_a_start_that_fails_raises_its_cause_and_frees_the_folder(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError("injected")

    state = f"sqlite:{tmp_path}/state"
    with monkeypatch.context() as patched:
        patched.setattr(place, fail)
        with pytest.raises(MemoryError, match="injected"):
            clipper.start(state=state, http="127.0.0.1:0", **QUICK)  # type: ignore[arg-type]
    clipper.start(state=state, **QUICK).close()  # type: ignore[arg-type]


def test_two_threads_that_close_a_server_both_return_when_it_is_closed(tmp_path: Path) -> None:
    server = clipper.start(state=f"sqlite:{tmp_path}/state", **QUICK)  # type: ignore[arg-type]
    threads = [threading.Thread(target=server.close) for _ in range(4)]
    for thread in threads:
        thread.start()
    until = time.monotonic() + 30
    for thread in threads:
        thread.join(until - time.monotonic())
        assert not thread.is_alive()
    clipper.start(state=f"sqlite:{tmp_path}/state", **QUICK).close()  # type: ignore[arg-type]


def test_a_closed_server_does_not_answer_from_its_cache() -> None:
    server = clipper.start(**QUICK)  # type: ignore[arg-type]
    server.deploy("twice", double, input="f64[2]")
    model = server.model("twice")
    plain = server.app("plain", models=["twice"], slo_ms=60_000)
    lasting = server.app("lasting", models=["twice"], slo_ms=60_000, default=[0.0, 0.0])
    row = [1.0, 2.0]
    rows = [row] * 40
    assert plain.predict(row).result(60).output.tolist() == [2.0, 4.0]
    assert model.predict(row).result(60).tolist() == [2.0, 4.0]
    server.close()
    for ask_again in (
        lambda: plain.predict(row),
        lambda: plain.predict(row, user="ann"),
        lambda: lasting.predict(row),
        lambda: lasting.predict_many(rows),
        lambda: plain.feedback(input=row, label=1.0),
        lambda: server.schedule_prediction(
            clipper.PredictionRequest(input=row, candidate_models=("twice",))
        ),
        lambda: model.predict(row).result(60),
        lambda: model.predict_many([row]).result(60),
        lambda: model.predict_many(rows).result(60),
    ):
        with pytest.raises(errors.ShuttingDown):
            ask_again()
    assert "this server is closed" in repr(plain)
