"""Models that are generators, in containers of their own: their parts arrive one by one, with
deadlines, backpressure and cancelling; a killed container ends what it had begun."""

import asyncio
import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import ClipperError, DeadlineExceeded, InvalidInput
from clipper_core.engine.model import Model
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until
from tests.threads import join
from tests.word_model import words

PATIENT_MS = 60_000.0
AHEAD = 4


def count(rows: np.ndarray) -> Iterator[object]:
    """Give the numbers below each row's, the rows in turn."""
    from clipper_container import RowPart

    for i in range(int(rows.max(initial=0))):
        for row, end in enumerate(rows):
            if i < end:
                yield RowPart(row, float(i), 0.5)


def lengths(xs: list[str]) -> list[int]:
    return [len(x) for x in xs]


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    limits = {"parts_ahead_max": AHEAD, "streams_max": 8, "answer_bytes_max": 8000}
    with clipper.start(**{**QUICK, "limits": limits}) as started:
        started.deploy("words", words, input="str", output="str", row_by_row=True, cache=False)
        started.deploy("count", count, input="f64", cache=False)
        started.deploy("lengths", lengths, input="str")
        started._learning.states.start_writing()  # its thread stays too
        yield started


def model_of(server: clipper.ClipperServer, name: str) -> Model:
    found = server.model(name)
    assert isinstance(found, Model)
    return found


def outputs(future: clipper.PartsFuture) -> list[object]:
    return [part.output for part in future]


def test_parts_and_the_whole(server: clipper.ClipperServer) -> None:
    model = model_of(server, "words")
    future = model.predict("a b c", PATIENT_MS, stream=True)
    parts = list(future)
    assert [(part.output, part.index, part.is_last) for part in parts] == [
        ("a ", 0, False),
        ("b ", 1, False),
        ("c ", 2, False),
        ("a b c ", 3, True),
    ]
    assert future.done()
    assert not future.cancelled()
    assert future.result(60).output == "a b c "
    assert model.predict("a b c", PATIENT_MS).result(60) == "a b c "
    assert outputs(model.predict("", PATIENT_MS, stream=True))[:-1] == []


def test_a_generator_of_batches_gives_each_row_its_own(server: clipper.ClipperServer) -> None:
    model = model_of(server, "count")
    future = model.predict(3.0, PATIENT_MS, stream=True)
    assert [(part.output, part.confidence) for part in future][:-1] == [
        (0.0, 0.5),
        (1.0, 0.5),
        (2.0, 0.5),
    ]
    assert future.result(60).output.tolist() == [0.0, 1.0, 2.0]
    found = model.predict_many(np.array([2.0, 0.0, 4.0]), PATIENT_MS).result(60)
    assert [row.tolist() for row in found] == [[0.0, 1.0], [], [0.0, 1.0, 2.0, 3.0]]


def test_asyncio(server: clipper.ClipperServer) -> None:
    model = model_of(server, "words")

    async def ask() -> tuple[list[object], object]:
        one = [part.output async for part in model.predict("a b", PATIENT_MS, stream=True)]
        return one, (await model.predict("c d", PATIENT_MS, stream=True)).output

    async def many() -> list[tuple[list[object], object]]:
        return await asyncio.gather(*(ask() for _ in range(20)))

    assert asyncio.run(many()) == [(["a ", "b ", "a b "], "c d ")] * 20


def test_a_model_without_parts_answers_in_one(server: clipper.ClipperServer) -> None:
    future = model_of(server, "lengths").predict("abc", PATIENT_MS, stream=True)
    assert outputs(future) == [3, 3]


def test_a_failure_keeps_what_has_arrived(server: clipper.ClipperServer) -> None:
    future = model_of(server, "words").predict("a fail b", PATIENT_MS, stream=True)
    assert outputs(future) == ["a ", "a "]
    whole = future.result(60)
    assert not whole.complete
    assert "no more words" in (whole.reason or "")
    with pytest.raises(ClipperError, match="no more words"):
        model_of(server, "words").predict("fail", PATIENT_MS, stream=True).result(60)


def test_deadlines(server: clipper.ClipperServer, tmp_path: Path) -> None:
    model, go = model_of(server, "words"), tmp_path / "go"
    # the container sits in one of them at a time, so each is let go before the next
    cases = [
        ("a wait", {"part_slo_ms": 20}, "part_slo_ms"),
        ("a wait", {"slo_total_ms": 20}, "slo_total_ms"),
    ]
    for text, limits, named in cases:
        future = model.predict(f"a wait:{go}", PATIENT_MS, stream=True, **limits)
        whole = future.result(60)
        go.touch()
        if whole.index:  # its first part was in time, on a slow machine too
            assert (whole.output, whole.complete) == ("a ", False), text
        assert named in (whole.reason or "")
        assert model.predict("b", PATIENT_MS).result(60) == "b "
        go.unlink()
    future = model.predict(f"wait:{go} a", 20, stream=True)
    with pytest.raises(DeadlineExceeded, match="slo_ms"):
        future.result(60)
    go.touch()


def test_a_reader_that_does_not_read_stops_its_model_and_no_other(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    model, log = model_of(server, "words"), tmp_path / "log"
    future = model.predict(f"log:{log} " * 30, PATIENT_MS, stream=True)
    wait_until(lambda: log.exists() and len(log.read_text()) == AHEAD)
    assert outputs(model.predict("a " * 20, PATIENT_MS, stream=True))[:-1] == ["a "] * 20
    assert len(log.read_text()) == AHEAD, "nobody has read"
    assert next(future).index == 0
    assert len(outputs(future)) == 30
    assert len(log.read_text()) == 30


def test_cancelling_closes_the_generator(server: clipper.ClipperServer, tmp_path: Path) -> None:
    model = model_of(server, "words")
    for n in range(2):
        closed = tmp_path / f"closed{n}"
        future = model.predict(f"closes:{closed} " + "a " * 50, PATIENT_MS, stream=True)
        assert next(future).index == 0
        if n:
            del future
        else:
            assert future.cancel()
            whole = future.result(60)
            assert not whole.complete
            assert future.cancelled()
            assert whole.output.endswith(" ")
        wait_until(closed.exists)


def test_answers_have_a_size(server: clipper.ClipperServer) -> None:
    whole = model_of(server, "words").predict("ab " * 1000, PATIENT_MS, stream=True).result(60)
    assert 0 < len(whole.output) < 3000
    assert "answer_bytes_max" in (whole.reason or "")


def test_many_at_a_time_each_with_its_own_parts(server: clipper.ClipperServer) -> None:
    model = model_of(server, "words")
    futures = [model.predict(f"{i} " * 9, PATIENT_MS, stream=True) for i in range(30)]
    for i, future in enumerate(futures):
        assert outputs(future) == [f"{i} "] * 9 + [f"{i} " * 9]


def test_batches_and_answers_in_parts_share_a_container(server: clipper.ClipperServer) -> None:
    model, found = model_of(server, "words"), []
    reader = threading.Thread(
        target=lambda: found.extend(outputs(model.predict("a " * 300, PATIENT_MS, stream=True)))
    )
    reader.start()
    for i in range(100):
        assert model.predict(f"b{i}", PATIENT_MS).result(60) == f"b{i} "
    join(reader)
    assert found == ["a "] * 300 + ["a " * 300]


def test_an_application_with_one_model(server: clipper.ClipperServer) -> None:
    app = server.app("writer", models=["words"], policy="single", default="none", slo_ms=PATIENT_MS)
    whole = app.predict("a b", stream=True, id="mine").result(60)
    assert (whole.output, whole.complete, whole.is_default) == ("a b ", True, False)
    assert whole.request_id == "mine"
    assert app.feedback(whole.id, label="a b ")
    assert not app.feedback(whole.id, label="a b ")
    answer = app.predict("fail", stream=True).result(60)
    assert (answer.output, answer.is_default, answer.complete) == ("none", True, False)
    assert "no more words" in (answer.reason or "")
    counts = server.stats()["applications"]["writer"]
    assert counts["queries"] == 2


def test_a_policy_that_learns_chooses_the_model(server: clipper.ClipperServer) -> None:
    for version in (1, 2):
        server.deploy("drafts", words, input="str", row_by_row=True, cache=False, version=version)
    models = ["drafts:1", "drafts:2"]
    app = server.app("chooser", models=models, policy="exp3", default="none", slo_ms=PATIENT_MS)
    for _ in range(5):
        whole = app.predict("a b", stream=True).result(60)
        assert whole.output == "a b "
        assert app.feedback(whole.id, label="a b ")


def test_an_application_that_asks_several_models_has_no_parts(
    server: clipper.ClipperServer,
) -> None:
    server.deploy("more", words, input="str", row_by_row=True, cache=False)
    app = server.app("both", models=["words", "more"], policy="ensemble", slo_ms=1000)
    with pytest.raises(InvalidInput, match="several models"):
        app.predict("a", stream=True)
    with pytest.raises(InvalidInput, match="stream=True"):
        app.predict("a", part_slo_ms=5)


def test_wrong_input_is_refused_at_once(server: clipper.ClipperServer) -> None:
    with pytest.raises(InvalidInput):
        model_of(server, "words").predict(1.0, stream=True)


def test_a_killed_container_ends_what_it_had_begun(server: clipper.ClipperServer) -> None:
    model = model_of(server, "words")
    futures = [model.predict("a " * 50, PATIENT_MS, stream=True) for _ in range(4)]
    for future in futures:
        assert next(future).output == "a "
    rows = server.stats()["models"][model.name]["replicas"]
    for row in rows:
        with contextlib.suppress(ProcessLookupError):
            os.kill(row["pid"], signal.SIGKILL)
    for future in futures:
        whole = future.result(60)
        assert not whole.complete
        assert whole.output == "a " * whole.index
        assert 1 <= whole.index <= 50
        assert "lost" in (whole.reason or "")
    assert model.predict("b c", PATIENT_MS, stream=True).result(60).output == "b c "


def test_a_closed_server_ends_its_answers() -> None:
    with clipper.start(**QUICK) as server:
        server.deploy("words", words, input="str", row_by_row=True, cache=False)
        future = model_of(server, "words").predict("a " * 1000, PATIENT_MS, stream=True)
        assert next(future).output == "a "
    whole = future.result(60)
    assert not whole.complete
