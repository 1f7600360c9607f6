"""Named tensors: what they cost beside one tensor with the same bytes.

The same no-op as a model of one tensor of 64 floats, of four named tensors of 16 each, and of two
named tensors of a free length; one server, a container of each. A round trip is predict() and
result(), one after another. A row is the time of an array of rows by predict_many, divided by their
number; of rows of free length fewer, since each is a task by itself. The anchor is one tensor; that
of two tensors of free length is one tensor of free length, `f64[*]`. No model reads its rows: what
reading a tensor costs that is a view with a stride, is not in these figures.
"""

import time
from functools import partial
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Predict, Row, interleave, per_call_ns, row

ITEMS, TENSORS = 64, 4
ARRAY_ROWS, FREE_ROWS = 50_000, 2_000
CALLS = 1000
ONE, ONE_FREE = "one tensor", "one tensor of free length"
FIXED, FREE = "four named tensors", "two tensors of free length"
ANCHORS = {FIXED: ONE, FREE: ONE_FREE}
TRIP_GOALS = dict.fromkeys(ANCHORS, Goal("at_most", 1.4))
ROW_GOALS = {FIXED: Goal("at_most", 1.3), FREE: Goal("at_most", 2.0)}


def one(xs: Any) -> Any:
    """Return a zero for each row of one tensor."""
    return np.zeros(len(xs))


def named(batch: Any) -> Any:
    """Return a zero for each row of several."""
    return {"y": np.zeros(len(next(iter(batch.values()))))}


def main(quick: bool) -> list[Row]:
    """Build the rows. quick: few repetitions."""
    repetitions = 2 if quick else 15
    random = np.random.default_rng(1)
    whole = random.random((ARRAY_ROWS, ITEMS))
    width = ITEMS // TENSORS
    parts = {f"x{i}": whole[:, i * width : (i + 1) * width] for i in range(TENSORS)}
    halves = {"a": [*whole[:FREE_ROWS, :32]], "b": [*whole[:FREE_ROWS, 32:]]}
    with clipper.start() as server:
        outputs = {"y": "f64"}
        models = {
            ONE: server.deploy("one", one, input=f"f64[{ITEMS}]", cache=False),
            ONE_FREE: server.deploy("one-free", one, input="f64[*]", cache=False),
            FIXED: server.deploy(
                "fixed",
                named,
                inputs=dict.fromkeys(parts, f"f64[{width}]"),
                outputs=outputs,
                cache=False,
            ),
            FREE: server.deploy(
                "free", named, inputs={"a": "f64[*]", "b": "f64[*]"}, outputs=outputs, cache=False
            ),
        }
        arrays: dict[str, Any] = {
            ONE: whole,
            ONE_FREE: [*whole[:FREE_ROWS]],
            FIXED: parts,
            FREE: halves,
        }
        inputs = {
            ONE: [*whole[:CALLS]],
            ONE_FREE: [*whole[:CALLS]],
            FIXED: [{name: part[i] for name, part in parts.items()} for i in range(CALLS)],
            FREE: [{name: half[i] for name, half in halves.items()} for i in range(CALLS)],
        }

        def row_us(name: str) -> float:
            began = time.perf_counter_ns()
            models[name].predict_many(arrays[name]).result(60)
            return (time.perf_counter_ns() - began) / 1000 / len(next(iter(_columns(arrays[name]))))

        trips = interleave(
            {name: partial(_trip_us, models[name].predict, inputs[name]) for name in models},
            repetitions,
        )
        rows = interleave({name: partial(row_us, name) for name in models}, repetitions)
    found = []
    for what, samples, goals in (
        ("a round trip", trips, TRIP_GOALS),
        ("a row of a full batch", rows, ROW_GOALS),
    ):
        for name, sample in samples.items():
            anchor = ANCHORS.get(name, "")
            found.append(
                row(
                    f"{name}: {what}",
                    sample,
                    "us",
                    anchor,
                    samples.get(anchor),
                    goals.get(name),
                    bounded_by="a fixed part of each batch, in Python, in the container",
                )
            )
    return found


def _trip_us(predict: Predict, inputs: list[Any]) -> float:
    return per_call_ns(predict, inputs) / 1000


def _columns(array: Any) -> Any:
    return array.values() if isinstance(array, dict) else [array]
