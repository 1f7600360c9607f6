"""Which query a challenger has, which files a decoy keeps, and what a person at a terminal sees of
long work."""

import io
import threading
from itertools import count
from pathlib import Path
from types import SimpleNamespace as Object
from typing import Any

import pytest

from clipper.cli.catalog.models import _print_progress
from clipper.errors import ShuttingDown
from clipper.selection.policy import Query
from clipper.serving.query.progress import progress
from clipper.serving.rollout.decoys import _SEGMENTS, Segments, segments_of
from clipper.serving.rollout.roles import Role, RoleAssignment
from clipper.types import VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")


def test_challengers_have_their_shares_of_the_queries() -> None:
    roles = {B: Role("challenger", 0.25), C: Role("challenger", 0.5)}
    assignment = RoleAssignment(roles, (A, B, C))
    found = []
    for uniform in (0.0, 0.249, 0.25, 0.749, 0.75, 0.999):
        plan = assignment._challenged(Query("u", uniform, (1.0,)))
        found.append(plan and (plan.models, plan.probabilities, plan.observers, plan.features))
    of_b, of_c = ((B,), (0.25,), (), (1.0,)), ((C,), (0.5,), (), (1.0,))
    assert found == [of_b, of_b, of_c, of_c, None, None]


def test_a_decoy_keeps_its_newest_files(tmp_path: Path) -> None:
    ring: Any = None
    folder = tmp_path / "new" / "decoy"
    names = []
    for some in (Segments(folder, 1 << 20, ring), Segments(folder, 1 << 20, ring)):
        for _ in range(3):
            some._file = some._next_segment()
            names.append([int(path.stem) for path in segments_of(folder)])
        some.close()
        some.close()
    assert names[:3] == [[1], [1, 2], [1, 2, 3]]
    assert names[3:] == [[1, 2, 3, 4], [2, 3, 4, 5], [3, 4, 5, 6]]
    assert len(names[-1]) == _SEGMENTS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("waits", "stream", "shown"),
    [
        ([True, True], Terminal(), 0),
        ([False, True], io.StringIO(), 0),
        ([False, True], Terminal(), 0),
        ([False, False, False, True], Terminal(), 2),
    ],
)
def test_progress_of_long_work(
    monkeypatch: pytest.MonkeyPatch, waits: list[bool], stream: io.StringIO, shown: int
) -> None:
    left, done = iter(waits), count(5)
    future: Any = Object(wait=lambda *seconds: next(left), progress=lambda: (next(done), 9))
    monkeypatch.setattr("time.monotonic", count(1).__next__)
    assert progress(future, "things", stream) is future
    monkeypatch.undo()
    written = stream.getvalue()
    assert (written.count("\r["), written.count("things")) == (shown, shown)
    assert written.endswith("\r\x1b[K") == bool(shown)
    assert next(left, None) is None


def test_stages_of_a_deployment_are_printed_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("clipper.cli.catalog.models._PROGRESS_S", 0.0)
    over, answers = threading.Event(), iter([[], "a", "a", None, "b" * 200, "end"])

    def stages(name: str) -> list[dict[str, str]]:
        answer = next(answers)
        if answer is None:
            raise ShuttingDown("gone.")
        if answer == "end":
            over.set()
        return [{"stage": "x", "detail": ""}, {"stage": "s", "detail": answer}] if answer else []

    _print_progress(Object(stages=stages), "m", over)
    lines = ["s a", f"s {'b' * 100}", "s end"]
    assert capsys.readouterr().err.splitlines() == [f"deploying m: {line}" for line in lines]
