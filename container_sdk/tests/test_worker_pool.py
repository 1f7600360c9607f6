"""Tests of WorkerPool: one thread at a time waits for jobs, and lets another one wait before it
runs a job."""

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clipper_container.host.server_connection import ODD_S, QUICK_S, Gate
from clipper_container.host.timers import Timers
from clipper_container.host.worker_pool import THREADS_MAX, WorkerPool
from container_sdk.tests.fake_server import join

PATIENCE_S = 20.0
Job = Callable[[], None]


class JobQueue:
    """The source of a pool's jobs: each wait() returns the jobs of one put()."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[list[Job]] = queue.SimpleQueue()

    def put(self, *jobs: Job) -> None:
        self._queue.put(list(jobs))

    def wait(self) -> list[Job]:
        return self._queue.get()


@contextmanager
def started_pool(jobs: JobQueue) -> Iterator[WorkerPool[Job]]:
    """Yield a pool that runs `jobs`; stop it at the end, and check that no thread remains."""
    timers = Timers()
    pool: WorkerPool[Job] = WorkerPool(jobs.wait, lambda job, inbox: job(), timers)
    try:
        yield pool
    finally:
        pool.stop()
        # one for each waiting thread, one for each leader after it
        for _ in range(THREADS_MAX + 2):
            jobs.put()
        pool.join(PATIENCE_S)
        timers.close()
        assert not [
            thread for thread in threading.enumerate() if thread.name.startswith("clipper-")
        ]


def done_of(jobs: JobQueue, *before: Job) -> threading.Event:
    """Put `before` and one more job; return an event that the last job sets."""
    done = threading.Event()
    jobs.put(*before, done.set)
    return done


def test_quick_work_is_done_by_one_thread_in_the_order_it_came() -> None:
    jobs, seen = JobQueue(), []
    with started_pool(jobs):
        for i in range(50):
            jobs.put(
                *(lambda k=k: seen.append((threading.get_ident(), k)) for k in (2 * i, 2 * i + 1))
            )
        assert done_of(jobs).wait(PATIENCE_S)
    assert [k for _, k in seen] == list(range(100))
    assert len({thread for thread, _ in seen}) == 1


def test_after_loop_ownership_moves_other_workers_handle_the_remaining_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("clipper_container.host.worker_pool.CHECK_S", 1000.0)
    jobs, gate, threads_seen = JobQueue(), threading.Event(), []
    with started_pool(jobs) as pool:

        def slow() -> None:
            pool.hand_over()
            pool.hand_over()  # no effect: it is not the leader any more
            threads_seen.append(threading.get_ident())
            gate.wait(PATIENCE_S)

        done = done_of(jobs, slow, slow, lambda: threads_seen.append(threading.get_ident()))
        assert done.wait(PATIENCE_S)  # while both slow jobs still wait
        assert len(set(threads_seen)) == 3
        gate.set()
        for _ in range(3 * THREADS_MAX):  # finished threads follow and lead again: none are added
            assert done_of(jobs, slow).wait(PATIENCE_S)
        assert len(pool._threads) < THREADS_MAX


def test_a_worker_that_is_slower_than_expected_loses_the_ownership_of_the_loop() -> None:
    jobs, gate = JobQueue(), threading.Event()
    with started_pool(jobs):
        for _ in range(3):  # before, at and after a check of the timer
            stuck = threading.Event()
            done = done_of(jobs, stuck.set, lambda: gate.wait(PATIENCE_S) and None)
            assert stuck.wait(PATIENCE_S)
            assert done.wait(PATIENCE_S)
        gate.set()
        assert done_of(jobs).wait(PATIENCE_S)


def test_it_polls_again_after_it_has_waited_long_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper_container.host.worker_pool.QUIET_CHECKS", 0)
    monkeypatch.setattr("clipper_container.host.worker_pool.CHECK_S", 0.001)
    jobs, gate = JobQueue(), threading.Event()
    with started_pool(jobs) as pool:
        for _ in range(5):
            assert done_of(jobs).wait(PATIENCE_S)
            pause = threading.Event()
            while pool._checked_s:
                pause.wait(0.001)
            done = done_of(jobs, lambda: gate.wait(PATIENCE_S) and None)
            assert done.wait(PATIENCE_S)
        gate.set()


def test_there_are_never_more_threads_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper_container.host.worker_pool.THREADS_MAX", 3)
    jobs, gate, count = JobQueue(), threading.Event(), threading.Semaphore(0)
    with started_pool(jobs) as pool:

        def slow() -> None:
            pool.hand_over()
            count.release()
            gate.wait(PATIENCE_S)

        done = done_of(jobs, *[slow] * 7)
        assert all(count.acquire(timeout=PATIENCE_S) for _ in range(3))
        assert len(pool._threads) == 3
        assert not done.is_set()
        gate.set()
        assert done.wait(PATIENCE_S)
        assert all(count.acquire(timeout=PATIENCE_S) for _ in range(4))


def test_a_model_is_quick_once_it_was_and_one_odd_answer_changes_little() -> None:
    gate = Gate(1)
    assert not gate.quick
    gate.took(-1.0)  # nothing was answered
    assert not gate.quick
    gate.took(QUICK_S / 10)
    assert gate.quick
    gate.took(50 * ODD_S)
    assert gate.quick
    for _ in range(3):
        gate.took(10 * QUICK_S)
    assert not gate.quick


def test_what_all_threads_of_many_do_is_done_once() -> None:
    """Several threads put slow and quick jobs alternately; each job runs exactly once."""
    jobs, seen, lock, over = JobQueue(), [], threading.Lock(), threading.Semaphore(0)
    with started_pool(jobs) as pool:

        def job(k: int) -> Any:
            def run() -> None:
                if k % 3 == 0:
                    pool.hand_over()
                with lock:
                    seen.append(k)
                over.release()

            return run

        def send(first: int) -> None:
            for k in range(first, first + 3000, 2):
                jobs.put(job(k), job(k + 1))

        senders = [threading.Thread(target=send, args=(first,)) for first in (0, 3000, 6000)]
        for sender in senders:
            sender.start()
        for sender in senders:
            join(sender)
        assert all(over.acquire(timeout=PATIENCE_S) for _ in range(9000))
    assert sorted(seen) == list(range(9000))
