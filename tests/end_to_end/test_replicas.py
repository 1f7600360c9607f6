"""Containers start, stop and die: under load, during a batch, frozen, repeatedly. No query is lost,
and none is answered twice."""

import contextlib
import logging
import os
import signal
import threading
import time

import numpy as np
import pytest

import clipper
from clipper.errors import (
    AlreadyExists,
    ClipperError,
    DeployFailed,
    StillLinked,
    UnknownModel,
    UnknownVersion,
)
from tests.memory_container import wait_until
from tests.signals import freeze, has_ended
from tests.threads import join

ROW = np.arange(4.0)


def total(xs):
    return xs.sum(axis=1)


def rows_of(server, model):
    return server.stats()["models"][model.name]["replicas"]


def pids(server, model):
    return [row["pid"] for row in rows_of(server, model) if row["state"] == "ready"]


class Load:
    """A thread that sends queries without a pause and counts every answer."""

    def __init__(self, model, slo_ms=10_000):
        self.model, self.slo_ms, self.queried, self.failed = model, slo_ms, 0, []
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        while not self._stop.is_set():
            futures = [self.model.predict(ROW + i, slo_ms=self.slo_ms) for i in range(20)]
            self.queried += len(futures)
            for i, future in enumerate(futures):
                try:
                    assert future.result(20) == 6.0 + 4 * i
                except (ClipperError, AssertionError) as error:
                    self.failed.append(error)

    def more(self, n=100):
        """Wait until `n` more queries have been sent and answered."""
        until = self.queried + n
        wait_until(lambda: self.queried >= until or self.failed)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *exc):
        self._stop.set()
        join(self._thread)


def test_scaling_under_load_loses_nothing(deploy, server):
    model = deploy(total, input="f64[4]", cache=False)
    with Load(model) as load:
        load.more()
        server.scale(model.name, 3)
        wait_until(lambda: len(pids(server, model)) == 3)
        load.more()
        server.scale(model.name, 1)
        wait_until(lambda: len(pids(server, model)) == 1)
        load.more()
        server.scale(model.name, 2)
        wait_until(lambda: len(pids(server, model)) == 2)
        load.more()
    assert load.failed == []


def test_replicas_share_the_queue(deploy, server):
    def slow(xs):
        time.sleep(0.02)
        return xs.sum(axis=1)

    model = deploy(
        slow, input="f64[4]", cache=False, replicas=2, batching={"mode": "static", "size_max": 1}
    )

    def both_have_had_some():
        assert model.predict_many(np.ones((20, 4))).result(20).tolist() == [4.0] * 20
        return all(row["batches"] >= 5 for row in rows_of(server, model))

    wait_until(both_have_had_some)


def test_scale_to_nothing_and_back(deploy, server):
    model = deploy(total, input="f64[4]", cache=False)
    (pid,) = pids(server, model)
    server.scale(model.name, 0)
    wait_until(lambda: has_ended(pid))
    future = model.predict(ROW, slo_ms=15_000)  # waits in the queue for a container to come
    server.scale(model.name, 1)
    assert future.result(20) == 6.0


# -- death


def test_killed_between_queries_it_comes_back(deploy, server):
    model = deploy(total, input="f64[4]", cache=False)
    (old,) = pids(server, model)
    os.kill(old, signal.SIGKILL)
    assert model.predict(ROW, slo_ms=15_000).result(20) == 6.0
    (row,) = wait_until(lambda: [row for row in rows_of(server, model) if row["state"] == "ready"])
    assert row["pid"] != old
    assert row["restart_count"] == 1
    assert "SIGKILL" in row["detail"]


def test_replicas_come_back_after_their_fork_server_is_killed(deploy, server):
    model = deploy(total, input="f64[4]", cache=False, replicas=2)
    assert [row["start"] for row in rows_of(server, model)] == ["forked", "forked"]
    before = pids(server, model)
    with open(f"/proc/{before[0]}/stat") as file:
        fork_server = int(file.read().rpartition(")")[2].split()[1])
    with Load(model) as load:
        load.more()
        os.kill(fork_server, signal.SIGKILL)
        wait_until(lambda: all(has_ended(pid) for pid in before))
        wait_until(lambda: len(pids(server, model)) == 2)
        load.more()
    for error in load.failed:  # a query is tried twice; both replicas died at nearly the same time
        assert isinstance(error, clipper.errors.ReplicaLost)
    assert [row["start"] for row in rows_of(server, model)] == ["forked", "forked"]


def gated(folder):
    """Write which process has a batch, and do not answer it until the gate is open."""

    def predict(xs):
        open(f"{folder}/has-{os.getpid()}", "w").close()
        while not os.path.exists(f"{folder}/gate"):
            time.sleep(0.002)
        return xs.sum(axis=1)

    return predict


def test_a_query_in_flight_goes_to_the_other_replica(deploy, server, tmp_path):
    model = deploy(gated(tmp_path), input="f64[4]", cache=False, replicas=2)
    both = pids(server, model)
    future = model.predict(ROW, slo_ms=20_000)
    (first,) = wait_until(lambda: [pid for pid in both if (tmp_path / f"has-{pid}").exists()])
    (second,) = set(both) - {first}
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: (tmp_path / f"has-{second}").exists(), "the other replica has the batch")
    (tmp_path / "gate").touch()
    assert future.result(20) == 6.0


def test_it_answers_before_it_stops(deploy, server, tmp_path):
    model = deploy(gated(tmp_path), input="f64[4]", cache=False)
    (pid,) = pids(server, model)
    future = model.predict(ROW, slo_ms=20_000)
    wait_until(lambda: (tmp_path / f"has-{pid}").exists())
    os.kill(pid, signal.SIGTERM)
    (tmp_path / "gate").touch()
    assert future.result(20) == 6.0
    wait_until(lambda: has_ended(pid))


def test_killed_mid_batch_without_another_replica(deploy, server, tmp_path, app):
    model = deploy(gated(tmp_path), input="f64[4]", cache=False)
    future = app(model, slo_ms=60_000, default=-1).predict(ROW)
    (pid,) = pids(server, model)
    wait_until(lambda: (tmp_path / f"has-{pid}").exists())
    os.kill(pid, signal.SIGKILL)
    # the one that comes in its place has the batch
    wait_until(lambda: len([*tmp_path.glob("has-*")]) == 2)
    (tmp_path / "gate").touch()
    assert future.result(60).output == 6.0


def test_many_deaths_under_load(deploy, server):
    """Three replicas are killed one after another under load: each query is answered once, with the
    right output."""
    model = deploy(total, input="f64[4]", cache=False, replicas=3)
    with Load(model) as load:
        for i in range(3):
            wait_until(lambda: len(pids(server, model)) == 3)
            load.more(40)
            victim = pids(server, model)[i]
            os.kill(victim, signal.SIGKILL)
            wait_until(lambda victim=victim: victim not in pids(server, model))
        load.more(40)
    assert [
        error for error in load.failed if not isinstance(error, clipper.errors.ReplicaLost)
    ] == []
    assert len(load.failed) < 0.05 * load.queried  # only who was on two that died


def test_frozen_traffic_moves_and_thawed_it_rejoins(deploy, server):
    model = deploy(total, input="f64[4]", cache=False, replicas=2)
    frozen, _ = pids(server, model)
    freeze(frozen)
    try:

        def is_overdue():
            """Return whether a batch of its is."""
            model.predict(ROW, slo_ms=50).exception(60)
            return any(row.get("suspect") for row in rows_of(server, model))

        wait_until(is_overdue)
        for i in range(50):
            assert model.predict(ROW + i, slo_ms=5000).result(60) == 6.0 + 4 * i
    finally:
        os.kill(frozen, signal.SIGCONT)
    wait_until(
        lambda: (
            len(pids(server, model)) == 2
            and not any(row["suspect"] for row in rows_of(server, model))
        )
    )
    before = {row["number"]: row["batches"] for row in rows_of(server, model)}

    def both_work():
        model.predict_many(np.ones((50, 4))).result(60)
        return all(row.get("batches", 0) > before[row["number"]] for row in rows_of(server, model))

    wait_until(both_work)


def test_frozen_with_a_batch(deploy, server, tmp_path):
    """The batch of a container that hangs is sent to the other one, or ends by its deadline; its
    late reply is ignored."""
    model = deploy(
        total, input="f64[4]", cache=False, replicas=2, batching={"mode": "static", "size_max": 4}
    )
    frozen, _ = pids(server, model)
    freeze(frozen)
    futures = [model.predict(ROW + i, slo_ms=1500) for i in range(100)]
    results = []
    for i, future in enumerate(futures):
        with contextlib.suppress(TimeoutError, clipper.errors.ReplicaLost):
            assert future.result(60) == 6.0 + 4 * i
            results.append(i)
    os.kill(frozen, signal.SIGCONT)
    assert len(results) >= 80
    wait_until(lambda: len(pids(server, model)) == 2)
    assert model.predict_many(np.ones((100, 4))).result(60).tolist() == [4.0] * 100


# -- what does not come up


def test_a_crash_loop_ends_with_the_last_lines(server, names):
    def exits(xs):
        return xs

    class Dying(clipper_container_model()):
        def load(self):
            import sys

            print("cannot find the licence server", file=sys.stderr, flush=True)
            sys.exit(9)

        predict_batch = exits

    name = next(names)
    with pytest.raises(DeployFailed, match=r"(?s)exit 3.*cannot find the licence server") as caught:
        server.deploy(name, Dying(), input="f64[4]")
    assert f"container {name}:1/0" in str(caught.value)
    assert caught.value.hint == f"Its whole log: clipper logs {name}:1"
    assert "cannot find the licence server" in server.logs(f"{name}:1")
    with pytest.raises(UnknownModel):
        server.model(name)
    assert not [s for s in server.stats()["models"] if s.startswith(name)]


def clipper_container_model():
    from clipper_container import Model

    return Model


def test_a_model_that_raises_while_it_loads(server, names):
    class Broken(clipper_container_model()):
        def load(self):
            raise FileNotFoundError("weights.bin")

        def predict_batch(self, inputs):
            return inputs[:, 0]

    with pytest.raises(DeployFailed, match=r"(?s)failed to load.*weights\.bin"):
        server.deploy(next(names), Broken())


def test_a_module_that_is_not_there(server, names):
    with pytest.raises(DeployFailed, match=r"No module named 'no_such_module'"):
        server.deploy(next(names), "no_such_module:predict")


def test_an_error_of_a_module_is_told_once_and_in_the_log_by_its_last_line(
    server, names, tmp_path, monkeypatch, caplog
):
    """Three attempts have the same traceback: the error has one, with the name of the user's file,
    and its hint on a line of its own; the log has one line per attempt, and one for the end."""
    (tmp_path / "half_done.py").write_text("import no_such_package\n\ndef f(rows): ...\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    name = next(names)
    with caplog.at_level(logging.WARNING), pytest.raises(DeployFailed) as caught:
        server.deploy(name, "half_done:f", input="f64[4]")
    lines = str(caught.value).splitlines()
    assert sum("Traceback" in line for line in lines) == 1
    assert sum('half_done.py", line 1' in line for line in lines) == 1
    assert lines[-1] == f"Its whole log: clipper logs {name}:1"
    told = [one.getMessage() for one in caplog.records if f"container {name}:1/0" in one.message]
    last = "Its last line: ModuleNotFoundError: No module named 'no_such_package'"
    assert told[:3] == [f"container {name}:1/0 exited: exit 3. {last}"] * 3
    assert told[3].startswith(f"container {name}:1/0 failed: exit 3; stopped after 3 exits")
    assert told[3].endswith(last)
    assert not told[4:]


def test_a_container_that_is_too_slow_to_load(names):
    class Slow(clipper_container_model()):
        def load(self):
            time.sleep(60)

        def predict_batch(self, inputs):
            return inputs[:, 0]

    with (
        clipper.start(load_s=0.5) as server,
        pytest.raises(DeployFailed, match=r"(?s)did not connect within 0\.5 s.*load_s"),
    ):
        server.deploy("slow", Slow())


def test_a_failed_deploy_leaves_the_latest_version_alone(deploy, server):
    model = deploy(lambda xs: xs[:, 0] * 0 + 1, input="f64[4]", cache=False)
    name = model.name.partition(":")[0]
    with pytest.raises(DeployFailed):
        server.deploy(name, "no_such_module:predict", input="f64[4]")
    assert server.model(name).name == model.name
    assert server.model(name).predict(ROW).result(60) == 1


# -- versions


def test_a_new_version_is_the_latest_once_it_is_ready(deploy, server, app, tmp_path):
    class Gated(clipper_container_model()):
        def load(self):
            while not (tmp_path / "gate").exists():
                time.sleep(0.005)

        def predict_batch(self, xs):
            return xs[:, 0] * 0 + 2

    first = deploy(lambda xs: xs[:, 0] * 0 + 1, input="f64[4]", cache=False)
    name = first.name.partition(":")[0]
    server.app("follows", models=[name], slo_ms=5000, default=-1)
    handle = server.app("follows")
    thread = threading.Thread(
        target=lambda: deploy(Gated(), input="f64[4]", cache=False, name=name)
    )
    thread.start()
    try:
        wait_until(lambda: f"{name}:2" in server.stats()["models"])
        assert handle.predict(ROW).result().output == 1
        assert server.model(name).name == f"{name}:1"
    finally:
        (tmp_path / "gate").touch()
        join(thread)
    answer = handle.predict(ROW).result()
    assert (answer.output, [str(m) for m in answer.models]) == (2, [f"{name}:2"])
    assert server.model(f"{name}:1").predict(ROW).result(60) == 1
    server.catalog.unregister_application("follows")


def test_a_rolling_upgrade_under_load_fails_nobody(deploy, server):
    model = deploy(total, input="f64[4]", cache=False)
    name = model.name.partition(":")[0]
    server.app("rolling", models=[name], slo_ms=20_000, default=-1)
    handle, stop, wrong = server.app("rolling"), threading.Event(), []

    def ask():
        while not stop.is_set():
            answer = handle.predict(ROW).result(40)
            if answer.output != 6.0:
                wrong.append(answer)

    thread = threading.Thread(target=ask)
    thread.start()
    deploy(total, input="f64[4]", cache=False, name=name)
    server.retire(f"{name}:1")
    deploy(total, input="f64[4]", cache=False, name=name)
    stop.set()
    join(thread)
    server.catalog.unregister_application("rolling")
    assert wrong == []


def test_a_version_never_changes_and_retires_for_good(deploy, server, app):
    model = deploy(total, input="f64[4]", cache=False)
    name = model.name.partition(":")[0]
    with pytest.raises(AlreadyExists, match="a version never changes"):
        server.deploy(name, total, version=1)
    assert model.predict(ROW).result(60) == 6.0
    app(name, slo_ms=100)
    with pytest.raises(StillLinked):
        server.retire(name)
    (pid,) = pids(server, model)
    server.retire(name, force=True)
    wait_until(lambda: has_ended(pid))
    with pytest.raises((UnknownModel, UnknownVersion)):
        server.model(f"{name}:1")
    with pytest.raises(AlreadyExists):
        server.deploy(name, total, version=1)


def test_deploys_of_one_name_at_once_get_versions_of_their_own(deploy, server):
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(deploy(total, input="f64[4]", name="rush")))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert sorted(model.name for model in made) == [f"rush:{i}" for i in (1, 2, 3, 4)]


def test_logs(deploy, server):
    def prints(xs):
        print("batch of", len(xs), flush=True)
        return xs.sum(axis=1)

    model = deploy(prints, input="f64[4]", cache=False)
    model.predict(ROW).result(60)
    wait_until(lambda: "batch of 1" in server.logs(model.name))
    with pytest.raises(UnknownModel, match="/7 was started"):
        server.logs(model.name, 7)


def test_as_many_lines_are_kept_as_configured():
    def prints(xs):
        for number in range(10):
            print("line", number, flush=True)
        return xs.sum(axis=1)

    with clipper.start(limits={"log_lines_max": 3}) as server:
        model = server.deploy("speaks", prints, input="f64[4]", warmup=False)
        model.predict(ROW).result(60)
        wait_until(lambda: "line 9" in server.logs(model.name))
        assert list(server.logs(model.name)) == ["line 7", "line 8", "line 9"]
