"""`python -m bench.proof [--hours 2] [--only NAMES]` measures what fits, and writes the pages.

Each benchmark of the plan runs in a process of its own; its result is kept in bench/results. Those
without a result come first, then those with the oldest. One that would not end in the time that is
left is put off to the next run. Then these pages are written from all results that are kept:

    docs/benchmarks-results.md   every row, with command, date, machine and commit
    docs/benchmarks.md           the table between the markers: goals met and missed, by benchmark
    docs/paper.md                the figures of the paper
    docs/compare.md              the table of peers between the markers

`--only engine,rest` measures these; `--only none` only writes the pages. The exit status is 1 if a
benchmark failed; its earlier result is kept.
"""

import argparse
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from bench import results
from bench.harness import Row, short, verdict
from bench.names import source_of
from bench.paper import __main__ as paper
from bench.results import ROOT, Result, age, section, title_of
from bench.runs import exit_on_sigterm

DOCS = ROOT / "docs"
HOURS = 2.0
SLACK = 3.0  # a run is stopped after this many times the seconds that it is expected to take
MARKERS = ("<!-- written by make proof -->", "<!-- end -->")


@dataclass(frozen=True)
class Planned:
    """A benchmark of the plan. seconds: expected duration; that of the last run replaces it."""

    name: str
    seconds: float
    arguments: tuple[str, ...] = ()

    @property
    def is_figure(self) -> bool:
        """Return whether it is a figure of the paper."""
        return self.name.startswith("figure")


PLAN = (
    Planned("engine", 330),
    Planned("application", 120),
    Planned("rest_peers", 900),
    Planned("rest", 300),
    Planned("doors", 120),
    Planned("client", 120),
    Planned("parts", 60),
    Planned("async_models", 60),
    Planned("calls", 60),
    Planned("grpc", 200),
    Planned("attacks", 300),
    Planned("fair", 120),
    Planned("several", 240),
    Planned("several_ray", 300),
    Planned("several_states", 180),
    Planned("containers", 120),
    Planned("container_start", 120),
    Planned("batch_cost", 240),
    Planned("tensors", 60),
    Planned("deadlines", 180),
    Planned("overload", 180),
    Planned("first_burst", 60),
    Planned("params", 480),
    Planned("learning", 600, ("--seeds", "3")),
    Planned("selection", 300),
    Planned("regret", 120),
    Planned("mlperf", 300),
    Planned("coverage", 120),
    Planned("mesh", 600),
    Planned("mesh_sim", 300),
    Planned("mesh_story", 120),
    Planned("many_models", 300),
    Planned("registry", 180),
    Planned("shared", 60),
    Planned("upgrade", 120),
    Planned("durability", 300, ("--kills", "20")),
    Planned("params_kills", 120),
    Planned("params_reshard", 150),
    Planned("stream_kills", 240, ("--kills", "20")),
    Planned("feedback_kills", 180, ("--kills", "20")),
    Planned("streams", 60),
    Planned("gpu", 120),
    Planned("install", 300),
    *(Planned(name, 240) for name in paper.figures()),
)


def main() -> int:
    """Measure what fits into the time, and write the pages."""
    parser = argparse.ArgumentParser(prog="python -m bench.proof", description=__doc__)
    parser.add_argument("--hours", type=float, default=HOURS, help=f"time in all  [{HOURS:g}]")
    parser.add_argument("--only", default="", help="benchmarks, engine,rest, or none  [all]")
    chosen = parser.parse_args()
    wanted = {name.replace("-", "_") for name in chosen.only.split(",") if name}
    if unknown := wanted - {planned.name for planned in PLAN} - {"none"}:
        parser.error(f"no {', '.join(sorted(unknown))} in the plan")
    plan = [planned for planned in PLAN if not wanted or planned.name in wanted]
    failed = measure(in_order(plan), time.monotonic() + chosen.hours * 3600)
    write_pages()
    return int(failed > 0)


def in_order(plan: Sequence[Planned]) -> list[Planned]:
    """Return the plan with what has no result first, then by the age of the results."""

    def newer(planned: Planned) -> float:
        kept = results.load(planned.name)
        commits = results.commits_since(kept.machine.get("commit", "")) if kept else None
        return float("-inf") if commits is None else -commits

    return sorted(plan, key=newer)


def measure(plan: Sequence[Planned], until_s: float) -> int:
    """Measure one benchmark after another until the time is over; return how many failed."""
    failed = 0
    for number, planned in enumerate(plan, 1):
        kept = results.load(planned.name)
        expected_s = kept.seconds if kept else planned.seconds
        left_s = until_s - time.monotonic()
        head = f"[{number}/{len(plan)}] {planned.name}"
        if expected_s > left_s:
            print(f"{head}: put off, it takes {expected_s:.0f} s", flush=True)
            continue
        print(f"{head}: about {expected_s:.0f} s; {left_s / 60:.0f} min left", flush=True)
        result = (
            paper.measure(planned.name)
            if planned.is_figure
            else results.measure(
                planned.name, list(planned.arguments), min(left_s, SLACK * expected_s + 60)
            )
        )
        failed += bool(result.error)
        print(f"    {result.error or verdict(result.rows)}", flush=True)
    return failed


# -- pages


def write_pages() -> None:
    """Write all pages from the results that are kept."""
    kept = [(planned, results.load(planned.name)) for planned in PLAN]
    pages = {
        DOCS / "paper.md": paper.page(),
        DOCS / "benchmarks-results.md": results_page(kept),
        DOCS / "benchmarks.md": replaced((DOCS / "benchmarks.md").read_text(), summary(kept)),
        DOCS / "compare.md": replaced(
            (DOCS / "compare.md").read_text(), peers_table(results.load("rest_peers"))
        ),
    }
    for path, text in pages.items():
        path.write_text(text)
        print(f"wrote {path.relative_to(ROOT)}")


def replaced(page: str, text: str) -> str:
    """Return a page with the text between its markers replaced. Raises: ValueError."""
    begin, end = MARKERS
    before, found, rest = page.partition(begin)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f"a page lacks its markers {begin} and {end}")
    return f"{before}{begin}\n\n{text.strip()}\n\n{end}{after}"


def summary(kept: Sequence[tuple[Planned, Result | None]]) -> str:
    """Return the table of benchmarks: goals met and missed, date and commit."""
    lines = [
        "| benchmark | goals met | missed | without a figure | measured |",
        "|---|---|---|---|---|",
    ]
    for planned, result in kept:
        if planned.is_figure:
            continue
        if result is None:
            lines.append(f"| `{planned.name}` | | | | not yet |")
            continue
        with_goal = [row for row in result.rows if row.goal and not row.missing]
        met = sum(row.met is True for row in with_goal)
        absent = sum(bool(row.missing) for row in result.rows)
        when = f"{result.date}, {result.machine.get('commit', '')} {age(result)}".strip()
        link = f"[`{planned.name}`](benchmarks-results.md#{planned.name.replace('_', '-')})"
        lines.append(f"| {link} | {met} | {len(with_goal) - met} | {absent} | {when} |")
    return "\n".join(lines)


def results_page(kept: Sequence[tuple[Planned, Result | None]]) -> str:
    """Return the page with every row; what missed its goal comes first."""
    lines = [
        "# Results of the benchmarks\n",
        "`make proof` writes this page from the files in bench/results. How to read a table, and"
        " how\nit is measured, is described in [Benchmarks](benchmarks.md). A result that is older"
        f" than\n{results.STALE_COMMITS} commits is marked.\n",
        "## What misses its goal\n",
        "| benchmark | row | value | ratio | goal | bounded by |",
        "|---|---|---|---|---|---|",
    ]
    for planned, result in kept:
        for row in result.rows if result else ():
            if row.met is False:
                lines.append(missed(planned.name, row))
    lines.append("")
    for planned, result in kept:
        if not planned.is_figure:
            title, rest = title_of(source_of(planned.name))
            about = f"{title}\n\n{rest}".strip()
            lines.append(section(planned.name.replace("_", "-"), about, result))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines))


def missed(name: str, row: Row) -> str:
    """Return the line of a row that missed its goal."""
    ratio = f"{short(row.ratio)} x" if row.ratio is not None else ""
    cells = (f"`{name}`", row.name, f"{short(row.value)} {row.unit}", ratio, row.goal)
    return "| " + " | ".join([*cells, row.bounded_by or "not known"]) + " |"


PEER_COLUMNS = {  # the end of a row's name -> the column's title
    "no-op f64[1]: requests": "no-op, requests/s",
    "linear digits model: requests": "linear, requests/s",
    "goodput at p99 <= 20 ms": "linear, goodput",
    "linear digits model: CPU a request": "CPU, us",
    "start to the first answer, three models": "start, s",
    "memory of all processes after it": "memory, MiB",
    "one of 50 poisoned": "failed beside poisoned rows, %",
    "kill -9 of the model's process": "failed after kill -9, %",
}


def peers_table(result: Result | None) -> str:
    """Return the table of servers that others wrote: ours beside each, measured in turns."""
    if result is None:
        return "Not measured yet: `python -m bench rest_peers`."
    peers = list(dict.fromkeys(row.against for row in result.rows if row.against))
    lines = [
        "Each cell: Clipper's figure, and that of the server beside it.\n",
        "| beside | " + " | ".join(PEER_COLUMNS.values()) + " |",
        "|---|" + "---|" * len(PEER_COLUMNS),
    ]
    for peer in peers:
        of_peer = [row for row in result.rows if row.against == peer]
        cells = [
            next((both(row) for row in of_peer if row.name.endswith(wanted)), "")
            for wanted in PEER_COLUMNS
        ]
        lines.append(f"| {peer} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", results.source_line(result)])


def both(row: Row) -> str:
    """Return our figure and theirs."""
    return f"{short(row.value)} and {short(row.against_value)}"


if __name__ == "__main__":
    exit_on_sigterm()
    sys.exit(main())
