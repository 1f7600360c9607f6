"""`python -m bench.paper [--quick] [--figures 3,6] [--page FILE]` measures the paper's figures.

Each figure is measured by a process of its own, and its result is kept in bench/results. The page,
docs/paper.md, is written from what is kept: for each figure the question, the command, the table
and the picture, with machine and commit. A figure that fails is named, keeps the result that it had
before, and makes the exit status 1. `--figures` measures some of them only; `--figures none` only
writes the page. `--quick` shows that each figure can be measured, keeps nothing and writes nothing.
"""

import argparse
import re
import sys
import tempfile
from pathlib import Path

from bench import results

FOLDER = Path(__file__).parent
PICTURES = Path("docs") / "images" / "paper"
LIMIT_S = 3600.0
INTRODUCTION = """\
# The figures of the paper

Clipper is described in Crankshaw et al., *Clipper: A Low-Latency Online Prediction Serving System*,
NSDI 2017. `make paper` measures its figures with this implementation and writes this page. Each
section names what differs from the paper's experiment: its data sets, GPUs and clusters are not at
hand on one machine, so that ratios can be compared, and absolute figures cannot. How to read a
table is described in [Benchmarks](benchmarks.md).
"""


def main() -> int:
    """Measure the figures, one after another, and write the page."""
    parser = argparse.ArgumentParser(prog="python -m bench.paper", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions; keeps nothing")
    parser.add_argument("--page", type=Path, default=results.ROOT / "docs" / "paper.md")
    parser.add_argument("--figures", default="", help="numbers, 3,6, or none  [all]")
    chosen = parser.parse_args()
    known = figures()
    wanted = {f"figure{figure}" for figure in chosen.figures.split(",") if figure} or {*known}
    if unknown := wanted - {*known, "figurenone"}:
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    failed = 0
    with tempfile.TemporaryDirectory() as scratch:
        for name in (name for name in known if name in wanted):
            result = measure(name, quick=chosen.quick, folder=Path(scratch))
            failed += bool(result.error)
            print(f"{name}: {result.error or 'measured'}, {result.seconds:.0f} s", flush=True)
    if not chosen.quick:
        chosen.page.write_text(page())
        print(f"wrote {chosen.page}")
    return int(failed > 0)


def figures() -> list[str]:
    """Return the names of the figures' modules in the order of their numbers."""
    return sorted((path.stem for path in FOLDER.glob("figure*.py")), key=number)


def number(name: str) -> int:
    """Return the number of a figure's module."""
    return int(re.sub(r"\D", "", name))


def measure(name: str, quick: bool = False, folder: Path = results.RESULTS) -> results.Result:
    """Measure one figure and keep its result and its picture; nothing is kept of a quick run,
    which writes into `folder`."""
    has_picture = "plot: Path" in (FOLDER / f"{name}.py").read_text()
    place = folder if quick else results.ROOT / PICTURES
    arguments = [*(["--quick"] if quick else []), *([f"--plot={place}"] if has_picture else [])]
    return results.measure(name, arguments, LIMIT_S, folder if quick else results.RESULTS)


def page() -> str:
    """Return the page, written from the results that are kept."""
    sections = [INTRODUCTION]
    for name in figures():
        title, rest = results.title_of(FOLDER / f"{name}.py")
        picture = PICTURES / f"{name}.png"
        shown = f"images/paper/{name}.png" if (results.ROOT / picture).is_file() else ""
        sections.append(results.section(title, rest, results.load(name), shown))
    return "\n".join(sections)


if __name__ == "__main__":
    sys.exit(main())
