"""Builds of a version: every error is reported, and nobody waits for ever."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.component.threads import SystemThreads
from clipper.errors import NotStarted, ShuttingDown
from clipper.manage.building import BUILDING, Building
from clipper.types import InputType, Model

LIMIT_S = 20.0
MODEL = Model("svm", 1, InputType.parse("f32[4]"))


class Told(list[tuple[str, str]]):
    """The list of what `done` was called with."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.fails, self.came = fails, threading.Event()

    def __call__(self, model: Model, error: str) -> None:
        self.append((str(model.id), error))
        self.came.set()
        if self.fails and not error:
            raise OSError("no process")


def building(told: Told) -> Building:
    environments: Any = SimpleNamespace(close=lambda: None)
    return Building(lambda: [], environments, told)


@pytest.mark.parametrize("error", [KeyError("field"), MemoryError("full"), RuntimeError("thread")])
def test_an_unexpected_error_is_told_and_the_version_can_be_built_again(error: Exception) -> None:
    told = Told()
    one = building(told)

    def work() -> str:
        raise error

    one.run(MODEL, BUILDING, work)
    assert one.wait(MODEL.id, LIMIT_S) is not False
    assert told.came.wait(LIMIT_S)
    assert type(error).__name__ in told[0][1]
    told.came.clear()
    one.run(MODEL, BUILDING, lambda: "")
    assert told.came.wait(LIMIT_S)
    assert told[1] == ("svm:1", "")
    one.close()


def test_an_error_of_the_start_after_the_build_is_told_too() -> None:
    told = Told(fails=True)
    one = building(told)
    one.run(MODEL, BUILDING, lambda: "")
    one.close()
    assert [error for _, error in told] == ["", "model 'svm:1' cannot start: OSError: no process"]


def test_a_thread_that_cannot_start_leaves_nothing_and_close_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told = Told()
    one = building(told)

    def refuse(self: object, target: object, name: str) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(SystemThreads, "start", refuse)
        with pytest.raises(NotStarted, match="clipper-environment"):
            one.run(MODEL, BUILDING, lambda: "")
    assert one.wait(MODEL.id, 0)
    assert one.stage_of(MODEL.id).stage == ""
    one.run(MODEL, BUILDING, lambda: "")
    assert told.came.wait(LIMIT_S)
    one.close()
    with pytest.raises(ShuttingDown):
        one.run(MODEL, BUILDING, lambda: "")


def test_a_wait_has_a_limit() -> None:
    one, goes_on = building(Told()), threading.Event()

    def work() -> str:
        goes_on.wait(LIMIT_S)
        return ""

    one.run(MODEL, BUILDING, work)
    assert not one.wait(MODEL.id, 0.01)
    goes_on.set()
    assert one.wait(MODEL.id, LIMIT_S)
    one.close()
