"""Wide rows through shared memory, with real processes: right answers through deaths, restarts and
mixed replicas, and nothing left in memory or among the descriptors afterwards.
"""

import contextlib
import gc
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError
from tests.memory_container import MemoryContainer, wait_until
from tests.signals import freeze
from tests.threads import join

WIDE = 784


def first_and_sum(xs):
    return np.stack([xs[:, 0], xs.sum(axis=1)], axis=1)


def rows_of(n, seed=0):
    """Return rows of small whole numbers: their sums are exact in f32."""
    return np.random.default_rng(seed).integers(0, 100, (n, WIDE)).astype(np.float32)


def regions_of(pid):
    """Return the mappings of rows in a process."""
    return Path(f"/proc/{pid}/maps").read_text().count("memfd:clipper-rows")


def descriptors_of(pid):
    found = 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of this very listing
            found += "clipper-rows" in os.readlink(link)
    return found


def ready(server, model):
    return [
        row["pid"]
        for row in server.stats()["models"][model.name]["replicas"]
        if row["state"] == "ready"
    ]


def check(model, x, slo_ms=10_000):
    got = model.predict_many(x, slo_ms=slo_ms).result(20)
    assert np.array_equal(np.stack(list(got)), first_and_sum(x))


@pytest.fixture
def wide(deploy):
    return deploy(first_and_sum, input=f"f32[{WIDE}]", cache=False)


def test_rows_lie_in_memory_that_the_container_maps(server, wide):
    (pid,) = ready(server, wide)
    before = regions_of("self")
    check(wide, rows_of(5000))
    assert regions_of("self") == before + 1
    assert regions_of(pid) == 1
    assert "r--s" in next(
        line
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines()
        if "clipper-rows" in line
    )


def test_several_classes_of_deadlines(server, wide):
    (pid,) = ready(server, wide)
    x = rows_of(600, 1)
    futures = [(wide.predict(row, slo_ms=slo_ms), row) for row in x for slo_ms in (12_000, 28_000)]
    for future, row in futures:
        assert np.array_equal(future.result(60), [row[0], row.sum()])
    assert regions_of(pid) == 2


def test_small_rows_are_not_shared(server, deploy):
    model = deploy(first_and_sum, input="f32[16]", cache=False)
    before = regions_of("self")
    x = np.ones((100, 16), np.float32)
    check(model, x)
    assert regions_of("self") == before


def test_killed_again_and_again_under_load(server, wide):
    """Every answer is right or an error with its reason; each new process maps the rows anew."""
    failed, answered, stop = [], 0, threading.Event()
    x = rows_of(400, 2)
    wanted = first_and_sum(x)

    def load():
        nonlocal answered
        while not stop.is_set():
            for future, want in [
                (wide.predict(row, slo_ms=10_000), want)
                for row, want in zip(x, wanted, strict=True)
            ]:
                try:
                    if not np.array_equal(future.result(20), want):
                        failed.append(want)
                except ClipperError:
                    pass  # tried twice, and killed twice
                answered += 1

    thread = threading.Thread(target=load)
    thread.start()
    try:
        for _ in range(2):  # a third death within a short time, and the server would let it rest
            (pid,) = wait_until(lambda: ready(server, wide))
            until = answered + 800
            wait_until(lambda until=until: answered >= until)
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: ready(server, wide) not in ([], [pid]))
    finally:
        stop.set()
        join(thread)
    assert not failed
    (pid,) = wait_until(lambda: ready(server, wide))
    for row, want in zip(x[:10], wanted, strict=False):
        assert np.array_equal(wide.predict(row, slo_ms=10_000).result(20), want)
    assert regions_of(pid) == 1
    check(wide, x)
    assert regions_of(pid) == 2, "arrays have a lane of their own"


def test_a_container_that_is_stopped_and_continued(server, wide):
    """A container is stopped while it holds a batch and continued later: its queries end in time,
    and its late reply changes nothing."""
    (pid,) = ready(server, wide)
    x = rows_of(200, 3)
    check(wide, x)
    freeze(pid)
    futures = [wide.predict(row, slo_ms=50) for row in x]
    for future in futures:
        with contextlib.suppress(ClipperError):
            future.result(60)
    later = [wide.predict(row + 1, slo_ms=20_000) for row in x]
    os.kill(pid, signal.SIGCONT)
    for future, row in zip(later, x, strict=True):
        assert np.array_equal(future.result(20), [row[0] + 1, row.sum() + WIDE])


def test_a_container_that_is_stopped_and_continued_with_an_array(server, wide):
    """The same with an array, whose rows are spans of cells."""
    (pid,) = ready(server, wide)
    x = rows_of(1000, 4)
    check(wide, x)
    freeze(pid)
    wide.predict_many(x, slo_ms=50).exception(60)
    later = wide.predict_many(x + 1, slo_ms=20_000)
    os.kill(pid, signal.SIGCONT)
    assert np.array_equal(np.stack(list(later.result(20))), first_and_sum(x + 1))


def test_one_that_shares_and_one_that_does_not(server, wide):
    name = wide.name.partition(":")[0]
    seen = []

    def plainly(xs):
        seen.append(len(xs))
        return first_and_sum(xs)

    with MemoryContainer(
        server.address, server.token, name, replica=7, input=f"f32[{WIDE}]"
    ) as other:
        other.serve(plainly)
        wait_until(lambda: len(ready(server, wide)) == 2)
        for seed in range(20):
            check(wide, rows_of(3000, seed))
            if seen:
                break
    assert seen
    check(wide, rows_of(100))


def test_a_model_may_keep_its_inputs(server, deploy):
    kept = []

    def keeps_its_inputs(xs):
        kept.append(xs)
        return [float(x[0]) + 1000 * sum(float(old.sum()) for old in kept[:-1]) for x in xs]

    model = deploy(keeps_its_inputs, input=f"f32[{WIDE}]", cache=False)
    total = 0.0
    for k in range(20):
        row = np.full(WIDE, k, np.float32)
        assert model.predict(row, slo_ms=5000).result(60) == k + 1000 * total
        total += k * WIDE


@pytest.mark.parametrize("settings", [{"shared_memory": False}, {"address": "tcp://127.0.0.1:0"}])
def test_without_sharing_rows_go_over_the_socket(settings):
    with clipper.start(heartbeat_ms=10_000, drain_s=0.2, **settings) as server:
        model = server.deploy("wide", first_and_sum, input=f"f32[{WIDE}]", cache=False)
        before = regions_of("self")
        check(model, rows_of(3000))
        assert regions_of("self") == before
        assert [regions_of(pid) for pid in ready(server, model)] == [0]


def test_nothing_is_left_after_the_server_has_ended():
    gc.collect()
    before = regions_of("self"), descriptors_of("self")
    with clipper.start(heartbeat_ms=100, drain_s=0.2) as server:
        model = server.deploy("wide", first_and_sum, input=f"f32[{WIDE}]", cache=False)
        check(model, rows_of(1000))
        assert (regions_of("self"), descriptors_of("self")) == (before[0] + 1, before[1] + 1)
    del server, model
    gc.collect()
    assert (regions_of("self"), descriptors_of("self")) == before
