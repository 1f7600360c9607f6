"""Tables that several threads train, read, walk through and clear at once. See
tests/core/test_embedding.py for the reference model."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Initializer, Optimizer

Array = np.ndarray[Any, Any]


def walked(table: Table) -> Iterator[tuple[int, Array]]:
    position: int | None = 0
    while position is not None:
        ids, values, _, position = table.walk(position, 2000)
        yield from zip(ids.tolist(), values, strict=True)


def together(work: Callable[[int], None], threads: int) -> None:
    pool = [threading.Thread(target=work, args=(k,)) for k in range(threads)]
    for thread in pool:
        thread.start()
    for thread in pool:
        thread.join()


def test_no_update_is_lost_between_threads(stress: int) -> None:
    """Gradients of -1 at a rate of 1 make each row the count of its updates, while all threads
    update and read rows and the table grows."""
    threads, rounds, n = 4, 60 * stress, 500
    table = Table("t", 8, optimizer=Optimizer("sgd", rate=1.0), initializer=Initializer("zeros"))
    torn: list[Array] = []
    ready = threading.Barrier(threads)

    def work(k: int) -> None:
        draw = np.random.default_rng(k)
        own = n + k * 10**6 + np.arange(n * rounds)
        ready.wait()
        for i in range(rounds):
            shared = np.arange(n)
            draw.shuffle(shared)
            table.push(shared, np.full((n, 8), -1.0))
            table.push(own[i * n : (i + 1) * n], np.full((n, 8), -1.0))
            rows = table.pull(shared)
            torn.extend(rows[(rows != rows[:, :1]).any(axis=1)])
            if i % 20 == 0:
                torn.extend(row for _, row in walked(table) if (row != row[0]).any())

    together(work, threads)
    assert not torn
    assert (table.pull(np.arange(n)) == threads * rounds).all()
    for k in range(threads):
        assert (table.pull(n + k * 10**6 + np.arange(n * rounds)) == 1).all()


def test_rows_are_found_while_their_memory_is_made(stress: int) -> None:
    """One thread adds the first row of a table, which allocates its memory, while others look for
    the row."""
    ids = np.arange(8)

    for _ in range(150 * stress):
        table, ready = (
            Table("t", 4, optimizer=Optimizer("sgd", rate=1.0), initializer=Initializer("zeros")),
            threading.Barrier(4),
        )

        def work(k: int, table: Table = table, ready: threading.Barrier = ready) -> None:
            gradient = np.full((1, 4), -1.0)
            ready.wait()
            for id_ in ids:
                table.push(ids[id_ : id_ + 1], gradient)

        together(work, 4)
        assert (table.pull(ids) == 4).all()


def test_rows_are_counted_while_parts_move(stress: int) -> None:
    """Threads read the number of rows and their memory from an index that others rebuild."""
    pieces, n = 800 * stress, 500
    table = Table("t", 2, initializer=Initializer("zeros"))
    seen: list[tuple[int, int]] = []
    over, ready = threading.Event(), threading.Barrier(3)

    def work(k: int) -> None:
        ready.wait()
        if k == 2:
            while not over.is_set():
                seen.append((len(table), table.nbytes))
            return
        for i in range(k, pieces, 2):
            table.push(np.arange(i * n, i * n + n), np.ones((n, 2)))
        over.set()

    together(work, 3)
    rows = [count for count, _ in seen]
    assert len(table) == pieces * n
    assert rows == sorted(rows)
    assert all(8 * count <= size for count, size in seen)


def test_threads_share_a_full_table(stress: int) -> None:
    table = Table("t", 2, rows_max=300, evicts=True)

    def work(k: int) -> None:
        draw = np.random.default_rng(k)
        for now in range(1, 150 * stress):
            ids = draw.integers(0, 1000, 40)
            table.push(ids, np.ones((40, 2)), stamp=now)
            if now % 50 == 0:
                table.expire(now - 20)

    together(work, 4)
    kept = [id_ for id_, _ in walked(table)]
    assert len(kept) == len(set(kept)) == len(table) <= 300
