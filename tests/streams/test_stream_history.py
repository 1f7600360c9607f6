"""Histories of records and answers under faults, and what their check finds."""

import shutil

import pytest

from bench.system.faults.stream_history import Asked, Heard, StreamHistory
from bench.system.faults.stream_kills import FAULTS, life

RIGHT = Heard("1-0", 1, "5-0", "2", 3.0)


def errors(*entries: Heard, kept: tuple[str, ...] = ("1-0",), entry: str = "5-0") -> list[str]:
    found = StreamHistory({1: Asked(2.0, entry)}, [*entries])
    return found.errors(lambda number: str(2 * number), [*kept])


def test_impossible_histories_are_detected() -> None:
    assert not errors(RIGHT)
    assert not errors(kept=(), entry=""), "it was not acknowledged"
    again = RIGHT._replace(at="2-0")
    assert "has 0 answers" in errors(kept=())[0]
    assert "has 2 answers" in errors(RIGHT, again, kept=("1-0", "2-0"))[0]
    assert "has 2 answers" in errors(RIGHT, again, kept=("1-0", "2-0"), entry="")[0]
    assert "not 2" in errors(RIGHT._replace(output="3"))[0]
    assert "is refused" in errors(RIGHT._replace(is_refused=True), kept=())[0]
    assert "before it was added" in errors(RIGHT._replace(ended_s=1.0))[0]
    assert "its answer says 6-0" in errors(RIGHT._replace(entry="6-0"))[0]
    assert "nobody has added it" in errors(RIGHT, RIGHT._replace(number=7))[0]
    assert "1 answers were read, and 0 are kept" in errors(RIGHT, kept=())[0]
    assert "0 answers were read, and 1 are kept" in errors(entry="")[0]


@pytest.fixture
def redis_is_there() -> None:
    if shutil.which("redis-server") is None:
        pytest.skip("no redis-server: python tools/fetch.py redis")


@pytest.mark.usefixtures("redis_is_there")
def test_records_are_answered_exactly_once_through_kills_and_freezes() -> None:
    """A short `python -m bench stream_kills`."""
    history, wrong = life(2, 0)
    assert sum(bool(one.entry) for one in history.asked.values()) > 50
    assert not wrong, wrong[:5]


@pytest.mark.usefixtures("redis_is_there")
def test_servers_with_a_planted_bug_that_answer_twice_are_found() -> None:
    """A server that is frozen answers twice if it holds records then, so it may take several."""
    freeze = FAULTS.index("freeze")
    for seed in range(freeze, 10 * len(FAULTS), len(FAULTS)):
        _, wrong = life(1, seed, "twice")
        assert all("answers" in text for text in wrong)
        if wrong:
            return
    pytest.fail("ten lives, and none shows it")
