"""Blocks of learned states that some threads read while others publish new ones. See
tests/core/test_policy_states.py, and tests/schedules/policy_states.cpp for all schedules."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np

from clipper_core.learning.policy_states import Held, state_block


def state_of(number: float) -> Any:
    block = state_block(np.full((4, 66), number), np.full((10, 2), number), number, 0)
    return SimpleNamespace(rows=block.rows, sure=block.sure)


def test_a_block_that_is_read_is_whole_while_others_are_published(stress: int) -> None:
    cells = [Held(state_of(0.0), None, 0, {}) for _ in range(2)]
    torn, ready = list[Any](), threading.Barrier(6)
    is_over = threading.Event()

    def publish(first: int) -> None:
        ready.wait(60)
        for i in range(2000 * stress):
            state = state_of(float(first + i))
            for cell in cells[: 1 + i % 2]:
                cell.publish(state if i % 50 else "no block")

    def read(k: int) -> None:
        ready.wait(60)
        while not is_over.is_set():
            copied = cells[k % 2].copied()
            if copied is not None:
                numbers = np.concatenate([part.ravel() for part in copied])
                if (numbers != numbers[0]).any():
                    torn.append(copied)

    writers = [threading.Thread(target=publish, args=(10**6 * k,)) for k in range(2)]
    readers = [threading.Thread(target=read, args=(k,)) for k in range(4)]
    for thread in writers + readers:
        thread.start()
    for thread in writers:
        thread.join()
    is_over.set()
    for thread in readers:
        thread.join()
    assert not torn
