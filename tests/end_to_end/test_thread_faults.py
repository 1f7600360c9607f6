"""An error at the entry of any thread: the server serves on, or says that it does not, and ends.

The threads are found by running a server with everything, so that a new one is tested too.
"""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.component import State
from clipper.errors import ClipperError
from tests.frontend.conftest import ask
from tests.thread_faults import ERRORS, bare, injected, names_seen

LIMIT_S = 60.0
QUICK: dict[str, Any] = {
    "heartbeat_ms": 100,
    "warmup": False,
    "drain_s": 0.2,
    "stop_grace_s": 1.0,
    "http": {"address": "127.0.0.1:0", "admin": "127.0.0.1:0"},
    "grpc": "127.0.0.1:0",
}


def total(rows: Any) -> Any:
    return rows.sum(axis=1)


@contextmanager
def started(tmp_path: Path, **more: Any) -> Iterator[clipper.ClipperServer]:
    with clipper.start(state=f"sqlite:{tmp_path}/state", **{**QUICK, **more}) as server:
        yield server


def use(server: clipper.ClipperServer) -> None:
    """Do what starts the threads that begin late: a model, an application, feedback, a decoy."""
    server.deploy("total", total, input="f32[2]")
    app = server.app("app", models=["total"], slo_ms=20_000, policy="exp3", default=0.0)
    answer = app.predict([1.0, 2.0]).result(LIMIT_S)
    assert not answer.is_default, answer
    app.feedback(answer, label=3.0)
    called = threading.Event()
    app.predict([1.0, 3.0]).add_done_callback(lambda _: called.set())
    assert called.wait(LIMIT_S)


def names_of(place: Path, **more: Any) -> list[str]:
    """Return the names of all threads of a server, without their numbers."""
    with names_seen() as seen, started(place, **more) as server:
        use(server)
    return list(seen)


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return the names of the threads of a server with HTTP, gRPC and an application."""
    return names_of(tmp_path_factory.mktemp("names"))


def says(server: clipper.ClipperServer, path: str) -> tuple[int, dict[str, Any]]:
    reply = ask(server.http_address, "GET", path)
    return reply.status, json.loads(reply.body)


def check(server: clipper.ClipperServer, name: str) -> str:
    """Check that the server serves, or says what has failed; return which."""
    failed = [one for one in server.health() if one.state is State.FAILED]
    if not failed:
        use(server)
        failed = [one for one in server.health() if one.state is State.FAILED]
    if not failed:
        assert says(server, "/v2/health/live")[0] == 200
        return "serves"
    assert [bare(one.name) for one in failed] == [name]
    if name in ("clipper-http", "clipper-http-core"):
        return "does not answer"  # who asks sees it
    status, body = says(server, "/v2/health/ready")
    assert (status, body["ready"]) == (503, False)
    assert name in body["waiting_for"][0]
    status, body = says(server, "/v2/health/live")
    assert status == (503 if failed[0].vital else 200)
    return "says so"


def ends(server: clipper.ClipperServer) -> bool:
    """Close the server; return whether that ended."""
    closing = threading.Thread(target=server.close)
    closing.start()
    closing.join(LIMIT_S)
    return not closing.is_alive()


def inject(name: str, kind: str, place: Path, **more: Any) -> str:
    """Start a server of which one thread fails at its entry, check it and close it; return what
    became of it."""
    with injected(name, kind):
        try:
            server = clipper.start(state=f"sqlite:{place}/state", **{**QUICK, **more})
        except (ClipperError, OSError, MemoryError, ZeroDivisionError) as error:
            found = f"start raises {type(error).__name__}"
        else:
            try:
                found = check(server, name)
            finally:
                assert ends(server), name
    with started(place):  # nothing holds the folder
        pass
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ERRORS)
def test_an_error_at_the_entry_of_a_thread(kind: str, names: list[str], tmp_path: Path) -> None:
    assert len(names) > 10, names
    outcomes = {name: inject(name, kind, tmp_path / name) for name in names}
    ends = {name for name, outcome in outcomes.items() if outcome != "serves"}
    # children end with the thread that forked them
    assert outcomes["clipper-processes"] == "start raises NotStarted"
    # all others are tried again
    assert ends == {
        "clipper-processes",
        "clipper-loop",
        "clipper-http",
        "clipper-http-core",
    }, outcomes


@pytest.mark.slow
@pytest.mark.parametrize("part", ["mesh", "params"])
def test_an_error_at_the_entry_of_a_thread_of(part: str, names: list[str], tmp_path: Path) -> None:
    def more(place: str) -> dict[str, Any]:
        return {"mesh": True} if part == "mesh" else {"params": str(tmp_path / f"{place}-tables")}

    mine = [name for name in names_of(tmp_path, **more("names")) if name not in names]
    assert mine
    for name in mine:
        for kind in ERRORS:
            place = f"{name}-{kind}"
            inject(name, kind, tmp_path / place, **more(place))


@pytest.mark.slow
def test_health_says_which_thread_has_failed(tmp_path: Path) -> None:
    """A thread that is tried again is no reason to be taken out of service; one that failed is."""
    with started(tmp_path) as server:
        use(server)
        before = {one.name: one.state for one in server.health()}
        assert set(before.values()) <= {State.RUNNING, State.NEW}, before
        assert says(server, "/v2/health/ready")[0] == 200
        for _ in range(100):  # its next turn ends the state, perhaps before it is asked for
            server._rolling._worker._lifecycle.move(State.DEGRADED, "injected")
            status, body = says(server, "/v2/health/ready")
            assert status == 200
            if "degraded" in body:
                break
        assert body["degraded"] == ["clipper-rolling failed: injected"]
        server._rolling._worker._lifecycle.move(State.FAILED, "injected")
        status, body = says(server, "/v2/health/ready")
        assert (status, body["waiting_for"]) == (503, ["clipper-rolling failed: injected"])
        assert says(server, "/v2/health/live")[0] == 200
        until = time.monotonic() + LIMIT_S
        assert server._rolling._worker.end(until - time.monotonic())
