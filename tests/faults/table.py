"""The table of faults: what could go wrong, what happens now, and which tests show it.

Each file `tests/faults/AREA.toml` holds entries `[[fault]]` with these keys:

    id      short and unique over all files, for example "H1"
    what    what happens, or used to happen: one sentence
    now     what happens now: one sentence
    tests   at least one test, as "path::function" from the root of the repository
    figure  optional: a measured figure, and the command that measures it

A file may begin with `title = "..."`, the heading of its section. `python -m tests.faults --write`
makes docs/faults.md of these files; tests/test_faults.py fails when the page is out of date or a
test that is named does not exist.
"""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent.parent
FOLDER = ROOT / "tests" / "faults"
PAGE = ROOT / "docs" / "faults.md"
KEYS = {"id", "what", "now", "tests", "figure"}

HEAD = """# Faults

What can go wrong, what Clipper does about it, and the tests that show it. A row exists only together with a test.

This page is generated from `tests/faults/*.toml`; do not edit it. After a change there, run `python -m tests.faults --write`.
"""  # noqa: E501


class Fault(NamedTuple):
    """One row of the table."""

    id: str
    what: str
    now: str
    tests: tuple[str, ...]
    figure: str


class Section(NamedTuple):
    """The rows of one file, in the order of their ids."""

    path: Path
    title: str
    faults: tuple[Fault, ...]


def read(path: Path) -> Section:
    """Read one file of the table.

    Raises ValueError, with the file and the entry in its text, for a missing, unknown or empty key.
    """
    table = tomllib.loads(path.read_text())
    faults = []
    for number, entry in enumerate(table.pop("fault", []), 1):
        where = f"{path.name}, fault {entry.get('id', f'number {number}')!r}"
        if unknown := sorted(entry.keys() - KEYS):
            raise ValueError(f"{where}: unknown keys: {', '.join(unknown)}")
        for key in ("id", "what", "now"):
            if not isinstance(entry.get(key), str) or not entry[key].strip():
                raise ValueError(f"{where}: {key} must be a sentence")
        tests = entry.get("tests")
        if (
            not isinstance(tests, list)
            or not tests
            or not all(isinstance(test, str) for test in tests)
        ):
            raise ValueError(f"{where}: tests must name at least one test")
        figure = entry.get("figure", "")
        faults.append(Fault(entry["id"], entry["what"], entry["now"], tuple(tests), figure))
    title = table.pop("title", path.stem.capitalize())
    if table:
        raise ValueError(
            f"{path.name}: unknown keys: {', '.join(sorted(table))}; entries are written as"
            " [[fault]]"
        )
    return Section(path, title, tuple(sorted(faults, key=_order)))


def read_all(folder: Path = FOLDER) -> list[Section]:
    """Read every file of the table, sorted by name."""
    return [read(path) for path in sorted(folder.glob("*.toml"))]


def problems(sections: list[Section], root: Path = ROOT) -> Iterator[str]:
    """Yield a sentence for each id that is used twice and each named test that does not exist under
    `root`."""
    seen: dict[str, str] = {}
    for section in sections:
        for fault in section.faults:
            if fault.id in seen:
                yield f"{section.path.name}: the id {fault.id} is used in {seen[fault.id]} as well"
            seen[fault.id] = section.path.name
            for test in fault.tests:
                path, *names = test.split("[")[0].split("::")
                if not names or "::".join(names) not in names_of_tests(root / path):
                    yield f"{section.path.name}: {fault.id}: there is no test {test}"


@lru_cache
def names_of_tests(path: Path) -> frozenset[str]:
    """Return the names of the tests in a file, `function` or `Class::function`, without importing
    it."""
    if not path.is_file():
        return frozenset()
    return frozenset(_test_names(ast.parse(path.read_text()), ""))


def _test_names(node: ast.AST, prefix: str) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and child.name.startswith(
            "test"
        ):
            yield prefix + child.name
        elif isinstance(child, ast.ClassDef) and child.name.startswith(("Test", "test")):
            yield from _test_names(child, f"{prefix}{child.name}::")
        elif isinstance(child, ast.If | ast.Try):
            yield from _test_names(child, prefix)
        elif isinstance(child, ast.Assign):  # Hypothesis: TestStates = StateMachine.TestCase
            names = [target.id for target in child.targets if isinstance(target, ast.Name)]
            yield from (prefix + name for name in names if name.startswith("Test"))


def page(sections: list[Section]) -> str:
    """Return the text of docs/faults.md."""
    parts = [HEAD]
    for section in sections:
        if section.faults:
            parts.append(
                f"## {section.title}\n\n| id | what happens | what Clipper does | shown by"
                " |\n|---|---|---|---|"
            )
            parts[-1] += "".join("\n" + _row(fault) for fault in section.faults) + "\n"
    return "\n".join(parts)


def _row(fault: Fault) -> str:
    now = f"{fault.now} {fault.figure}" if fault.figure else fault.now
    tests = ", ".join(f"`{test}`" for test in fault.tests)
    return f"| {fault.id} | {_cell(fault.what)} | {_cell(now)} | {tests} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _order(fault: Fault) -> tuple[str, int, str]:
    letters, digits = re.fullmatch(r"(\D*)(\d*).*", fault.id, re.S).groups()  # type: ignore[union-attr]
    return letters, int(digits or 0), fault.id
