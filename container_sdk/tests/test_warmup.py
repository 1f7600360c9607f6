"""Warm-up batches of a model, their report, and that no warm-up keeps a container from serving."""

import json
import signal
import threading
from typing import Any

import numpy as np
import pytest

from clipper_container.model import FunctionModel, Model, Scored, SeveralOutputs
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.warmup import (
    ERROR_CHARS_MAX,
    OFF,
    ROWS_MAX,
    TIMINGS_MAX,
    WarmUp,
    warm_up,
)


def run(function: Any, input: str, output: str = "", batch_max: int = 0, **options: Any) -> WarmUp:
    return warm_up(Evaluator(FunctionModel(function), "m", **options), input, output, batch_max)


def test_batches_double_up_to_the_bound_and_each_but_the_first_is_reported() -> None:
    sizes: list[int] = []

    def total(rows: Any) -> Any:
        sizes.append(len(rows))
        return rows.sum(axis=1)

    found = run(total, "f64[4]")
    assert sizes[:6] == [1, 1, 1, 1, 2, 2]
    assert max(sizes) == ROWS_MAX
    assert [n for n, _ in found.timings] == sizes[1:]
    assert len(found.timings) <= TIMINGS_MAX
    assert found.output == "f64"
    sizes.clear()
    run(total, "f64[4]", batch_max=5)
    assert max(sizes) == 4


def test_a_slow_model_gets_no_large_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper_container.worker.warmup.BATCH_S", 0.0)
    sizes: list[int] = []
    run(lambda rows: sizes.append(len(rows)) or np.zeros(len(rows)), "f64[4]")
    assert set(sizes) == {1}
    monkeypatch.setattr("clipper_container.worker.warmup.TIME_S", 0.0)
    sizes.clear()
    assert (
        len(run(lambda rows: sizes.append(len(rows)) or np.zeros(len(rows)), "f64[4]").timings) == 1
    )


@pytest.mark.parametrize(
    ("input", "kind"),
    [
        ("f32[2,3]", np.ndarray),
        ("i64", np.ndarray),
        ("bool[4]", np.ndarray),
        ("f16[8]", np.ndarray),
        ("f64[*]", list),
        ("str", list),
        ("bytes", list),
    ],
)
def test_made_up_rows_are_as_predict_batch_has_them(input: str, kind: type) -> None:
    seen: list[Any] = []
    found = run(lambda rows: seen.append(rows) or [1] * len(rows), input)
    assert found.timings
    assert all(isinstance(rows, kind) for rows in seen)
    assert {len(rows) for rows in seen} >= {1, 2, 256}
    if kind is np.ndarray:
        assert not seen[0].flags.writeable
        assert seen[0].dtype.kind == {"f": "f", "i": "i", "b": "b"}[input[0]]
    if input == "bytes":
        assert isinstance(seen[0][0], memoryview)


@pytest.mark.parametrize(
    ("input", "rows", "given"),
    [
        ("f64[2]", [[1, 2], [3, 4], [5, 6]], [[1, 2], [3, 4]]),
        ("str", ["a", "b", "c"], ["a", "b"]),
        ("f64[*]", [[1], [2, 3]], None),
        ("any", [{"a": 1}, {"b": 2}], [{"a": 1}, {"b": 2}]),
    ],
)
def test_rows_given_are_repeated_to_fill_a_batch(input: str, rows: Any, given: Any) -> None:
    seen: dict[int, Any] = {}
    run(
        lambda rows: seen.setdefault(len(rows), rows) is not None and [1] * len(rows),
        input,
        json.dumps(rows),
    )
    assert 256 in seen
    if given is not None:
        assert np.asarray(seen[2]).tolist() == given


def test_bytes_given_are_latin_1_text() -> None:
    seen: list[Any] = []
    run(
        lambda rows: seen.append(bytes(rows[0])) or [1] * len(rows),
        "bytes",
        json.dumps([b"\xff\x00".decode("latin-1")]),
    )
    assert seen[0] == b"\xff\x00"


def test_nothing_runs_when_it_is_off_or_nothing_is_known_of_the_input() -> None:
    def fail(rows: Any) -> Any:
        raise AssertionError("it must not be called")

    assert run(fail, "f64[4]", OFF) == WarmUp()
    assert run(fail, "any") == WarmUp()
    assert run(fail, "f64[4294967295,4294967295]") == WarmUp(), "a row too large to be made up"


def test_made_up_rows_are_not_given_to_a_model_with_tables() -> None:
    class Learner(Model):
        def __init__(self) -> None:
            self.tables = {"factors": {"dim": 8}}

        def predict_batch(self, inputs: Any) -> Any:
            raise AssertionError("it must not be called")

    assert warm_up(Evaluator(Learner(), "m"), "f64[4]", "", 0) == WarmUp()


@pytest.mark.parametrize(
    ("function", "output"),
    [
        (lambda rows: 1 / 0, ""),
        (lambda rows: [1], "[[1.0],[2.0]]"),
        (lambda rows: rows.sum(axis=1), '["text"]'),
        (lambda rows: rows.sum(axis=1), "[]"),
        (lambda rows: rows.sum(axis=1), "{"),
    ],
)
def test_a_warm_up_that_fails_is_reported(
    function: Any, output: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run(function, "f64[1]", output)
    assert found.output == ""
    text = capsys.readouterr().err
    assert text == f"model 'm': {found.error}\n"


@pytest.mark.parametrize(
    ("function", "error"),
    [
        (lambda rows: [1.0], "got a batch of 2 and returned 1 value"),
        (lambda rows: eval("absent"), "NameError: name 'absent' is not defined"),
        (lambda rows: __import__("absent_module"), "No module named 'absent_module'"),
    ],
)
@pytest.mark.parametrize("row_by_row", [False, True])
def test_a_model_that_fails_on_every_batch_is_broken(
    function: Any, error: str, row_by_row: bool
) -> None:
    if row_by_row and "batch" in error:
        return
    found = run(function, "f64[1]", row_by_row=row_by_row)
    assert found.broken
    assert error in found.error


@pytest.mark.parametrize("row_by_row", [False, True])
@pytest.mark.parametrize("retry_singly", [False, True])
def test_a_model_of_several_outputs_without_names_is_broken(
    row_by_row: bool, retry_singly: bool
) -> None:
    def several(rows: Any) -> Any:
        raise SeveralOutputs("forward() returned 2 outputs (a, b)")

    found = run(several, "f64[1]", row_by_row=row_by_row, retry_singly=retry_singly)
    assert found.broken
    assert found.error == "it fails on every batch: forward() returned 2 outputs (a, b)"


def test_what_one_row_does_is_not_said_of_every_batch() -> None:
    def late(rows: Any) -> Any:
        if len(rows) > 1:
            value = 1
        return [value] * len(rows)

    for function in (late, lambda rows: {}[0], lambda rows: 1 / 0):
        found = run(function, "f64[1]")
        assert (found.broken, bool(found.error)) == (False, True)


def test_what_a_failed_warm_up_says_can_be_sent() -> None:
    def fails(rows: Any) -> Any:
        raise ValueError("\ud800 and more" + "x" * 5000)

    error = run(fails, "f64[1]").error
    assert len(error) <= ERROR_CHARS_MAX
    assert error.encode().decode() == error


def test_rows_of_a_free_length_are_said_to_be_a_list() -> None:
    found = run(lambda rows: rows.sum(axis=1), "f64[*]")
    assert "come as a list" in found.error
    assert "come as a list" not in run(lambda rows: rows.nothing, "f64[2]").error


def test_a_model_that_takes_sessions_gets_session_0_in_the_warm_up() -> None:
    class Sessions(Model):
        sessions = True

        def predict_batch(self, inputs: Any, sessions: Any) -> Any:
            assert sessions.tolist() == [0] * len(inputs)
            return Scored(inputs, np.ones(len(inputs)))

    assert warm_up(Evaluator(Sessions(), "m"), "f32[3]", "", 0).output == "f32[3]"


def test_one_row_at_a_time() -> None:
    assert run(lambda row: str(row.sum()), "f64[2]", row_by_row=True).output == "str"


def test_a_call_that_does_not_return_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clipper_container.worker.warmup.LIMIT_S", 0.05)
    found = run(lambda rows: threading.Event().wait(60), "f64[1]")
    assert found == WarmUp(error="the warm-up took longer than 0.05 s and was interrupted")
    assert "interrupted" in capsys.readouterr().err
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
