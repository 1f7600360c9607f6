"""The floor in C: floor.c, compiled when a benchmark asks for it, in a process of its own that
answers line by line."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.processes import Program

SOURCE = Path(__file__).with_name("floor.c")
NO_COMPILER = "not measured: no C compiler (gcc, cc or clang) to build bench/system/anchors/floor.c"


def compiled(source: Path, target: Path, *options: str) -> bool:
    """Compile a file of C; return False where there is no compiler. Raises: CalledProcessError."""
    compiler = next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)
    if compiler is None:
        return False
    warnings = ("-Wall", "-Wextra")
    subprocess.run([compiler, "-O2", *warnings, *options, "-o", target, source, "-lm"], check=True)
    return True


class Bare:
    """The C program of floor.c. `measure("unix", n)` returns ns per round trip, or per atomic add;
    floor.c has the names."""

    def __init__(self, program: Path) -> None:
        self._program = Program(program, apart=True)

    def measure(self, what: str, n: int) -> float:
        self._program.say(f"{what} {n}")
        return float(self._program.line())

    def close(self) -> None:
        self._program.kill()


@contextmanager
def bare() -> Iterator[Bare | None]:
    """Run the program during the block. Yields None if there is no C compiler."""
    with tempfile.TemporaryDirectory(prefix="floor-") as folder:
        program = Path(folder, "floor")
        if not compiled(SOURCE, program):
            yield None
            return
        running = Bare(program)
        try:
            yield running
        finally:
            running.close()
