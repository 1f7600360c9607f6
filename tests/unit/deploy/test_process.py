"""Real child processes: kept alive, given up, stopped, and none left behind."""

import itertools
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections import defaultdict
from dataclasses import replace

import pytest

from clipper import load_config
from clipper.deploy import ContainerSpec
from clipper.deploy.processes.model_process import TOKEN_ENV, command
from clipper.errors import ShuttingDown
from clipper.manage.deployment import restart_policy
from clipper.processes import ChildState, Notice, NoticeKind, RestartPolicy, describe_exit
from clipper.processes.restarts import StartLimit
from tests.unit.deploy.deployers import ProcessDeployer

# exits count as one series, however long a start takes
QUICK = RestartPolicy(
    backoff_s_min=0.005, backoff_s_max=0.02, window_s=3600.0, grace_s=5.0, apart_s=0.0
)
PATIENCE_S = 60.0  # what starts has a low priority, and gets little of a machine that is busy


class Events:
    """Records what the deployer tells about replicas, and waits for it."""

    def __init__(self) -> None:
        self._queue: queue.Queue[Notice] = queue.Queue()
        self.seen: list[Notice] = []

    def __call__(self, name: str, version: int, replica: int, notice: Notice) -> None:
        self._queue.put(notice)

    def next(self, *kinds: NoticeKind) -> Notice:
        while True:
            event = self._queue.get(timeout=PATIENCE_S)
            self.seen.append(event)
            if event.kind in kinds:
                return event

    def drain(self) -> list[Notice]:
        """Return all events so far."""
        while not self._queue.empty():
            self.seen.append(self._queue.get())
        return self.seen


@pytest.fixture
def events():
    return Events()


@pytest.fixture
def deployer(events):
    with ProcessDeployer(events, QUICK) as made:
        yield made


@pytest.fixture
def spec(tmp_path):
    """Makes a spec of a model with this source; it has no server to connect to, and waits for
    one."""

    def make(source: str = "def predict(x):\n    return x\n", **fields: object) -> ContainerSpec:
        new = tmp_path / "new"  # a container that starts may be reading the file
        new.write_text(textwrap.dedent(source))
        new.replace(tmp_path / "model.py")
        target, connect = "model:predict", f"unix:{tmp_path}/none"
        return ContainerSpec(
            **{
                "name": "svm",
                "target": target,
                "connect": connect,
                "code": (str(tmp_path),),
                **fields,
            }
        )

    return make


def alive(pid: int) -> bool:
    """Return whether there is such a process, zombies included."""
    return os.path.exists(f"/proc/{pid}")


def is_zombie(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def wait_for_log(deployer, text: str) -> None:
    until(lambda: any(text in line for line in deployer.logs("svm", 1, 0)))


def test_a_replica_runs_until_it_is_stopped(deployer, events, spec):
    deployer.start(spec())
    pid = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "reconnecting")
    (status,) = deployer.list()
    assert (status.name, status.version, status.replica, status.state, status.pid) == (
        "svm",
        1,
        0,
        "running",
        pid,
    )
    deployer.stop("svm")
    assert not alive(pid)
    stopped = events.next(NoticeKind.STOPPED)
    assert (stopped.pid, stopped.detail) == (pid, "exit 0")
    (status,) = deployer.list()
    assert (status.state, status.pid, status.restart_count) == (ChildState.STOPPED, 0, 0)


def test_a_killed_replica_is_started_again(deployer, events, spec):
    deployer.start(spec())
    first = events.next(NoticeKind.STARTED).pid
    os.kill(first, signal.SIGKILL)
    exited = events.next(NoticeKind.EXITED)
    assert (exited.pid, exited.detail) == (first, "killed (SIGKILL)")
    assert events.next(NoticeKind.RESTARTING).detail.startswith("again in ")
    second = events.next(NoticeKind.STARTED).pid
    assert second != first
    assert not alive(first)
    (status,) = deployer.list()
    assert (status.pid, status.restart_count, status.detail) == (second, 1, "killed (SIGKILL)")


def test_a_crash_loop_stops_and_keeps_the_last_words(deployer, events, spec):
    deployer.start(spec("print('about to fail')\nraise RuntimeError('no weights')\n"))
    failed = events.next(NoticeKind.FAILED)
    assert failed.detail.startswith("exit 3; stopped after 5 exits in ")
    assert failed.log_tail[-1] == "RuntimeError: no weights"
    assert "about to fail" in failed.log_tail
    assert "model 'svm' failed to load: RuntimeError: no weights" in failed.log_tail
    kinds = [event.kind for event in events.seen]
    assert kinds.count(NoticeKind.STARTED) == kinds.count(NoticeKind.EXITED) == 5
    assert kinds.count(NoticeKind.RESTARTING) == 4
    (status,) = deployer.list()
    assert (status.state, status.restart_count) == (ChildState.HELD, 4)
    assert status.detail.endswith("; held")
    assert 0 < status.again_s <= failed.again_s
    assert "held, and tried again in " in failed.detail
    assert failed.again_s > 0
    assert "RuntimeError: no weights" in deployer.logs("svm", 1, 0)
    assert not any(alive(event.pid) for event in events.seen)
    deployer.stop("svm")  # is no error
    deployer.start(spec())  # mended
    events.next(NoticeKind.STARTED)


def test_pauses_double(deployer, events, spec):
    deployer.start(spec("import os\nos._exit(7)\n"))
    events.next(NoticeKind.FAILED)
    pauses = [event.detail for event in events.seen if event.kind == NoticeKind.RESTARTING]
    assert pauses == ["again in 0.0 s"] * 4
    assert {e.detail for e in events.seen if e.kind == NoticeKind.EXITED} == {"exit 7"}


def test_an_interpreter_that_is_not_there(deployer, events, spec):
    deployer.start(spec(python="/no/such/python"))
    failed = events.next(NoticeKind.FAILED)
    assert failed.detail.startswith("not started: ")
    assert "/no/such/python" in failed.log_tail[-1]


def test_a_replica_that_ignores_sigterm_is_killed_after_its_grace(deployer, events, spec):
    deployer.start(
        spec(
            "import signal, time\nsignal.signal(signal.SIGTERM,"
            " signal.SIG_IGN)\nprint('deaf')\ntime.sleep(60)\n"
        )
    )
    pid = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "deaf")
    deployer.stop("svm", grace_s=0.05)
    assert events.next(NoticeKind.STOPPED).detail == "killed (SIGKILL)"
    assert not alive(pid)


def test_stop_chooses_by_version_and_replica_and_ends_the_pause(deployer, events, spec):
    deployer.start(spec(), 0)
    deployer.start(spec(), 1)
    deployer.start(spec(version=2), 0)
    for _ in range(3):
        events.next(NoticeKind.STARTED)
    with pytest.raises(ValueError, match="running already"):
        deployer.start(spec(), 1)
    deployer.stop("svm", 1, 0)
    assert [s.state for s in deployer.list()] == ["stopped", "running", "running"]
    deployer.stop("svm", 1)
    assert [s.state for s in deployer.list()] == ["stopped", "stopped", "running"]
    deployer.stop("other")
    deployer.stop("svm")
    assert [s.state for s in deployer.list()] == ["stopped"] * 3


def test_stopping_while_it_waits_to_start_again(events, spec):
    with ProcessDeployer(events, RestartPolicy(backoff_s_min=60, backoff_s_max=60)) as deployer:
        deployer.start(spec("raise SystemExit(1)\n"))
        assert events.next(NoticeKind.RESTARTING).detail == "again in 60.0 s"
        deployer.stop("svm")
        assert deployer.list()[0].state == ChildState.STOPPED


def test_events_may_call_back(spec):
    events = Events()

    def on_notice(name: str, version: int, replica: int, notice: Notice) -> None:
        if notice.kind == NoticeKind.STARTED:
            assert processes.list()[0].state == ChildState.RUNNING
            processes.stop("svm")  # returns at once; the process ends later
        events(name, version, replica, notice)
        raise RuntimeError("a callback's own trouble")

    with ProcessDeployer(on_notice, QUICK) as processes:
        processes.start(spec())
        assert events.next(NoticeKind.STOPPED).kind == NoticeKind.STOPPED


def test_closing_leaves_no_process_and_no_descriptor(spec):
    before = len(os.listdir("/proc/self/fd"))
    events = Events()
    deployer = ProcessDeployer(events, QUICK)
    for replica in range(3):
        deployer.start(spec(), replica)
    pids = [events.next(NoticeKind.STARTED).pid for _ in range(3)]
    deployer.close()
    deployer.close()
    assert not any(alive(pid) for pid in pids)
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ShuttingDown, match="closed"):
        deployer.start(spec())


def test_calls_after_the_end_do_nothing_and_write_to_no_descriptor(spec):
    events = Events()
    deployer = ProcessDeployer(events, QUICK)
    deployer.start(spec())
    pid = events.next(NoticeKind.STARTED).pid
    deployer.close()
    others = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(20)]  # the numbers are used again
    try:
        deployer.stop("svm")
        deployer.served("svm", 1, 0, pid)
        deployer.excuse("svm", 1, 0, pid)
        for other in others:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(other)
    finally:
        for other in others:
            os.close(other)


def test_a_grandchild_that_holds_the_pipe_delays_nothing(spec):
    before = len(os.listdir("/proc/self/fd"))
    events = Events()
    with ProcessDeployer(events, RestartPolicy(exits_max=1)) as deployer:
        deployer.start(
            spec(
                "import os, subprocess\nsubprocess.Popen(['sleep', '3'])\nprint('bye', flush=True)"
                "\nos._exit(5)\n"
            )
        )
        failed = events.next(NoticeKind.FAILED)
        assert failed.detail.startswith("exit 5; ")
        assert failed.log_tail == ("bye",)
    assert len(os.listdir("/proc/self/fd")) == before


def test_children_die_with_a_killed_parent(tmp_path, spec):
    made = spec()
    source = f"""
        from clipper.deploy import ContainerSpec
        from tests.unit.deploy.deployers import ProcessDeployer
        import time
        deployer = ProcessDeployer(lambda *told: print(told[-1].pid, flush=True))
        deployer.start(ContainerSpec(name="svm", target="model:predict", connect={made.connect!r}, code={made.code!r}))
        while not any("reconnecting" in line for line in deployer.logs("svm", 1, 0)):
            time.sleep(0.01)
        print("up", flush=True)
        time.sleep(60)
    """  # noqa: E501
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source)], stdout=subprocess.PIPE, text=True
    ) as parent:
        try:
            assert parent.stdout is not None
            pid = int(parent.stdout.readline())
            assert parent.stdout.readline() == "up\n"
            assert alive(pid)
        finally:
            parent.kill()
    # whoever adopts orphans here may never reap them
    until(lambda: not alive(pid) or is_zombie(pid))


def test_the_token_is_not_on_the_command_line(deployer, events, spec):
    made = spec("import os, sys\nprint('token', os.environ.get('CLIPPER_TOKEN'))\n", token="hush")
    assert "hush" not in repr(made)
    assert not any("hush" in word for word in command(made, 0))
    assert TOKEN_ENV in command(made, 0)
    deployer.start(spec(token="hush", env={"EXTRA": "1"}))
    pid = events.next(NoticeKind.STARTED).pid
    wait_for_log(deployer, "reconnecting")
    with open(f"/proc/{pid}/cmdline") as file:
        assert "hush" not in file.read()


def test_long_and_many_lines_are_bounded(deployer, events, spec):
    deployer.start(
        spec(
            "print('x' * 10_000)\nfor i in range(1000): print(i)\nprint('end', end='')\nraise"
            " SystemExit(0)"
        )
    )
    events.next(NoticeKind.EXITED)
    lines = deployer.logs("svm", 1, 0)
    assert len(lines) <= 200
    assert all(len(line) <= 4096 for line in lines)
    deployer.stop("svm")
    with pytest.raises(KeyError):
        deployer.logs("svm", 1, 5)


def test_exits_in_words():
    assert describe_exit(3) == "exit 3"
    assert describe_exit(-9) == "killed (SIGKILL)"
    assert describe_exit(-64) == "killed (SIGRTMAX)"
    assert describe_exit(-50) == "killed (signal 50)"


def test_settings_of_the_server_are_those_of_its_containers():
    settings = load_config(
        stop_grace_s=0.25, restarts_max=7, restart_ms_min=30, restart_ms_max=400, restart_window_s=9
    ).server
    policy = restart_policy(settings)
    assert policy == RestartPolicy(
        backoff_s_min=0.03, backoff_s_max=0.4, exits_max=7, window_s=9.0, grace_s=0.25, queued=True
    )


def test_restarts_of_several_replicas_are_spaced(events, spec):
    """Four containers die at the same time: their restarts are apart, whatever each one's pause
    is."""
    policy = RestartPolicy(backoff_s_min=0.001, backoff_s_max=0.001, exits_max=3, apart_s=20.0)
    with ProcessDeployer(events, policy) as deployer:
        for number in range(4):
            deployer.start(spec("raise SystemExit(3)"), number)
        due_s = []
        for _ in range(4):
            event = events.next(NoticeKind.RESTARTING)
            due_s.append(time.monotonic() + event.again_s)
        assert all(b - a >= 10 for a, b in itertools.pairwise(sorted(due_s))), due_s


def test_containers_beyond_the_limit_start_in_order():
    limit = StartLimit[str](at_once=2)
    assert [limit.wait(name) for name in "abcde"] == [0, 1, 2, 3, 4]
    for name in "ab":
        assert limit.next() == name
        limit.began(name)
    assert limit.next() is None
    limit.ended("d")  # it is stopped before it starts
    limit.ended("a")
    assert limit.next() == "c"
    limit.began("c")
    assert limit.next() is None
    limit.ended("b")
    assert limit.next() == "e"
    assert limit.next() is None


def test_a_container_that_tells_no_end_of_its_start_holds_no_other_up(events, spec, monkeypatch):
    monkeypatch.setattr("clipper.processes.restarts.cores", lambda: 2)
    slow = spec("import time\ntime.sleep(60)")
    with ProcessDeployer(events, replace(QUICK, queued=True)) as deployer:
        for number in range(3):
            deployer.start(slow, number)
        for _ in range(3):
            events.next(NoticeKind.STARTED)


def test_few_containers_start_at_once(events, spec, monkeypatch):
    """Processes start one at a time on two cores; one that is stopped while it waits never
    starts."""
    monkeypatch.setattr("clipper.processes.restarts.cores", lambda: 2)
    monkeypatch.setattr("clipper.processes.supervisor.START_S", 60.0)

    about: dict[NoticeKind, list[int]] = defaultdict(list)

    def follow(name: str, version: int, replica: int, notice: Notice) -> None:
        about[notice.kind].append(replica)
        if notice.kind is NoticeKind.STARTED and replica == 0:
            for number in (1, 2, 3):
                deployer.start(slow, number)
        if notice.kind is NoticeKind.WAITING and replica == 3:
            deployer.stop("svm", replica=3)
        events(name, version, replica, notice)

    slow = spec("import time\ntime.sleep(60)")
    with ProcessDeployer(follow, replace(QUICK, queued=True)) as deployer:
        deployer.start(slow, 0)
        events.next(NoticeKind.STOPPED)
        assert about[NoticeKind.STOPPED] == [3]
        assert about[NoticeKind.WAITING] == [1, 2, 3]
        waited = [event for event in events.seen if event.kind is NoticeKind.WAITING]
        assert waited[-1].detail == "containers that start before it: 3"
        for ended in (0, 1):
            deployer.stop("svm", replica=ended)
            events.next(NoticeKind.STARTED)
            assert about[NoticeKind.STARTED][-1] == ended + 1
