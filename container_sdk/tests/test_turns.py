"""Threads that use one model get it in the order of their requests."""

import threading
import time

from clipper_container.worker.turns import Turns

THREADS = 8


def test_threads_get_their_turns_in_the_order_of_their_requests() -> None:
    turns, order = Turns(), list[int]()

    def work(number: int) -> None:
        with turns:
            order.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(THREADS)]
    with turns:
        for number, thread in enumerate(threads):
            thread.start()
            while turns.waiting <= number:
                time.sleep(0)
    with turns:  # after those that wait
        order.append(THREADS)
    for thread in threads:
        thread.join()
    assert order == list(range(THREADS + 1))


def test_one_thread_at_a_time_has_its_turn() -> None:
    turns, inside, most = Turns(), [0], [0]

    def work() -> None:
        for _ in range(500):
            with turns:
                inside[0] += 1
                most[0] = max(most[0], inside[0])
                time.sleep(0)
                inside[0] -= 1

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (most, turns.waiting) == ([1], 0)
