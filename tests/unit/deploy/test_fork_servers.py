"""Fork servers and the real processes that they fork: what a replica inherits, what ends with what,
and when a replica is started plainly.
"""

import errno
import json
import os
import resource
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from functools import partial

import pytest

from clipper.deploy.processes.model_process import ENTRY
from clipper.deploy.processes.warmup_deaths import WarmUpDeaths
from clipper.deploy.replicas import ReplicaDeployer
from clipper.processes import NoticeKind, RestartPolicy, Supervisor, fork_servers, spawned
from tests.signals import freeze
from tests.unit.deploy.deployers import ProcessDeployer
from tests.unit.deploy.test_process import PATIENCE_S, Events, alive, is_zombie, until, wait_for_log

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
def deployer(events):
    with ProcessDeployer(events, replace(QUICK, answer_s=PATIENCE_S)) as made:
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


@pytest.fixture
def others_serve(monkeypatch):
    """Has replicas of other models serve beside those of a test."""
    monkeypatch.setattr(ReplicaDeployer, "any_is_ready", lambda self: True)


def report(deployer, replica=0):
    """Return the JSON line that SOURCE prints."""
    until(lambda: any(line.startswith("{") for line in deployer.logs("svm", 1, replica)))
    lines = deployer.logs("svm", 1, replica)
    return json.loads(next(line for line in reversed(lines) if line.startswith("{")))


def started(events, count):
    return [events.next(NoticeKind.STARTED) for _ in range(count)]


def program(version=1):
    return fork_servers.Program(("svm", version), ENTRY, {})


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
    started(events, 2)
    pids = [each.pid for each in deployer.list()]
    first, second = report(deployer, 0), report(deployer, 1)
    assert start(deployer, 0) == start(deployer, 1) == "forked"
    assert first["parent"] == second["parent"] == parent(pids[0]) != os.getpid()
    assert first["folder"] == os.getcwd()
    assert first["extra"] == "1"
    assert first["random"] != second["random"]
    assert first["numpy"] != second["numpy"]
    assert first["omp"] == "3"
    assert set(first["threads"]) == {3}
    assert [first["group"], second["group"]] == pids
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
    pid = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "loads")
    os.kill(pid, signal.SIGTERM)
    assert events.next(NoticeKind.EXITED).pid == pid
    deployer.stop("svm")


@pytest.mark.usefixtures("others_serve")
def test_only_a_warm_replica_has_the_usual_priority(deployer, events, spec):
    """A starting replica leaves the cores to those that serve, from its first instruction on."""

    def seen(task):
        return os.sched_getscheduler(task), os.getpriority(os.PRIO_PROCESS, task)

    deployer.start(
        spec("import os\nprint('loads', os.sched_getscheduler(0) == os.SCHED_BATCH)\n" + SOURCE)
    )
    pid = events.next(NoticeKind.STARTED).pid
    assert seen(parent(pid))[0] == os.SCHED_BATCH
    wait_for_log(deployer, "loads True")
    until(lambda: seen(pid) == seen(0))
    assert {seen(int(task)) for task in os.listdir(f"/proc/{pid}/task")} == {seen(0)}


@pytest.mark.usefixtures("others_serve")
def test_an_only_replica_is_restarted_at_the_usual_priority(deployer, events, spec):
    loading = "import os\nprint('loads', os.sched_getscheduler(0) == os.SCHED_BATCH)\n" + SOURCE
    deployer.start(spec(loading), 0)
    only = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "loads True")
    os.kill(only, signal.SIGKILL)
    assert events.next(NoticeKind.EXITED).pid == only
    wait_for_log(deployer, "loads False")


def test_the_first_replica_of_all_has_the_usual_priority(deployer, spec):
    """Checks the priority of one that slows no other down: a low one may be next to nothing."""
    deployer.start(
        spec("import os\nprint('loads', os.sched_getscheduler(0) == os.SCHED_BATCH)\n" + SOURCE)
    )
    wait_for_log(deployer, "loads False")


@pytest.mark.usefixtures("others_serve")
def test_a_fork_server_that_an_only_replica_waits_for_has_the_usual_priority(
    deployer, events, spec, packages, tmp_path
):
    noted = tmp_path / "noted"
    notes = f"import os\nopen({str(noted)!r}, 'a').write(f'{{os.sched_getscheduler(0)}} ')"
    env = packages(noting=notes)
    deployer.start(spec("import noting\ndef predict(x): return x\n", env=env))
    first = parent(events.next(NoticeKind.STARTED).pid)
    os.kill(first, signal.SIGKILL)
    second = parent(events.next(NoticeKind.STARTED).pid)
    assert noted.read_text().split() == [str(os.SCHED_BATCH), str(os.SCHED_OTHER)]
    assert os.sched_getscheduler(second) == os.SCHED_BATCH


def test_what_a_fork_server_lacks_is_said_once(deployer, events, spec, monkeypatch):
    def lacks(*given):
        raise OSError(errno.EMFILE, "Too many open files")

    with monkeypatch.context() as broken:
        broken.setattr(spawned, "spawn", lacks)
        deployer.start(spec())
        assert events.next(NoticeKind.RESTARTING).detail == (
            "not started, the server is short of something: [Errno 24] Too many open files; it is"
            " tried until it succeeds"
        )
    assert events.next(NoticeKind.STARTED).detail == "forked"


def test_the_exit_code_is_the_childs_and_no_zombie_stays(deployer, events, spec):
    deployer.start(spec("import os, sys\nprint(os.getppid(), flush=True)\nos._exit(7)\n"))
    exited = events.next(NoticeKind.EXITED)
    assert exited.detail == "exit 7"
    fork_server = int(exited.log_tail[0])
    deployer.stop("svm")
    assert not alive(exited.pid)
    deployer.start(spec())
    pid = events.next(NoticeKind.STARTED).pid
    assert parent(pid) == fork_server
    os.kill(pid, signal.SIGKILL)
    assert events.next(NoticeKind.EXITED).detail == "killed (SIGKILL)"


def test_a_killed_fork_server_is_replaced_with_its_replicas(deployer, events, spec):
    deployer.start(spec(), 0)
    deployer.start(spec(), 1)
    before = [events.next(NoticeKind.STARTED).pid for _ in range(2)]
    fork_server = parent(before[0])
    os.kill(fork_server, signal.SIGKILL)
    exits = [events.next(NoticeKind.EXITED) for _ in range(2)]
    assert {event.detail for event in exits} == {"ended with its fork server"}
    after = [events.next(NoticeKind.STARTED).pid for _ in range(2)]
    assert not any(alive(pid) and not is_zombie(pid) for pid in (*before, fork_server))
    assert parent(after[0]) == parent(after[1]) not in (fork_server, os.getpid())


def test_a_frozen_fork_server_delays_no_stop(deployer, events, spec, monkeypatch):
    """Its replica ends all the same, and the exit code is reported as unknown."""
    deployer.start(spec())
    pid = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "reconnecting")
    fork_server = parent(pid)
    os.kill(fork_server, signal.SIGSTOP)
    try:
        deployer.stop("svm")
        assert (
            events.next(NoticeKind.STOPPED).detail == "ended; its fork server does not report how"
        )
        answers_late(monkeypatch, deployer)
        deployer.start(spec())
        events.next(NoticeKind.STARTED)
        assert start(deployer) == "plain: the fork server did not answer in time"
    finally:
        os.kill(fork_server, signal.SIGCONT)
    until(lambda: not alive(fork_server))


def never(pid):
    return False


def answers_late(monkeypatch, deployer):
    """Let fork servers that are frozen look as if they imported, for longer than is waited."""
    monkeypatch.setattr(fork_servers, "_is_frozen", never)
    monkeypatch.setattr(deployer, "_policy", replace(QUICK, answer_s=0.05))


@pytest.mark.parametrize("late", [True, False])
def test_a_frozen_fork_server_without_replicas_is_killed(deployer, events, spec, monkeypatch, late):
    deployer.start(spec())
    fork_server = parent(events.next(NoticeKind.STARTED).pid)
    deployer.stop("svm")
    freeze(fork_server)
    if late:
        answers_late(monkeypatch, deployer)
    deployer.start(spec())
    until(lambda: not alive(fork_server))


def test_no_replica_waits_for_a_frozen_fork_server(events, spec):
    """Replicas of a frozen fork server go on, and further ones are forked from another one."""
    with ProcessDeployer(events, replace(QUICK, answer_s=PATIENCE_S)) as deployer:
        deployer.start(spec())
        first = events.next(NoticeKind.STARTED).pid
        fork_server = parent(first)
        freeze(fork_server)
        try:
            deployer.start(spec(), 1)
            second = events.next(NoticeKind.STARTED)
            assert second.detail == "forked"
            assert parent(second.pid) != fork_server
            assert not ended(first)
        finally:
            os.kill(fork_server, signal.SIGCONT)


def test_nothing_outlives_a_killed_deployer(spec):
    made = spec()
    source = f"""
        from clipper.deploy import ContainerSpec
        from tests.unit.deploy.deployers import ProcessDeployer
        import time
        deployer = ProcessDeployer(lambda *told: print(told[-1].pid, flush=True))
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
    event = events.next(NoticeKind.STARTED)
    why = "plain: importing busy left the process with 2 threads"
    assert (event.detail, start(deployer)) == (why, why)
    assert parent(event.pid) == os.getpid()
    wait_for_log(deployer, "reconnecting")
    os.kill(event.pid, signal.SIGKILL)
    events.next(NoticeKind.STARTED)
    assert start(deployer) == "forked", "the fork server of the next start does not import it"


def test_arrow_starts_no_thread_in_a_fork_server(deployer, events, spec):
    pytest.importorskip("pyarrow")  # pandas imports it, and scikit-learn imports pandas
    deployer.start(spec("import pyarrow\ndef predict(x): return x\n"))
    assert events.next(NoticeKind.STARTED).detail == "forked"


def test_an_import_that_fails_makes_a_plain_start(deployer, events, spec, packages):
    env = packages(broken="raise OSError('no licence')")
    deployer.start(spec("import broken\ndef predict(x): return x\n", env=env))
    event = events.next(NoticeKind.STARTED)
    assert event.detail == "plain: importing broken failed: OSError: no licence"
    exited = events.next(NoticeKind.EXITED)
    assert exited.detail == "exit 3"
    assert any("no licence" in line for line in exited.log_tail), "the model itself tells"


def test_a_model_may_request_a_process_of_its_own(deployer, events, spec):
    deployer.start(
        spec("import os\ndef predict(x): return x\npredict.fork = False\nprint('as', os.getpid())")
    )
    first = events.next(NoticeKind.STARTED)
    wait_for_log(deployer, "reconnecting")
    assert deployer.logs("svm", 1, 0).count(f"as {first.pid}") == 2, "one process, two programs"
    assert start(deployer) == "plain: the model requires it"
    os.kill(first.pid, signal.SIGKILL)
    assert events.next(NoticeKind.EXITED).detail == "killed (SIGKILL)"
    assert parent(events.next(NoticeKind.STARTED).pid) == os.getpid()


def test_a_changed_package_and_changed_limits_make_another_fork_server(
    deployer, events, spec, packages
):
    env = packages(thing="VALUE = 1")
    source = SOURCE + "import thing\nprint('value', thing.VALUE)\n"
    deployer.start(spec(source, env=env))
    first = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "value 1")
    packages(thing="VALUE = 22")
    os.kill(first, signal.SIGKILL)
    second = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "value 22")
    assert start(deployer) == "forked"
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft - 1, hard))
    try:
        os.kill(second, signal.SIGKILL)
        events.next(NoticeKind.STARTED)
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
    first = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, f"imported by {first}")
    wait_for_log(deployer, "reconnecting")
    until(lambda: len(deployer.processes.fork_servers.pids) == 2)
    os.kill(first, signal.SIGKILL)
    events.next(NoticeKind.STARTED)
    wait_for_log(deployer, "reconnecting")
    assert sum("imported by" in line for line in deployer.logs("svm", 1, 0)) == 1


def test_none_is_started_for_imports_that_are_due_when_the_supervisor_ends(monkeypatch):
    monkeypatch.setattr(fork_servers, "PREPARE_S", 0.0)
    with Supervisor() as supervisor:
        servers = fork_servers.ForkServers(supervisor)
        supervisor.request_stop()
        supervisor.post(partial(servers.learn, program(), ["hidden"], ["hidden"]))
    assert not supervisor.list()
    assert servers.pids == []


def test_idle_fork_servers_end(deployer, events, spec, monkeypatch):
    monkeypatch.setattr(fork_servers, "IDLE_S", 0.05)
    deployer.start(spec())
    fork_server = parent(events.next(NoticeKind.STARTED).pid)
    time.sleep(0.2)
    assert alive(fork_server), "it has a replica"
    deployer.stop("svm")
    until(lambda: not alive(fork_server))


def test_at_the_limit_a_fork_server_that_is_idle_gives_way_however_short_it_is(monkeypatch):
    monkeypatch.setattr(fork_servers, "FORK_SERVERS_MAX", 0)
    servers = fork_servers.ForkServers(Supervisor())
    idle_s = []
    monkeypatch.setattr(servers, "_end_idle", lambda seconds: idle_s.append(seconds))
    assert servers._find(program()) == "0 fork servers run already"
    assert idle_s == [0.0]


def test_what_is_known_of_models_is_bounded(monkeypatch):
    monkeypatch.setattr(fork_servers, "REMEMBERED_MAX", 3)
    servers = fork_servers.ForkServers(Supervisor())
    for version in range(1, 6):
        servers.start_plainly(program(version), "why")
    assert [*servers._plain] == [("svm", version) for version in (3, 4, 5)]


def test_without_fork_servers(events, spec):
    with ProcessDeployer(events, QUICK, fork=False) as deployer:
        deployer.start(spec())
        assert parent(events.next(NoticeKind.STARTED).pid) == os.getpid()
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
    exits = sum(event.kind is NoticeKind.EXITED for event in events.drain())
    assert exits == 2
    assert any(
        f"ended 2 times in its warm-up at a batch of {dies_at} rows" in line
        for line in deployer.logs("svm", 1, 0)
    )


FORKS = """
import os, signal, time
left = os.fork()  # it holds all that the model has open
if not left:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
print("left", left, flush=True)
def predict(x): return x
"""


def ended(pid):
    return not alive(pid) or is_zombie(pid)


def left_of(deployer, pid):
    """Return the process that the model has left, and check that it is in the group of it."""
    wait_for_log(deployer, "left ")
    lines = [line for line in deployer.logs("svm", 1, 0) if line.startswith("left ")]
    left = int(lines[-1].split()[1])
    assert os.getpgid(left) == pid
    return left


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("how", ["killed", "stopped", "frozen"])
def test_what_a_model_has_started_ends_with_it(events, spec, fork, how):
    """Also when its fork server does not reap it."""
    with ProcessDeployer(events, replace(QUICK, answer_s=PATIENCE_S), fork=fork) as deployer:
        deployer.start(spec(FORKS))
        pid = events.next(NoticeKind.STARTED).pid
        left = left_of(deployer, pid)
        frozen = parent(pid) if fork and how == "frozen" else 0
        if frozen:
            os.kill(frozen, signal.SIGSTOP)
        try:
            if how == "stopped":
                deployer.stop("svm")
            else:
                os.kill(pid, signal.SIGKILL)
                assert events.next(NoticeKind.EXITED).pid == pid
            until(partial(ended, left))
        finally:
            if frozen:
                os.kill(frozen, signal.SIGCONT)


def test_what_a_model_has_started_ends_with_its_fork_server(deployer, events, spec):
    deployer.start(spec(FORKS))
    pid = events.next(NoticeKind.STARTED).pid
    left = left_of(deployer, pid)
    os.kill(parent(pid), signal.SIGKILL)
    assert events.next(NoticeKind.EXITED).detail == "ended with its fork server"
    until(partial(ended, left))


def test_what_a_fork_server_tells_late_is_of_the_process_before(
    deployer, events, spec, monkeypatch
):
    """Tells the end of a process late, as a fork server that was frozen, when another runs."""
    deployer.start(spec())
    first = events.next(NoticeKind.STARTED).pid
    fork_server = parent(first)
    os.kill(fork_server, signal.SIGSTOP)
    (child,) = [
        entry.child
        for name, entry in deployer.supervisor._entries.items()
        if name.startswith("container")
    ]
    monkeypatch.setattr(fork_servers, "_is_frozen", never)
    monkeypatch.setattr(child, "_policy", replace(QUICK, answer_s=0.05))
    os.kill(first, signal.SIGKILL)
    assert events.next(NoticeKind.EXITED).detail == "ended; its fork server does not report how"
    second = events.next(NoticeKind.STARTED).pid
    os.kill(fork_server, signal.SIGCONT)
    until(lambda: fork_server not in deployer.processes.fork_servers.pids)
    assert not ended(second)
    assert [event.kind for event in events.drain()].count(NoticeKind.EXITED) == 1


def test_a_child_that_a_fork_server_makes_too_late_ends(events, spec, monkeypatch):
    """The process that was started instead has a control socket of its own."""
    with ProcessDeployer(events, replace(QUICK, answer_s=PATIENCE_S)) as deployer:
        deployer.start(spec())
        fork_server = parent(events.next(NoticeKind.STARTED).pid)
        os.kill(fork_server, signal.SIGSTOP)
        try:
            answers_late(monkeypatch, deployer)
            deployer.start(spec(), 1)
            second = events.next(NoticeKind.STARTED)
            assert second.detail == "plain: the fork server did not answer in time"
        finally:
            os.kill(fork_server, signal.SIGCONT)
        deployer.stop("svm", replica=0)
        until(partial(ended, fork_server))
        until(lambda: others(second.pid) == [])
        assert alive(second.pid)


def others(pid):
    """Return the processes that hold the pipe of a process's output, but it and this one."""
    pipe = os.readlink(f"/proc/{pid}/fd/1")
    found = []
    for other in filter(str.isdecimal, os.listdir("/proc")):
        try:
            held = [os.readlink(f"/proc/{other}/fd/{fd}") for fd in os.listdir(f"/proc/{other}/fd")]
        except OSError:
            continue
        if pipe in held and int(other) not in (pid, os.getpid()):
            found.append(int(other))
    return found
