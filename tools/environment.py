"""Make the environment of this checkout in .venv: tools of the build, the compiled core, and what
clipper needs.

    python3.11 tools/environment.py run        # what `make demo` needs
    python3.11 tools/environment.py develop    # and what tests, checks and benchmarks need

Uses the standard library alone, since it runs before anything is installed. While the compiler
works, pip fetches and installs the packages. Each step that is done is recorded with what it was
made from, so a repeat costs a fraction of a second, and an edit of pyproject.toml installs packages
again only if their list changed. The time that is left is estimated from how fast the steps so far
were on this machine.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

if sys.version_info < (3, 11):  # noqa: UP036 - this file runs before anything checked the version
    raise SystemExit(f"{sys.executable} is older than 3.11. make PYTHON=/path/to/python3.11")
from projects import FOLDERS, declared, lines_of, names

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STATE = VENV / ".environment.json"
PIP = [str(PYTHON), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
# The versions that `make pins` wrote. Another file, or none where it is empty: CLIPPER_PINS.
PINS = os.environ.get("CLIPPER_PINS", str(ROOT / "tools" / "constraints.txt"))
EXTRAS = {"run": ("demo", "plot"), "develop": ("demo", "plot", "test", "check", "bench")}
SAY_EVERY_S = 10.0  # where the output is not a terminal
LAST_LINES = 10  # of a command that failed
END_S = 10.0  # for a command to end once another has failed


class Failure(Exception):
    """A step failed; the message names it, the reason and the next command."""


@dataclass
class Step:
    """One command of the set-up, and how long it takes on a machine like the one it was measured on
    (2 cores)."""

    name: str
    command: list[str]
    seconds: float
    environment: dict[str, str] = field(default_factory=dict)
    left_s: float | None = None  # what the command itself says is left
    started: float = 0.0
    output: list[str] = field(default_factory=list)


class Progress:
    """One line that says what is done, how far it is, and about how many seconds are left."""

    def __init__(self, steps: list[Step]) -> None:
        self._waiting = list(steps)
        self._running: list[Step] = []
        self._begun = time.monotonic()
        self._expected_s = self._measured_s = 0.0  # of the steps that are finished
        self._shown = self._share = 0.0
        self._terminal = sys.stdout.isatty()

    def begin(self, step: Step) -> None:
        self._waiting.remove(step)
        self._running.append(step)
        step.started = time.monotonic()
        self.show(now=True)

    def end(self, step: Step) -> None:
        self._running.remove(step)
        self._expected_s += step.seconds
        self._measured_s += time.monotonic() - step.started

    def left_s(self) -> float:
        """Return about how many seconds are left: steps that run at once count once."""
        pace = self._measured_s / self._expected_s if self._expected_s else 1.0
        running = [self._left_of(step, pace) for step in self._running]
        return max(running, default=0.0) + sum(step.seconds * pace for step in self._waiting)

    def _left_of(self, step: Step, pace: float) -> float:
        if step.left_s is not None:
            return step.left_s
        return max(step.seconds * pace - (time.monotonic() - step.started), 1.0)

    def show(self, now: bool = False) -> None:
        spent, left = time.monotonic() - self._begun, self.left_s()
        self._share = max(self._share, spent / (spent + left + 0.01))  # it never goes back
        text = (
            f"[{self._share:4.0%}]"
            f" {', '.join(step.name for step in self._running)}: about {left:.0f} s left"
        )
        if self._terminal:
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif now or time.monotonic() - self._shown >= SAY_EVERY_S:
            self._shown = time.monotonic()
            print(text, flush=True)

    def say(self, text: str) -> None:
        print(f"\r\x1b[K{text}" if self._terminal else text, flush=True)

    def close(self) -> None:
        self.say(f"[100%] the environment is ready after {time.monotonic() - self._begun:.0f} s")


def run(steps: list[Step], progress: Progress) -> None:
    """Run steps at the same time until all have ended; raises Failure when one fails, after ending
    the others."""
    lines: queue.Queue[tuple[Step, str | None]] = queue.Queue()
    running: dict[str, subprocess.Popen[str]] = {}
    try:
        for step in steps:
            progress.begin(step)
            running[step.name] = process = subprocess.Popen(
                step.command,
                cwd=ROOT,
                env={**os.environ, **step.environment},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
            threading.Thread(target=_read_lines, args=(step, process, lines), daemon=True).start()
        while running:
            try:
                step, line = lines.get(timeout=1)
            except queue.Empty:
                progress.show()
                continue
            if line is not None:
                _take_line(step, line, progress)
            elif running.pop(step.name).wait():
                last = "\n".join(f"    {text}" for text in step.output[-LAST_LINES:])
                raise Failure(f"{step.name} failed: {' '.join(step.command[:6])} ...\n{last}")
            else:
                progress.end(step)
    finally:
        for process in running.values():
            _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command with all its processes; what ignores SIGTERM is killed."""
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _read_lines(
    step: Step, process: subprocess.Popen[str], lines: queue.Queue[tuple[Step, str | None]]
) -> None:
    """Put a command's lines into the queue, and None at their end. Runs in a thread of its own."""
    assert process.stdout
    with process.stdout:
        for line in process.stdout:
            lines.put((step, line.rstrip()))
    lines.put((step, None))


def _take_line(step: Step, line: str, progress: Progress) -> None:
    """Take a line of a command's output: its own estimate, a warning of the compiler, or text for a
    failure."""
    if found := re.fullmatch(r"core: +\d+%, about (\d+) s left", line):
        step.left_s = float(found[1])
        return
    step.output.append(line)
    if line.startswith("core: warnings") or "another build" in line:
        progress.say(line)


def requirements(kind: str) -> tuple[list[str], list[str]]:
    """Return what the build requires, and what our distributions and the extras and groups of
    `kind` require."""
    wanted = [line for folder in FOLDERS for line in declared(folder)["project"]["dependencies"]]
    for extra in EXTRAS[kind]:
        wanted += lines_of(extra)
    ours = names()
    return declared()["build-system"]["requires"], sorted(
        {line for line in wanted if not line.startswith(ours)}
    )


def digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=12).hexdigest()


def pins() -> list[str]:
    """Return the options of pip that keep packages at the versions of the pins."""
    return ["-c", PINS] if PINS else []


def pinned() -> str:
    """Return the text of the pins; empty without any."""
    return Path(PINS).read_text() if PINS else ""


def metadata() -> str:
    """Hash what an editable install writes down: names, versions, dependencies, commands and
    packages of all our distributions."""
    parts = [declared(folder) for folder in FOLDERS]
    texts = [[part["project"], part["tool"]["setuptools"]["packages"]] for part in parts]
    return digest(texts, os.path.realpath(ROOT))


def make(kind: str, core: str) -> None:
    """Bring .venv up to date for `kind`; raises Failure."""
    tools, packages = requirements(kind)
    try:
        state: dict[str, str] = json.loads(STATE.read_text())
    except (OSError, ValueError):
        state = {}
    interpreter = digest(sys.version, os.path.realpath(sys.executable))
    another = state.get("python", interpreter) != interpreter  # .venv was made by another Python
    if not PYTHON.exists() or another:
        state = {}
    want = {
        "python": interpreter,
        "tools": digest(tools, pinned()),
        f"packages-{kind}": digest(packages, pinned()),
        "editable": metadata(),
    }
    missing = [name for name in want if state.get(name) != want[name]]
    build_core = [str(PYTHON), str(ROOT / "tools" / "build_core.py"), "--variant", core]
    if not missing:
        if subprocess.run(build_core, cwd=ROOT, check=False).returncode:
            raise Failure("the core could not be compiled")
        return
    clear = ["--clear"] if another else []
    venv = Step(
        f"Python {sys.version.split()[0]} in .venv",
        [sys.executable, "-m", "venv", *clear, str(VENV)],
        4,
    )
    install_tools = Step("Cython and numpy", [*PIP, *pins(), *tools], 8)
    compile_core = Step("compiling the core", build_core, 80)
    install_packages = Step(
        f"{len(packages)} packages", [*PIP, *pins(), *packages], 20 if kind == "run" else 35
    )
    editable = Step(
        "clipper itself",
        [*PIP, "--no-build-isolation", "--no-deps", *(f"-e./{folder}" for folder in FOLDERS)],
        5,
        {"CLIPPER_CORE": "none"},
    )
    done = {
        "python": (venv,),
        "tools": (install_tools,),
        f"packages-{kind}": (install_packages,),
        "editable": (editable,),
    }
    steps = [step for name in want if name in missing for step in done[name]]
    progress = Progress([*steps, compile_core])
    for together in ((venv,), (install_tools,), (compile_core, install_packages), (editable,)):
        now = [step for step in together if step in steps or step is compile_core]
        if now:
            run(now, progress)
            for name, these in done.items():
                if these[0] in now:
                    state[name] = want[name]
            partial = STATE.with_suffix(".partial")
            partial.write_text(json.dumps(state))
            partial.replace(STATE)
    progress.close()


def main() -> int:
    parser = argparse.ArgumentParser(description="Make the environment of this checkout in .venv.")
    parser.add_argument("kind", choices=EXTRAS)
    parser.add_argument(
        "--core", default=os.environ.get("CLIPPER_BUILD", "release"), help="the variant of the core"
    )
    arguments = parser.parse_args()
    (ROOT / "build").mkdir(exist_ok=True)
    with (ROOT / "build" / "environment.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("another set-up is running in this checkout; waiting for it", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            make(arguments.kind, arguments.core)
        except Failure as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            print("\ninterrupted; the next run continues from here", file=sys.stderr)
            return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
