"""The rows of bench_goals.py, printed as a table when the run is over."""

import pytest

from bench.harness import Row, table, verdict

_ROWS: list[Row] = []


@pytest.fixture
def measured_rows() -> list[Row]:
    """Return the list of rows that are printed at the end of the run."""
    return _ROWS


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _ROWS:
        terminalreporter.section(
            "goals of the engine, quick: `python -m bench engine` measures them in full"
        )
        terminalreporter.write_line(table(_ROWS))
        terminalreporter.write_line(verdict(_ROWS))
