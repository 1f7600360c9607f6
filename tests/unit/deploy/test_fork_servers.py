"""Fork servers and the real processes that they fork: what a replica inherits, what ends with what,
and when a replica is started plainly.
"""

import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from clipper.deploy import EventKind, ProcessDeployer, RestartPolicy
from clipper.deploy.processes import fork_servers
from clipper.deploy.processes.warmup_deaths import WarmUpDeaths
from tests.unit.deploy.test_process import (
    PATIENCE_S,
    Events,
    alive,
    is_zombie,
    until,
    wait_for_log,
)

QUICK = RestartPolicy(backoff_s_min=0.005, backoff_s_max=0.02, exits_max=9, apart_s=0.0)
SOURCE = """
import json, os, random, resource, sys, threading
import numpy as np
import threadpoolctl
def predict(x):
    return x
print(json.dumps({
    "parent": os.getppid(), "folder": os.getcwd(), "extra": os.environ.get("EXTRA"),
    "random": random.random(), "numpy": float(np.random.random()), "threads": [
        lib["num_threads"] for lib in threadpoolctl.threadpool_info()],
    "omp": os.environ["OMP_NUM_THREADS"], "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
    "group": os.getpgid(0), "signals": open("/proc/self/status").read().partition("SigBlk:")[2].split()[0],
    "open": [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")],
}))
print("to stderr", file=sys.stderr)
"""  # noqa: E501


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def deployer(events, monkeypatch):
    monkeypatch.setattr("clipper.deploy.processes.process.ANSWER_S", PATIENCE_S)
    with ProcessDeployer(events, QUICK) as made:
        yield made


@pytest.fixture
def spec(tmp_path):
    """Makes a spec of a model with this source."""
    from clipper.deploy import ContainerSpec

    def make(source: str = "def predict(x):\n    return x\n", **fields: object) -> ContainerSpec:
        (tmp_path / "model.py").write_text(textwrap.dedent(source))
        made = {"name": "svm", "target": "model:predict", "connect": f"unix:{tmp_path}/none"}
        return ContainerSpec(**{**made, "code": (str(tmp_path),), **fields})

    return make


@pytest.fixture
def packages(tmp_path):
    """Makes a folder of installed packages; returns the environment that has it."""

    def make(**sources: str) -> dict[str, str]:
        version = f"python{sys.version_info[0]}.{sys.version_info[1]}"
        place = tmp_path / "lib" / version / "site-packages"
        place.mkdir(parents=True, exist_ok=True)
        for name, source in sources.items():
            (place / f"{name}.py").write_text(textwrap.dedent(source))
        paths = [str(place), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONUSERBASE": str(tmp_path), "PYTHONPATH": os.pathsep.join(paths)}

    return make


def report(deployer, replica=0):
    """Return the JSON line that SOURCE prints."""
    until(lambda: any(line.startswith("{") for line in deployer.logs("svm", 1, replica)))
    lines = deployer.logs("svm", 1, replica)
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def parent(pid):
    with open(f"/proc/{pid}/stat") as file:
        return int(file.read().rpartition(")")[2].split()[1])


def start(deployer, replica=0):
    (found,) = [each.start for each in deployer.list() if each.replica == replica]
    return found


def test_a_forked_replica_is_as_if_started_by_itself(deployer, events, spec, packages):
    env = {"EXTRA": "1", **packages(rng="import numpy.random\nnumpy.random.random()")}
    made = spec("import rng\n" + SOURCE, env=env, token="hush", threads=3)
    deployer.start(made, 0)
    deployer.start(made, 1)
    pids = [events.next(EventKind.STARTED).pid for _ in range(2)]
    first, second = report(deployer, 0), report(deployer, 1)
    assert start(deployer, 0) == start(deployer, 1) == "forked"
    assert first["parent"] == second["parent"] == parent(pids[0]) != os.getpid()
    assert first["folder"] == os.getcwd()
    assert first["extra"] == "1"
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]
    assert first["omp"] == "3"
    assert set(first["threads"]) == {3}
    assert first["group"] == os.getpgid(0)
    assert first["signals"] == "0" * 16
    sockets = [path for path in first["open"] if path.startswith("socket:")]
    assert len(sockets) <= 1, "of the fork server's own it has none"
    wait_for_log(deployer, "to stderr")
    with open(f"/proc/{pids[0]}/cmdline") as file:
        line = file.read()
    assert line.startswith("clipper-container svm:1/")
    assert "hush" not in line


def test_a_replica_that_does_not_load_yet_can_be_ended(deployer, events, spec):
    """Its fork server ignores SIGTERM; a replica must not, from its first instruction on."""
    deployer.start(spec("import time\nprint('loads')\ntime.sleep(1000)\n"))
    pid = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, "loads")
    os.kill(pid, signal.SIGTERM)
    assert events.next(EventKind.EXITED).pid == pid
    deployer.stop("svm")


def test_only_a_warm_replica_has_the_usual_priority(deployer, events, spec):
    """A starting replica leaves the cores to those that serve, from its first instruction on."""

    def seen(task):
        return os.sched_getscheduler(task), os.getpriority(os.PRIO_PROCESS, task)

    deployer.start(
        spec("import os\nprint('loads', os.sched_getscheduler(0) == os.SCHED_BATCH)\n" + SOURCE)
    )
    pid = events.next(EventKind.STARTED).pid
    assert seen(parent(pid))[0] == os.SCHED_BATCH
    wait_for_log(deployer, "loads True")
    until(lambda: seen(pid) == seen(0))
    assert {seen(int(task)) for task in os.listdir(f"/proc/{pid}/task")} == {seen(0)}


def test_an_only_replica_is_restarted_at_the_usual_priority(deployer, events, spec):
    loading = "import os\nprint('loads', os.sched_getscheduler(0) == os.SCHED_BATCH)\n" + SOURCE
    deployer.start(spec(loading), 0)
    only = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, "loads True")
    os.kill(only, signal.SIGKILL)
    assert events.next(EventKind.EXITED).pid == only
    wait_for_log(deployer, "loads False")


def test_the_exit_code_is_the_childs_and_no_zombie_stays(deployer, events, spec):
    deployer.start(spec("import os, sys\nprint(os.getppid())\nsys.exit(7)\n"))
    exited = events.next(EventKind.EXITED)
    assert exited.detail == "exit 7"
    fork_server = int(exited.log_tail[0])
    deployer.stop("svm")
    assert not alive(exited.pid)
    deployer.start(spec())
    pid = events.next(EventKind.STARTED).pid
    assert parent(pid) == fork_server
    os.kill(pid, signal.SIGKILL)
    assert events.next(EventKind.EXITED).detail == "killed (SIGKILL)"


def test_a_killed_fork_server_is_replaced_with_its_replicas(deployer, events, spec):
    deployer.start(spec(), 0)
    deployer.start(spec(), 1)
    before = [events.next(EventKind.STARTED).pid for _ in range(2)]
    fork_server = parent(before[0])
    os.kill(fork_server, signal.SIGKILL)
    exits = [events.next(EventKind.EXITED) for _ in range(2)]
    assert {event.detail for event in exits} == {"ended with its fork server"}
    after = [events.next(EventKind.STARTED).pid for _ in range(2)]
    assert not any(alive(pid) and not is_zombie(pid) for pid in (*before, fork_server))
    assert parent(after[0]) == parent(after[1]) not in (fork_server, os.getpid())


def test_a_frozen_fork_server_delays_no_stop(deployer, events, spec, monkeypatch):
    """Its replica ends all the same, and the exit code is reported as unknown."""
    deployer.start(spec())
    pid = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, "reconnecting")
    fork_server = parent(pid)
    os.kill(fork_server, signal.SIGSTOP)
    try:
        deployer.stop("svm")
        assert events.next(EventKind.STOPPED).detail == "ended; its fork server does not report how"
        monkeypatch.setattr("clipper.deploy.processes.process.ANSWER_S", 0.05)
        deployer.start(spec())
        events.next(EventKind.STARTED)
        assert start(deployer).startswith("plain: the fork server did not answer within")
    finally:
        os.kill(fork_server, signal.SIGCONT)
    until(lambda: not alive(fork_server))


def test_a_frozen_fork_server_without_replicas_is_killed(deployer, events, spec, monkeypatch):
    deployer.start(spec())
    fork_server = parent(events.next(EventKind.STARTED).pid)
    deployer.stop("svm")
    os.kill(fork_server, signal.SIGSTOP)
    monkeypatch.setattr("clipper.deploy.processes.process.ANSWER_S", 0.05)
    deployer.start(spec())
    until(lambda: not alive(fork_server))


def test_nothing_outlives_a_killed_deployer(spec):
    made = spec()
    source = f"""
        from clipper.deploy import ContainerSpec, ProcessDeployer
        import time
        deployer = ProcessDeployer(lambda event: print(event.pid, flush=True))
        deployer.start(ContainerSpec(name="svm", target="model:predict", connect={made.connect!r},
                                     code={made.code!r}))
        time.sleep(60)
    """
    words = [sys.executable, "-c", textwrap.dedent(source)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        fork_server = parent(pid)
        process.kill()
    until(lambda: all(not alive(one) or is_zombie(one) for one in (pid, fork_server)))


def test_an_import_that_starts_a_thread_makes_a_plain_start(deployer, events, spec, packages):
    env = packages(
        busy="import threading as t\nt.Thread(target=t.Event().wait, daemon=True).start()"
    )
    deployer.start(spec("import busy\ndef predict(x): return x\n", env=env))
    event = events.next(EventKind.STARTED)
    why = "plain: importing busy left the process with 2 threads"
    assert (event.detail, start(deployer)) == (why, why)
    assert parent(event.pid) == os.getpid()
    wait_for_log(deployer, "reconnecting")
    os.kill(event.pid, signal.SIGKILL)
    events.next(EventKind.STARTED)
    assert start(deployer) == "forked", "the fork server of the next start does not import it"


def test_arrow_starts_no_thread_in_a_fork_server(deployer, events, spec):
    pytest.importorskip("pyarrow")  # pandas imports it, and scikit-learn imports pandas
    deployer.start(spec("import pyarrow\ndef predict(x): return x\n"))
    assert events.next(EventKind.STARTED).detail == "forked"


def test_an_import_that_fails_makes_a_plain_start(deployer, events, spec, packages):
    env = packages(broken="raise OSError('no licence')")
    deployer.start(spec("import broken\ndef predict(x): return x\n", env=env))
    event = events.next(EventKind.STARTED)
    assert event.detail == "plain: importing broken failed: OSError: no licence"
    exited = events.next(EventKind.EXITED)
    assert exited.detail == "exit 3"
    assert any("no licence" in line for line in exited.log_tail), "the model itself tells"


def test_a_model_may_request_a_process_of_its_own(deployer, events, spec):
    deployer.start(
        spec("import os\ndef predict(x): return x\npredict.fork = False\nprint('as', os.getpid())")
    )
    first = events.next(EventKind.STARTED)
    wait_for_log(deployer, "reconnecting")
    assert deployer.logs("svm", 1, 0).count(f"as {first.pid}") == 2, "one process, two programs"
    assert start(deployer) == "plain: the model requires it"
    os.kill(first.pid, signal.SIGKILL)
    assert events.next(EventKind.EXITED).detail == "killed (SIGKILL)"
    assert parent(events.next(EventKind.STARTED).pid) == os.getpid()


def test_a_changed_package_and_changed_limits_make_another_fork_server(
    deployer, events, spec, packages
):
    env = packages(thing="VALUE = 1")
    source = SOURCE + "import thing\nprint('value', thing.VALUE)\n"
    deployer.start(spec(source, env=env))
    first = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, "value 1")
    packages(thing="VALUE = 22")
    os.kill(first, signal.SIGKILL)
    second = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, "value 22")
    assert start(deployer) == "forked"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        os.kill(second, signal.SIGKILL)
        events.next(EventKind.STARTED)
        until(lambda: report(deployer)["files"] == soft - 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_what_a_replica_imports_by_itself_is_imported_for_the_next(
    deployer, events, spec, packages, monkeypatch
):
    monkeypatch.setattr(fork_servers, "PREPARE_S", 0.0)
    env = packages(hidden="print('imported by', __import__('os').getpid())")
    deployer.start(
        spec(
            "import importlib\nimportlib.import_module('hid' + 'den')\ndef predict(x): return x",
            env=env,
        )
    )
    first = events.next(EventKind.STARTED).pid
    wait_for_log(deployer, f"imported by {first}")
    wait_for_log(deployer, "reconnecting")
    until(lambda: len(deployer._fork_servers.pids) == 2)
    os.kill(first, signal.SIGKILL)
    events.next(EventKind.STARTED)
    wait_for_log(deployer, "reconnecting")
    assert sum("imported by" in line for line in deployer.logs("svm", 1, 0)) == 1


def test_none_is_started_for_imports_that_are_due_when_the_deployer_closes(spec, monkeypatch):
    """The deployer would wait a minute for it, until it is idle."""
    monkeypatch.setattr(fork_servers, "PREPARE_S", 0.0)
    servers = fork_servers.ForkServers(lambda fd, handler: None, lambda fd: None)
    servers.learn(spec(), {}, ["hidden"], ["hidden"])
    servers.close()
    servers.do_due()
    started = servers.pids
    servers.close()
    assert started == []


def test_idle_fork_servers_end(deployer, events, spec, monkeypatch):
    monkeypatch.setattr(fork_servers, "IDLE_S", 0.05)
    deployer.start(spec())
    fork_server = parent(events.next(EventKind.STARTED).pid)
    time.sleep(0.2)
    assert alive(fork_server), "it has a replica"
    deployer.stop("svm")
    until(lambda: not alive(fork_server))


def test_at_the_limit_a_fork_server_that_is_idle_gives_way_however_short_it_is(spec, monkeypatch):
    monkeypatch.setattr(fork_servers, "FORK_SERVERS_MAX", 0)
    servers = fork_servers.ForkServers(lambda fd, handler: None, lambda fd: None)
    idle_s = []
    monkeypatch.setattr(servers, "_end_idle", lambda seconds: idle_s.append(seconds))
    assert servers._find(spec(), {}) == "0 fork servers run already"
    assert idle_s == [0.0]


def test_what_is_known_of_models_is_bounded(spec, monkeypatch):
    monkeypatch.setattr(fork_servers, "REMEMBERED_MAX", 3)
    servers = fork_servers.ForkServers(lambda fd, handler: None, lambda fd: None)
    for version in range(1, 6):
        servers.start_plainly(spec(version=version), "why")
    assert [version for _, version in servers._plain] == [3, 4, 5]


def test_without_fork_servers(events, spec):
    with ProcessDeployer(events, QUICK, fork=False) as deployer:
        deployer.start(spec())
        assert parent(events.next(EventKind.STARTED).pid) == os.getpid()
        assert start(deployer) == "plain: server.fork_server is off"


def test_a_model_that_ends_in_its_warm_up_gets_a_smaller_one_then_none():
    deaths = WarmUpDeaths()
    deaths.began(8)
    assert deaths.ended() == ""
    deaths.began(8)
    assert "ended 2 times in its warm-up at a batch of 8 rows" in deaths.ended()
    assert deaths.rows_max == 4
    deaths.began(4)
    assert "has no warm-up" in deaths.ended()
    assert deaths.rows_max == 0
    deaths.over()
    assert deaths.ended() == ""


@pytest.mark.parametrize(("dies_at", "most"), [(4, "2"), (1, "0")])
def test_a_replica_that_dies_in_its_warm_up_comes_up(deployer, events, spec, dies_at, most):
    source = (
        f"import os\ndef predict(x):\n    len(x) < {dies_at} or os._exit(9)\n    return x[:, 0]\n"
    )
    deployer.start(spec(source, input="f64[2]"))
    wait_for_log(deployer, "reconnecting")
    exits = sum(event.kind is EventKind.EXITED for event in events.drain())
    assert exits == 2
    assert any(
        f"ended 2 times in its warm-up at a batch of {dies_at} rows" in line
        for line in deployer.logs("svm", 1, 0)
    )
