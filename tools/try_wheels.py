"""Install the wheels of dist/ into a new environment, as a user does, and measure it.

    make try-wheels
    python tools/try_wheels.py --offline FOLDER     # dependencies from a folder of wheels

The environment is made in a temporary folder. Its PATH has no compiler. Printed: seconds of the
installation, megabytes and packages of it, `pip check`, what `import clipper` takes, and the
seconds from the start of a program to the first answer of its model, once as the processor is and
once with the core for any x86-64.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
LIMIT_S = 600.0
IMPORTS = 7
PROGRAM = """\
import clipper, clipper_core.engine.engine as core, numpy
with clipper.start() as server:
    server.deploy("sums", lambda rows: rows.sum(axis=1), input="f64[3]")
    app = server.app("total", models=["sums"], slo_ms=20_000)
    assert app.predict(numpy.arange(3.0)).result(timeout=60).output == 3.0
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
        unset = ("PYTHON", "CLIPPER_", "CC", "CXX")
        kept = {name: text for name, text in os.environ.items() if not name.startswith(unset)}
        done = subprocess.run(
            [str(word) for word in words],
            cwd=self.folder,
            env={**kept, "PATH": str(self.python.parent), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
            check=False,
        )
        if done.returncode:
            raise SystemExit(f"{' '.join(map(str, words[:6]))} failed:\n{done.stdout}")
        return done.stdout

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
        more = ["--no-index", "--find-links", arguments.offline.resolve()]
        started = time.perf_counter()
        environment.pip("install", "-q", *(more if arguments.offline else []), *wheels)
        print(f"{time.perf_counter() - started:7.1f} s   pip install of {len(wheels)} wheels")
        print(f"{environment.megabytes() - before:7.1f} MB  installed")
        names = environment.pip("list", "--format", "freeze").split()
        ours = [name for name in names if name.startswith("clipper")]
        others = len(names) - len(ours) - sum(name.startswith(("pip=", "setup")) for name in names)
        print(f"{others:7d}     packages of others")
        environment.pip("check")
        times = [float(environment.run(environment.python, "-c", IMPORT)) for _ in range(IMPORTS)]
        print(f"{statistics.median(times) * 1e3:7.1f} ms  import clipper (median of {IMPORTS})")
        (Path(place) / "program.py").write_text(PROGRAM)
        for cpu, name in (("", "this processor"), ("baseline", "any x86-64")):
            started = time.perf_counter()
            core = environment.run(environment.python, "program.py", CLIPPER_CPU=cpu).strip()
            seconds = time.perf_counter() - started
            where = Path(core).relative_to(environment.folder / "venv" / "lib")
            print(f"{seconds:7.1f} s   to the first answer, core for {name}: {where}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
