"""Every row of the engine's goals, a group a round: what `python -m bench engine --quick` prints,
beside the structures' prices.

    pytest bench/micro --benchmark-only

The rows are in extra_info, and in one table at the end of the run.
"""

from dataclasses import asdict
from typing import Any

import pytest

from bench.harness import FAILED, Row, finite
from bench.system.engine import GROUPS, measure
from bench.system.engine.effort import QUICK


@pytest.mark.parametrize("group", GROUPS)
def test_goals(benchmark: Any, measured_rows: list[Row], group: str) -> None:
    rows = benchmark.pedantic(measure, (group, QUICK), rounds=1)
    measured_rows += rows
    benchmark.extra_info["rows"] = [finite(asdict(row)) for row in rows]
    assert not [row for row in rows if row.missing.startswith(FAILED)]
