"""The lock of the states: one thread at a time, as often as it wants."""

import threading

import pytest

from clipper_core.learning.state_lock import StateLock


def test_one_thread_takes_it_several_times() -> None:
    lock = StateLock()
    with lock, lock, lock:
        pass
    with pytest.raises(RuntimeError, match="not held"):
        lock.__exit__(None, None, None)


def test_another_thread_waits_until_it_is_given_back() -> None:
    lock = StateLock()
    waits = threading.Event()
    order = list[str]()

    def wait() -> None:
        waits.set()
        with lock:
            order.append("the other")

    with lock:
        other = threading.Thread(target=wait)
        other.start()
        assert waits.wait(60)
        with pytest.raises(ZeroDivisionError), lock:
            1 / 0  # noqa: B018
        order.append("first")
    other.join(60)
    assert order == ["first", "the other"]


def test_who_does_not_hold_it_cannot_give_it_back() -> None:
    lock, refused = StateLock(), list[str]()

    def give() -> None:
        try:
            lock.__exit__(None, None, None)
        except RuntimeError as error:
            refused.append(str(error))

    with lock:
        other = threading.Thread(target=give)
        other.start()
        other.join(60)
    assert refused == ["the lock is not held by this thread"]


def test_what_many_threads_count_under_it_is_exact() -> None:
    lock, total = StateLock(), [0]

    def count() -> None:
        for _ in range(2000):
            with lock:
                before = total[0]
                with lock:
                    total[0] = before + 1

    threads = [threading.Thread(target=count) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert total == [16_000]
