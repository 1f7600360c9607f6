"""An installation of the wheels in dist/ (`make wheels`), as a user makes it, and its first answer.

Each is into a new environment in a temporary folder, whose PATH has no compiler. Servers that
others wrote are installed in the same way, in turn with ours. What is not in dist/ comes from where
pip looks: with PIP_NO_INDEX=1 and PIP_FIND_LINKS=FOLDER from a folder of wheels.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from bench.harness import FAILED, Goal, Row, Sample, UnknownRows, absent, interleave, row
from bench.peers import PEERS
from bench.results import ROOT

DIST = ROOT / "dist"
OURS = "clipper"
# what is imported, of what is installed
MODULES = {
    OURS: "clipper",
    "mosec": "mosec",
    "litserve": "litserve",
    "bentoml": "bentoml",
    "ray": "ray.serve",
}
INSTALLED_S = Goal("value_at_most", 10.0)
ANSWERED_S = Goal("value_at_most", 20.0)
LIMIT_S = 600.0
LOOK_S = 0.01
IMPORTS = 7
FREE = ("--http", "127.0.0.1:0", "--admin", "127.0.0.1:0")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/api/total/predict")
CORES = {"": "the core for this processor", "baseline": "the core for any x86-64"}
PROGRAM = """\
import clipper, clipper_core.engine.engine as core, numpy

def total(rows):
    return rows.sum(axis=1)

def zero(rows):
    return rows[:, 0] * 0

if __name__ == "__main__":
    with clipper.start() as server:
        server.deploy("total", total, input="f64[3]")
        server.deploy("zero", zero, input="f64[3]")
        for policy in ("ensemble", "mixture", "stacking", "exp3", "exp4", "bandit", "lints"):
            name, both = f"by-{policy}", ["total", "zero"]
            app = server.app(name, both, policy=policy, slo_ms=20_000, default=-1.0)
            for turn in range(20):
                answer = app.predict(numpy.full(3, turn / 10), user="ann").result(timeout=60)
                assert not answer.is_default, answer
                app.feedback(answer, label=turn * 0.3)
        many = server.model("total").predict_many(numpy.ones((10_000, 3))).result(60)
        assert (many == 3.0).all()
    print(core.__file__)
"""
IMPORT = "import time; a = time.perf_counter(); import {}; print(time.perf_counter() - a)"


class InstallationFailed(Exception):
    """A command of a new environment failed; the message has what it printed."""


class Environment:
    """A new environment in a folder, whose commands see no compiler. The pip of this environment
    installs into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        words: list[str | Path] = [sys.executable, "-m", "venv", "--without-pip"]
        subprocess.run([*words, folder / "venv"], check=True, timeout=LIMIT_S)
        self.site = next((folder / "venv" / "lib").glob("python3*")) / "site-packages"

    def run(self, *words: str | Path, **variables: str) -> str:
        """Run a command of the environment and return what it printed. Raises
        InstallationFailed."""
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder,
            env=self.variables(variables),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise InstallationFailed(f"{' '.join(map(str, words[:6]))} failed:\n{done.stdout}")
        return done.stdout

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        """Return the variables of its commands."""
        unset = ("PYTHON", "CLIPPER_", "COVERAGE_", "CC", "CXX")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
        return {**kept, "PATH": str(self.python.parent), **more}

    def pip(self, *words: str | Path, **variables: str) -> str:
        """Run pip for the environment."""
        pip = ("-m", "pip", "--disable-pip-version-check", "--python", self.python)
        return self.run(sys.executable, *pip, *words, **variables)

    def packages(self) -> dict[str, str]:
        """Return the versions of the packages that were installed."""
        listed = json.loads(self.pip("list", "--format", "json"))
        return {str(one["name"]): str(one["version"]) for one in listed}

    def megabytes(self) -> float:
        """Return the size of its files."""
        files = (path for path in (self.folder / "venv").rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.is_file()) / 1e6

    def serve(self, *words: str, **variables: str) -> float:
        """Run `clipper serve` with the function `total` of a file in the folder, query it and end
        it; return the seconds to its first answer. Raises InstallationFailed."""
        started = time.perf_counter()
        output = self.folder / "output"
        with (
            output.open("w") as file,
            subprocess.Popen(
                [self.python.with_name("clipper"), "serve", *words, "--input", "f64[3]", *FREE],
                cwd=self.folder,
                env=self.variables({"PYTHONUNBUFFERED": "1", **variables}),
                stdout=file,
                stderr=file,
            ) as server,
        ):
            try:
                seconds = self._first_answer(server, output, started)
            finally:
                server.terminate()
        if server.returncode:
            raise InstallationFailed(
                f"clipper serve ended with {server.returncode}:\n{output.read_text()}"
            )
        return seconds

    def _first_answer(
        self, server: "subprocess.Popen[bytes]", output: Path, started: float
    ) -> float:
        while not (address := ADDRESS.search(output.read_text())):
            if server.poll() is not None or time.perf_counter() - started > LIMIT_S:
                raise InstallationFailed(f"clipper serve has no address:\n{output.read_text()}")
            time.sleep(LOOK_S)
        body = b'{"input": [0, 1, 2]}'
        with urllib.request.urlopen(address[0], body, timeout=LIMIT_S) as reply:
            answer = json.load(reply)
        if answer["output"] != 3.0:
            raise InstallationFailed(f"clipper serve answers {answer}")
        return time.perf_counter() - started


class Installation:
    """Runs of one `pip install`, each in a new environment in a folder, and what they gave.

    words: what pip installs. megabytes: of each time. packages, newest: of the last one. failure:
    the message of a time that failed, which is the last one; empty if there is none.
    """

    def __init__(self, folder: Path, words: Sequence[str | Path]) -> None:
        self._folder, self._words = folder, words
        self._newest: Environment | None = None
        self.megabytes: list[float] = []
        self.packages: dict[str, str] = {}
        self.failure = ""

    @property
    def newest(self) -> Environment:
        """The environment that was made last."""
        assert self._newest is not None, "nothing is installed yet"
        return self._newest

    def again(self) -> float:
        """Install once more; return the seconds, NaN if it failed."""
        if self.failure:
            return float("nan")
        shutil.rmtree(self._folder, ignore_errors=True)
        self._folder.mkdir()
        environment = self._newest = Environment(self._folder)
        before = environment.megabytes()
        started = time.perf_counter()
        try:
            environment.pip("install", "-q", *self._words)
            seconds = time.perf_counter() - started
            environment.pip("check")
        except (InstallationFailed, subprocess.TimeoutExpired) as error:
            self.failure = str(error).strip().splitlines()[-1]
            return float("nan")
        self.megabytes.append(environment.megabytes() - before)
        self.packages = environment.packages()
        return seconds


def main(quick: bool, rows: Sequence[str] = ()) -> list[Row]:
    """Build the rows. quick: one installation of each. rows: of these alone."""
    unknown = sorted({*rows} - {*MODULES})
    if unknown:
        raise UnknownRows(f"no rows {', '.join(unknown)}; there are {', '.join(MODULES)}")
    wheels = sorted(DIST.glob("*.whl"))
    with tempfile.TemporaryDirectory(prefix="clipper-install-") as place:
        installed = {
            name: Installation(Path(place, name), wheels_or(name, wheels))
            for name in rows or MODULES
            if name != OURS or wheels
        }
        cases = {name: one.again for name, one in installed.items()}
        seconds = interleave(cases, 1 if quick else 3, 0 if quick else 1)
        made = [] if wheels else [absent("clipper: pip install", "s", "run: make wheels")]
        for name, sample in seconds.items():
            made += rows_of(name, installed[name], sample)
        if OURS in installed and not installed[OURS].failure:
            made += answers(installed[OURS].newest, 1 if quick else 5)
    return made


def wheels_or(name: str, wheels: Sequence[Path]) -> Sequence[str | Path]:
    """Return what pip installs for a server: our wheels, or the packages of a peer."""
    return wheels if name == OURS else PEERS[name].requirements


def rows_of(name: str, installed: Installation, seconds: Sample) -> list[Row]:
    """Build the rows of one server."""
    goal = INSTALLED_S if name == OURS else None
    if installed.failure:
        return [absent(f"{name}: pip install", "s", f"{FAILED}: {installed.failure}", goal=goal)]
    environment = installed.newest
    code = IMPORT.format(MODULES[name])
    imports = [float(environment.run(environment.python, "-c", code)) for _ in range(IMPORTS)]
    ours = [one for one in installed.packages if one.startswith("clipper")]
    note = f"{len(ours)} of them ours" if ours else ""
    return [
        row(f"{name}: pip install", seconds, "s", goal=goal),
        row(f"{name}: installed", Sample(tuple(installed.megabytes)), "MB"),
        row(f"{name}: packages", len(installed.packages), "packages", note=note),
        row(f"{name}: import {MODULES[name]}", Sample(tuple(imports)).map(in_ms), "ms"),
    ]


def in_ms(seconds: float) -> float:
    """Return milliseconds."""
    return seconds * 1e3


def answers(environment: Environment, repetitions: int) -> list[Row]:
    """Build the rows of first answers, with each core of the wheel."""
    (environment.folder / "program.py").write_text(PROGRAM)
    found: list[Row] = []
    for cpu, core in CORES.items():
        served = [environment.serve("program:total", CLIPPER_CPU=cpu) for _ in range(repetitions)]
        started = time.perf_counter()
        said = environment.run(environment.python, "program.py", CLIPPER_CPU=cpu).strip()
        seconds = time.perf_counter() - started
        where = str(Path(said).relative_to(environment.site))
        name = f"clipper serve to its first answer, {core}"
        found.append(row(name, Sample(tuple(served)), "s", goal=ANSWERED_S))
        found.append(row(f"a program with seven policies, {core}", seconds, "s", note=where))
    return found
