"""Calls between models: a call by a model, beside a query from the server's own process.

Both go to the same model in a container of its own, one after another, and are not cached. A call
crosses two more sockets and two threads of the server. The CPU is that of the server's process.
"""

import time

import numpy as np

import clipper
from bench.harness import Goal, Row, interleave, row
from clipper_container import Calls
from clipper_core.engine.model import Model

CALLS, QUICK_CALLS = 1000, 50
REPETITIONS, QUICK_REPETITIONS = 7, 2
PATIENT_MS = 60_000.0
PATIENCE_S = 60.0


def double(rows: np.ndarray) -> np.ndarray:
    """Return twice each number."""
    return 2 * rows


def one_by_one(count: float, calls: Calls) -> float:
    """Make so many calls, each after the one before; return the seconds of one."""
    import time

    began_s = time.perf_counter()
    for i in range(int(count)):
        calls.model("double").predict(float(i)).result()
    return (time.perf_counter() - began_s) / count


def at_once(count: float, calls: Calls) -> float:
    """Call with so many inputs; return the seconds of one."""
    import time

    import numpy as np

    began_s = time.perf_counter()
    calls.model("double").predict_many(np.arange(count)).result()
    return (time.perf_counter() - began_s) / count


def main(quick: bool = False) -> list[Row]:
    """Return the rows of the benchmark."""
    count = QUICK_CALLS if quick else CALLS
    with clipper.start() as server:
        server.deploy("double", double, input="f64", cache=False)
        for name, function in (("one_by_one", one_by_one), ("at_once", at_once)):
            server.deploy(
                name,
                function,
                input="f64",
                row_by_row=True,
                cache=False,
                warmup=False,
                calls=["model:double"],
            )
        target = server.model("double")
        assert isinstance(target, Model)

        def asked(name: str) -> float:
            model = server.model(name)
            assert isinstance(model, Model)
            return float(model.predict(float(count), PATIENT_MS).result(PATIENCE_S)) * 1e6

        def queries() -> float:
            began_s = time.perf_counter()
            for i in range(count):
                target.predict(float(i), PATIENT_MS).result(PATIENCE_S)
            return (time.perf_counter() - began_s) / count * 1e6

        def cpu() -> float:
            began_s = time.process_time()
            asked("one_by_one")
            return (time.process_time() - began_s) / count * 1e6

        cases = {
            "call": lambda: asked("one_by_one"),
            "query": queries,
            "many": lambda: asked("at_once"),
            "cpu": cpu,
        }
        found = interleave(cases, QUICK_REPETITIONS if quick else REPETITIONS)
    return [
        row(
            "a call by a model",
            found["call"],
            "us",
            "a query of the server's own process",
            found["query"],
            goal=Goal("at_most", 1.5),
        ),
        row("a row of predict_many", found["many"], "us"),
        row("a call, CPU of the server's process", found["cpu"], "us"),
    ]
