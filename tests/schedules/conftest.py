"""The explorer, compiled once, and the table of what was explored at the end of the run."""

from typing import Any

import pytest

from tests.schedules.explorer import Explorer

EXPLORED: list[str] = []


@pytest.fixture(scope="session")
def explorer() -> Explorer:
    made = Explorer()
    assert made.program.exists()
    return made


@pytest.fixture(scope="session")
def explored() -> list[str]:
    """Return the lines for the table."""
    return EXPLORED


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if EXPLORED:
        terminalreporter.section("schedules")
        for line in EXPLORED:
            terminalreporter.write_line(line)
