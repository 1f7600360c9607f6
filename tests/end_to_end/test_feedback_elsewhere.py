"""Feedback sent to another server than the one that answered: real servers over one store, and real
kills."""

import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from clipper.errors import AlreadyExists, ClipperError, InvalidInput, StoreError, UnknownPrediction
from tests.frontend.conftest import ask
from tests.memory_container import wait_until
from tests.processes import Program
from tests.store.conftest import own_etcd, own_redis
from tests.threads import join

__all__ = ["own_etcd", "own_redis"]

PATIENCE_S = 60.0
POLICY = "kl_ucb(discount=1)"  # counts exactly
COUNT = 300

ANSWERING = """
import sys, clipper
server = clipper.start(state=sys.argv[1], folder=sys.argv[2], restart_ms_min=20)
server.deploy("m", lambda rows: rows.sum(axis=1).astype(int), input="f64[2]")
app = server.app("a", ["m"], slo_ms=30_000, policy="kl_ucb(discount=1)")
print(*[app.predict([i, 0.0]).result(60).id for i in range(int(sys.argv[3]))], flush=True)
sys.stdin.read()
"""


@pytest.fixture(params=["sqlite", "redis", "etcd"])
def state(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "sqlite":
        return f"{tmp_path}/state"
    return str(request.getfixturevalue(f"own_{request.param}").url)


@pytest.fixture
def answering(state: str, tmp_path: Path) -> Iterator[tuple[Program, list[str]]]:
    """Yield a server that has answered, and the ids of its answers. A label is the number of its
    answer."""
    words = [sys.executable, "-c", ANSWERING, state, tmp_path / "a", COUNT]
    with Program(*words, apart=True) as process:
        ids = process.line().split()
        assert len(ids) == COUNT
        yield process, ids


def seen(server: clipper.ClipperServer) -> int:
    """Return how many observations are in the shared state of the application, as this server has
    it."""
    learner = server._learning.states.learner("a", POLICY, None, [clipper.VersionedModel("m", 1)])
    return int(learner.state(None).seen)


@pytest.mark.slow
def test_feedback_to_another_server_counts_once_and_survives_a_kill(
    state: str, answering: tuple[Program, list[str]], tmp_path: Path
) -> None:
    process, ids = answering
    with clipper.start(
        state=state, folder=str(tmp_path / "b"), http="127.0.0.1:0", drain_s=1.0
    ) as server:
        app = server.app("a", ["m"], slo_ms=30_000, policy=POLICY)
        assert app.feedback(ids[0], label=0)
        assert not app.feedback(ids[0], label=0), "counted before"
        assert app.feedback(ids[1], correct=True)
        with pytest.raises(InvalidInput):
            app.feedback(ids[2], label=2.5)
        many = app.feedback_many([*ids[:20], "00000000-1", "nothing"], [*range(20), 0, 0])
        assert (many.counted, many.duplicates, many.unknown) == (18, 2, 2)
        path = "/api/a/feedback"
        assert ask(server.http_address, "POST", path, {"id": ids[20], "label": 20}).json == {
            "counted": True
        }
        both = {"feedback": [{"id": ids[20], "label": 20}, {"id": ids[21], "score": 0.5}]}
        assert ask(server.http_address, "POST", path, both).json == {
            "counted": 1,
            "duplicates": 1,
            "unknown": 0,
        }
        wait_until(lambda: seen(server) == 22, "what the other learned is heard of", PATIENCE_S)
        acknowledged = 22 + send_feedback_until_killed(process, app, ids[22:])
        early = is_taken(app, ids[-1])  # on a busy machine its lease may have ended already
        acknowledged += early
        with clipper.start(state=state, folder=str(tmp_path / "a"), drain_s=1.0) as again:
            if early:
                wait_until(lambda: seen(again) >= acknowledged, "of the other server", PATIENCE_S)
            total = seen(again)
            assert acknowledged <= total <= acknowledged + 1, (
                "the last one's reply may have died with it"
            )
            wait_until(lambda: seen(server) == total, "the other learns of it", PATIENCE_S)
        if state.partition(":")[0] not in ("unix", "etcd"):
            wait_until(lambda: is_unknown(app, ids[-1]), "its lease has ended", PATIENCE_S)
            assert (early, seen(server)) == (False, total)
            return
        wait_until(
            lambda: early or is_taken(app, ids[-1]), "its answer is in the store", PATIENCE_S
        )
        repeated = app.feedback_many(ids, range(COUNT))
        assert (repeated.counted + repeated.duplicates, repeated.unknown) == (COUNT, 0)
        assert COUNT - 1 <= seen(server) <= COUNT, "at most what was told at the kill is lost"
        assert total + (not early) + repeated.counted == seen(server)


def send_feedback_until_killed(process: Program, app: Any, ids: list[str]) -> int:
    """Send feedback one by one while the server that answered is killed; return how many were
    acknowledged."""
    acknowledged, enough = [0], threading.Event()

    def send_feedback() -> None:
        for i, id in enumerate(ids, COUNT - len(ids)):
            try:
                acknowledged[0] += app.feedback(id, label=i)
            except ClipperError:
                break
            if acknowledged[0] == 30:
                enough.set()
        enough.set()

    thread = threading.Thread(target=send_feedback)
    thread.start()
    assert enough.wait(PATIENCE_S)
    process.kill()
    join(thread)
    assert acknowledged[0] >= 30
    return acknowledged[0]


def is_taken(app: Any, id: str) -> bool:
    try:
        return bool(app.feedback(id, label=COUNT - 1))
    except (UnknownPrediction, StoreError):  # the latter until the lease of its server has ended
        return False


def is_unknown(app: Any, id: str) -> bool:
    try:
        app.feedback(id, label=1)
    except UnknownPrediction:
        return True
    except StoreError:
        return False
    raise AssertionError("nobody can know of it")


@pytest.mark.slow
def test_a_copy_of_the_folder_of_a_server_that_runs_is_refused(tmp_path: Path) -> None:
    state = f"{tmp_path}/state"
    with clipper.start(state=state, folder=str(tmp_path / "a")):
        shutil.copytree(tmp_path / "a", tmp_path / "copy")
        with pytest.raises(AlreadyExists, match="remove `node` and `journal` from the copy"):
            clipper.start(state=state, folder=str(tmp_path / "copy"))
        (tmp_path / "copy" / "node").unlink()
        shutil.rmtree(tmp_path / "copy" / "journal")
        with clipper.start(state=state, folder=str(tmp_path / "copy")):
            pass
