"""The threads of a host: one that cannot start, or that fails, does not end what it served."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from clipper_container.host import model_cache, worker_pool
from clipper_container.host.model_cache import ModelCache, RequestFailed
from clipper_container.host.server_connections import ServerConnections
from clipper_container.host.timers import Timers
from clipper_container.host.work_record import WorkRecord
from clipper_container.model import as_model
from clipper_container.runtime import Artifact, Loaded, Runtime
from container_sdk.tests.test_worker_pool import PATIENCE_S, JobQueue, done_of, started_pool


@contextmanager
def no_more_threads(named: str, count: int) -> Iterator[list[int]]:
    """Let the next `count` starts of threads fail whose names begin with `named`."""
    known, left = threading.Thread.start, [count]

    def start(self: threading.Thread) -> None:
        if self.name.startswith(named) and left[0]:
            left[0] -= 1
            raise RuntimeError("can't start new thread")
        known(self)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(threading.Thread, "start", start)
        yield left


def test_a_pool_that_gets_no_thread_goes_on_with_those_that_it_has() -> None:
    jobs = JobQueue()
    with started_pool(jobs) as pool, no_more_threads("clipper-host-", 3) as left:
        for _ in range(3):  # each wants a follower, and there is none
            assert done_of(jobs, pool.hand_over).wait(PATIENCE_S)
        assert left == [0]
        assert done_of(jobs, pool.hand_over).wait(PATIENCE_S)  # now there is one
        assert done_of(jobs).wait(PATIENCE_S)


def test_an_error_of_waiting_for_work_does_not_end_the_leader(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker_pool, "AGAIN_S", 0.0)
    jobs = JobQueue()
    known, errors = jobs.wait, [MemoryError("full"), OSError(24, "no descriptor")]

    def wait() -> Any:
        found = known()
        if errors:
            raise errors.pop()
        return found

    monkeypatch.setattr(jobs, "wait", wait)
    with started_pool(jobs):
        jobs.put()
        jobs.put()
        assert done_of(jobs).wait(PATIENCE_S)
    assert "no descriptor" in capsys.readouterr().err


class Breaking(Runtime):
    """A runtime whose `unload` raises, and whose loads take as long as the test says."""

    types = ("breaking",)

    def __init__(self) -> None:
        self.may_load, self.loads = threading.Event(), list[str]()
        self.may_load.set()

    def load(self, artifact: Artifact) -> Loaded:
        self.loads.append(artifact.model)
        assert self.may_load.wait(PATIENCE_S) or artifact.model != "slow"
        return Loaded(as_model(len), 1)

    def unload(self, artifact: Artifact, loaded: Loaded) -> None:
        raise SystemExit("injected in unload")


@contextmanager
def cache_of(runtime: Runtime, loaders: int) -> Iterator[ModelCache]:
    timers = Timers()
    connections = ServerConnections(timers, lambda *_: None)
    cache = ModelCache([runtime], connections, timers, 1 << 30, loaders, WorkRecord())
    try:
        yield cache
    finally:
        cache.close()
        connections.close()
        timers.close()


def test_an_unload_that_raises_ends_no_loader_and_no_request() -> None:
    runtime = Breaking()
    with cache_of(runtime, 1) as cache:
        assert cache.load(Artifact("m0", "breaking"), 5.0).result(PATIENCE_S)
        cache.unload("m0").result(PATIENCE_S)
        runtime.may_load.clear()
        for i in range(1, 4):  # unloaded while it loads: the loader itself unloads it
            loading = cache.load(Artifact(f"m{i}", "breaking"), 5.0)
            while f"m{i}" not in runtime.loads:
                pass
            leaving = cache.unload(f"m{i}")
            runtime.may_load.set()
            with pytest.raises(RequestFailed, match="unloaded meanwhile"):
                loading.result(PATIENCE_S)
            leaving.result(PATIENCE_S)
            runtime.may_load.clear()
        runtime.may_load.set()
        assert cache.load(Artifact("m9", "breaking"), 5.0).result(PATIENCE_S)


def test_an_unexpected_error_of_a_load_ends_no_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    with cache_of(Breaking(), 1) as cache:
        known: Callable[..., None] = cache._settle
        errors = [MemoryError("injected"), MemoryError("injected")]

        def settle(*words: Any) -> None:
            if errors:
                raise errors.pop()
            known(*words)

        monkeypatch.setattr(cache, "_settle", settle)
        for i in range(2):
            with pytest.raises(RequestFailed, match="injected"):
                cache.load(Artifact(f"m{i}", "breaking"), 5.0).result(PATIENCE_S)
        assert cache.load(Artifact("m3", "breaking"), 5.0).result(PATIENCE_S)


def test_a_loader_that_cannot_be_replaced_is_replaced_later(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(model_cache, "AGAIN_S", 0.01)
    monkeypatch.setattr(model_cache, "PREPARE_S", 0.01)
    runtime = Breaking()
    runtime.may_load.clear()
    with cache_of(runtime, 1) as cache, no_more_threads("clipper-host-load", 2) as left:
        with pytest.raises(RequestFailed, match="did not load within"):
            cache.load(Artifact("slow", "breaking"), 0.01).result(PATIENCE_S)
        again = cache.load(Artifact("m", "breaking"), 5.0)
        while left != [0]:
            pass
        while "m" not in runtime.loads:
            pass
        runtime.may_load.set()
        assert again.result(PATIENCE_S)
