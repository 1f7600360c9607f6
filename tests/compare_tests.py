"""Lists the test functions that were added, removed, renamed or moved since a revision.

    python -m tests.compare_tests 2d3d591      the working tree beside that revision

Functions are those that `pytest --collect-only` finds, without parameters. The revision is
collected in a copy of its tests, with the packages as they are installed now. A function that is
gone is called moved if one of the same name is new elsewhere, and renamed if a new function has
nearly the same body. The exit status is 1 if functions are gone, or if files cannot be collected.
"""

import ast
import difflib
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable
from io import BytesIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PATHS = ("tests", "container_sdk/tests")
SAME_BODY = 0.8  # share of lines from which on a new function is an old one under another name


def functions_of(root: Path) -> tuple[set[str], list[str]]:
    """Return node ids without parameters, and the errors of files that cannot be collected."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "--collect-only",
        "-q",
        "-p",
        "no:cacheprovider",
        *PATHS,
    ]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run(
        command, cwd=root, env=environment, capture_output=True, text=True
    ).stdout.splitlines()
    tests = {
        line.split("[")[0] for line in found if "::" in line and not line.startswith(("ERROR", " "))
    }
    return tests, [line for line in found if line.startswith("ERROR ")]


def unpack(revision: str, root: Path) -> None:
    """Put all files of a revision below `root`, and the compiled core of now beside them."""
    archive = subprocess.run(
        ["git", "archive", revision], cwd=ROOT, capture_output=True, check=True
    ).stdout
    with tarfile.open(fileobj=BytesIO(archive)) as files:
        files.extractall(root, filter="data")


def body_of(root: Path, test: str) -> list[str]:
    """Return the lines of a test function, without its name."""
    path, *names = test.split("::")
    for node in ast.walk(ast.parse((root / path).read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[-1]:
            return [line for statement in node.body for line in ast.unparse(statement).splitlines()]
    return []


def match(
    gone: Iterable[str], new: Iterable[str], old_root: Path, new_root: Path
) -> dict[str, str]:
    """Return, for each function that is gone, the new one that it became, where there is one."""
    left = {test: body_of(new_root, test) for test in new}
    became = {}
    for test in sorted(gone):
        body = body_of(old_root, test)

        def likeness(
            other: str, body: list[str] = body, name: str = test.rpartition("::")[2]
        ) -> float:
            same = other.rpartition("::")[2] == name
            return 2.0 if same else difflib.SequenceMatcher(None, body, left[other]).ratio()

        best = max(left, key=likeness, default="")
        if best and likeness(best) >= SAME_BODY:
            became[test] = best
            del left[best]
    return became


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    with tempfile.TemporaryDirectory(prefix="clipper-compare-") as scratch:
        old_root = Path(scratch)
        unpack(sys.argv[1], old_root)
        (before, old_errors), (now, new_errors) = functions_of(old_root), functions_of(ROOT)
        became = match(before - now, now - before, old_root, ROOT)
    gone = before - now - set(became)
    for test in sorted(now - before - set(became.values())):
        print(f"added    {test}")
    for old, new in became.items():
        print(
            f"{'moved   ' if old.rpartition('::')[2] == new.rpartition('::')[2] else 'renamed '}"
            f" {old} -> {new}"
        )
    for test in sorted(gone):
        print(f"removed  {test}")
    for kind, errors in ((f"{sys.argv[1]}:", old_errors), ("now:", new_errors)):
        for error in errors:
            print(f"not collected {kind} {error}")
    print(
        f"{len(before)} test functions at {sys.argv[1]}, {len(now)} now: "
        f"{len(now - before) - len(became)} added,"
        f" {len(became)} moved or renamed, {len(gone)} removed"
    )
    return int(bool(gone or new_errors))


if __name__ == "__main__":
    sys.exit(main())
