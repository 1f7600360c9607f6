"""Models that call models and applications, each in a process of its own: a pipeline, what may be
called, circles, limits, deadlines, and the death of a container in the middle."""

import os
import runpy
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, InvalidInput
from clipper_container import Calls
from clipper_core.engine.model import Model
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until

PATIENT_MS = 60_000.0
CALLS_MAX = 8


def double(rows: np.ndarray) -> np.ndarray:
    return 2 * rows


def waits(x: str) -> str:
    """Wait for a file, after making another one."""
    import pathlib
    import time

    begun, _, path = x.partition(" ")
    pathlib.Path(begun).touch()
    while not pathlib.Path(path).exists():
        time.sleep(0.002)
    return "done"


def serial(text: str, calls: Calls) -> str:
    """Do what a text says, one call after another."""
    from clipper_container import CallFailed

    verb, _, rest = text.partition(" ")
    try:
        if verb == "double":
            return str(calls.model("double").predict(float(rest)).result())
        if verb == "many":
            rows = [float(word) for word in rest.split()]
            return str(calls.model("double").predict_many(rows).result())
        if verb == "array":
            return str(sum(calls.model("double").predict_many(np.arange(float(rest))).result()))
        if verb == "both":
            first = calls.model("double").predict(1.0)
            second = calls.model("double").predict(2.0)
            return f"{second.result()} {first.result()}"
        if verb == "app":
            found = calls.app("doubled").predict(float(rest), user="me").result()
            return f"{found.output} {found.is_default} {bool(found.id)}"
        if verb == "wait":
            return str(calls.model("waits").predict(rest).result())
        if verb == "too-many":
            for i in range(int(rest)):
                calls.model("double").predict(float(i))
            return "all"
        return str(calls.model(verb).predict(rest).result())
    except CallFailed as error:
        return f"{type(error).__name__} {error.code}: {error}"


async def parallel(x: float, calls: Calls) -> float:
    """Call twice at a time."""
    import asyncio

    found = await asyncio.gather(*(calls.model("double").predict(x) for _ in range(2)))
    return float(sum(found))


class Reader:
    """A class with the attribute, which calls in its own thread only."""

    input = output = "str"
    calls: Calls

    def predict_batch(self, rows: list[str]) -> list[str]:

        import threading

        texts: list[str] = []

        def call() -> None:
            try:
                self.calls.model("double").predict(1.0)
            except RuntimeError as error:
                texts.append(str(error))

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return [f"{texts[0]} {self.calls.model('double').predict(4.0).result()}" for _ in rows]


def ring(text: str, calls: Calls) -> str:
    from clipper_container import CallCycle

    try:
        return str(calls.model("ring-b" if text == "a" else "ring-a").predict(text).result())
    except CallCycle as error:
        return f"a circle: {error}"


TARGETS = ["model:double", "model:waits", "app:doubled", "model:deep-1", "model:gone"]


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    limits = {"calls_max": CALLS_MAX, "call_depth_max": 2}
    with clipper.start(**{**QUICK, "limits": limits}) as started:
        started.deploy("double", double, input="f64")
        started.app("doubled", models=["double"], slo_ms=PATIENT_MS, default=-1.0)

        def add(
            name: str, function: object, calls: list[str], kind: str = "str", most: int = 128
        ) -> None:
            started.deploy(
                name,
                function,
                input=kind,
                output=kind,
                cache=False,
                row_by_row=True,
                warmup=False,
                calls=calls,
                max_concurrency=most,
            )

        add("waits", waits, [])
        add("serial", serial, TARGETS)
        add("parallel", parallel, ["model:double"], "f64", CALLS_MAX // 2)
        add("ring-a", ring, ["model:ring-b"])
        add("ring-b", ring, ["model:ring-a"])
        add("deep-1", serial, ["model:deep-2"])
        add("deep-2", serial, ["model:double"])
        started.deploy("reader", Reader, cache=False, warmup=False, calls=["model:double"])
        started._learning.states.start_writing()  # its thread stays too
        assert ask(started, "array 100") == "9900.0"  # and so does that of callbacks
        yield started


def model_of(server: clipper.ClipperServer, name: str) -> Model:
    found = server.model(name)
    assert isinstance(found, Model)
    return found


def ask(server: clipper.ClipperServer, text: str, name: str = "serial") -> str:
    return str(model_of(server, name).predict(text, PATIENT_MS).result(60))


def pid_of(server: clipper.ClipperServer, name: str) -> int:
    version = next(m.id for m in server.catalog.view.models() if m.name == name)
    return server._deployment.containers.of(version)[0].hello.pid


def test_a_model_calls_models_and_applications(server: clipper.ClipperServer) -> None:
    assert ask(server, "double 3") == "6.0"
    assert ask(server, "many 1 2 3") == "[2.0, 4.0, 6.0]"
    assert ask(server, "array 100") == "9900.0"
    assert ask(server, "both") == "4.0 2.0"
    assert ask(server, "app 5") == "10.0 False True"


def test_async_models_await_their_calls(server: clipper.ClipperServer) -> None:
    model = model_of(server, "parallel")
    waiting = [model.predict(float(i), PATIENT_MS) for i in range(100)]
    assert [future.result(60) for future in waiting] == [4.0 * i for i in range(100)]


def test_a_class_has_an_attribute_and_threads_are_told(server: clipper.ClipperServer) -> None:
    text = ask(server, "x", "reader")
    assert "while a batch is evaluated" in text
    assert text.endswith("8.0")


def test_only_what_is_listed_can_be_called(server: clipper.ClipperServer) -> None:
    text = ask(server, "parallel 1")
    assert text.startswith("CallNotAllowed call-not-allowed")
    assert "model:parallel" in text
    assert ask(server, "gone 1").startswith("CallFailed model-not-found")
    for wrong in ("double", "mesh:double", "app:"):
        with pytest.raises(InvalidInput, match="cannot be called"):
            server.deploy("wrong", serial, row_by_row=True, calls=[wrong])


def test_a_circle_and_a_chain_that_is_too_long_are_refused(server: clipper.ClipperServer) -> None:
    assert "ring-a -> ring-b -> ring-a" in ask(server, "a", "ring-a")
    text = ask(server, "deep-1 deep-2 1")
    assert text.startswith("CallLimit call-limit")
    assert "limits.call_depth_max = 2" in text


def test_open_calls_have_a_limit(server: clipper.ClipperServer) -> None:
    text = ask(server, f"too-many {CALLS_MAX + 1}")
    assert text.startswith("CallLimit call-limit")
    assert "limits.calls_max" in text
    assert ask(server, "double 3") == "6.0"


def test_a_call_ends_by_the_deadline_of_its_caller(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    model = model_of(server, "serial")
    late = model.predict(f"wait {begun} {gate}", 400.0)
    with pytest.raises(ClipperError):
        late.result(60)
    gate.touch()
    assert ask(server, "double 4") == "8.0"


def test_a_killed_callee_is_an_error_or_is_tried_again(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    future = model_of(server, "serial").predict(f"wait {begun} {gate}", PATIENT_MS)
    wait_until(begun.exists)
    os.kill(pid_of(server, "waits"), signal.SIGKILL)
    gate.touch()
    assert future.result(60) == "done"


def test_a_killed_caller_is_tried_again(server: clipper.ClipperServer, tmp_path: Path) -> None:
    begun, gate = tmp_path / "begun", tmp_path / "gate"
    future = model_of(server, "serial").predict(f"wait {begun} {gate}", PATIENT_MS)
    wait_until(begun.exists)
    os.kill(pid_of(server, "serial"), signal.SIGKILL)
    gate.touch()
    assert future.result(60) == "done"
    assert ask(server, "double 4") == "8.0"


def test_the_pipeline_of_the_examples() -> None:
    path = Path(__file__).parents[2] / "examples" / "calls" / "serve.py"
    example = runpy.run_path(str(path))
    with clipper.start(**QUICK) as server:
        example["deploy"](server)
        app = server.app("answers")
        for query, word in (("by which time is a query answered", "deadline"),) * 3:
            answer = app.predict(query, slo_ms=PATIENT_MS).result(60)
            assert word in answer.output
        counts = {model.id.name: model for model in server.catalog.view.models()}
        assert set(counts) == {"embed", "rank", "explain"}
