"""examples/online_learning, short: a model gets better from feedback alone, with a shard killed in
the middle."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parents[2] / "examples" / "online_learning"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.syspath_prepend(str(HERE))
    yield importlib.import_module("serve")
    for name in ("serve", "machine", "worlds"):
        sys.modules.pop(name, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "queries", "kills", "gain"), [("clicks", 4000, 1, 0.08), ("digits", 800, 0, 0.3)]
)
def test_a_model_learns_while_it_serves(
    example: Any, world: str, queries: int, kills: int, gain: float
) -> None:
    lines: list[str] = []
    right, defaults = example.run(world, queries, kills=kills, slo_ms=60_000.0, say=lines.append)
    tenth = queries // 10
    assert right[-tenth:].mean() > right[:tenth].mean() + gain, lines
    assert defaults == 0, lines
    assert sum("killed shard" in line for line in lines) == kills
