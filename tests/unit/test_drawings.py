"""The calls that draw charts with matplotlib; and the report and page of a profile."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from clipper.cli.measurement import profiling
from clipper.errors import InvalidInput
from clipper.load.chart_png import save_png
from clipper.load.profile import Point, fit_latency
from clipper_demo import picture
from clipper_demo.online_learning import LearningEvent, LearningSample, Story
from tests.expected import check_expected

figures = pytest.importorskip("matplotlib.figure", reason="make venv brings matplotlib")


def calls(of: MagicMock) -> list[str]:
    """Return the calls as texts, numbers with six digits: the last ones depend on numpy's version
    and on the processor."""
    return [
        re.sub(r"\d+\.\d+(e[+-]?\d+)?", lambda digits: f"{float(digits[0]):.6g}", str(call))
        for call in (str(call).removeprefix("call.") for call in of.mock_calls)
    ]


def test_the_picture_of_the_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    made = MagicMock(name="Figure")
    monkeypatch.setattr(figures, "Figure", made)
    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", MagicMock())
    shown = []
    samples = [
        LearningSample(
            float(i),
            {"exp3": {f"m{k}": (i + k) / 20 for k in range(7 - i)}, "own": {"m1": 0.5}},
            {"exp3": 2 * i, "own": 0},
            {"exp3": 10 * i, "own": 0},
        )
        for i in range(4)
    ]
    events = [LearningEvent(1.5, "spoiled", "m1", "v"), LearningEvent(2.5, "mended", "m1", "^")]
    models = tuple(f"m{k}" for k in range(7))
    for story in (Story(("exp3", "own"), models, samples, events), Story(("stacking",), ("m0",))):
        panels = [MagicMock(name=f"panel{i}") for i in range(len(story.applications) + 1)]
        made.return_value.subplots.return_value = panels
        picture.draw(story, "a.png")
        shown += [*calls(made), *(f"{i}: {one}" for i, p in enumerate(panels) for one in calls(p))]
        shown += [
            f"{story.recent_error(app)} {story.whole_error(app)}" for app in story.applications
        ]
        made.reset_mock()
    text = "\n".join(line for line in shown if "get_xaxis_transform()" not in line[:30])
    check_expected("picture.txt", without_ids(text) + "\n")


def without_ids(text: str) -> str:
    return "\n".join(line.partition("<MagicMock")[0] for line in text.splitlines())


POINTS = [Point(1, 1.0, 1.5, 60), Point(2, 1.5, 2.0, 60), Point(4, 2.5, 9.0, 50)]


def test_the_chart_of_a_profile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made: Any = MagicMock(name="Figure")
    monkeypatch.setattr(figures, "Figure", made)
    monkeypatch.setattr("matplotlib.backends.backend_agg.FigureCanvasAgg", MagicMock())
    line, shown = fit_latency(POINTS), []
    for slo_ms in (None, 20.0):
        save_png(profiling._latency_chart("svm", POINTS, line, slo_ms), "p.png")
        shown += calls(made)
        made.reset_mock()
    made.return_value.savefig.side_effect = OSError(28, "No space left")
    with pytest.raises(InvalidInput, match=r"cannot write p\.png: No space left\."):
        save_png(profiling._latency_chart("svm", POINTS, line, None), "p.png")
    shown += [profiling._report(POINTS, line, "how", advice) for advice in ("", "advice")]
    monkeypatch.setattr("clipper.load.machine.machine", lambda: {"cpu": "c"})
    monkeypatch.setattr("clipper.load.page.time.strftime", lambda _: "NOW")
    monkeypatch.setattr(profiling, "command_line", lambda: "clipper profile svm")
    for limit in (None, 20.0):
        latency = profiling._latency_chart("svm", POINTS, line, limit)
        page = profiling._page("svm", POINTS, latency, ["advice"])
        shown.append(page.partition("</style>")[2].replace("><", ">\n<"))
    known = tmp_path / "m.onnx"
    known.touch()
    targets = "a:b", "a/b:c", "m.onnx", str(known), "m.skops", str(known.with_suffix(".pkl"))
    shown.append(str([profiling._can_start(target) for target in targets]))
    check_expected("profile-charts.txt", without_ids("\n".join(shown)) + "\n")
