"""Reports of load tests, profiles and the demo for fixed figures: every number, bar and colour."""

import json
import math
from collections import Counter
from dataclasses import astuple

import pytest
from rich.console import Console
from rich.text import Text

from clipper.load.chart import Axis, Chart, Series, short
from clipper.load.measurement import Measurement, QueryOutcome
from clipper.load.page import HEAD, charts_of, milliseconds, page, remarks, row_of
from clipper.load.profile import Point, advice, bars, fit_latency, seen_by
from clipper_core.runtime.histogram import LatencyHistogram
from clipper_demo import live
from clipper_demo.faults import InjectedFault
from clipper_demo.load import OutcomeCounts, Outcomes
from clipper_demo.report import ApplicationFigures, DemoReport, ModelFigures, Sample, between
from tests.expected import check_expected


def measurement(rate: float, lag_s: float = 0.0) -> Measurement:
    """Return a measurement of fifty queries, some of each outcome, ever slower; the last is not
    answered."""
    found = Measurement(rate, 5.0, 20.0, waited=int(lag_s * 100), cpu_s=0.25)
    for i in range(50):
        due_s = i / rate
        number = found.sent(due_s, due_s + lag_s)
        outcome = QueryOutcome(min(max(i - 44, 0), 5))
        error = f"error {i % 25}" if outcome == QueryOutcome.ERROR else ""
        if outcome != QueryOutcome.UNANSWERED:
            found.done(number, outcome, due_s + lag_s + 0.0005 * (i + 1) ** 1.1, error)
    return found


def test_figures_of_a_load_test() -> None:
    calm, busy, cut = measurement(10), measurement(40, 0.03), measurement(100)
    cut.interrupted = True
    for i in range(25):
        cut.done(0, QueryOutcome.ERROR, 0.1, f"error {i}")
    steps = [calm, busy, cut]
    shown = [json.dumps(step.summary(), indent=1) for step in (*steps, Measurement(1, 2, 3))]
    shown += ["  ".join(row) for row in (HEAD, *map(row_of, steps))]
    shown += [*remarks(steps), "--", *remarks([busy]), "--", *remarks([busy] * 5)]
    shown += [str(step.holds(slo, share)) for step in steps for slo, share in ((20, 0.5), (9, 0.3))]
    for charts in (charts_of([calm]), charts_of(steps), charts_of([Measurement(1, 2, 3)])):
        shown += [line for one in charts for line in (one.title, one.legend(), one.svg())]
    check_expected("load.txt", "\n".join(shown).replace("><", ">\n<") + "\n")


def test_axes() -> None:
    values = (-2.5e6, 0, 1e-4, 0.00123, 7, 1e6, 999_999, 123_456_789)
    shown = [short(value) for value in values]
    shown += [milliseconds(value) for value in (0, 9.999, 99.994, 100, math.nan, math.inf)]
    for log in (False, True):
        for points in ([(1, 1)], [(0, -5), (10, 5)], [(3, 1e-5), (3e5, 1e4), (7, math.inf)]):
            for least in (None, 0.5):
                axes = [Axis("x<y", log, least=least), Axis("y", log)]
                axes.append(Axis("t", log, [(2, "two"), (9, "<9>")], least))
                lines = [Series("<a>", points, "a", dots) for dots in (False, True)]
                for x, y in (axes[:2], axes[::-1][:2]):
                    shown.append(Chart('"t"', x, y, lines, [("<rule>", 4)]).svg())
    many = [Series("many", [(i, i % 7) for i in range(9000)], "b", dots=True)]
    shown.append(str(Chart("many", Axis("x"), Axis("y"), many).svg().count("M")))
    shown.append(Chart("none", Axis("x"), Axis("y"), [Series("", [], "a")]).svg())
    check_expected("charts.txt", "\n".join(shown).replace("><", ">\n<") + "\n")


def test_a_page(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clipper.load.page.time.strftime", lambda _: "NOW")
    chart = Chart("c&d", Axis("x"), Axis("y"), [Series("a", [(1, 1)], "a")])
    text = page("a<b", "do -x", ["be <quick>"], [("h<", "i"), ("1", "<2>")], [chart], {"k": "v&"})
    assert "</style><h1>a&lt;b</h1><pre>$ do -x</pre><p>be &lt;quick&gt;</p><div" in text
    cells = "<tr><td>1</td><td>&lt;2&gt;</td></tr>"
    assert f"<tr><th>h&lt;</th><th>i</th></tr></thead><tbody>{cells}</tbody>" in text
    assert f"<h2>c&amp;d</h2><p>{chart.legend()}</p>{chart.svg()}<p" in text
    assert text.endswith('class="dim">NOW · k v&amp;</p></html>\n')


def test_what_a_profile_advises() -> None:
    lines = [
        [Point(1, 1.0, 1.5, 60), Point(2, 1.5, 2.0, 60), Point(4, 2.5, 9.0, 50)],
        [Point(1, 5.0, 6.0, 5), Point(2, 4.0, 4.5, 5), Point(4, 3.0, 3.5, 5)],  # falls
        [Point(1, 0.1, 0.2, 5), Point(2, 9.0, 9.0, 5), Point(4, 30.0, 31.0, 5)],  # base below 0
        [Point(8, 0.0, 0.0, 1)],
    ]
    shown = []
    for points in lines:
        fit = fit_latency(points)
        shown += [str(fit), repr([f"{value:.6g}" for value in (fit.base_ms, fit.row_ms)])]
        shown += [
            repr(astuple(advice("m", points, slo, rate)))
            for slo in (0.5, 4, 20)
            for rate in (0, 3e3)
        ]
    shown += [line for points in lines[:3] for line in (*bars(points), *bars(points, 9))]
    profile = [[1, 100.0, 3], [4, 800.0, 1]], [[1, 300.0, 1], [2, 50.0, 0]]
    shown += map(repr, seen_by({"replicas": [{"profile": one} for one in profile] + [{}]}))
    check_expected("profile.txt", "\n".join(shown) + "\n")


def counters(n: int) -> dict[str, object]:
    latency, rows = LatencyHistogram(), LatencyHistogram()
    for i in range(100 * (n - 1)):
        latency.record(1000 * (i % 100 + 1))
        rows.record(4)
    return {
        "replicas": [{"state": "ready", "limit": 8}, {"state": "running", "suspect": n > 1}],
        "wanted": 3,
        "hits": 10 * n,
        "joined": 5 * n,
        "ended": {"ok": 30 * n, "late": n},
        "latency_us": latency.snapshot(),
        "batch_rows": rows.snapshot(),
    }


def drawn(what: object, width: int = 100) -> str:
    console = Console(width=width, force_terminal=True, color_system="standard", _environ={})
    with console.capture() as capture:
        console.print(what)
    text = capture.get().replace("\x1b", "^")
    return "".join(f"{line.rstrip()}\n" for line in text.splitlines())


APPLICATION = ApplicationFigures(
    "digits", 20.0, 2.5, 900, 880, 352.0, 1.5, 12.25, 2.0, 0.0, 0.991, 3, 0, {}, {}, 0.9567
)
BAD = ApplicationFigures(
    "d", 7.5, 2.5, 9, 8, 3.4, 9.994, 10.0, 9.996, 99.95, 0.98999, 0, 7,
    {"late": 4, "no model": 2, "third": 1}, {"refused": 2, "gone": 1}, 1.0,
)  # fmt: skip
MODELS = (
    ModelFigures("svm:1", ("ready", "suspect"), 120.4, 1.25, 14.0, 7.94, 16, 0.256, 2),
    ModelFigures("forest:2", ("backoff",), 0.0, 0.0, 0.0, 0.0, 0, 0.0, 1),
    ModelFigures("new:3", ("running", "failed", "starting", "stopped"), 9.5, 10, 9.999, 1, 1, 1, 4),
)


def test_the_display_of_the_demo() -> None:
    faults = [
        InjectedFault("killed", "svm:1/0", 77, 3.0),
        InjectedFault("frozen", "svm:1/0", 78, 3.0),
        InjectedFault("killed", "svm:1/0", 77, 3.0, gone_s=0.0125),
        InjectedFault("killed", "svm:1/0", 77, 3.0, 0.01, 0.0, 50, 12, 5),
    ]
    events = [live.happened(fault, 59.9 + 30 * i) for i, fault in enumerate(faults)]
    events += [live.event_line(3600, "what", " text", "red"), live.event_line(0, "w", "t", "dim")]
    plot = Text("PLOT")
    shown = []
    for figures, models in ((APPLICATION, MODELS), (BAD, ())):
        report = DemoReport(figures, models)
        shown.append(json.dumps(report.as_dict(), indent=1))
        for learning in (False, True):
            for height in (live.BOTH_LINES - 1, live.BOTH_LINES):
                for some in (events, events[:1]):
                    what = live.screen(report, 400.5, 61.7, some, plot, learning, height)
                    shown.append(drawn(what))
    shown += [live.share(value) for value in (0, 0.5, 0.99999, 1)]
    check_expected("demo.txt", "\n".join(shown) + "\n")


def test_figures_between_two_samples() -> None:
    outcomes = Outcomes()
    outcomes.answer_us.extend([9000, *range(1000, 101_000, 1000)])
    outcomes.wall_us.extend([9000, *range(2000, 102_000, 1000)])
    outcomes.counts = OutcomeCounts(5, 1, 1, 1, 1, 1, Counter(late=1))
    before = Sample(10.0, {"models": {"svm:1": counters(1)}}, outcomes.counts.copy())
    outcomes.counts.reasons.update(late=3, other=5)
    outcomes.counts.errors.update(gone=2)
    stats = {"models": {"svm:1": counters(3), "new:1": counters(2), "gone:1": {"replicas": []}}}
    now = OutcomeCounts(125, 101, 21, 6, 61, 91, outcomes.counts.reasons, outcomes.counts.errors)
    after = Sample(14.0, stats, now)
    report = between(before, after, outcomes, "digits", 20.0)
    figures = report.application
    assert (figures.seconds, figures.sent, figures.answered, figures.defaults) == (4, 120, 100, 20)
    assert (figures.answers_per_s, figures.partial, figures.slo_met) == (25, 5, 0.9)
    assert (figures.p50_ms, figures.p99_ms) == (50, 99)
    assert (figures.wall_p50_ms, figures.wall_p99_ms, figures.accuracy) == (51, 100, 0.75)
    assert figures.default_reasons == {"other": 5, "late": 3}
    assert figures.errors == {"gone": 2}
    svm, new = report.models
    assert svm.replicas == ("ready", "suspect")
    assert (svm.requested_per_s, svm.limit, svm.wanted, svm.ready) == (20.5, 8, 3, 1)
    assert svm.cached == 30 / 82
    assert (round(svm.p50_ms / 50, 1), round(svm.p99_ms / 99, 1), svm.batch_rows) == (1, 1, 4)
    assert (new.requested_per_s, new.cached) == (20.5, 30 / 82)
    nothing = between(after, after, outcomes, "digits", 20.0)
    assert (nothing.application.accuracy, nothing.application.slo_met) == (0, 0)
    assert (nothing.application.p99_ms, nothing.models[0].cached) == (0, 0)
