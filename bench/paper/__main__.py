"""`python -m bench.paper [--quick] [--page FILE] [--figures 3,6]` measures the paper's figures.

Each figure is measured by a process of its own. The page, docs/paper.md, holds for each the
question, the command, the table and the picture, with machine and commit. A figure that fails is
named on the page, and the exit status is 1. `--figures` measures some of them only; the page names
the others. `--quick` shows only that each figure can be measured.
"""

import argparse
import ast
import json
import re
import subprocess
import sys
import time
from pathlib import Path

from bench.harness import Row, markdown, verdict
from clipper.load.machine import machine

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).parent
PICTURES = Path("docs") / "images" / "paper"
LIMIT_S = 3600
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
    parser.add_argument("--quick", action="store_true", help="few repetitions")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "paper.md")
    parser.add_argument("--figures", default="", help="numbers, 3,6  [all]")
    chosen = parser.parse_args()
    known = sorted((path.stem for path in FOLDER.glob("figure*.py")), key=number)
    wanted = {f"figure{figure}" for figure in chosen.figures.split(",") if figure} or {*known}
    if unknown := wanted - {*known}:
        parser.error(f"no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    names = [name for name in known if name in wanted]
    sections, failed = [INTRODUCTION], 0
    if left := [str(number(name)) for name in known if name not in wanted]:
        sections.append(f"Figures {', '.join(left)} were not measured in this run.\n")
    for name in names:
        began_s = time.monotonic()
        text, status = section(name, chosen.quick)
        sections.append(text)
        failed += status
        took_s = time.monotonic() - began_s
        print(f"{name}: {'failed' if status else 'measured'} in {took_s:.0f} s", flush=True)
    chosen.page.write_text("\n".join(sections))
    print(f"wrote {chosen.page}")
    return int(failed > 0)


def number(name: str) -> int:
    """Return the number of a figure's module."""
    return int(re.sub(r"\D", "", name))


def section(name: str, quick: bool) -> tuple[str, int]:
    """Measure one figure; return its section and 0, or a section with its error and 1."""
    command = ["-m", "bench", name, *(["--quick"] if quick else [])]
    source = (FOLDER / f"{name}.py").read_text()
    about = ast.get_docstring(ast.parse(source)) or name
    title, _, rest = about.partition("\n\n")
    picture = [f"--plot={ROOT / PICTURES}"] if "plot: Path" in source else []
    done = subprocess.run(
        [sys.executable, *command, "--json", *picture],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    lines = [f"## {' '.join(title.split())}\n", rest, "" if rest else None]
    lines.append(f"`python {' '.join(command)}`, {time.strftime('%Y-%m-%d')}, {place()}\n")
    if done.returncode:
        lines.append(f"This run failed: `{last_line(done.stderr)}`\n")
        return "\n".join(line for line in lines if line is not None), 1
    rows = [from_json(fields) for fields in json.loads(done.stdout)]
    if (ROOT / PICTURES / f"{name}.png").is_file() and picture:
        lines.append(f"![{name}](images/paper/{name}.png)\n")
    lines += [markdown(rows).removeprefix("## rows\n"), f"{verdict(rows)}.\n"]
    return "\n".join(line for line in lines if line is not None), 0


def from_json(fields: dict[str, object]) -> Row:
    """Return a row from its JSON form, in which a missing figure is null."""
    value = fields.pop("value")
    return Row(value=float("nan") if value is None else value, **fields)  # type: ignore[arg-type]


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


def place() -> str:
    """Return machine, load and commit in one line."""
    return ", ".join(f"{key} {value}" for key, value in machine().items() if value)


if __name__ == "__main__":
    sys.exit(main())
