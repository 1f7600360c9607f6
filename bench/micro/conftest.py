"""The rows of bench_goals.py, told as a table when the run is over."""

import pytest

from bench.harness import Row, table, verdict

_TOLD: list[Row] = []


@pytest.fixture
def told() -> list[Row]:
    """What is put here is shown at the end."""
    return _TOLD


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _TOLD:
        terminalreporter.section(
            "goals of the engine, quick: `python -m bench engine` measures them in full"
        )
        terminalreporter.write_line(table(_TOLD))
        terminalreporter.write_line(verdict(_TOLD))
