"""The texts of numbers, times and values for people, at each side of every bound."""

import math
from types import SimpleNamespace as Object
from typing import Any

import pytest

from clipper.cli.mesh.models import _bytes, _fullness, _size
from clipper.cli.monitoring.top_screen import _ms, _number, _span
from clipper.cli.output import table
from clipper.cli.server_command import short
from clipper.cli.servers import doctor
from clipper.clock import age_of
from clipper.config import _number as setting
from clipper.config import _shown, _type_name
from clipper.load.chart import short as tick
from clipper.manage.change_words import value_of as entry
from clipper.manage.rollouts.decisions import _share, seconds_of
from clipper.metrics.text import _number as sample
from clipper.types import Batching, UserValue
from tests.unit.test_pure_functions import check, of_text


def beside(*bounds: float) -> list[float]:
    """Return each bound, and values just below and above it."""
    return [near for bound in bounds for near in (bound - bound / 1000, bound, bound + bound / 500)]


def shown_setting(value: object) -> str:
    return _shown(value, "server.address")


def test_numbers_and_times() -> None:
    links = [{"name": "m", "version": None}, {"name": "n", "version": 2}]
    texts = ["x" * 58, "x" * 59, links, [{"name": "m"}], [], {"a": 1}]
    cases: list[tuple[Any, list[Any]]] = [
        (_ms, [None, 0.0, *beside(10, 1000)]),
        (_number, [0, 0.04, *beside(10)]),
        (_span, [0.0, *beside(60, 120, 3600, 7200, 86_400)]),
        (age_of, [-1.0, 0.0, *beside(60, 120, 3600, 7200, 86_400, 172_800)]),
        (_bytes, [0, 1, 1023, 1024, 1025, 2**20 - 1, 2**20, 2**30 - 1, 2**30, 2**41]),
        (short, texts),
        (entry, ["y" * 70, *texts]),
        (table, [([], "none"), ([("a", "b")], "none"), ([("a", "b"), (1, "long"), ("x", 2)], "")]),
        (setting, [0.0, 1.0, 1.5, -2.0]),
        (shown_setting, ["x" * 58, "x" * 59, 7, ("a",)]),
        (_type_name, [str, int, float, bool, Batching, UserValue, dict[str, list[int]], list[str]]),
        (sample, [1, 1.5, math.inf, -math.inf, math.nan]),
        (tick, [0, *beside(0.001, 1e6, -1e6), 0.0009]),
        (_share, ["5%", " 100% ", "0%", "101%", 0.05, 1, 0, "x", 1.01, None]),
        (seconds_of, [60, "60s", " 5m ", "1h", "30d", "721h", "720h", "-1s", "x", 0]),
    ]
    check("shown.txt", of_text(*cases))


@pytest.mark.parametrize(
    ("copies", "info", "size"), [([3, 9, 4], 5, 9), ([], 5, 5), ([], None, 0), ([2], None, 2)]
)
def test_size_of_a_model(copies: list[int], info: int | None, size: int) -> None:
    status: Any = Object(
        copies=[Object(size_bytes=n) for n in copies],
        info=None if info is None else Object(size_bytes=info),
    )
    assert _size(status) == size


def test_how_full_an_instance_is() -> None:
    for used, capacity, bars, share in (
        (0, 0, 0, 0),
        (0, 9, 0, 0),
        (1, 2, 0.5, 50),
        (9, 3, 1, 100),
    ):
        one: Any = Object(used_bytes=used, capacity_bytes=capacity)
        text = _fullness(one)
        width = text.count("█") + text.count("·")
        assert (text.count("█"), text.split()[-2:]) == (round(bars * width), [str(share), "%"])
        assert width >= 10


@pytest.mark.parametrize(("cores", "verdict"), [(1, "warn"), (2, "ok"), (64, "ok")])
def test_one_core_is_few(cores: int, verdict: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {*range(cores)})
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"bmi2", "avx2", "sse2"})
    (found,) = doctor.machine()
    beginning = f"{cores} core{'s' * (cores > 1)}, CPU AVX2"
    assert (found.verdict, found.text.startswith(beginning)) == (verdict, True)
    assert ("take turns" in found.text) == (cores == 1)
