"""Records which tests run which functions of the package and of the SDK, for tests.mutants.

    python -m tests.covering            all test files, two at a time: half an hour
    python -m tests.covering --jobs 4   what an interrupted run recorded is kept (build/covering)
    python -m tests.covering FILE...    these alone; what the record says of the others is kept

Needs coverage.py: .venv/bin/python -m pip install "coverage>=7.10". Each test file runs in a
process of its own. Lines that run in a process started by a test count for that test, or for the
whole file if its tests share what they start. tests/covering.txt names for each function some tests
that run its lines, those with the least time and the fewest other functions first.
"""

import argparse
import ast
import contextlib
import hashlib
import json
import math
import os
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parent.parent
RECORD = ROOT / "tests" / "covering.txt"
SOURCES = ("python/clipper", "python/clipper_client", "container_sdk/src/clipper_container")
FILE_LIMIT_S = 400.0
TIMES_COVERED = 4  # how many tests of each line are kept, if that many run it
FUNCTION_MAX = 14  # tests of a function
FUNCTION_MAX_S = 60.0  # their time; one test of each line is kept beyond it

# What says little of the package, or needs the whole machine.
LEFT_OUT = (
    "tests/allocation/",
    "tests/clients/",
    "tests/core/",
    "tests/end_to_end/test_wheels.py",
    "tests/images/test_containers.py",
    "tests/images/test_tables.py",
    "tests/kubernetes/",
    "tests/languages/",
    "tests/schedules/",
    "tests/stress/",
)

CONFIG = """[run]
source =
    {root}/python/clipper
    {root}/python/clipper_client
    {root}/container_sdk/src/clipper_container
data_file = {folder}/lines
parallel = true
patch =
    _exit
    fork
sigterm = true
context = ${{COVERING_TEST}}
disable_warnings =
    no-data-collected
    module-not-imported
    module-not-measured
    already-imported
"""

Lines = dict[str, dict[int, set[str]]]  # source file -> line -> tests


# -- the plugin: which test runs


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Tell coverage.py, here and in processes that are started from here, which test begins."""
    import coverage

    test = item.nodeid.partition("[")[0]
    found = getattr(item, "_fixtureinfo").name2fixturedefs.values()  # noqa: B009
    shares = any(fixtures[-1].scope != "function" and fixtures[-1].baseid for fixtures in found)
    os.environ["COVERING_TEST"] = test.partition("::")[0] if shares else test
    if measuring := coverage.Coverage.current():
        measuring.switch_context(test)


# -- recording


def test_files() -> list[str]:
    found = [
        *(ROOT / "tests").glob("*/**/test_*.py"),
        *(ROOT / "container_sdk/tests").rglob("test_*.py"),
    ]
    names = sorted(path.relative_to(ROOT).as_posix() for path in found)
    return [name for name in names if not name.startswith(LEFT_OUT)]


def folder_of(test: str) -> Path:
    """Return where what is known of a test file is kept while its text is the same."""
    digest = hashlib.sha256((ROOT / test).read_bytes()).hexdigest()[:12]
    return ROOT / "build/covering" / f"{test.replace('/', '-')}-{digest}"


def run(test: str) -> str:
    """Run the tests of a file. Returns pytest's last line."""
    folder = folder_of(test)
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    config = folder / "config"
    config.write_text(CONFIG.format(root=ROOT, folder=folder))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    command += ["-p", "tests.covering", f"--junitxml={folder}/times", test]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**os.environ, "COVERAGE_PROCESS_START": str(config), "COVERING_TEST": test},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=FILE_LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"longer than {FILE_LIMIT_S:g} s"
    (folder / "found.json").write_text(json.dumps(condense(test, folder)))
    return (done.stdout.splitlines() or [""])[-1]


def condense(test: str, folder: Path) -> dict[str, Any]:
    """Read what pytest and coverage.py wrote: the seconds of each test, and who runs which lines.

    Returns {"seconds": {test: seconds}, "lines": {source: {line: [test]}}}.
    """
    from coverage import CoverageData
    from coverage.exceptions import DataError

    seconds, module = Counter[str](), test.removesuffix(".py").replace("/", ".")
    for case in ElementTree.parse(folder / "times").iter("testcase"):
        outer = case.get("classname", "").removeprefix(module).strip(".")
        name = "::".join(filter(None, (test, outer, case.get("name", "").partition("[")[0])))
        for whole in (test, name):
            seconds[whole] += float(case.get("time", 0))
    lines: dict[str, dict[int, list[str]]] = {}
    for path in folder.glob("lines.*"):
        data = CoverageData(str(path))
        with contextlib.suppress(DataError):  # a process that was killed while it wrote
            data.read()
        for source in data.measured_files():
            found = lines.setdefault(Path(source).relative_to(ROOT).as_posix(), {})
            for line, contexts in data.contexts_by_lineno(source).items():
                found[line] = found.get(line, [])
                tests = {context.rpartition("|")[2] or test for context in contexts}
                found[line] += sorted(tests.difference(found[line]))
        path.unlink()
    return {"seconds": seconds, "lines": lines}


def read(test: str, lines: Lines, seconds: Counter[str]) -> None:
    """Add what was recorded of a test file: who runs which lines, and how long the tests take."""
    path = folder_of(test) / "found.json"
    if path.exists():
        known = json.loads(path.read_text())
        seconds.update(known["seconds"])
        for source, found in known["lines"].items():
            for line, tests in found.items():
                lines[source][int(line)].update(tests)


# -- choosing


def functions_of(tree: ast.AST, name: str = "") -> Iterator[tuple[str, range]]:
    """Return the names of functions, as tests.mutants has them, with the lines of their bodies."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            if not isinstance(child, ast.ClassDef):
                yield inner, range(child.body[0].lineno, (child.end_lineno or 0) + 1)
            yield from functions_of(child, inner)
        elif isinstance(child, ast.stmt | ast.ExceptHandler | ast.match_case):
            yield from functions_of(child, name)


def choose(lines: dict[int, set[str]], seconds: Counter[str], functions: Counter[str]) -> list[str]:
    """Choose tests of a function.

    lines: who runs its lines.  functions: how many functions each test runs.
    """
    runs: defaultdict[str, set[int]] = defaultdict(set)
    for line, tests in lines.items():
        for test in tests:
            runs[test].add(line)

    def cost(test: str) -> float:
        return (0.3 + seconds[test]) * math.sqrt(functions[test]) / len(runs[test])

    chosen, covered, total = [], Counter[int](), 0.0
    for needed in (1, TIMES_COVERED):
        for test in sorted(runs.keys() - chosen, key=lambda test: (cost(test), test)):
            if needed > 1 and (
                len(chosen) >= FUNCTION_MAX or total + seconds[test] > FUNCTION_MAX_S
            ):
                continue
            if any(covered[line] < needed for line in runs[test]):
                chosen.append(test)
                covered.update(runs[test])
                total += seconds[test] if needed > 1 else 0.0
    return sorted(chosen, key=lambda test: (cost(test), test))


def choose_all(lines: Lines, seconds: Counter[str]) -> dict[str, list[str]]:
    """Choose the tests of all functions: "path function" -> tests."""
    found: dict[str, dict[int, set[str]]] = {}
    for path, known in sorted(lines.items()):
        for name, body in functions_of(ast.parse((ROOT / path).read_bytes())):
            if ran := {line: known[line] for line in body if line in known}:
                found[f"{path} {name}"] = ran
    functions = Counter(test for ran in found.values() for test in set().union(*ran.values()))
    return {name: choose(ran, seconds, functions) for name, ran in found.items()}


@dataclass(frozen=True)
class Covering:
    """The content of tests/covering.txt. tests: of each function, "path function". seconds: of each
    test or whole file."""

    tests: dict[str, list[str]]
    seconds: dict[str, float]

    def write(self, path: Path = RECORD) -> None:
        chosen = {test for tests in self.tests.values() for test in tests}
        named = sorted(chosen | {test.partition("::")[0] for test in chosen})
        number = {test: i for i, test in enumerate(named)}
        rows = [f"{self.seconds[test]:.1f} {test[max(test.find('::'), 0) :]}" for test in named]
        for source, group in groupby(sorted(self.tests), lambda name: name.partition(" ")[0]):
            rows += ["", source]
            for name in group:
                numbers = (str(number[test]) for test in self.tests[name])
                rows.append(" ".join((name.partition(" ")[2], *numbers)))
        path.write_text("\n".join(rows) + "\n")

    def replaced(self, newer: "Covering") -> "Covering":
        """Return this record with what a newer one says of the test files that it ran, without
        functions and tests that no longer exist."""
        again = {test.partition("::")[0] for test in newer.seconds}
        texts = {path: (ROOT / path).read_text() for path in test_files()}
        defined = {
            f"{source} {name}"
            for folder in SOURCES
            for path in (ROOT / folder).rglob("*.py")
            for source in [path.relative_to(ROOT).as_posix()]
            for name, _ in functions_of(ast.parse(path.read_bytes()))
        }

        def is_kept(test: str) -> bool:
            path, _, name = test.partition("::")
            if path in again or path not in texts:
                return False
            return not name or f"def {name.rpartition('::')[2]}(" in texts[path]

        tests, seconds = {}, {**self.seconds, **newer.seconds}
        for name in sorted((self.tests.keys() | newer.tests.keys()) & defined):
            found = [test for test in self.tests.get(name, []) if is_kept(test)]
            if name in newer.tests:
                found = sorted((*newer.tests[name], *found), key=lambda test: seconds[test])
            if found:
                tests[name] = found[:FUNCTION_MAX]
        return Covering(tests, seconds)

    @classmethod
    def read(cls, path: Path = RECORD) -> "Covering":
        first, *sources = path.read_text().rstrip().split("\n\n")
        named, seconds, file = [], {}, ""
        for row in first.splitlines():
            taken, name = row.split(" ", 1)
            file = file if name.startswith("::") else name
            named.append(file if name == file else file + name)
            seconds[named[-1]] = float(taken)
        tests = {}
        for text in sources:
            source, *functions = text.splitlines()
            for row in functions:
                name, *numbers = row.split()
                tests[f"{source} {name}"] = [named[int(number)] for number in numbers]
        return cls(tests, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.covering", usage=__doc__)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("tests", nargs="*", help="some test files; all if none is named")
    chosen = parser.parse_args()
    jobs, tests = chosen.jobs, chosen.tests or test_files()
    missing = [test for test in tests if not (folder_of(test) / "found.json").exists()]
    with ThreadPoolExecutor(jobs) as pool:
        runs = {pool.submit(run, test): test for test in missing}
        for i, done in enumerate(as_completed(runs), 1):
            print(f"{i} of {len(missing)}: {runs[done]}: {done.result()}", flush=True)
    lines: Lines = defaultdict(lambda: defaultdict(set))
    seconds = Counter[str]()
    for test in tests:
        read(test, lines, seconds)
    found = Covering(choose_all(lines, seconds), seconds)
    if chosen.tests:
        found = Covering.read().replaced(found)
    found.write()
    print(f"{len(found.tests)} functions are run by {len(found.seconds)} tests and files")


if __name__ == "__main__":
    main()
