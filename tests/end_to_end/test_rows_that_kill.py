"""Rows that end their container, processes that containers leave behind, and what a model sees of
the server's environment. A client cannot take a model out of service."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import numpy as np
import pytest

import clipper
from clipper.errors import ContainerDied, DeployFailed
from tests.control_groups import own_group_mounted
from tests.end_to_end.test_replicas import pids, rows_of
from tests.frontend.conftest import ask
from tests.memory_container import wait_until
from tests.processes import Program
from tests.signals import has_ended

POISON = 666.0


def total(rows):
    if (rows == POISON).any():
        os._exit(9)
    return rows.sum(axis=1)


@pytest.fixture
def server(tmp_path):
    with clipper.start(state=str(tmp_path), http="127.0.0.1:0") as made:
        yield made


def test_rows_that_end_their_container_do_not_end_the_model(server):
    model = server.deploy("m", total, input="f64[2]", cache=False)
    for i in range(6):
        with pytest.raises(ContainerDied, match="ended twice"):
            model.predict([POISON, i], slo_ms=20_000).result(30)
    assert model.predict([1, 2], slo_ms=20_000).result(30) == 3
    (row,) = rows_of(server, model)
    assert (row["state"], row["restart_count"]) == ("ready", 12)


def test_a_row_that_ended_two_processes_is_refused(server):
    model = server.deploy("m", total, input="f64[2]", cache=False)
    bad = [POISON, 1.0]
    with pytest.raises(ContainerDied, match="ended twice"):
        model.predict(bad, slo_ms=20_000).result(30)
    deployment = server._deployment
    wait_until(lambda: deployment.row_blames.refused == 1)
    model.predict([1, 2], slo_ms=20_000).result(30)
    before = pids(server, model)
    with pytest.raises(ContainerDied, match="is refused"):
        model.predict(bad, slo_ms=20_000).result(30)
    answers = model.predict_many(np.array([[1.0, 1.0], bad, [2.0, 2.0]]), slo_ms=20_000)
    answers.wait(30)
    assert [str(status.name) for status in map(answers.status, range(3))] == [
        "OK",
        "REPLICA_LOST",
        "OK",
    ]
    assert pids(server, model) == before


def test_neighbours_of_such_a_row_are_answered(server):
    model = server.deploy("m", total, input="f64[2]", cache=False)
    futures = [model.predict([i, i], slo_ms=20_000) for i in range(40)]
    bad = model.predict([POISON, 0], slo_ms=20_000)
    futures += [model.predict([i, 1], slo_ms=20_000) for i in range(40)]
    assert [future.result(30) for future in futures] == [
        *(2 * i for i in range(40)),
        *(i + 1 for i in range(40)),
    ]
    with pytest.raises(ContainerDied):
        bad.result(30)


def doubled(rows):
    return 2 * rows.sum(axis=1)


@pytest.mark.slow
def test_many_such_rows_in_one_array_are_each_refused_and_the_rest_is_answered(server):
    model = server.deploy("m", total, input="f64[2]", cache=False)
    other = server.deploy("other", doubled, input="f64[2]", cache=False)
    rows = np.array([[POISON if i % 4 == 0 else 1.0, i] for i in range(40)])
    wanted = ["REPLICA_LOST" if i % 4 == 0 else "OK" for i in range(40)]
    answers = model.predict_many(rows, slo_ms=60_000)
    meanwhile = model.predict([1, 2], slo_ms=20_000)
    assert other.predict([1, 2], slo_ms=20_000).result(30) == 6
    answers.wait(60)
    assert [answers.status(i).name for i in range(40)] == wanted
    assert meanwhile.result(30) == 3
    wait_until(lambda: server._deployment.row_blames.refused == 10)
    assert model.predict([1, 2], slo_ms=20_000).result(30) == 3
    before = pids(server, model)
    again = model.predict_many(rows, slo_ms=60_000)
    again.wait(60)
    assert [again.status(i).name for i in range(40)] == wanted
    assert pids(server, model) == before


def waits(rows):
    if (rows == 7).any():
        time.sleep(0.5)
    return rows.sum(axis=1)


def test_rows_of_a_container_that_was_killed_are_answered_and_not_blamed(server):
    model = server.deploy("m", waits, input="f64[2]", cache=False)
    for _ in range(2):
        future = model.predict([7, 1], slo_ms=30_000)
        wait_until(lambda: any(row.get("in_flight") for row in rows_of(server, model)))
        os.kill(pids(server, model)[0], signal.SIGKILL)
        assert future.result(40) == 8
    assert server._deployment.row_blames.refused == 0


def forks(rows):
    if (rows == POISON).any():
        subprocess.Popen(["sleep", "20"], close_fds=False)
        for fd in map(int, os.listdir("/proc/self/fd")):
            try:
                os.set_inheritable(fd, True)
            except OSError:
                continue
        child = os.fork()
        if child == 0:
            time.sleep(20)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    return rows.sum(axis=1)


def test_a_child_that_holds_the_connection_of_a_dead_container_holds_no_row(server):
    model = server.deploy("m", forks, input="f64[2]", cache=False, warmup=False)
    began = time.monotonic()
    future = model.predict([POISON, 1], slo_ms=60_000)
    wait_until(lambda: future.done())
    assert time.monotonic() - began < 30
    assert model.predict([1, 2], slo_ms=20_000).result(30) == 3


def variables(rows):
    return ["\n".join(sorted(os.environ)) for _ in rows]


def test_a_model_does_not_see_the_secrets_of_the_server(tmp_path, monkeypatch):
    secrets = {
        "CLIPPER_INFLUX__TOKEN": "t",
        "CLIPPER_ADMIN_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "k",
        "AWS_SESSION_TOKEN": "k",
        "DATABASE_URL": "postgres://u:p@h/d",
        "TORCH_TOKEN": "t",
        "GITHUB_TOKEN": "t",
    }
    wanted = {"OMP_PROC_BIND": "true", "LC_TIME": "C.UTF-8", "MODEL_COLOUR": "blue"}
    for name, value in {**secrets, **wanted}.items():
        monkeypatch.setenv(name, value)
    with clipper.start(state=str(tmp_path), env_pass=["MODEL_*"]) as server:
        for fork in ("forked", "plain"):
            model = server.deploy(fork, variables, input="f64[1]", output="str", cache=False)
            seen = model.predict([1.0], slo_ms=20_000).result(30).split("\n")
            assert not secrets.keys() & {*seen}
            assert wanted.keys() <= {*seen}
            (row,) = rows_of(server, model)
            with open(f"/proc/{row['pid']}/environ", "rb") as file:
                assert b"postgres" not in file.read()


def test_the_end_of_the_supervising_thread_is_told_by_live_and_by_deploy(server, monkeypatch):
    monkeypatch.setattr("threading.excepthook", lambda _: None)
    model = server.deploy("m", total, input="f64[2]", cache=False)

    def dies():
        raise SystemExit("the thread ends")

    server._processes.post(dies)
    wait_until(lambda: server._processes.failure)
    assert any(one.vital and str(one.state) == "failed" for one in server.health())
    # its process ends with that thread, and its connection later
    wait_until(
        lambda: [(row["state"], row["pid"]) for row in rows_of(server, model)] == [("failed", 0)]
    )
    with pytest.raises((DeployFailed, clipper.errors.NotStarted)):
        server.deploy("late", total, input="f64[2]")


@pytest.mark.parametrize(
    ("restarts_max", "state"),
    [(0, "it is started again on request only"), (1, "held, tried again in")],
)
def test_ready_tells_the_containers_that_have_failed_and_those_that_are_held(
    tmp_path, restarts_max, state
):
    with clipper.start(
        state=str(tmp_path), http="127.0.0.1:0", restarts_max=restarts_max
    ) as server:
        model = server.deploy("m", total, input="f64[2]", cache=False)
        assert "held" not in ask(server.http_address, "GET", "/v2/health/ready").json
        (pid,) = pids(server, model)
        # no signal by which operators and the kernel stop processes
        os.kill(pid, signal.SIGUSR1)

        def told():
            return ask(server.http_address, "GET", "/v2/health/ready").json.get("held")

        (text,) = wait_until(told)
        assert text.startswith("m:1/0: killed (SIGUSR1); ")
        assert state in text


def leaves_a_daemon(rows):
    """Start a process in a session of its own, whose parent ends; return its id."""
    reads, writes = os.pipe()
    child = os.fork()
    if child == 0:
        os.setsid()
        daemon = os.fork()
        if daemon == 0:
            time.sleep(600)
        else:
            os.write(writes, str(daemon).encode())
        os._exit(0)
    os.waitpid(child, 0)
    daemon = os.read(reads, 20).decode()
    return [daemon for _ in rows]


@pytest.fixture
def groups(tmp_path_factory):
    """Control groups can be made."""
    with own_group_mounted(tmp_path_factory.mktemp("groups")):
        yield


@pytest.mark.usefixtures("groups")
@pytest.mark.parametrize("fork", [True, False])
def test_a_daemon_that_a_model_has_left_ends_with_it(tmp_path, fork):
    with clipper.start(state=str(tmp_path / "s"), server={"fork_server": fork}) as server:
        model = server.deploy("m", leaves_a_daemon, input="f64[2]", cache=False, warmup=False)
        first = int(model.predict([1, 2], slo_ms=20_000).result(30))
        (pid,) = pids(server, model)
        os.kill(pid, signal.SIGKILL)
        wait_until(lambda: has_ended(first))
        second = int(model.predict([1, 2], slo_ms=60_000).result(60))
        assert not has_ended(second)
        server.retire("m")
        wait_until(lambda: has_ended(second))


@pytest.mark.usefixtures("groups")
def test_a_daemon_of_a_model_of_a_killed_server_ends_when_the_next_one_starts(tmp_path):
    source = f"""
        import time, clipper
        from tests.end_to_end.test_rows_that_kill import leaves_a_daemon
        server = clipper.start(state={str(tmp_path / "s")!r})
        model = server.deploy("m", leaves_a_daemon, input="f64[2]", cache=False, warmup=False)
        print(model.predict([1, 2], slo_ms=20_000).result(30), flush=True)
        time.sleep(600)
    """
    with Program(sys.executable, "-c", textwrap.dedent(source)) as program:
        daemon = int(program.line())
        assert not has_ended(daemon)
    with clipper.start(state=str(tmp_path / "s")):
        wait_until(lambda: has_ended(daemon))
