"""The queue of loads beside a sorted list, and times of loads beside numpy."""

from random import Random

import numpy as np
import pytest

from clipper.mesh.decisions.load_queue import (
    FEW,
    SEED_MS,
    LoadPace,
    LoadQueue,
    LoadTimes,
    QueuedLoad,
)


def order(queue: LoadQueue) -> list[str]:
    found = []
    while (load := queue.pop()) is not None:
        found.append(load.model)
    return found


def test_those_a_request_waits_for_come_first() -> None:
    queue = LoadQueue()
    for load in (
        QueuedLoad("old", 5, 1),
        QueuedLoad("new", 9, 2),
        QueuedLoad("late", 3, 8, True),
        QueuedLoad("early", 1, 7, True),
    ):
        assert queue.push(load) is None
    assert queue.waiting == 2
    assert order(queue) == ["early", "late", "new", "old"]
    assert (len(queue), queue.waiting) == (0, 0)


def test_promotion() -> None:
    queue = LoadQueue()
    queue.push(QueuedLoad("a", 9, 1))
    queue.push(QueuedLoad("b", 5, 1))
    assert queue.promote("b", 20)
    assert not queue.promote("c", 20)
    assert "b" in queue
    assert order(queue) == ["b", "a"]


def test_queued_again_it_is_raised_and_never_lowered() -> None:
    queue = LoadQueue()
    queue.push(QueuedLoad("a", 5, 1, True, 100))
    assert queue.push(QueuedLoad("a", 9, 7, False, 0)) is None
    assert queue.pop() == QueuedLoad("a", 9, 1, True, 100)
    assert queue.pop() is None


def test_full_it_keeps_those_that_are_waited_for() -> None:
    queue = LoadQueue(2)
    assert queue.push(QueuedLoad("a", 5, 1)) is None
    assert queue.push(QueuedLoad("b", 9, 1)) is None
    refused = QueuedLoad("c", 99, 1)
    assert queue.push(refused) is refused
    dropped = queue.push(QueuedLoad("d", 1, 1, True))
    assert dropped is not None
    assert dropped.model == "a"
    assert queue.push(QueuedLoad("e", 1, 2, True)) is not None
    last = QueuedLoad("f", 1, 3, True)
    assert queue.push(last) is last
    assert order(queue) == ["d", "e"]


@pytest.mark.parametrize("seed", range(20))
def test_beside_a_sorted_list(seed: int) -> None:
    rng, queue = Random(seed), LoadQueue(30)
    reference: dict[str, list[int]] = {}  # waiting, since, used
    for now in range(1000, 1600):
        id, kind = f"m{rng.randrange(60)}", rng.random()
        if kind < 0.6:
            load = QueuedLoad(id, rng.randrange(10**6), now, rng.random() < 0.3)
            dropped = queue.push(load)
            if id in reference:
                held = reference[id]
                reference[id] = [
                    held[0] or load.waiting,
                    now if load.waiting and not held[0] else held[1],
                    max(held[2], load.used_ms),
                ]
            elif dropped is not load:
                reference[id] = [load.waiting, now, load.used_ms]
            if dropped is not None and dropped is not load:
                assert not reference[dropped.model][0]
                del reference[dropped.model]
        elif kind < 0.7:
            assert (queue.drop(id) is not None) == (reference.pop(id, None) is not None)
        elif kind < 0.8:
            assert queue.promote(id, now) == (id in reference)
            if id in reference:
                held = reference[id]
                reference[id] = [True, held[1] if held[0] else now, max(held[2], now)]
        else:
            popped = queue.pop()
            best = min(
                reference,
                key=lambda m: (0, reference[m][1]) if reference[m][0] else (1, -reference[m][2]),
                default=None,
            )
            assert (popped.model if popped else None) == best or (
                popped and reference[popped.model] == reference[best or ""]
            )
            if popped:
                del reference[popped.model]
        assert len(queue) == len(reference) <= 30
        assert queue.waiting == sum(1 for held in reference.values() if held[0])


def test_times_of_loads() -> None:
    times = LoadTimes(limit_s=60)
    assert times.assumed_ms("onnx") == times.mean_ms("onnx") == 20_000
    assert LoadTimes(limit_s=1).assumed_ms("onnx") == 1000
    assert LoadTimes(limit_s=4).assumed_ms("onnx") == SEED_MS
    took = np.random.default_rng(1).lognormal(6, 0.3, 50)
    for n, ms in enumerate(took, 1):
        times.add("onnx", ms)
        if n > 1:
            deviation = np.std(took[:n], ddof=1)
            expected = took[:n].mean() + (5 if n <= FEW else 3) * deviation
            assert times.assumed_ms("onnx") == pytest.approx(min(expected, 60_000))
    assert times.count("onnx") == 50
    assert times.count("skops") == 0
    assert times.mean_ms("onnx") == pytest.approx(took.mean())
    assert times.assumed_ms("skops") == 20_000


def test_one_stall_does_not_make_the_pace() -> None:
    pace = LoadPace()
    for took_ms in [10.0] * 8 + [1000.0]:
        pace.add(took_ms)
    assert pace.slot_ms < 15
    for took_ms in [1000.0] * 60:  # and what is slow now is slow
        pace.add(took_ms)
    assert pace.slot_ms == pytest.approx(1000, rel=0.05)
