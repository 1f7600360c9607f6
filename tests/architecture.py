"""Generate the parts of docs/architecture.md that follow from the code.

`python tests/test_docs.py` writes them between the markers of that page.
"""

import ast
import importlib
import re
import sys
import textwrap
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import Any

import clipper
from clipper.processes.state import table_rows

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "clipper_core"
PACKAGE = ROOT / "python" / "clipper"
SDK = ROOT / "container_sdk" / "src" / "clipper_container"
PAGE = ROOT / "docs" / "architecture.md"
INDENT = 15
WIDTH = 99


def blocks() -> dict[str, str]:
    """Return the generated text of the page by the name of its markers."""
    core = [(f"{name}/", core_page(name), modules(CORE / name)) for name in levels()]
    return {
        "core": fenced(listing(core)),
        "core picture": fenced(core_picture(levels())),
        "packages": fenced(listing(packages())),
        "layers": fenced(layers()),
        "states of children": "\n".join(table_rows()),
        "sdk": fenced(listing([("", first_sentence(SDK / "__init__.py"), modules(SDK))])),
    }


def replaced(page: str, parts: dict[str, str]) -> str:
    """Return the page with these parts between their markers."""
    for name, text in parts.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        head, found, rest = page.partition(begin)
        assert found, f"{PAGE.name} has no markers for {name!r}"
        assert end in rest, f"{PAGE.name} has no end marker for {name!r}"
        page = f"{head}{begin}\n{text}\n\n{end}{rest.partition(end)[2]}"
    return page


def fenced(text: str) -> str:
    return f"```\n{text}\n```"


def levels() -> dict[str, int]:
    """Return the packages of the core, lowest first, each with its height in the import graph."""
    declared = {
        path.parent.name: re.findall(r"\w+", found[1])
        for path in sorted(CORE.glob("*/__init__.pxd"))
        if (found := re.search(r"^# May import: (.+)\.$", path.read_text(), re.M))
    }
    height: dict[str, int] = {"nothing": -1}
    while len(height) <= len(declared):
        for name, targets in declared.items():
            if all(target in height for target in targets):
                height[name] = 1 + max(height[target] for target in targets)
    del height["nothing"]
    return dict(sorted(height.items(), key=lambda item: (item[1], item[0])))


def core_picture(height: dict[str, int]) -> str:
    """Return the packages of the core in rows; a package imports from lower rows only."""
    rows = [[name for name in height if height[name] == level] for level in set(height.values())]
    return "\n".join("  " + "   ".join(row) for row in reversed(rows))


def layers() -> str:
    """Return the rows of the Python package, with a star for those that import the core."""
    tidy = importlib.import_module("tests.test_tidy")
    return "\n".join(
        "  " + "   ".join(f"{name}*" if name in tidy.CORE_USERS else name for name in row)
        for row in reversed(tidy.PYTHON_LAYERS)
    )


def packages() -> list[tuple[str, str, list[str]]]:
    """Return the packages of python/clipper: name, first sentence, modules."""
    return [
        (f"{page.parent.name}/", first_sentence(page), modules(page.parent))
        for page in sorted(PACKAGE.glob("*/__init__.py"))
    ] + [("", "Modules beside the packages:", modules(PACKAGE, nested=False))]


def modules(folder: Path, nested: bool = True) -> list[str]:
    """Return the modules of a package, then its packages with a slash."""
    suffix = ".pxd" if folder.is_relative_to(CORE) else ".py"
    own = sorted(path.stem for path in folder.glob(f"*{suffix}") if path.stem != "__init__")
    below = sorted(f"{path.parent.name}/" for path in folder.glob("*/__init__.py"))
    return [*own, *below] if nested else own


def core_page(name: str) -> str:
    """Return the first paragraph of the page of a package of the core."""
    text = (CORE / name / "__init__.pxd").read_text().split("\n#\n")[0]
    return " ".join(line.lstrip("# ") for line in text.splitlines())


def first_sentence(path: Path) -> str:
    """Return the first sentence of a module's docstring."""
    text = " ".join((ast.get_docstring(ast.parse(path.read_text())) or "").split())
    return re.split(r"(?<=\.) ", text)[0]


def listing(rows: Iterable[tuple[str, str, list[str]]]) -> str:
    """Return rows of name, text and modules, wrapped to the width of the page."""
    lines: list[str] = []
    pad = " " * INDENT
    for name, text, names in rows:
        lines += textwrap.wrap(f"{name:<{INDENT}}{text}", WIDTH, subsequent_indent=pad)
        lines += textwrap.wrap(" ".join(names), WIDTH, initial_indent=pad, subsequent_indent=pad)
    return "\n".join(line.rstrip() for line in lines)


def query_path() -> str:
    """Return the Python files that a query passes which is not plain, and which the cache does not
    answer. A plain one passes none."""
    with clipper.start() as server:
        server.deploy("sums", lambda rows: rows.sum(axis=1), input="f64[2]")
        server.deploy(
            "named",
            lambda rows: {"sum": rows.sum(axis=1)},
            input="f64[2]",
            outputs={"sum": "f64"},
        )
        app = server.app("total", models=["sums"], slo_ms=10_000, default=-1.0)
        named = server.app("one", models=["named"], slo_ms=10_000, policy="ridge", output="sum")
        for _ in range(8):  # the first query may import more, and the slowest are written down
            app.predict([0.0, 0.0]).result()
            named.predict([0.0, 0.0]).result()
        files, future = traced(lambda: app.predict([0.0, 0.0], context=[1.0]))
        files += traced(future.result)[0]
        assert not files, f"a plain query runs code of {files}"
        down, future = traced(lambda: named.predict([1.0, 2.0]))
        up, answer = traced(future.result)
    assert answer.output == 3.0, answer
    lines = []
    for call, files in (("app.predict(x)", down), ("future.result()", up)):
        names = [path.relative_to(PACKAGE).as_posix() for path in files]
        lines += [call, *(f"  {name}" for name in names)]
    return fenced("\n".join(lines))


def traced(call: Callable[[], Any]) -> tuple[list[Path], Any]:
    """Return the files of the package whose functions run during the call, and its result."""
    files: list[Path] = []

    def on_event(frame: FrameType, event: str, _: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            files.append(path)

    sys.setprofile(on_event)
    try:
        result = call()
    finally:
        sys.setprofile(None)
    return list(dict.fromkeys(files)), result
