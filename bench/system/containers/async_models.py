"""Async models: rows that wait side by side in one process, beside one after another.

A row waits for 50 ms. The first figure is the time until a burst of 1 000 rows is answered by one
container, whose best is 50 ms; a model that is not async takes 50 ms for each row.
"""

import time

import clipper
from bench.harness import Row, interleave, row
from clipper_core.engine.model import Model

ROWS, QUICK_ROWS = 1000, 100
REPETITIONS, QUICK_REPETITIONS = 7, 2
WAIT_S = 0.05
PATIENT_MS = 60_000.0
PATIENCE_S = 60.0


async def wait(x: float) -> float:
    """Wait as for another service, and answer."""
    import asyncio

    await asyncio.sleep(0.05)
    return x


async def at_once(x: float) -> float:
    """Answer without waiting."""
    return x


def main(quick: bool = False) -> list[Row]:
    """Return the rows of the benchmark."""
    rows = QUICK_ROWS if quick else ROWS
    with clipper.start() as server:
        for name, function in (("wait", wait), ("at_once", at_once)):
            server.deploy(
                name, function, input="f64", row_by_row=True, cache=False, max_concurrency=ROWS
            )

        def burst(name: str) -> float:
            model = server.model(name)
            assert isinstance(model, Model)
            began_s = time.perf_counter()
            waiting = [model.predict(float(i), PATIENT_MS) for i in range(rows)]
            found = [future.result(PATIENCE_S) for future in waiting]
            assert found == [float(i) for i in range(rows)]
            return time.perf_counter() - began_s

        def cpu() -> float:
            began_s = time.process_time()
            burst("at_once")
            return (time.process_time() - began_s) / rows * 1e6

        cases = {
            "burst": lambda: burst("wait") * 1e3,
            "row": lambda: burst("at_once") / rows * 1e6,
            "cpu": cpu,
        }
        found = interleave(cases, QUICK_REPETITIONS if quick else REPETITIONS)
    return [
        row(
            f"{rows} rows that wait for 50 ms, one process",
            found["burst"],
            "ms",
        ),
        row("a row that does not wait, in a burst", found["row"], "us"),
        row("the same, CPU of the server's process", found["cpu"], "us"),
    ]
