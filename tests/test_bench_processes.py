"""Processes of benchmarks: answers, and what ends a wait for one."""

import os
import threading

import pytest

from bench.processes import ObjectProcess, call_all


class Served:
    """An object that lives in another process."""

    def __init__(self, number: int) -> None:
        if number < 0:
            raise ValueError(f"no number {number}")
        self._number = number

    def times(self, by: int) -> int:
        return self._number * by

    def fail(self) -> None:
        raise KeyError("missing")

    def end(self) -> None:
        os._exit(3)

    def hang(self) -> None:
        threading.Event().wait()


def test_methods_run_in_other_processes_and_keep_their_order() -> None:
    with ObjectProcess(Served, 2, limit_s=60) as two, ObjectProcess(Served, 3, limit_s=60) as three:
        assert call_all([two, three], "times", 5) == [10, 15]
        two.start("times", 1)
        two.start("times", 2)
        assert (two.result(), two.result()) == (2, 4)


@pytest.mark.parametrize(
    ("number", "method", "limit_s", "error", "text"),
    [
        (1, "fail", 60, RuntimeError, "KeyError: 'missing'"),
        (-1, "times", 60, RuntimeError, "ValueError: no number -1"),
        (1, "end", 60, RuntimeError, "exit status 3"),
        (1, "hang", 0.2, TimeoutError, "no answer within 0.2 s"),
    ],
)
def test_a_process_without_an_answer_is_an_error(
    number: int, method: str, limit_s: float, error: type[Exception], text: str
) -> None:
    with (
        ObjectProcess(Served, number, limit_s=limit_s) as process,
        pytest.raises(error, match=text),
    ):
        process.call(method)


def test_a_process_that_has_ended_is_named_at_the_next_start() -> None:
    with ObjectProcess(Served, 1, limit_s=60) as process:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="exit status 3"):
                process.call("end")
