"""Servers that share a store are one system: each serves what any of them was configured to
serve."""

import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import clipper
from bench.system.several_servers import on_redis
from clipper.catalog.catalog import Catalog
from clipper.types import Model
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer, own_redis

__all__ = ["own_redis"]

PATIENCE_S = 60.0


@pytest.fixture
def pair(
    own_redis: RedisServer, tmp_path: Path
) -> Iterator[tuple[clipper.ClipperServer, clipper.ClipperServer]]:
    """Yield two servers on one Redis."""
    with (
        clipper.start(state=own_redis.url, folder=str(tmp_path / "a"), drain_s=1.0) as one,
        clipper.start(state=own_redis.url, folder=str(tmp_path / "b"), drain_s=1.0) as other,
    ):
        yield one, other


def connected(server: clipper.ClipperServer, model: str) -> int:
    """Return how many containers of a version are connected to this server."""
    return int(server.stats()["models"].get(model, {}).get("has", 0))


def processes(server: clipper.ClipperServer, model: str) -> int:
    replicas = server.stats()["models"].get(model, {}).get("replicas", [])
    return sum(replica["state"] not in ("stopped", "failed") for replica in replicas)


@pytest.mark.slow
def test_each_server_applies_operations_of_another_one(
    pair: tuple[clipper.ClipperServer, clipper.ClipperServer],
) -> None:
    one, other = pair
    one.deploy("m", lambda rows: rows.sum(axis=1), input="f64[2]")
    one.app("a", ["m"], slo_ms=20_000, default=-1)
    wait_until(lambda: connected(other, "m:1") == 1, "the other server runs it", PATIENCE_S)
    wait_until(lambda: "a" in other.catalog.view.applications, "and knows who asks", PATIENCE_S)
    assert other.app("a").predict([1.0, 2.0]).result(60).output == 3.0
    other.scale("m", 2)
    wait_until(lambda: connected(one, "m:1") == 2, "the first one scales, too", PATIENCE_S)
    one.scale("m", 1)
    wait_until(lambda: processes(other, "m:1") == 1, "and down", PATIENCE_S)
    other.deploy("m", lambda rows: rows.sum(axis=1) * 10, input="f64[2]")
    wait_until(lambda: connected(one, "m:2") == 1, "the next version", PATIENCE_S)
    wait_until(
        lambda: one.app("a").predict([1.0, 2.0]).result(60).output == 30.0,
        "its queries follow",
        PATIENCE_S,
    )
    other.retire("m:1")
    wait_until(lambda: processes(one, "m:1") == 0, "a retired version ends everywhere", PATIENCE_S)
    assert one.app("a").predict([1.0, 2.0]).result(60).output == 30.0


def feedback_again(port: int, about: tuple[str, float]) -> dict[str, object]:
    """Give feedback again while the server that answered is not known to be gone, or the store is
    not reached again."""
    until_s = time.monotonic() + PATIENCE_S
    while (found := on_redis.give_feedback(port, about)).get("status") == 503:
        assert time.monotonic() < until_s
    return found


@pytest.mark.slow
def test_no_query_fails_through_an_upgrade_kills_and_a_restart_of_the_store() -> None:
    """Two servers start at once on an empty store, and declare the same."""
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: python tools/fetch.py redis")
    with on_redis.cluster(2) as servers:
        assert on_redis.feedback_anywhere(servers, 8) == (8, 8)
        first, second = servers.servers
        left = [on_redis.predicted(first.port, i) for i in range(12)]
        assert on_redis.give_feedback(first.port, left[0]) == {"counted": True}
        killed = [on_redis.predicted(second.port, 100 + i) for i in range(8)]
        for port, about in ((second.port, killed[0]), (first.port, killed[1])):
            assert on_redis.give_feedback(port, about) == {"counted": True}
        steps: on_redis.Story = (
            ("an upgrade", lambda all: on_redis.replace(all, first, signal.SIGTERM)),
            ("kill -9", lambda all: on_redis.replace(all, second, signal.SIGKILL)),
            ("a restart of Redis", on_redis.restart_redis),
        )
        for name, sent, failed, _ in on_redis.through(servers, 300, 200.0, steps):
            assert sent, name
            assert not failed, name
        # about answers of a server that was upgraded since
        assert feedback_again(second.port, left[0]) == {"counted": False}
        assert feedback_again(second.port, left[1]) == {"counted": True}
        assert feedback_again(first.port, left[1]) == {"counted": False}
        many = {"feedback": [{"id": id, "label": label} for id, label in left]}
        counted = on_redis.send_request(first.port, "POST", "/api/a/feedback", many)[1]
        assert counted == {"counted": 10, "duplicates": 2, "unknown": 0}
        # about answers of a server that was killed, two of which it had learned about
        for about, counts in zip(killed[:3], (False, False, True), strict=True):
            assert feedback_again(first.port, about) == {"counted": counts}
            assert feedback_again(second.port, about) == {"counted": False}
        many = {"feedback": [{"id": id, "label": label} for id, label in killed]}
        counted = on_redis.send_request(second.port, "POST", "/api/a/feedback", many)[1]
        assert counted == {"counted": 5, "duplicates": 3, "unknown": 0}


def test_what_two_servers_declare_at_once_is_deployed_by_the_first(
    own_redis: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second server finds the version in the store before its view of the store follows."""
    file = tmp_path / "clipper.toml"
    file.write_text('[models.m]\ntarget = "operator:neg"\ninput = "f64[1]"\nreplicas = 0\n')
    register = Catalog.register

    def second(self: Catalog, model: Model, *, promote: bool = True) -> Model:
        monkeypatch.setattr(Catalog, "register", register)
        register(Catalog(self._store, follow=False), model, promote=promote)
        return register(self, model, promote=promote)

    monkeypatch.setattr(Catalog, "register", second)
    with clipper.start(file, state=own_redis.url, folder=str(tmp_path / "state")) as server:
        assert server.catalog.view.model("m").id.version == 1
