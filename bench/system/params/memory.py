"""Rows of `python -m bench params` about a table in memory: pulls and pushes beside torch, FBGEMM,
numpy, a dict, and loops in C (rows_floor.c)."""

import contextlib
import ctypes
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.harness import Goal, Row, Sample, absent, interleave, row
from bench.system.anchors.bare import compiled
from bench.system.params import fbgemm
from clipper_core.params.embedding import Table
from clipper_core.params.optimizer import Optimizer

BATCH = 4096
SOLE_IDS = 64  # a call of fewer ids takes locks, also in a thread that is alone
PULL_LIMIT = "limit: index line and row"
PUSH_LIMIT = "limit: index line and the same arithmetic"
SOURCE = Path(__file__).with_name("rows_floor.c")
NO_TORCH = "not measured: torch is not installed"
NO_COMPILER = "not measured: no C compiler to build bench/system/params/rows_floor.c"
Ids = np.ndarray[Any, np.dtype[np.int64]]
Case = Callable[[Ids, Ids], object]  # (places, ids)


def pulls(quick: bool) -> list[Row]:
    n = 50_000 if quick else 1_000_000
    dims = [16, 64] if quick else [16, 64, 128]
    return [one for dim in dims for one in _pull(n, dim, quick)]


def _pull(n: int, dim: int, quick: bool) -> list[Row]:
    world = World(n, dim)
    out = np.empty((BATCH, dim), np.float32)
    by_id = (
        {int(i): row for i, row in zip(world.ids[:20_000], world.weights, strict=False)}
        if dim == 64
        else {}
    )
    order = np.argsort(world.ids)
    sorted_ids = world.ids[order]
    cases: dict[str, Case] = {
        "ours": lambda _, ids: world.table.pull(ids, out=out),
        "numpy.take, rows known": lambda places, _: np.take(
            world.weights, places, axis=0, out=out, mode="clip"
        ),
        "searchsorted and take": lambda _, ids: np.take(
            world.weights, order[np.searchsorted(sorted_ids, ids)], axis=0, out=out, mode="clip"
        ),
    }
    if by_id:
        known = list(by_id)
        cases["dict of arrays"] = lambda places, _: np.stack(
            [by_id[known[i]] for i in (places % 20_000).tolist()]
        )
    with floor() as kernel:
        if kernel is not None:
            # rows as the table has them, with their state
            beside = np.ones((n, world.table.width), np.float32)
            cases[PULL_LIMIT] = lambda places, _: kernel.gather_by_lines(
                _at(beside),
                dim,
                world.table.width,
                _at(world.lines),
                _at(places),
                len(places),
                _at(out),
            )
        if (torch := torch_module()) is not None:
            weights, into = torch.from_numpy(world.weights), torch.from_numpy(out)
            cases["torch index_select, rows known"] = lambda places, _: torch.index_select(
                weights, 0, torch.from_numpy(places), out=into
            )
            if dim == 64 and (peer := fbgemm.table(torch, world.weights, out)) is not None:
                cases["fbgemm forward, rows known"] = peer.forward
        rates = world.rates(cases, 20 if quick else 60, 3 if quick else 7)
    return _beside(
        f"pull, dim {dim}",
        rates,
        {
            PULL_LIMIT: Goal("at_least", 0.65 if dim == 16 else 0.8),
            "searchsorted and take": Goal("at_least", 6),
            "torch index_select, rows known": Goal("at_least", 0.65) if dim == 64 else None,
            "numpy.take, rows known": None,
            **(
                {
                    "dict of arrays": Goal("at_least", 20),
                    "fbgemm forward, rows known": Goal("at_least", 1.2),
                }
                if dim == 64
                else {}
            ),
        },
        PULL_LIMIT,
        "memory: a loop that reads a line of an index and copies the row",
    )


def pushes(quick: bool) -> list[Row]:
    n = 50_000 if quick else 1_000_000
    return [*_push(n, 64, "adagrad", 4.0, quick), *_push(n, 64, "adam", 6.0, quick)]


def _push(n: int, dim: int, optimizer: str, better: float, quick: bool) -> list[Row]:
    world = World(n, dim, optimizer)
    gradients = np.random.default_rng(1).standard_normal((BATCH, dim)).astype(np.float32)
    cases: dict[str, Case] = {"ours": lambda _, ids: world.table.push(ids, gradients)}
    with floor() as kernel:
        if kernel is not None:
            moved = np.zeros((n, 2 * dim), np.float32)
            cases["limit: read, change, write"] = lambda places, _: kernel.update(
                _at(moved), dim, _at(places), len(places), _at(gradients)
            )
            beside = np.ones((n, world.table.width), np.float32)
            cases[PUSH_LIMIT] = lambda places, _: kernel.step(
                optimizer,
                _at(beside),
                dim,
                _at(world.lines),
                _at(places),
                len(places),
                _at(gradients),
            )
        if (torch := torch_module()) is not None:
            cases["torch, sparse gradients"] = _torch_step(
                torch, world.weights.copy(), optimizer, gradients
            )
            if (
                optimizer == "adagrad"
                and (peer := fbgemm.table(torch, world.weights, gradients)) is not None
            ):
                cases |= {"fbgemm forward": peer.forward, "fbgemm both": peer.forward_and_backward}
        rates = world.rates(cases, 10 if quick else 30, 3 if quick else 7)
    goals: dict[str, Goal | None] = {
        "torch, sparse gradients": Goal("at_least", better),
        PUSH_LIMIT: None,
    }
    if optimizer == "adagrad":
        goals["limit: read, change, write"] = Goal("at_least", 0.55)
        goals["fbgemm, exact Adagrad"] = Goal("at_least", 2.5)
        if "fbgemm both" in rates:
            rates["fbgemm, exact Adagrad"] = fbgemm.backward(
                rates["fbgemm both"], rates["fbgemm forward"]
            )
    else:
        rates.pop("limit: read, change, write", None)  # Adam moves half as much again
    return _beside(
        f"push, exact {optimizer}, dim {dim}",
        rates,
        goals,
        PUSH_LIMIT,
        "roots, divisions and memory: a loop that reads a line of an index and does the same"
        " arithmetic",
    )


def _torch_step(torch: Any, weights: Any, optimizer: str, gradients: Any) -> Case:
    parameter = torch.nn.Parameter(torch.from_numpy(weights))
    kinds = {"adagrad": torch.optim.Adagrad, "adam": torch.optim.SparseAdam}
    steps, given = kinds[optimizer]([parameter], lr=0.01), torch.from_numpy(gradients)

    def step(places: Ids, _: Ids) -> None:
        parameter.grad = torch.sparse_coo_tensor(
            torch.from_numpy(places)[None], given, parameter.shape, check_invariants=False
        )
        steps.step()

    return step


def small(quick: bool) -> list[Row]:
    """Measure few ids at once, where the call itself is the cost."""
    world, few = World(50_000 if quick else 1_000_000, 64), 16
    out = np.empty((few, 64), np.float32)
    cases: dict[str, Case] = {
        "ours": lambda _, ids: world.table.pull(ids, out=out),
        "take": lambda places, _: np.take(world.weights, places, axis=0, out=out, mode="clip"),
    }
    took = world.rates(cases, 2000, 3 if quick else 7, few)
    ours, take = (took[name].map(lambda rate: few / rate) for name in cases)
    return [
        row(
            f"pull of {few} rows of 64 floats",
            ours,
            "us",
            "numpy.take, rows known",
            take,
            Goal("at_most", 1.5),
        )
    ]


def threads(quick: bool) -> list[Row]:
    """Two threads in one table, which take locks then, beside one, which does not. By what each
    does in its own CPU time."""
    world, turns = World(50_000 if quick else 1_000_000, 64), 3 if quick else 7
    gradients: Any = np.ones((BATCH, 64), np.float32)
    runs: dict[str, Case] = {
        "pull": lambda _, ids: world.table.pull(ids),
        "push": lambda _, ids: world.table.push(ids, gradients[: len(ids)]),
    }
    found = []
    with floor() as kernel:
        loops = {} if kernel is None else loops_in_c(kernel, world, gradients)
        for name, run in runs.items():
            cases = {
                "one": (run, 1),
                "two": (run, 2),
                "one, calls without locks": (in_calls(run, SOLE_IDS), 1),
                "one, calls with locks": (in_calls(run, SOLE_IDS - 1), 1),
            }
            if name in loops:
                cases |= {"one loop": (loops[name], 1), "two loops": (loops[name], 2)}
            batches = 40 if quick else 150
            rates = interleave(
                {
                    case: partial(world.together, work, count, batches)
                    for case, (work, count) in cases.items()
                },
                turns,
            )
            found.append(
                row(
                    f"{name}, two threads",
                    rates["two"],
                    "Mrow/s",
                    "one thread",
                    rates["one"],
                    Goal("at_least", 1.7),
                    bounded_by=bound_of_two({case: max(rates[case].values) for case in rates}),
                )
            )
    return found


def loops_in_c(kernel: "Kernel", world: "World", gradients: Any) -> dict[str, Case]:
    """Return what a pull and a push do, as loops in C without locks."""
    beside = np.ones((len(world.ids), world.table.width), np.float32)

    def gather(places: Ids, _: Ids) -> None:
        out = np.empty((len(places), 64), np.float32)  # as a pull makes its own
        kernel.gather_by_lines(
            _at(beside), 64, world.table.width, _at(world.lines), _at(places), len(places), _at(out)
        )

    def update(places: Ids, _: Ids) -> None:
        kernel.step(
            "adagrad", _at(beside), 64, _at(world.lines), _at(places), len(places), _at(gradients)
        )

    return {"pull": gather, "push": update}


def in_calls(run: Case, size: int) -> Case:
    """Return the same work in calls of at most `size` ids."""

    def each(places: Ids, ids: Ids) -> None:
        for at in range(0, len(ids), size):
            run(places[at : at + size], ids[at : at + size])

    return each


def bound_of_two(rates: Mapping[str, float]) -> str:
    """Return what bounds two threads beside one: locks, and what both share of the machine.

    rates: Mrow/s of the fastest turns, of one thread, with calls so small that it takes locks and
    with others, and of one and two threads of a loop in C without locks, if there is a compiler.
    """
    plain_ns = 1e3 / rates["one"]
    locks_ns = max(
        0.0, 1e3 / rates["one, calls with locks"] - 1e3 / rates["one, calls without locks"]
    )
    left = 2 * plain_ns / (plain_ns + locks_ns)
    text = (
        f"locks, which a thread that is alone does not take, cost {locks_ns:.2g} ns a row beside"
        f" {plain_ns:.3g} ns without: they leave {left:.2f} x"
    )
    if "two loops" not in rates:
        return text
    loops = min(2.0, rates["two loops"] / rates["one loop"])
    return (
        f"{text}; two threads of a loop in C without locks reach {loops:.2f} x, so both leave"
        f" {left * loops / 2:.2f} x"
    )


def row_size(quick: bool) -> list[Row]:
    n = 100_000 if quick else 1_000_000
    table = World(n, 64).table
    each = table.nbytes / len(table) - 4 * table.width
    return [
        row(
            "memory of a row, beyond its floats and state",
            each,
            "bytes",
            goal=Goal("value_at_most", 24),
            note=f"{n} rows",
        )
    ]


class World:
    """A table of n rows under random 64-bit ids; the same weights as an array whose row numbers are
    known."""

    def __init__(self, n: int, dim: int, optimizer: str = "adagrad") -> None:
        self.draw = np.random.default_rng(0)
        self.ids = self.draw.integers(-(2**63), 2**63 - 1, n)
        self.weights = self.draw.standard_normal((n, dim)).astype(np.float32)
        self.table = Table("bench", dim, optimizer=Optimizer(optimizer))
        for at in range(0, n, BATCH):
            self.table.write(self.ids[at : at + BATCH], self.weights[at : at + BATCH])
        self.lines = np.zeros((n, 8), np.int64)
        self.lines[:, 0] = np.arange(n)

    def together(self, run: Case, count: int, batches: int) -> float:
        """Return millions of rows per second of CPU time, of all threads together."""
        ready = threading.Barrier(count, timeout=60.0)

        def work(which: int) -> float:
            draw = np.random.default_rng(which)
            each = [draw.integers(0, len(self.ids), BATCH) for _ in range(batches)]
            pairs = [(places, self.ids[places]) for places in each]
            ready.wait()
            begun = time.thread_time_ns()
            for places, ids in pairs:
                run(places, ids)
            return BATCH * batches / (time.thread_time_ns() - begun) * 1e3

        with ThreadPoolExecutor(count) as pool:
            return sum(pool.map(work, range(count)))

    def rates(
        self, cases: dict[str, Case], batches: int, turns: int, batch: int = BATCH
    ) -> dict[str, Sample]:
        """Return millions of rows per second of CPU time: the median batch of each turn."""

        def measure(run: Case) -> Callable[[], float]:
            def once() -> float:
                took = []
                for _ in range(batches):
                    places = self.draw.integers(0, len(self.ids), batch)
                    ids = self.ids[places]
                    begun = time.thread_time_ns()
                    run(places, ids)
                    took.append(time.thread_time_ns() - begun)
                return batch / float(np.median(took)) * 1e3

            return once

        return interleave({name: measure(run) for name, run in cases.items()}, turns)


def _beside(
    name: str, rates: dict[str, Sample], goals: Mapping[str, Goal | None], limit: str, limit_is: str
) -> list[Row]:
    """Return the rows of ours beside each of the others. limit: the case that bounds ours,
    described by `limit_is`."""
    ours = rates["ours"]

    def bound(peer: str) -> str:
        if limit not in rates or peer == limit:
            return ""
        most, share = rates[limit].median / rates[peer].median, ours.median / rates[limit].median
        return f"{limit_is} is {most:.2g} x here, and ours {share:.2g} of that loop"

    found = [
        row(f"{name}, of {peer}", ours, "Mrow/s", peer, rates[peer], goal, bounded_by=bound(peer))
        for peer, goal in goals.items()
        if peer in rates
    ]
    missing = {"limit": NO_COMPILER, "torch": NO_TORCH, "fbgemm": fbgemm.ABSENT}
    for peer, goal in goals.items():
        if peer not in rates and (
            why := next((text for start, text in missing.items() if peer.startswith(start)), "")
        ):
            found.append(absent(f"{name}, of {peer}", "Mrow/s", why, peer, goal))
    return found


# -- what it is held against


@contextlib.contextmanager
def floor() -> Iterator[Any]:
    """Return the kernel of rows_floor.c; None if there is no compiler."""
    with tempfile.TemporaryDirectory(prefix="rows-") as folder:
        library = Path(folder, "rows.so")
        if not compiled(
            SOURCE, library, "-O3", "-march=native", "-fno-math-errno", "-shared", "-fPIC"
        ):
            yield None
            return
        found = ctypes.CDLL(str(library))
        yield Kernel(found)


class Kernel:
    """Addresses and numbers as C has them."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library

    def gather_by_lines(
        self, rows: int, dim: int, stride: int, lines: int, places: int, n: int, out: int
    ) -> None:
        self._call(self._library.gather_by_lines, rows, dim, stride, lines, places, n, out)

    def update(self, rows: int, dim: int, places: int, n: int, gradients: int) -> None:
        self._call(self._library.update, rows, dim, places, n, gradients)

    def step(
        self, optimizer: str, rows: int, dim: int, lines: int, places: int, n: int, gradients: int
    ) -> None:
        function = getattr(self._library, f"update_{optimizer}")
        self._call(function, rows, dim, lines, places, n, gradients)

    @staticmethod
    def _call(function: Any, *values: int) -> None:
        function(*(ctypes.c_int64(value) for value in values))


def _at(array: Any) -> int:
    return int(array.ctypes.data)


def torch_module() -> Any:
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(1)
    return torch
