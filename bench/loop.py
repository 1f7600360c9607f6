"""Measure the developer's loop: how long a fresh clone, a change and a run of the tests take.

    python bench/loop.py                          # a clone, small changes, the tests, the size of
    .venv (25 min) python bench/loop.py --rows cold,nothing,pyx,header
    python bench/loop.py --rows ci                # .ci/run (35 min)

Each row runs in a clone of HEAD in a temporary folder. Uses the standard library alone. Exit status
1: a row missed its goal or failed.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIRST_PREDICTION = " ready after"  # what the demo prints when each model has answered
GOALS = {
    "cold": (120, "s", "clone to the first prediction of make demo"),
    "nothing": (3, "s", "make build, nothing changed"),
    "pyx": (15, "s", "make build, scheduler.pyx changed"),
    "header": (30, "s", "make build, clock_cache.hpp changed"),
    "test": (720, "s", "make test"),
    "size": (3.0, "GB", ".venv after make test"),
    "ci": (2100, "s", ".ci/run in a clone of its own"),
}


def run(command: list[str], folder: Path, until: str = "") -> float:
    """Run a command and return its seconds, or those until it prints a line that begins with
    `until`.

    Raises: subprocess.CalledProcessError with the last lines, if it fails.
    """
    environment = {
        key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")
    }
    started, seen = time.monotonic(), 0.0
    last: list[str] = []
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    for line in process.stdout:
        last = [*last[-19:], line]
        if until and not seen and line.startswith(until):
            seen = time.monotonic() - started
    if process.wait() or (until and not seen):
        raise subprocess.CalledProcessError(process.returncode, command, "".join(last))
    return seen or time.monotonic() - started


def change(path: Path) -> None:
    """Change a file of the core in a way that changes the code."""
    text = path.read_text()
    mark = (
        "\ncdef int _bench_loop = 1\n"
        if path.suffix == ".pyx"
        else "\nstatic const int clipper_bench_loop = 1;\n"
    )
    if path.suffix == ".hpp" and text.rstrip().endswith("#endif"):
        text, mark = text.rstrip().removesuffix("#endif"), f"{mark}#endif\n"
    path.write_text(text + mark)


def clone(parent: Path) -> Path:
    subprocess.run(["git", "clone", "-q", str(ROOT), str(parent / "clipper")], check=True)
    return parent / "clipper"


def gigabytes(folder: Path) -> float:
    """Return the disk space of a folder; a file with several links counts once."""
    sizes = {}
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file():
            stat = path.stat()
            sizes[stat.st_dev, stat.st_ino] = stat.st_blocks * 512
    return sum(sizes.values()) / 1e9


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--rows", default="cold,nothing,pyx,header,test,size", help=f"of {','.join(GOALS)}"
    )
    parser.add_argument("--json", action="store_true", help="a list of rows on stdout")
    options = parser.parse_args()
    wanted = options.rows.split(",")
    if unknown := set(wanted) - set(GOALS):
        parser.error(f"unknown rows: {', '.join(sorted(unknown))}; there are {', '.join(GOALS)}")
    with tempfile.TemporaryDirectory(prefix="clipper-loop-") as scratch:
        folder = clone(Path(scratch))
        core = folder / "src" / "clipper_core"
        if "cold" not in wanted and {"nothing", "pyx", "header", "test", "size"} & set(wanted):
            run(["make", "build"], folder)
        measure: dict[str, Callable[[], float]] = {
            "cold": lambda: run(["make", "demo", "ARGS=--seconds 1"], folder, FIRST_PREDICTION),
            "nothing": lambda: run(["make", "build"], folder),
            "pyx": lambda: _measure_build(folder, core / "scheduling" / "scheduler.pyx"),
            "header": lambda: _measure_build(folder, core / "cache" / "clock_cache.hpp"),
            "test": lambda: run(["make", "test"], folder),
            "size": lambda: gigabytes(folder / ".venv"),
            "ci": lambda: _measure_ci(folder),
        }
        rows = [_measure(name, measure[name]) for name in GOALS if name in wanted]
    if options.json:
        print(json.dumps(rows, indent=2))
    return int(not all(row["met"] for row in rows))


def _measure_build(folder: Path, changed: Path) -> float:
    change(changed)
    return run(["make", "build"], folder)


def _measure_ci(folder: Path) -> float:
    with tempfile.TemporaryDirectory(prefix="clipper-ci-") as scratch:
        return run(["bash", ".ci/run"], clone(Path(scratch)))


def _measure(name: str, measured: Callable[[], float]) -> dict[str, object]:
    goal, unit, what = GOALS[name]
    try:
        value, note = measured(), ""
    except subprocess.CalledProcessError as error:
        value, note = float("nan"), f"failed: {' '.join(error.cmd)}\n{error.output}"
    met = value <= goal
    print(
        f"{what:46} {value:8.1f} {unit:3} goal {goal:6} {'met' if met else 'MISSED'} {note}",
        file=sys.stderr,
        flush=True,
    )
    return {
        "name": name,
        "what": what,
        "value": value,
        "unit": unit,
        "goal": goal,
        "met": met,
        "note": note,
    }


if __name__ == "__main__":
    if not shutil.which("git"):
        sys.exit("git is needed for a fresh clone. apt-get install git")
    sys.exit(main())
