"""The counter of instructions: what it adds up and what it lets pass."""

import json

import pytest

from bench import instructions

PART = """version: 1
events: Ir
ob=/lib/python3.11
fl=???
fn=loop
10 100
cob=/src/clipper_core/ring.cpython-311.so
cfn=push
calls=3 20
10 77
11 5
ob=/src/clipper_core/ring.cpython-311.so
fn=push
20 60
cob=/lib/libc.so.6
cfn=memcpy
calls=3 0
21 10
21 7
ob=/lib/libc.so.6
fn=memcpy
0 10
summary: 182
totals: 182
"""


def test_a_part_of_callgrinds_output_adds_up() -> None:
    assert instructions.read(PART.splitlines()) == {"core": 67, "all": 182}


@pytest.mark.parametrize(
    ("compiler", "surroundings", "core", "every", "worse"),
    [
        ("g++ 12", "here", 102.9, 1029.0, False),
        ("g++ 12", "here", 103.1, 1000.0, True),
        ("g++ 12", "here", 100.0, 1031.0, True),
        ("g++ 12", "there", 100.0, 2000.0, False),
        ("g++ 12", "there", 104.0, 1000.0, True),
        ("g++ 13", "here", 200.0, 2000.0, False),
        ("g++ 12", "here", 50.0, 500.0, False),
    ],
)
def test_counts_are_compared_where_they_can_be(
    compiler: str, surroundings: str, core: float, every: float, worse: bool
) -> None:
    record = {
        "compiler": "g++ 12",
        "surroundings": "here",
        "calls": {"x": {"core": 100.0, "all": 1000.0}},
    }
    found = {"x": {"core": core, "all": every}, "a new call": {"core": 1.0, "all": 1.0}}
    verdicts = list(
        instructions.judge(found, {"compiler": compiler, "surroundings": surroundings}, record)
    )
    assert [worse for _, worse in verdicts] == [worse, False]
    assert ("MORE" in verdicts[0][0]) == worse


def test_every_call_that_is_counted_runs_and_is_on_record() -> None:
    compared = [name for name in instructions.CALLS if name not in instructions.VARYING]
    for name in compared:
        n, make = instructions.CALLS[name]
        make()(n // 8)
    record = json.loads(instructions.RECORD.read_text())
    assert list(record["calls"]) == compared
    assert all(counts["all"] >= counts["core"] > 0 for counts in record["calls"].values())
