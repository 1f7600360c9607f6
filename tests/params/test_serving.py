"""A server that serves and trains tables: its set of shards, what models declare, what reaches
their containers."""

import json
import os
import select
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.config import load
from clipper.errors import (
    ConfigError,
    DeployFailed,
    DoesNotFit,
    InvalidInput,
    ShardAway,
    TypeConflict,
    UnknownTable,
)
from clipper.params import Client, TableSpec
from clipper.params.client.user_rows import UserRows
from clipper.params.local.address_file import read_address_file
from clipper.params.local.local_set import LocalSet, supervisor_of
from clipper.params.local.served_set import ServedSet, settings_of
from clipper.settings.params import ParamsSettings
from clipper_container import Model, session_of
from tests.params.conftest import TOKEN, Shards, until
from tests.processes import Program
from tests.signals import freeze

QUICK: dict[str, Any] = {
    "heartbeat_ms": 2000,
    "warmup": False,
    "restart_ms_min": 20,
    "restart_ms_max": 200,
    "drain_s": 1.0,
}
PATIENCE_S = 60.0


SCORES = {
    "scores": {
        "dim": 1,
        "optimizer": "sgd",
        "optimizer_settings": {"rate": 1.0},
        "initializer": "zeros",
    }
}
MISSPELT = {"scores": {"dim": 1, "optimiser": "sgd"}}


class Scores(Model):
    """A model whose input is an id. It answers with the id's row, and feedback moves that row
    towards the label."""

    input = "i64[1]"
    tables: Any = SCORES

    def load(self) -> None:
        self.begun = self.tables.pull("scores", [0])  # tables are there when it loads

    def predict_batch(self, inputs: Any) -> Any:
        return self.tables.pull("scores", inputs[:, 0])[:, 0]

    def correct(self, inputs: Any, labels: Any, sessions: Any) -> None:
        wrong = self.predict_batch(inputs) - np.asarray(labels, np.float32)
        self.tables.push("scores", inputs[:, 0], wrong[:, None])


class Misspelt(Scores):
    tables = MISSPELT


class Bare(Model):
    """A model that declares no table: the deployment names it."""

    input = "i64[1]"

    def predict_batch(self, inputs: Any) -> Any:
        return self.tables.pull("bare", inputs[:, 0])[:, 0]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    folder = tmp_path_factory.mktemp("served")
    with clipper.start(params=str(folder / "set"), **QUICK) as started:
        started._learning.states.start_writing()
        yield started


def own(server: clipper.ClipperServer) -> LocalSet:
    assert server._parameters.served is not None
    assert server._parameters.served._own is not None
    return server._parameters.served._own


@pytest.fixture
def deploy(server: clipper.ClipperServer) -> Iterator[Callable[..., None]]:
    """Deploys a model, and retires it after the test."""
    made: list[str] = []

    def do(name: str, model: Any, **settings: Any) -> None:
        server.deploy(name, model, cache=False, **settings)
        made.append(name)

    yield do
    for name in made:
        server.retire(name, force=True)


def call_once(app: clipper.ApplicationHandle, id: int) -> clipper.Answer:
    found: clipper.Answer = app.predict([id]).result(PATIENCE_S)
    assert not found.is_default, found.reason
    return found


@pytest.mark.slow
def test_the_next_query_reads_rows_trained_by_feedback(
    server: clipper.ClipperServer, deploy: Callable[..., None]
) -> None:
    deploy("scores", Scores, replicas=2)
    app = server.app("learns", models=["scores"], policy="stacking", slo_ms=30_000)
    assert call_once(app, 7).output == 0
    app.feedback(call_once(app, 7), label=3.0)
    until(lambda: call_once(app, 7).output == 3)
    assert server.params.pull("scores", [7, 8]).tolist() == [[3], [0]], (
        "whoever asks the shards sees the same"
    )
    replicas: Any = server.stats()["models"]["scores:1"]["replicas"]
    assert sorted(replica["feedback_sent"] for replica in replicas) == [0, 1], (
        "both read what one learned"
    )
    assert all(call_once(app, 7).output == 3 for _ in range(20))


@pytest.mark.slow
def test_model_with_tables_that_declares_no_reads_is_not_cached(
    server: clipper.ClipperServer,
) -> None:
    server.deploy("uncached", Scores)
    app = server.app("uncached", models=["uncached"], slo_ms=30_000)
    assert [call_once(app, 77).output for _ in range(2)] == [0, 0]
    server.params.push("scores", [77], -np.ones((1, 1), np.float32))
    assert call_once(app, 77).output == 1
    server.retire("uncached", force=True)


@pytest.mark.slow
def test_a_killed_shard_is_restarted_before_the_model_times_out(
    server: clipper.ClipperServer, deploy: Callable[..., None]
) -> None:
    deploy("after", Scores)
    app = server.app("killed", models=["after"], policy="stacking", slo_ms=30_000)
    call_once(app, 70)
    os.kill(own(server).pids()[0], signal.SIGKILL)
    assert server.params.pull("scores", [70]).tolist() == [[0]], "it came back with its tables"
    app.feedback(call_once(app, 71), label=5.0)
    until(lambda: call_once(app, 71).output == 5)


@pytest.mark.slow
def test_tables_can_be_named_at_deployment(
    server: clipper.ClipperServer, deploy: Callable[..., None]
) -> None:
    deploy("bare", Bare, tables={"bare": {"dim": 4, "initializer": "constant"}})
    app = server.app("told", models=["bare"], slo_ms=30_000)
    assert call_once(app, 1).output == server.params.pull("bare", [1])[0, 0]
    assert server.catalog.view.model("bare").tables == {
        "bare": {"dim": 4, "initializer": "constant"}
    }


@pytest.mark.slow
def test_a_users_row_is_the_context_of_their_queries(
    server: clipper.ClipperServer,
    deploy: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of two models is right for a user; the user's vector determines which."""
    # every query waits for its row, also where one takes more than 50 ms
    patient = partial(UserRows, answer_s=PATIENCE_S)
    monkeypatch.setattr("clipper.params.local.served_set.UserRows", patient)
    for label in (0, 1):
        deploy(f"says-{label}", partial(constant, label), input="i64[1]")
    server.params.create(
        TableSpec(
            "users", 1, optimizer="sgd", initializer="zeros", optimizer_settings={"rate": 1.0}
        )
    )
    users = [f"u{i}" for i in range(4)]
    ids = np.array([session_of(user) for user in users], np.uint64)
    server.params.push("users", ids, [[-1.0] if i % 2 else [1.0] for i in range(4)])
    app = server.app(
        "theirs",
        models=["says-0", "says-1"],
        policy="linucb",
        context_table="users",
        slo_ms=30_000,
        default=-1,
    )
    outputs = []
    for turn in range(60):
        answer = app.predict([turn], user=users[turn % 4]).result(PATIENCE_S)
        outputs.append(answer.output)
        app.feedback(answer, label=turn % 2)
    assert outputs[20:] == [0, 1] * 20
    counts = server.stats()["applications"]["theirs"]["context"]
    assert counts == {"table": "users", "pulled": 60, "away": 0, "unusable": 0}
    app.predict([1], user="u1", context=[0.5]).result(PATIENCE_S)
    app.predict([1]).result(PATIENCE_S)
    assert server.stats()["applications"]["theirs"]["context"]["pulled"] == 60, (
        "one that brings its own, and nobody's"
    )


def constant(label: int, rows: Any) -> Any:
    return [label] * len(rows)


@pytest.mark.slow
def test_invalid_context_tables_are_refused(
    server: clipper.ClipperServer, deploy: Callable[..., None]
) -> None:
    deploy("any", partial(constant, 0), input="i64[1]")
    server.params.create(TableSpec("broad", 33))
    with pytest.raises(DoesNotFit, match=r"policy 'ensemble' of application 'c' takes no context"):
        server.app("c", models=["any"], context_table="broad")
    with pytest.raises(DoesNotFit, match=r"rows of table 'broad' have 33 numbers"):
        server.app("c", models=["any"], policy="linucb", context_table="broad")
    with pytest.raises(UnknownTable, match="nowhere"):
        server.app("c", models=["any"], policy="linucb", context_table="nowhere")
    with pytest.raises(InvalidInput, match="`context_table`: Expected `str`"):
        server.app("c", models=["any"], policy="linucb", context_table=["broad"])


@pytest.mark.slow
def test_invalid_tables_of_a_model_are_refused(server: clipper.ClipperServer) -> None:
    with pytest.raises(
        InvalidInput, match=r"declares table 'scores' with 'optimiser'.*'optimizer'"
    ):
        server.deploy("misspelt", Misspelt)
    server.params.create(TableSpec("taken", 3))
    with pytest.raises(TypeConflict, match=r"model 'wide:1' declares table 'taken': .*dim"):
        server.deploy("wide", Bare, tables={"taken": {"dim": 2}})
    with pytest.raises(InvalidInput, match="a mapping with `dim`"):
        server.deploy("no-dim", Bare, tables={"t": {}})
    with pytest.raises(InvalidInput, match="declares table 't'"):
        server.deploy("no-number", Bare, tables={"t": {"dim": "many"}})
    with pytest.raises(InvalidInput, match=r"table 't'.*`int` >= 1"):
        server.deploy("no-number", Bare, tables={"t": {"dim": 0}})
    with pytest.raises(DoesNotFit, match="does not reach them"):
        server.deploy("docked", Bare, tables={"t": {"dim": 1}}, deployer="docker")
    assert not server.stages("wide"), "nothing was started"


def test_a_model_with_tables_needs_a_server_with_a_set() -> None:
    with clipper.start(**QUICK) as server:
        with pytest.raises(
            DoesNotFit, match=r"declares tables \(scores\), and this server has none"
        ) as told:
            server.deploy("scores", Scores)
        assert "clipper.start(params=" in told.value.hint
        with pytest.raises(DoesNotFit, match="no tables"):
            server.params  # noqa: B018
        with pytest.raises(
            DoesNotFit, match=r"context_table='users', and this server has no tables"
        ):
            server.app("c", policy="linucb", context_table="users")
        # as a server with tables made it
        server.catalog.register_application("c", policy="linucb", context_table="users")
        assert "context" not in server.stats()["applications"]["c"]
        with pytest.raises(
            DeployFailed, match=r"declares parameter tables .'scores'.*no parameter server"
        ):
            server.deploy(
                "named", "tests.params.test_serving:Scores", code=[str(Path(__file__).parents[2])]
            )


@pytest.mark.slow
def test_a_set_of_the_server_starts_and_stops_with_it(tmp_path: Path) -> None:
    file = tmp_path / "clipper.toml"
    file.write_text(
        f'[server]\nstate = "{tmp_path}/state"\nparams = "{tmp_path}/set"\n[params]\nshards ='
        " 2\nsnapshot_s = 0\n"
    )
    with clipper.start(file, **QUICK) as server:
        server.deploy("scores", Scores, cache=False)
        server.params.push("scores", [3, 4], [[-1.0], [-2.0]])
        assert server.stats()["params"] == {"folder": f"{tmp_path}/set", "own": True, "restarts": 0}
        with clipper.start(params=f"{tmp_path}/set", **QUICK) as other:
            assert not other.stats()["params"]["own"], "two servers share one set"
            assert other.params.pull("scores", [3])[0, 0] == 1
        assert server.params.pull("scores", [4])[0, 0] == 2, "the other's end did not end it"
    assert supervisor_of(tmp_path / "set") == 0
    with clipper.start(params=f"{tmp_path}/set", state=f"{tmp_path}/state", **QUICK) as server:
        assert len(server.params) == 2, (
            "as many shards as the folder knows of, though nobody said so"
        )
        app = server.app("again", models=["scores"], slo_ms=30_000)
        until(lambda: server.stats()["models"]["scores:1"]["has"] == 1)
        assert call_once(app, 4).output == 2
    assert read_address_file(tmp_path / "set")["settings"]["snapshot_s"] == 0


SERVES = """
import sys, time, clipper
from clipper.params import TableSpec
server = clipper.start(params=sys.argv[1])
server.params.create(TableSpec("t", 1, initializer="zeros", optimizer="sgd", optimizer_settings={"rate": 1.0}))
server.params.push("t", [1], [[-1.0]])
print(server.params.call(0, "stats")["pid"], flush=True)
time.sleep(600)
"""  # noqa: E501


@pytest.mark.slow
def test_a_set_ends_with_its_killed_server_and_the_next_server_continues_it(tmp_path: Path) -> None:
    with Program(sys.executable, "-c", SERVES, tmp_path, apart=True) as server:
        shard = os.pidfd_open(int(server.line()))
        os.kill(server.pid, signal.SIGKILL)
        assert select.select([shard], [], [], PATIENCE_S)[0], "nothing is left of it"
    os.close(shard)
    with clipper.start(params=str(tmp_path), **QUICK) as after:
        assert after.stats()["params"]["own"]
        assert after.params.pull("t", [1])[0, 0] == 1, "its shards heard of it, and took a snapshot"


@pytest.mark.slow
def test_a_running_set_is_used_and_not_stopped(tmp_path: Path) -> None:
    running = LocalSet(ParamsSettings(folder=str(tmp_path), snapshot_s=0.0)).start()
    try:
        running.wait_ready(PATIENCE_S)
        with clipper.start(params=str(tmp_path), **QUICK) as server:
            server.params.create(TableSpec("t", 1))
        with Client(tmp_path) as client:
            assert client.spec("t").dim == 1
        (pid,) = running.pids().values()
        freeze(pid)
        try:
            with pytest.raises(ShardAway, match="shard 0"):
                ServedSet(ParamsSettings(folder=str(tmp_path))).start(0.2)
        finally:
            os.kill(pid, signal.SIGCONT)
    finally:
        running.stop(snapshot=False)


def test_a_set_that_an_engine_runs_elsewhere_is_used(shards: Shards) -> None:
    shards.up(2)
    told = {"addresses": shards.addresses, "token": TOKEN, "engine": "ray"}
    (shards.root / "shards.json").write_text(json.dumps(told))
    served = ServedSet(ParamsSettings(folder=str(shards.root), shards=2)).start(PATIENCE_S)
    try:
        assert not served.stats()["own"]
        served.make("model 'm:1'", {"t": {"dim": 2}})
        assert served.client.spec("t").dim == 2
    finally:
        served.stop()
    assert all(server.ready.is_set() for server in shards.servers.values())


def test_settings_of_a_set_default_to_those_of_its_folder(tmp_path: Path) -> None:
    (tmp_path / "shards.json").write_text(
        '{"settings": {"shards": 5, "replicas": 2, "token": "", "gone": 1}}'
    )
    found = settings_of(load(env={}, params=str(tmp_path)))
    assert (found.shards, found.replicas, found.folder) == (5, 2, str(tmp_path))
    file = tmp_path / "clipper.toml"
    file.write_text(f'[server]\nparams = "{tmp_path}"\n[params]\nshards = 1\n')
    found = settings_of(load(file, env={}))
    assert (found.shards, found.replicas) == (1, 2)
    file.write_text(f'[server]\nparams = "{tmp_path}"\n[params]\nfolder = "elsewhere"\n')
    with pytest.raises(ConfigError, match=r"Leave out params\.folder"):
        settings_of(load(file, env={}))
