"""Async models in containers of their own: rows that wait side by side, CANCEL of rows that nobody
wants, parts of async generators, and the death of their container."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, DeadlineExceeded, InvalidInput
from clipper_core.engine.model import Model
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until

PATIENT_MS = 60_000.0
ROWS = 200


async def steps(x: str) -> str:
    """Do what the words of a text say."""
    import asyncio
    import pathlib

    begun = 0
    try:
        for word in x.split():
            verb, _, path = word.partition(":")
            if verb == "fail":
                raise ValueError("told to fail")
            if verb == "sleep":
                await asyncio.sleep(float(path))
            if verb == "log":
                with open(path, "a") as file:
                    file.write("x")
            if verb == "wait":
                while not pathlib.Path(path).exists():
                    await asyncio.sleep(0.002)
            begun += 1
    finally:
        if x.startswith("ends:"):
            pathlib.Path(x.split()[0][5:]).write_text(str(begun))
    return x


async def halves(rows: np.ndarray) -> np.ndarray:
    """Halve a batch of numbers; one with a negative number fails."""
    import asyncio

    await asyncio.sleep(0)
    if rows.min() < 0:
        raise ValueError("a negative number")
    return rows / 2


async def letters(x: str) -> AsyncIterator[str]:
    """Give the letters of a text; wait for a file at `?`, fail at `!`."""
    import asyncio
    import pathlib

    path, _, text = x.rpartition(" ")
    try:
        for letter in text:
            while letter == "?" and not pathlib.Path(path).exists():
                await asyncio.sleep(0.002)
            if letter == "!":
                raise ValueError("no more letters")
            yield letter
    finally:
        if path.endswith(".closed"):
            pathlib.Path(path).touch()


class Looking:
    """A model that is not async, and looks whether somebody waits for its batch."""

    input = "str"
    output = "str"

    def predict_batch(self, rows: list[str]) -> list[str]:
        import pathlib
        import time

        from clipper_container import is_cancelled

        path, _, verb = rows[0].rpartition(" ")
        if verb == "look":
            pathlib.Path(path).touch()
            while not is_cancelled():
                time.sleep(0.002)
            pathlib.Path(path + ".cancelled").touch()
            raise RuntimeError("nobody waits")
        return rows


def slowly(x: str) -> Iterator[str]:
    """Yield dots until it is closed."""
    import pathlib
    import time

    path, _, verb = x.rpartition(" ")
    try:
        while verb == "dots":
            pathlib.Path(path).touch()
            time.sleep(0.002)
            yield "."
        yield x
    finally:
        if verb == "dots":
            pathlib.Path(path + ".closed").touch()


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    limits = {"parts_ahead_max": 4}
    with clipper.start(**{**QUICK, "limits": limits}) as started:
        for name, function, most in (
            ("steps", steps, ROWS),
            ("narrow", steps, 2),
            ("letters", letters, 100),
            ("slowly", slowly, 1),
        ):
            started.deploy(
                name,
                function,
                input="str",
                output="str",
                cache=False,
                row_by_row=True,
                max_concurrency=most,
            )
        started.deploy("halves", halves, input="f64", cache=False)
        started.deploy("singly", halves, input="f64", cache=False, retry_singly=True)
        started.deploy("looking", Looking, cache=False)
        started._learning.states.start_writing()  # its thread stays too
        yield started


def model_of(server: clipper.ClipperServer, name: str) -> Model:
    found = server.model(name)
    assert isinstance(found, Model)
    return found


def pid_of(server: clipper.ClipperServer, name: str) -> int:
    version = next(m.id for m in server.catalog.view.models() if m.name == name)
    return server._deployment.containers.of(version)[0].hello.pid


def test_many_rows_wait_side_by_side_in_one_process(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model = model_of(server, "steps")
    logged = tmp_path / "log"
    gate = tmp_path / "gate"
    waiting = [model.predict(f"log:{logged} wait:{gate} {i}", PATIENT_MS) for i in range(ROWS)]
    wait_until(lambda: logged.exists() and len(logged.read_text()) == ROWS)
    assert not any(future.done() for future in waiting)
    gate.touch()
    assert [future.result(60).split()[-1] for future in waiting] == [*map(str, range(ROWS))]


def test_a_slow_row_does_not_hold_back_others(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model = model_of(server, "steps")
    gate = tmp_path / "gate"
    slow = model.predict(f"wait:{gate}", PATIENT_MS)
    assert [model.predict(str(i), PATIENT_MS).result(60) for i in range(50)] == [
        *map(str, range(50))
    ]
    assert not slow.done()
    gate.touch()
    assert slow.result(60) == f"wait:{gate}"


def test_max_concurrency_bounds_what_runs(server: clipper.ClipperServer, tmp_path: Path) -> None:
    model = model_of(server, "narrow")
    logged = tmp_path / "log"
    gate = tmp_path / "gate"
    waiting = [model.predict(f"log:{logged} wait:{gate} {i}", PATIENT_MS) for i in range(6)]
    wait_until(lambda: logged.exists() and len(logged.read_text()) == 2)
    gate.touch()
    assert all(future.result(60) for future in waiting)
    assert len(logged.read_text()) == 6


def test_batches_and_failures(server: clipper.ClipperServer) -> None:
    rows = np.arange(100.0)
    assert model_of(server, "halves").predict_many(rows, PATIENT_MS).result(60).tolist() == [
        *rows / 2
    ]
    with pytest.raises(ClipperError, match="a negative number"):
        model_of(server, "halves").predict(-1.0, PATIENT_MS).result(60)
    mixed = model_of(server, "singly").predict_many(np.array([1.0, -1.0, 4.0]), PATIENT_MS)
    assert mixed.wait(60)
    assert [mixed.error(i) is None for i in range(3)] == [True, False, True]
    with pytest.raises(ClipperError, match="told to fail"):
        model_of(server, "steps").predict("fail", PATIENT_MS).result(60)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
def test_a_row_that_nobody_wants_is_cancelled(
    server: clipper.ClipperServer, tmp_path: Path, how: str
) -> None:
    model = model_of(server, "steps")
    ended = tmp_path / "ended"
    logged = tmp_path / "log"
    text = f"ends:{ended} log:{logged} wait:{tmp_path / 'never'}"
    future = model.predict(text, PATIENT_MS if how == "cancel" else 300)
    if how == "cancel":
        wait_until(logged.exists)
        future.cancel()
    else:
        with pytest.raises(DeadlineExceeded):
            future.result(60)
    wait_until(ended.exists)
    assert ended.read_text() == "2"
    assert model.predict("on", PATIENT_MS).result(60) == "on"


def test_a_hedge_that_lost_is_cancelled(server: clipper.ClipperServer, tmp_path: Path) -> None:
    app = server.app(
        "either", models=["steps", "narrow"], decider="first", slo_ms=PATIENT_MS, default=""
    )
    ended = tmp_path / "ended"
    # the first to find no file makes it, and answers; the other waits for a file that never comes
    text = f"ends:{ended} sleep:0"
    assert app.predict(text).result(60).output == text
    slow = model_of(server, "steps")
    gate = tmp_path / "gate"
    blocked = [slow.predict(f"wait:{gate} {i}", PATIENT_MS) for i in range(2)]
    gate.touch()
    assert all(future.result(60) for future in blocked)


def test_a_model_that_looks_sees_that_nobody_waits(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model, begun = model_of(server, "looking"), tmp_path / "begun"
    future = model.predict(f"{begun} look", PATIENT_MS)
    wait_until(begun.exists)
    future.cancel()
    wait_until(Path(f"{begun}.cancelled").exists)
    assert model.predict("on", PATIENT_MS).result(60) == "on"


def test_a_generator_of_a_whole_answer_is_closed(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model, begun = model_of(server, "slowly"), tmp_path / "begun"
    future = model.predict(f"{begun} dots", PATIENT_MS)
    wait_until(begun.exists)
    future.cancel()
    wait_until(Path(f"{begun}.closed").exists)
    assert model.predict("on", PATIENT_MS).result(60) == "on"


def test_parts_of_an_async_generator(server: clipper.ClipperServer, tmp_path: Path) -> None:
    model = model_of(server, "letters")
    gate = tmp_path / "gate"
    held = model.predict(f"{gate} ab?c", PATIENT_MS, stream=True)
    parts = iter(held)
    assert [next(parts).output, next(parts).output] == ["a", "b"]
    others = [model.predict("xyz", PATIENT_MS, stream=True) for _ in range(20)]
    assert [future.result(60).output for future in others] == ["xyz"] * 20
    assert model.predict("whole", PATIENT_MS).result(60) == "whole"
    gate.touch()
    assert held.result(60).output == "ab?c"
    failed = model.predict("ab!", PATIENT_MS, stream=True).result(60)
    assert (failed.output, failed.complete) == ("ab", False)
    assert "no more letters" in (failed.reason or "")


def test_a_reader_that_stops_stops_an_async_generator(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model, closed = model_of(server, "letters"), tmp_path / "a.closed"
    future = model.predict(f"{closed} " + "a" * 1000, PATIENT_MS, stream=True)
    assert next(iter(future)).output == "a"
    assert not closed.exists()  # limits.parts_ahead_max
    future.cancel()
    wait_until(closed.exists)


def test_asyncio_asks_for_many_rows(server: clipper.ClipperServer) -> None:
    model = model_of(server, "steps")

    async def ask() -> list[str]:
        return await asyncio.gather(*(_answer(model, f"sleep:0.001 {i}") for i in range(ROWS)))

    assert len(set(asyncio.run(ask()))) == ROWS


async def _answer(model: Model, x: str) -> str:
    found: str = await model.predict(x, PATIENT_MS)
    return found


def test_a_killed_container_fails_no_row_that_can_be_tried_again(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model = model_of(server, "steps")
    logged = tmp_path / "log"
    gate = tmp_path / "gate"
    waiting = [model.predict(f"log:{logged} wait:{gate} {i}", PATIENT_MS) for i in range(50)]
    wait_until(lambda: logged.exists() and len(logged.read_text()) == 50)
    os.kill(pid_of(server, "steps"), signal.SIGKILL)
    gate.touch()
    assert [future.result(60).split()[-1] for future in waiting] == [*map(str, range(50))]


def test_a_container_that_is_stopped_answers_what_it_has(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    server.deploy("leaving", steps, row_by_row=True, input="str", output="str", cache=False)
    model = model_of(server, "leaving")
    logged = tmp_path / "log"
    gate = tmp_path / "gate"
    waiting = [model.predict(f"log:{logged} wait:{gate} {i}", PATIENT_MS) for i in range(9)]
    wait_until(lambda: logged.exists() and len(logged.read_text()) == 9)
    os.kill(pid_of(server, "leaving"), signal.SIGTERM)
    gate.touch()
    assert all(future.result(60) for future in waiting)
    assert len(logged.read_text()) == 9  # none was begun twice


def test_its_bounds_are_checked(server: clipper.ClipperServer) -> None:
    for wrong in (0, 8193, -1):
        with pytest.raises(InvalidInput, match="max_concurrency"):
            server.deploy("wrong", steps, row_by_row=True, max_concurrency=wrong)
