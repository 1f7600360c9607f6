"""Install the wheels of dist/ into a new environment, as a user does, and measure it.

    make try-wheels
    python tools/try_wheels.py --offline FOLDER     # dependencies from a folder of wheels

The environment is made in a temporary folder. Its PATH has no compiler. Printed: seconds of the
installation, megabytes and packages of it, what `pip check` says, what `import clipper` takes, the
seconds from the start of `clipper serve` to its first answer over HTTP, and those of a program with
two models and seven policies: both as the processor is, and with the core for any x86-64.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LIMIT_S = 600.0
LOOK_S = 0.01
IMPORTS = 7
FREE = ("--http", "127.0.0.1:0", "--admin", "127.0.0.1:0")
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/api/total/predict")
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
IMPORT = "import time; a = time.perf_counter(); import clipper; print(time.perf_counter() - a)"


class Environment:
    """A new environment in a folder, whose commands see no compiler."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.python = folder / "venv" / "bin" / "python"
        subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True, timeout=LIMIT_S)

    def run(self, *words: str | Path, **variables: str) -> str:
        """Run a command of the environment and return what it printed. Raises SystemExit."""
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
            raise SystemExit(f"{' '.join(map(str, words[:6]))} failed:\n{done.stdout}")
        return done.stdout

    def variables(self, more: dict[str, str]) -> dict[str, str]:
        """Return the variables of its commands."""
        unset = ("PYTHON", "CLIPPER_", "CC", "CXX")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
        return {**kept, "PATH": str(self.python.parent), **more}

    def serve(self, *words: str, **variables: str) -> float:
        """Run `clipper serve`, query it and end it; return the seconds to the first answer."""
        started = time.perf_counter()
        output = self.folder / "output"
        with (
            output.open("w") as file,
            subprocess.Popen(
                [self.python.with_name("clipper"), "serve", *words],
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
            raise SystemExit(f"clipper serve ended with {server.returncode}:\n{output.read_text()}")
        return seconds

    def _first_answer(
        self, server: "subprocess.Popen[bytes]", output: Path, started: float
    ) -> float:
        while not (address := ADDRESS.search(output.read_text())):
            if server.poll() is not None or time.perf_counter() - started > LIMIT_S:
                raise SystemExit(f"clipper serve prints no address:\n{output.read_text()}")
            time.sleep(LOOK_S)
        body = b'{"input": [0, 1, 2]}'
        with urllib.request.urlopen(address[0], body, timeout=LIMIT_S) as reply:
            answer = json.load(reply)
        if answer["output"] != 3.0:
            raise SystemExit(f"clipper serve answers {answer}")
        return time.perf_counter() - started

    def pip(self, *words: str | Path) -> str:
        """Run pip of the environment."""
        return self.run(self.python, "-m", "pip", "--disable-pip-version-check", *words)

    def megabytes(self) -> float:
        """Return the size of its files."""
        files = (path for path in (self.folder / "venv").rglob("*") if not path.is_symlink())
        return sum(path.stat().st_size for path in files if path.is_file()) / 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description="Install the wheels of dist/ as a user does.")
    parser.add_argument("--offline", type=Path, help="a folder that has the dependencies as wheels")
    arguments = parser.parse_args()
    wheels = sorted(DIST.glob("*.whl"))
    if not wheels:
        raise SystemExit("there are no wheels in dist/. Run: make wheels")
    with tempfile.TemporaryDirectory(prefix="clipper-try-") as place:
        environment = Environment(Path(place))
        before = environment.megabytes()
        offline = arguments.offline
        more = ["--no-index", "--find-links", offline.resolve()] if offline else []
        started = time.perf_counter()
        environment.pip("install", "-q", *more, *wheels)
        print(f"{time.perf_counter() - started:7.1f} s   pip install of {len(wheels)} wheels")
        print(f"{environment.megabytes() - before:7.1f} MB  installed")
        names = environment.pip("list", "--format", "freeze").split()
        ours = [name for name in names if name.startswith("clipper")]
        others = len(names) - len(ours) - sum(name.startswith(("pip=", "setup")) for name in names)
        print(f"{others:7d}     packages of others")
        print(f"           pip check: {environment.pip('check').strip()}")
        times = [float(environment.run(environment.python, "-c", IMPORT)) for _ in range(IMPORTS)]
        print(f"{statistics.median(times) * 1e3:7.1f} ms  import clipper (median of {IMPORTS})")
        (Path(place) / "program.py").write_text(PROGRAM)
        served = ("program:total", "--input", "f64[3]", *FREE)
        for cpu, name in (("", "this processor"), ("baseline", "any x86-64")):
            seconds = environment.serve(*served, CLIPPER_CPU=cpu)
            print(f"{seconds:7.1f} s   clipper serve to its first answer, core for {name}")
            started = time.perf_counter()
            core = environment.run(environment.python, "program.py", CLIPPER_CPU=cpu).strip()
            seconds = time.perf_counter() - started
            where = Path(core).relative_to(environment.folder / "venv" / "lib")
            print(f"{seconds:7.1f} s   a program with seven policies, core for {name}: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
