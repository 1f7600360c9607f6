"""Drawings of the demo: columns of block characters, events by time, and the picture."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from clipper.load.chart_png import NeedsMatplotlib, check_matplotlib
from clipper_demo import plot
from clipper_demo.online_learning import LearningEvent, LearningSample, Story

MODELS = ("forest", "svm")


def story(*samples: tuple[float, float], events: tuple[LearningEvent, ...] = ()) -> Story:
    """Return a story of the demo. samples: (time, share of the forest) each; one answer in ten is
    wrong."""
    recorded = Story(("exp3", "stacking"), MODELS, events=list(events))
    for number, (at_s, share) in enumerate(samples):
        shares = {
            "exp3": {"forest": share, "svm": 1 - share},
            "stacking": {"forest": 0.5, "svm": 0.5},
        }
        counts = {"exp3": 10 * number, "stacking": 20 * number}
        errors = {"exp3": number, "stacking": 0}
        recorded.samples.append(LearningSample(at_s, shares, counts, errors))
    return recorded


def shown(recorded: Story, now_s: float, width: int = 80) -> list[str]:
    console = Console(width=width, force_terminal=False, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(plot.shares_plot(recorded, now_s))
    return console.export_text().splitlines()


def test_columns() -> None:
    assert plot.column_heights([0.0, 0.01, 0.5, 1.0, 2.0], 1) == [[" "], ["▁"], ["▄"], ["█"], ["█"]]
    assert plot.column_heights([0.25, 0.5, 0.75, 1.0], 2) == [
        [" ", "▄"],
        [" ", "█"],
        ["▄", "█"],
        ["█", "█"],
    ]


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_a_column_is_never_lower_than_that_of_a_smaller_value(rows: int) -> None:
    heights = [
        sum(plot.BLOCKS.index(block) for block in column)
        for column in plot.column_heights([i / 200 for i in range(201)], rows)
    ]
    assert heights == sorted(heights)
    assert (heights[0], heights[-1]) == (0, 8 * rows)


def test_history_is_the_last_sample_of_each_moment() -> None:
    recorded = story((0.0, 0.1), (10.0, 0.9))
    assert plot.history(recorded, "exp3", "forest", 26.0, 26) == [0.1] * 9 + [0.9] * 17
    assert plot.history(recorded, "exp3", "forest", 10.0, 26) == [0.0] * 15 + [0.1] * 10 + [0.9]
    assert plot.history(Story(("exp3",), MODELS), "exp3", "svm", 5.0, 4) == [0.0] * 4


def test_marks_stand_where_it_happened_and_leave_with_the_time() -> None:
    recorded = story(
        (0.0, 0.5),
        events=(
            LearningEvent(5.0, "svm gives wrong labels", "svm", "d"),
            LearningEvent(25.5, "killed", "svm", "k"),
        ),
    )
    assert plot.marks(recorded, 26.0, 26) == " " * 4 + "d" + " " * 20 + "k"
    assert plot.marks(recorded, 40.0, 26) == " " * 11 + "k" + " " * 14
    assert plot.marks(recorded, 99.0, 26).strip() == ""


def test_the_plot_fits_a_small_terminal_and_shows_all() -> None:
    recorded = story(
        *((float(i), i / 30) for i in range(31)),
        events=(LearningEvent(20.0, "svm gives wrong labels", "svm", "d"),),
    )
    lines = shown(recorded, 30.0)
    assert max(map(len, lines)) <= 80
    assert len(lines) == 1 + 2 * len(MODELS) + 4
    assert "exp3 picks a model to 100%" in " ".join(lines[0].split())
    assert "stacking weighs all to 50%" in " ".join(lines[0].split())
    assert lines[2].startswith(" forest")
    assert "100%" in lines[2]
    assert "  50%" in lines[2]
    assert lines[-3].count("d") == 2
    assert "wrong: 10.0% lately, 10.0% in all" in lines[-2]
    assert "d wrong labels" in lines[-1]


def test_nothing_yet_is_drawn_too() -> None:
    assert len(shown(Story(("exp3", "stacking"), MODELS), 0.0)) >= 1 + 2 * len(MODELS) + 3
    assert plot.line(Story(("exp3",), MODELS)) == "exp3: ; 0.0% wrong"


def test_a_line_for_a_log() -> None:
    assert (
        plot.line(story((0.0, 0.2), (1.0, 0.8)))
        == "exp3: forest 80%, svm 20%; 10.0% wrong  |  stacking: forest 50%, svm 50%; 0.0% wrong"
    )


def test_errors_of_late_and_in_all() -> None:
    recorded = story(*((float(i), 0.5) for i in range(20)))
    last = recorded.samples[-1]
    recorded.samples.append(
        LearningSample(
            20.0, last.shares, {"exp3": 290, "stacking": 400}, {"exp3": 69, "stacking": 0}
        )
    )
    assert recorded.whole_error("exp3") == 69 / 290
    assert recorded.recent_error("exp3") == (69 - 15) / (290 - 150)


def test_the_picture(tmp_path: Path) -> None:
    """The test runs in a process of its own, since matplotlib writes caches and warns."""
    pytest.importorskip("matplotlib")
    code = """
import sys
from clipper_demo import picture
from clipper_demo.online_learning import LearningEvent, LearningSample, Story
shares = {"exp3": {"forest": 0.7, "svm": 0.3}, "stacking": {"forest": 0.5, "svm": 0.5}}
counts = [{"exp3": n, "stacking": n} for n in range(20)]
samples = [LearningSample(float(n), shares, counts[n], counts[n // 5]) for n in range(20)]
story = Story(("exp3", "stacking"), ("forest", "svm"), samples, [LearningEvent(5.0, "svm gives wrong labels", "svm", "d")])
picture.draw(story, sys.argv[1])
assert {panel.get_ylim()[0] for panel in picture.figure_of(story).axes} == {0.0}
picture.draw(Story(("exp3", "stacking"), ("forest", "svm")), sys.argv[1] + ".empty.png")
"""  # noqa: E501
    path = tmp_path / "shares.png"
    subprocess.run(
        [sys.executable, "-c", code, path],
        check=True,
        env={**os.environ, "MPLCONFIGDIR": str(tmp_path)},
    )
    head = path.read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert int.from_bytes(head[16:20], "big") > 900


def test_without_matplotlib_the_reason_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(NeedsMatplotlib, match="matplotlib is not installed") as caught:
        check_matplotlib()
    assert caught.value.hint == 'Run: pip install "clipper-serving[plot]"'
