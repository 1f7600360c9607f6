"""Results of benchmarks, kept as files, and the sections of pages that are written from them.

`bench/results/NAME.json` holds what one run of one benchmark printed, with the command, the date,
the machine and the commit. Pages are written from these files, so that a figure on a page is always
one that a command printed. A result that is older than STALE_COMMITS commits is marked.
"""

import ast
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.harness import Row, finite, markdown, verdict
from clipper.load.machine import machine

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "bench" / "results"
STALE_COMMITS = 200
END_S = 20.0  # for a benchmark that is stopped, to end its processes


@dataclass(frozen=True)
class Result:
    """Holds the outcome of one run of a benchmark.

    command: the command that printed it. seconds: its duration. machine: what clipper.load.machine
    returned at the start. error: why there are no rows; empty if there are.
    """

    name: str
    command: str
    date: str
    seconds: float
    machine: dict[str, str] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    error: str = ""


def measure(name: str, arguments: list[str], limit_s: float, folder: Path = RESULTS) -> Result:
    """Run `python -m bench NAME ARGUMENTS --json` in a process of its own, and keep the result.

    A run that fails, or lasts longer than `limit_s`, returns a result with an error and leaves the
    result that was kept before. No process of the run is left.
    """
    command = ["-m", "bench", name, *arguments]
    shown = [argument for argument in command if not argument.startswith("--plot")]
    about = machine()
    began_s = time.monotonic()
    rows: tuple[Row, ...] = ()
    error = ""
    with subprocess.Popen(
        [sys.executable, *command, "--json"],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            out, said = process.communicate(timeout=limit_s)
            if process.returncode:
                error = f"exit status {process.returncode}: {last_line(said)}"
            else:
                rows = tuple(row_of(fields) for fields in json.loads(out))
        except subprocess.TimeoutExpired:
            error = f"it was stopped after {limit_s:.0f} s"
        except ValueError as wrong:
            error = f"its output is not JSON: {wrong}"
        finally:
            end_session(process)
    result = Result(
        name,
        f"python {' '.join(shown)}",
        time.strftime("%Y-%m-%d"),
        round(time.monotonic() - began_s, 1),
        about,
        rows,
        error,
    )
    if not error:
        save(result, folder)
    return result


def end_session(process: "subprocess.Popen[str]") -> None:
    """End a process, which then ends what it has started, and kill what is left of its session."""
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(END_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def save(result: Result, folder: Path = RESULTS) -> None:
    """Write a result to its file."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {**asdict(result), "rows": [finite(asdict(row)) for row in result.rows]}
    (folder / f"{result.name}.json").write_text(json.dumps(fields, indent=1) + "\n")


def load(name: str, folder: Path = RESULTS) -> Result | None:
    """Return the result that is kept for a benchmark, or None."""
    try:
        fields = json.loads((folder / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return Result(**{**fields, "rows": tuple(row_of(row) for row in fields["rows"])})


def row_of(fields: dict[str, object]) -> Row:
    """Return a row from its JSON form, in which a missing figure is null."""
    value = fields.pop("value")
    return Row(value=float("nan") if value is None else value, **fields)  # type: ignore[arg-type]


def last_line(text: str) -> str:
    """Return the last line that is not empty."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")


# -- how old a result is


def commits_since(commit: str) -> int | None:
    """Return how many commits of this working copy are newer than `commit`; None if unknown."""
    known = commit.removesuffix("-dirty")
    if not known:
        return None
    counted = subprocess.run(
        ["git", "-C", str(ROOT), "rev-list", "--count", f"{known}..HEAD"],
        capture_output=True,
        text=True,
    )
    return int(counted.stdout) if counted.returncode == 0 else None


def age(result: Result) -> str:
    """Return a remark about a result that does not belong to recent code; empty otherwise."""
    newer = commits_since(result.machine.get("commit", ""))
    if newer is None:
        return "**The commit of this run is unknown here.**"
    return f"**Old: {newer} commits have been made since.**" if newer > STALE_COMMITS else ""


# -- sections of pages


def source_line(result: Result) -> str:
    """Return one line with the command, the date, the machine and the commit."""
    where = ", ".join(f"{key} {value}" for key, value in result.machine.items() if value)
    return " ".join(
        part for part in (f"`{result.command}`, {result.date}, {where}.", age(result)) if part
    )


def title_of(source: Path) -> tuple[str, str]:
    """Return the first paragraph of a module's docstring in one line, and the other paragraphs."""
    about = ast.get_docstring(ast.parse(source.read_text())) or source.stem
    title, _, rest = about.partition("\n\n")
    return " ".join(title.split()), rest


def section(title: str, about: str, result: Result | None, picture: str = "") -> str:
    """Return the section of a page: title, explanation, source, picture, table and verdict."""
    lines = [f"## {title}\n"]
    if about:
        lines.append(f"{about}\n")
    if result is None:
        return "\n".join([*lines, "Not measured yet.\n"])
    lines.append(f"{source_line(result)}\n")
    if result.error:
        return "\n".join([*lines, f"This run failed: `{result.error}`\n"])
    if picture:
        lines.append(f"![{result.name}]({picture})\n")
    rows = list(result.rows)
    tables = markdown(rows).removeprefix("## rows\n").strip()
    if tables.startswith("## "):
        tables = f"#{tables}"
    tables = tables.replace("\n## ", "\n### ")
    return "\n".join([*lines, f"{tables}\n", f"{verdict(rows)}.\n"])
