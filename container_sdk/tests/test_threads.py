"""The threads of a container: after an error at its entry each goes on."""

import errno
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from clipper_container.host.timers import Timers
from clipper_container.runtime import Artifact
from clipper_container.threads import CallPool, KeptThread
from clipper_container.wire.transport import FrameConnection, Heart, StopSwitch
from container_sdk.tests.test_host_threads import Breaking, cache_of, no_more_threads
from container_sdk.tests.test_worker_pool import PATIENCE_S, JobQueue, done_of, started_pool

ERRORS: dict[str, Callable[[], BaseException]] = {
    "memory": lambda: MemoryError("injected"),
    "descriptors": lambda: OSError(errno.EMFILE, "injected"),
    "unexpected": lambda: ZeroDivisionError("injected"),
    "exit": lambda: SystemExit("injected"),
}


@contextmanager
def injected(named: str, kind: str) -> Iterator[list[str]]:
    """Let the functions of threads whose names begin with `named` fail when they are first called;
    yield the names."""
    failed: list[str] = []
    known = KeptThread._is_done

    def is_done(self: KeptThread) -> bool:
        name = threading.current_thread().name
        if not name.startswith(named) or name in failed:
            return known(self)
        failed.append(name)
        function = self._function

        def fail() -> None:
            self._function = function
            raise ERRORS[kind]()

        self._function = fail
        return known(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(KeptThread, "_is_done", is_done)
        yield failed


def wait_until(true: Callable[[], bool]) -> None:
    give_up_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < give_up_s, "it does not come true"
        time.sleep(0.005)


each_error = pytest.mark.parametrize("kind", ERRORS)


@each_error
def test_a_thread_goes_on_after_an_error(kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    errors, ran = [ERRORS[kind]()], threading.Event()

    def run() -> None:
        if errors:
            raise errors.pop()
        ran.set()

    assert KeptThread("clipper-test", run).join(PATIENCE_S)
    assert ran.is_set()
    assert "injected" in capsys.readouterr().err


@each_error
def test_a_pool_of_a_host_goes_on_after_an_error_at_the_entry_of_its_threads(kind: str) -> None:
    jobs = JobQueue()
    with injected("clipper-host-", kind) as failed, started_pool(jobs) as pool:
        assert done_of(jobs, pool.hand_over).wait(PATIENCE_S)
        assert done_of(jobs, pool.hand_over).wait(PATIENCE_S)
        assert {"clipper-host-0", "clipper-host-1"} <= {*failed}


def test_a_job_that_ends_its_thread_does_not_end_the_pool() -> None:
    jobs = JobQueue()
    with started_pool(jobs) as pool:

        def leave() -> None:
            raise SystemExit("of a model")

        for _ in range(3):
            jobs.put(leave)
            assert done_of(jobs).wait(PATIENCE_S)
        wait_until(lambda: pool._followers == len(pool._threads) - 1)
        assert not any(thread.join(0.0) for thread in pool._threads)


@each_error
def test_timers_go_on_after_an_error_at_the_entry_of_their_thread(kind: str) -> None:
    with injected("clipper-host-timers", kind) as failed:
        timers, ran = Timers(), threading.Event()
        timers.after(0.0, ran.set)
        assert ran.wait(PATIENCE_S)
    timers.close()
    assert failed == ["clipper-host-timers"]


@each_error
def test_models_are_loaded_after_an_error_at_the_entry_of_a_loader(kind: str) -> None:
    with injected("clipper-host-load", kind) as failed, cache_of(Breaking(), 1) as cache:
        assert cache.load(Artifact("m", "breaking"), 5.0).result(PATIENCE_S)
    assert len(failed) == 1


@each_error
def test_calls_are_made_after_an_error_at_the_entry_of_a_thread(kind: str) -> None:
    with injected("clipper-test", kind) as failed:
        pool = CallPool("clipper-test", 1)
        assert pool.submit(lambda: 1 + 1).result(PATIENCE_S) == 2
        with pytest.raises(type(ERRORS[kind]())):
            pool.submit(lambda: fail(kind)).result(PATIENCE_S)
        assert pool.submit(lambda: 3).result(PATIENCE_S) == 3
    pool.close()
    pool.close()
    assert failed == ["clipper-test-0"]
    with pytest.raises(RuntimeError, match="the pool is closed"):
        pool.submit(lambda: 1)


def fail(kind: str) -> None:
    raise ERRORS[kind]()


def test_all_threads_of_a_pool_of_calls_start_or_none() -> None:
    with no_more_threads("clipper-test-2", 1), pytest.raises(RuntimeError):
        CallPool("clipper-test", 3)
    for thread in threading.enumerate():
        if thread.name.startswith("clipper-test"):
            thread.join(PATIENCE_S)
            assert not thread.is_alive()


def test_a_call_that_no_thread_has_begun_is_cancelled_at_the_end() -> None:
    pool = CallPool("clipper-test", 1)
    begun = threading.Event()
    may_end = threading.Event()

    def wait() -> bool:
        begun.set()
        return may_end.wait(PATIENCE_S)

    first, second = pool.submit(wait), pool.submit(wait)
    assert begun.wait(PATIENCE_S)
    pool.close()
    may_end.set()
    assert first.result(PATIENCE_S)
    assert second.cancelled()


@contextmanager
def connected() -> Iterator[tuple[FrameConnection, socket.socket]]:
    ours, theirs = socket.socketpair()
    theirs.settimeout(PATIENCE_S)
    stop = StopSwitch()
    connection = FrameConnection(ours, stop, 1 << 20, PATIENCE_S)
    try:
        yield connection, theirs
    finally:
        connection.close()
        theirs.close()
        stop.close()


@each_error
def test_a_heart_beats_after_an_error_at_the_entry_of_its_thread(kind: str) -> None:
    with connected() as (connection, theirs), injected("clipper-heart", kind) as failed:
        heart = Heart(connection, 0.01, lambda: connection.send([b"beat"]))
        assert theirs.recv(4) == b"beat"
        heart.stop()
    assert failed == ["clipper-heart"]


@pytest.mark.parametrize("kind", ["memory", "descriptors", "unexpected"])
def test_a_heart_that_fails_shuts_its_connection_down(
    kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The container then connects again at once, and is not taken for silent after a while."""
    with connected() as (connection, theirs):
        heart = Heart(connection, 0.01, lambda: fail(kind))
        assert theirs.recv(4) == b""
        heart.stop()
    assert "injected" in capsys.readouterr().err
