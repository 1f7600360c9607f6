"""A store that loses its content while servers run takes no application and no model out of
service."""

import json
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

import clipper
from clipper import errors
from clipper.cli import main
from tests.frontend.conftest import ask
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer, own_redis

__all__ = ["own_redis"]

PATIENCE_S = 60.0
QUICK: dict[str, Any] = {"warmup": False, "drain_s": 1.0, "stop_grace_s": 1.0}


def total(rows: Any) -> Any:
    return rows.sum(axis=1)


def run(server: clipper.ClipperServer, *words: str) -> click.testing.Result:
    url = f"http://{server.admin_address}"
    return click.testing.CliRunner().invoke(
        main, [*words, "--url", url, "--token", server.config.http.token], catch_exceptions=False
    )


def answers(server: clipper.ClipperServer, at: float) -> bool:
    """Return whether the model answers a query that is in no cache."""
    return not server.app("a").predict(np.array([at, 1.0])).result(PATIENCE_S).is_default


@pytest.mark.slow
def test_an_emptied_redis_takes_nothing_out_of_service(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    http = {"address": "127.0.0.1:0", "admin": "127.0.0.1:0", "token": "t" * 24}
    settings = {"state": own_redis.url, **QUICK}
    with (
        clipper.start(**settings, folder=str(tmp_path / "a"), http=http) as one,
        clipper.start(**settings, folder=str(tmp_path / "b")) as other,
    ):
        one.deploy("m", total, input="f64[2]")
        one.app("a", ["m"], slo_ms=20_000, default=-1)
        wait_until(
            lambda: other.stats()["models"].get("m:1", {}).get("has") == 1, "followed", PATIENCE_S
        )
        wait_until(lambda: "a" in other.catalog.view.applications, "followed", PATIENCE_S)
        copy = (tmp_path / "a/catalog.copy").read_bytes()
        assert own_redis.ask("FLUSHALL") == b"+OK"
        for server in (one, other):
            wait_until(
                lambda server=server: server.stats()["store"]["refused"], "noticed", PATIENCE_S
            )
        assert answers(one, 1.0)
        assert answers(other, 2.0)
        assert one.stats()["models"]["m:1"]["has"] == 1, "its container runs on"
        ready = ask(one.http_address, "GET", "/v2/health/ready")
        assert ready.status == 200
        assert "has lost the catalog" in ready.json["store"]
        with pytest.raises(errors.StoreError, match="has lost the catalog"):
            one.app("b", ["m"])
        assert (tmp_path / "a/catalog.copy").read_bytes() == copy
        shown = run(one, "ps")
        assert "has lost the catalog" in shown.output
        assert "Write --restore or --as-is" in run(one, "store", "accept").output
        done = run(one, "store", "accept", "--restore")
        assert done.exit_code == 0, done.output
        assert "records were written back" in done.output
        wait_until(lambda: not other.stats()["store"]["refused"], "the other follows", PATIENCE_S)
        assert answers(one, 3.0)
        assert answers(other, 4.0)
        assert "store" not in ask(one.http_address, "GET", "/v2/health/ready").json
        one.app("b", ["m"], slo_ms=20_000)
        wait_until(lambda: "b" in other.catalog.view.applications, "followed", PATIENCE_S)
        again = run(one, "store", "accept", "--restore")
        assert "nothing to accept" in again.output


@pytest.mark.slow
def test_a_server_that_starts_on_an_emptied_redis_serves_from_its_copy(
    own_redis: RedisServer, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "state": own_redis.url,
        "folder": str(tmp_path / "a"),
        "feedback": {"write_ms": 20},
        **QUICK,
    }
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        server.app("a", ["m"], slo_ms=20_000, default=-1, policy="exp3")
        answer = server.app("a").predict(np.ones(2)).result(PATIENCE_S)
        server.app("a").feedback(answer, label=2.0)
    assert own_redis.ask("FLUSHALL") == b"+OK"
    for _ in range(2):
        with clipper.start(**settings) as server:
            assert server.stats()["store"]["refused"]
            wait_until(
                lambda server=server: server.stats()["models"]["m:1"]["has"] == 1, "", PATIENCE_S
            )
            assert answers(server, 1.0)
            answer = server.app("a").predict(np.ones(2)).result(PATIENCE_S)
            server.app("a").feedback(answer, label=2.0)
    with clipper.start(**settings) as server:
        assert server.manage.accept_store(restore=False).message
        wait_until(lambda: not server.catalog.models(), "what it lacks is gone", PATIENCE_S)
        assert not server.stats()["store"]["refused"]
    assert (tmp_path / "a/catalog.copy.before").exists()


@pytest.mark.slow
def test_an_emptied_state_file_takes_nothing_out_of_service(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"state": str(tmp_path), **QUICK}
    with clipper.start(**settings) as server:
        server.deploy("m", total, input="f64[2]")
        server.app("a", ["m"], slo_ms=20_000, default=-1)
    for name in ("state.db", "state.db-wal", "state.db-shm"):
        (tmp_path / name).unlink(missing_ok=True)
    with clipper.start(**settings) as server:
        assert "has lost the catalog" in server.stats()["store"]["refused"]
        wait_until(lambda: server.stats()["models"]["m:1"]["has"] == 1, "", PATIENCE_S)
        assert answers(server, 1.0)
        change = server.manage.by("ann", dry_run=True).accept_store(restore=True)
        assert change.dry_run
        assert server.stats()["store"]["refused"]
        server.manage.by("ann").accept_store(restore=True)
        assert server.stats().get("store") is None
    with clipper.start(**settings) as server:
        wait_until(lambda: server.stats()["models"]["m:1"]["has"] == 1, "", PATIENCE_S)
        assert answers(server, 2.0)
        assert json.loads(json.dumps(server.manage.history()))[-1]["actor"] == "ann"
