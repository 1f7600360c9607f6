"""A shortage of the deployer (descriptors, its folder, its thread) is no exit of a replica."""

import errno
import os
import resource
import signal
import threading
import time

import pytest

from clipper.deploy.processes.model_process import _ModelWork
from clipper.errors import NotStarted
from clipper.processes import ChildState, NoticeKind, RestartPolicy, forked
from clipper.processes.restarts import Restarts
from clipper.processes.spawned import spawn
from clipper_container.shortage import is_own
from tests.unit.deploy.deployers import ProcessDeployer
from tests.unit.deploy.test_process import QUICK, Events, alive, spec, until  # noqa: F401


@pytest.fixture
def events():
    return Events()


def opened() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("fork", [True, False])
@pytest.mark.parametrize("free", range(6))
def test_a_start_without_descriptors_is_made_later_and_leaks_none(events, spec, free, fork):  # noqa: F811
    with ProcessDeployer(events, QUICK, fork=fork) as deployer:
        deployer.supervisor._spares.close()  # those are what a start needs
        deployer.supervisor._spares._most = 0
        before = opened()
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        holes = sorted({*range(before + 64)} - {*map(int, os.listdir("/proc/self/fd"))})
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (holes[free], limits[1]))
            deployer.start(spec())
            first = events.next(NoticeKind.RESTARTING)
            assert first.detail.startswith(
                "not started, the server is short of something: [Errno 24] Too many open files"
            )
            assert first.detail.count("it is tried until it succeeds") == 1
            (status,) = deployer.list()
            assert status.state in (ChildState.SHORT, ChildState.STARTING), (
                "it is tried all the time"
            )
            assert status.restart_count == 0
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert events.next(NoticeKind.STARTED).pid
        assert not any(event.kind is NoticeKind.EXITED for event in events.seen)
        deployer.stop("svm")
    assert opened() <= before


def test_a_shortage_is_never_given_up(events, spec, monkeypatch):  # noqa: F811
    tries = iter([OSError(errno.EAGAIN, "no process is free")] * 12)

    def starts(*given):
        for error in tries:
            raise error
        return spawn(*given)

    monkeypatch.setattr(forked, "spawn", starts)
    policy = RestartPolicy(backoff_s_min=0.001, own_s_max=0.002, apart_s=0.0, exits_max=3)
    with ProcessDeployer(events, policy, fork=False) as deployer:
        deployer.start(spec())
        events.next(NoticeKind.STARTED)
        assert {event.kind for event in events.seen} <= {
            NoticeKind.WAITING,
            NoticeKind.RESTARTING,
            NoticeKind.STARTED,
        }


@pytest.mark.parametrize("fork", [True, False])
def test_a_replica_starts_where_it_was_deployed(events, spec, tmp_path, monkeypatch, fork):  # noqa: F811
    folder = tmp_path / "release"
    folder.mkdir()
    monkeypatch.chdir(folder)
    with ProcessDeployer(events, QUICK, fork=fork) as deployer:
        deployer.start(spec())
        pid = events.next(NoticeKind.STARTED).pid
        until(lambda: os.readlink(f"/proc/{pid}/cwd") == str(folder))
        os.chdir("/")
        os.kill(pid, signal.SIGKILL)
        pid = events.next(NoticeKind.STARTED).pid
        until(lambda: os.readlink(f"/proc/{pid}/cwd") == str(folder))
        folder.rmdir()
        os.kill(pid, signal.SIGKILL)
        pid = events.next(NoticeKind.STARTED).pid
        until(lambda: os.readlink(f"/proc/{pid}/cwd").startswith(str(folder)))


def test_a_server_whose_own_folder_is_gone_deploys(events, spec, tmp_path, monkeypatch):  # noqa: F811
    folder = tmp_path / "gone"
    folder.mkdir()
    monkeypatch.chdir(folder)
    folder.rmdir()
    with ProcessDeployer(events, QUICK) as deployer:
        deployer.start(spec())
        pid = events.next(NoticeKind.STARTED).pid
        until(lambda: any("reconnecting" in line for line in deployer.logs("svm", 1, 0)))
        assert alive(pid)


def test_an_error_at_one_replica_is_an_event_of_that_replica(events, spec, monkeypatch):  # noqa: F811
    takes = _ModelWork.reported
    broken = []

    def fails(self, report, told):
        if self._spec.name == "bad" and not broken:
            broken.append(report)
            raise LookupError("a handler failed")
        return takes(self, report, told)

    monkeypatch.setattr(_ModelWork, "reported", fails)
    with ProcessDeployer(events, QUICK) as deployer:
        deployer.start(spec())
        good = events.next(NoticeKind.STARTED).pid
        deployer.start(spec(name="bad", input="f64[2]"))
        bad = events.next(NoticeKind.EXITED).pid
        assert events.next(NoticeKind.STARTED).pid not in (good, bad)
        assert broken
        assert alive(good)
        assert not deployer.failure


def test_a_thread_that_ends_is_told_and_nothing_waits_for_it(events, spec, monkeypatch):  # noqa: F811
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    deployer = ProcessDeployer(events, QUICK)
    deployer.start(spec())
    pid = events.next(NoticeKind.STARTED).pid

    def dies():
        raise SystemExit("the thread ends")

    deployer.supervisor._loop.call(dies)
    until(lambda: deployer.failure)
    (status,) = deployer.list()
    assert (status.state, status.pid) == (ChildState.FAILED, 0)
    with pytest.raises(NotStarted, match="not supervised any more"):
        deployer.start(spec(name="late"))
    began = time.monotonic()
    deployer.close()
    assert time.monotonic() - began < 20
    until(lambda: not alive(pid))


def test_a_limit_below_what_is_open_ends_nothing(events, spec):  # noqa: F811
    with ProcessDeployer(events, QUICK) as deployer:
        deployer.start(spec())
        pid = events.next(NoticeKind.STARTED).pid
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (1, limits[1]))
            os.kill(pid, signal.SIGKILL)
            time.sleep(0.3)
            assert not deployer.failure
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        assert events.next(NoticeKind.STARTED).pid != pid


def test_what_is_own():
    assert is_own(OSError(errno.EMFILE, ""))
    assert is_own(MemoryError())
    assert is_own(RuntimeError("can't start new thread"))
    assert not is_own(FileNotFoundError(errno.ENOENT, ""))
    assert not is_own(ValueError())


def exits(restarts: Restarts, count: int, **given: object) -> list[float]:
    """Return the pauses after so many exits in a row, each after a second."""
    return [
        restarts.ended(float(i), **given).pause_s  # type: ignore[arg-type]
        for i in range(count)
    ]


def test_one_that_never_served_is_held_for_long_and_longer():
    pauses = exits(Restarts(RestartPolicy(exits_max=3)), 12)
    assert pauses[:2] == [0.1, 0.2]
    assert all(15 <= pause_s <= 600 for pause_s in pauses[2:])
    assert pauses[-1] >= 300


def test_one_that_was_killed_is_never_held_and_is_away_no_longer_than_it_served():
    restarts = Restarts(RestartPolicy(exits_max=3))
    pauses = [restarts.ended(float(i), i - 0.5, stopped=True) for i in range(20)]
    assert not any(one.held for one in pauses)
    assert max(one.pause_s for one in pauses) <= 0.1


def test_one_that_served_and_crashes_is_tried_again_soon():
    restarts = Restarts(RestartPolicy(exits_max=3))
    verdicts = [restarts.ended(float(i), i - 0.5) for i in range(9)]
    assert all(one.held for one in verdicts[2:])
    assert max(one.pause_s for one in verdicts) <= 10


def test_only_no_restarts_at_all_is_final():
    assert Restarts(RestartPolicy(exits_max=0)).ended(1.0, 0.5).is_final
    assert not any(Restarts(RestartPolicy(exits_max=1)).ended(1.0).is_final for _ in range(9))


def test_an_excused_exit_is_not_counted():
    restarts = Restarts(RestartPolicy(exits_max=3))
    for i in range(30):
        assert not restarts.ended(float(i), i - 0.4).held
        assert restarts.excuse() == 0.1
