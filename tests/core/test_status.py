"""Conversion of a status to an exception, and the numbers that other languages see."""

import subprocess
import sys

import pytest

from clipper_core.runtime.status import Status, StatusError, error_for


def test_numbers_are_dense_and_fixed() -> None:
    assert [status.value for status in Status] == list(range(18))
    assert (
        Status.PENDING,
        Status.OK,
        Status.FULL,
        Status.DEADLINE,
        Status.CANCELLED,
        Status.UNNEEDED,
    ) == (0, 1, 2, 3, 9, 17)


@pytest.mark.parametrize("status", list(Status))
def test_every_status_has_an_error_that_keeps_the_detail(status: Status) -> None:
    error = error_for(status, "the detail")
    assert isinstance(error, Exception)
    assert "the detail" in str(error)


def test_an_error_without_a_bound_class_has_its_status() -> None:
    error = StatusError("why", Status.BAD_OUTPUT)
    assert error.status is Status.BAD_OUTPUT
    assert str(error) == "why"


BIND = """
from clipper_core.runtime.status import Status, StatusError, bind_errors, error_for
assert type(error_for(2, "x")) is StatusError
class Busy(Exception): pass
bind_errors({Status.FULL: Busy})
assert type(error_for(2, "x")) is Busy and str(error_for(Status.FULL, "x")) == "x"
assert type(error_for(3, "x")) is StatusError
from clipper_core.engine.engine import Engine
from clipper_core.engine.model import Model
m = Model(Engine(manual_clock=True), "m:1", 1, "f64", lane_rows=2)
futures = [m.predict(float(i)) for i in range(3)]
assert [f.status() for f in futures] == [0, 0, 2]
try: futures[2].result()
except Busy: print("bound")
"""


def test_bound_classes_are_what_results_raise() -> None:
    """Binding is for good, so the test runs in a process of its own."""
    run = subprocess.run([sys.executable, "-c", BIND], capture_output=True, text=True, check=False)
    assert (run.stdout, run.stderr) == ("bound\n", "")


KEYWORDS = """
from clipper_core.runtime.status import bind_keywords, refuse_keyword
from clipper_core.runtime.timer_wheel import TimerWheel
def text(**given):
    try:
        TimerWheel(**given)
    except TypeError as error:
        return f"{type(error).__name__}: {error}"
print(text(capacty=3))
class Meant(TypeError): pass
def refuse(function, unknown, names):
    raise Meant(f"{function} {unknown} {names}")
bind_keywords(refuse)
print(text(capacty=3))
"""


def test_a_compiled_function_refuses_a_keyword_as_was_bound() -> None:
    done = subprocess.run(
        [sys.executable, "-c", KEYWORDS], capture_output=True, text=True, check=True
    )
    plain, bound = done.stdout.splitlines()
    assert "__cinit__() has no keyword 'capacty'; it has " in plain
    assert plain.startswith("TypeError")
    assert bound.startswith("Meant: __cinit__ ('capacty',) [")
