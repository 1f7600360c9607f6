"""A report as a single HTML file without script or network: command, figures, charts, machine."""

import html
import math
import time
from collections.abc import Mapping, Sequence

import numpy as np

from clipper.load.chart import Axis, Chart, Series
from clipper.load.measurement import SHARES, Measurement, QueryOutcome, quantile

_REMARKS_MAX = 8
_BINS = 60  # intervals of latency over time
_STYLE = """
:root{--bg:#fff;--fg:#1d2733;--dim:#66717e;--line:#dfe3e8;--a:#0067b8;--b:#c2410c;--c:#15803d;--d:#7c3aed;--bad:#b91c1c}
@media(prefers-color-scheme:dark){:root{--bg:#12171d;--fg:#e4e9ee;--dim:#93a0ad;--line:#2b343d;--a:#4cb3ff;--b:#ff9a57;
--c:#4ade80;--d:#c4a2ff;--bad:#ff8080}}
body{font:15px/1.5 system-ui,sans-serif;background:var(--bg);color:var(--fg);max-width:60rem;margin:1.5rem auto;padding:0 1rem}
h1{font-size:1.4rem;margin:0 0 .3rem}h2{font-size:1.05rem;margin:1.6rem 0 .2rem}p{margin:.3rem 0}
code,pre{font:13px ui-monospace,monospace}
pre{border:1px solid var(--line);border-radius:6px;padding:.5rem .7rem;overflow-x:auto}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{padding:.2rem .7rem .2rem 0;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}
th{color:var(--dim);font-weight:500}td:first-child,th:first-child{text-align:left}
svg{width:100%;height:auto;display:block}.dim,.tick,.axis{color:var(--dim);fill:var(--dim)}.tick,.axis{font-size:12px}
.grid{stroke:var(--line);stroke-width:1}polyline{fill:none;stroke-width:1.8;stroke-linejoin:round}
.rule{stroke:var(--bad);stroke-width:1.2;stroke-dasharray:5 4}text.rule{stroke:none;fill:var(--bad);font-size:12px}
.dots{fill:none;stroke-width:2.4;stroke-linecap:round;opacity:.45}
.a{stroke:var(--a)}.b{stroke:var(--b)}.c{stroke:var(--c)}.d{stroke:var(--d)}
circle.a,span.a{fill:var(--a);color:var(--a)}circle.b,span.b{fill:var(--b);color:var(--b)}
circle.c,span.c{fill:var(--c);color:var(--c)}circle.d,span.d{fill:var(--d);color:var(--d)}
.bad{color:var(--bad)}span{margin-right:.8rem}
"""  # noqa: E501


def page(
    title: str,
    command: str,
    advice: Sequence[str],
    table: Sequence[Sequence[str]],
    charts: Sequence[Chart],
    where: Mapping[str, str],
) -> str:
    """Return the HTML. advice: sentences above the figures. table: the first row is the header."""
    head, *rows = table
    cells = "".join(
        f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows
    )
    top = "".join(f"<th>{html.escape(cell)}</th>" for cell in head)
    drawn = "".join(
        f"<h2>{html.escape(one.title)}</h2><p>{one.legend()}</p>{svg}"
        for one in charts
        if (svg := one.svg())
    )
    facts = " · ".join(f"{key} {value}" for key, value in where.items())
    when = time.strftime("%Y-%m-%d %H:%M")
    lines = "".join(f"<p>{html.escape(line)}</p>" for line in advice)
    return (
        '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport"'
        f' content="width=device-width,initial-scale=1"><title>{html.escape(title)}</title><style>{_STYLE}</style><h1>{html.escape(title)}</h1><pre>$'  # noqa: E501
        f" {html.escape(command)}</pre>{lines}<div"
        f' class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{cells}</tbody></table></div>{drawn}<p'  # noqa: E501
        f' class="dim">{when} · {html.escape(facts)}</p></html>\n'
    )


def charts_of(steps: Sequence[Measurement]) -> list[Chart]:
    """Return charts: p99 over rates if there are several; latency over time and its distribution
    of the last one.
    """
    charts = [rates_chart(steps)] if len(steps) > 1 else []
    shown = (
        max(steps, key=lambda step: (step.holds(step.slo_ms), step.rate))
        if len(steps) > 1
        else steps[0]
    )
    of = f" at {shown.rate:g} a second" if len(steps) > 1 else ""
    return [*charts, time_chart(shown, of), tail_chart(steps)]


def rates_chart(steps: Sequence[Measurement]) -> Chart:
    """Return the chart of p99 over rates. Failures count as infinite latency."""
    ordered = sorted(steps, key=lambda step: step.rate)
    points = {
        share: [(step.rate, quantile(step.strict_ms(), share)) for step in ordered]
        for share in (0.5, 0.99)
    }
    series = [
        Series(f"p{100 * share:g}", points[share], colour)
        for share, colour in ((0.5, "a"), (0.99, "b"))
    ]
    x = Axis("queries a second", log=True)
    return Chart("Latency by rate", x, Axis("ms", log=True), series, [_slo(steps[0])])


def time_chart(step: Measurement, of: str) -> Chart:
    """Return the chart of latency over time."""
    due, latency = np.array(step.due_s), step.latency_ms
    answered = step.answered
    edges = np.linspace(0, max(step.lasted_s, 1e-9), _BINS + 1)
    at = np.clip(np.digitize(due, edges) - 1, 0, _BINS - 1)
    middle = (edges[:-1] + edges[1:]) / 2
    lines = []
    for share, colour in ((0.5, "a"), (0.99, "b")):
        values = [quantile(latency[(at == i) & answered], share) for i in range(_BINS)]
        lines.append(
            Series(f"p{100 * share:g}", [*zip(middle.tolist(), values, strict=True)], colour)
        )
    dots = Series(
        "each answer",
        [*zip(due[answered].tolist(), latency[answered].tolist(), strict=True)],
        "d",
        dots=True,
    )
    x = Axis("seconds since the start, when the query was due", least=0.0)
    return Chart(f"Latency over time{of}", x, Axis("ms", log=True), [dots, *lines], [_slo(step)])


def tail_chart(steps: Sequence[Measurement]) -> Chart:
    """Return the chart of the tail: share of slower answers on a logarithmic axis."""
    series = []
    for step, colour in zip(steps[-4:], "abcd", strict=False):
        answers = np.sort(step.answers_ms())
        n = len(answers)
        places = np.concatenate(
            [np.linspace(0, n - 1, 200), n - np.geomspace(1, max(n, 1), 200)]
        ).astype(int)
        points = [
            (math.log10(n / max(n - i, 1)), float(answers[i]))
            for i in np.unique(places).tolist()
            if 0 <= i < n
        ]
        series.append(Series(f"{step.rate:g} a second", points, colour))
    nines = [(float(n), f"99{'.' if n > 2 else ''}{'9' * (n - 2)} %") for n in range(2, 6)]
    ticks = [(0.0, "0 %"), (math.log10(2), "50 %"), (1.0, "90 %"), *nines]
    x = Axis("share of the answers that took no longer", ticks=ticks, least=0.0)
    return Chart("Distribution", x, Axis("ms", log=True), series, [_slo(steps[0])])


def _slo(step: Measurement) -> tuple[str, float]:
    return f"SLO {step.slo_ms:g} ms", step.slo_ms


# -- the same figures for a shell and a page

HEAD = (
    "rate",
    "sent/s",
    *(f"p{100 * share:g}" for share in SHARES),
    "max",
    "ok",
    "missing",
    "default",
    "refused",
    "error",
    "unanswered",
    "late",
    "goodput/s",
)


def row_of(step: Measurement) -> list[str]:
    """Return a row of the table."""
    answers, counts = step.answers_ms(), step.counts()
    times = [milliseconds(quantile(answers, share)) for share in (*SHARES, 1.0)]
    kinds = [str(counts[kind.name.lower()]) for kind in QueryOutcome]
    late = str(int(np.sum(answers > step.slo_ms)))
    return [
        f"{step.rate:g}",
        f"{step.total / step.lasted_s:.1f}",
        *times,
        *kinds,
        late,
        f"{step.goodput():.1f}",
    ]


def remarks(steps: Sequence[Measurement]) -> list[str]:
    """Return notes that the reader of the figures needs."""
    found = []
    for step in steps:
        at = f"at {step.rate:g} a second " if len(steps) > 1 else ""
        lag = step.lag_ms
        if step.is_behind():
            late, most = milliseconds(quantile(lag, 0.99)), milliseconds(float(lag.max()))
            busy = f"it used {step.cpu_s / step.lasted_s:.0%} of a core"
            found.append(
                f"{at}the generator itself was late: p99 {late}, at most {most}; {busy}. Latency "
                "counts that too: take "
                "the figures for an upper bound, lower the rate, or generate on "
                "another machine."
            )
        if step.waited > step.total // 100:
            found.append(
                f"{at}{step.waited} queries waited for a free connection, which their latency has:"
                " raise --connections."
            )
        if step.interrupted:
            found.append(
                f"{at}it was interrupted after {step.lasted_s:.1f} s of {step.seconds:g} s."
            )
        found += [f"{at}{count} x {what}" for what, count in step.errors.most_common(5)]
    rest = len(found) - _REMARKS_MAX
    return [*found[:_REMARKS_MAX], f"and {rest} more remarks: see -o json"] if rest > 0 else found


def milliseconds(value: float) -> str:
    """Format milliseconds."""
    return (
        "-" if not math.isfinite(value) else f"{value:.2f} ms" if value < 100 else f"{value:.0f} ms"
    )
