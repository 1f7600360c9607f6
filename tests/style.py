"""Measures how the code reads: docstrings and structure.

    python -m tests.style [PATH...]                a table: one row per folder, one column per rule
    python -m tests.style [PATH...] --list RULE    each place that breaks the rule

RULE is a column of the table, "inheritance" or "duplicate type".
"""

import argparse
import ast
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PRODUCT = (
    ROOT / "python/clipper",
    ROOT / "python/clipper_client",
    ROOT / "container_sdk/src/clipper_container",
)
SKIPPED = ("build", "__pycache__", "node_modules", "_pb2", ".egg-info")

# A first line that begins with one of these words does not say what the thing is or does.
WEAK_BEGINNINGS = re.compile(
    r"(?:Of|As|By|What|Who|Whom|Whose|Whether|Where|When|Why|How|If|It|They|That|This|To|For|From|In|On|Those|Told)\b"
)

ALLOWED_BASES = re.compile(
    r"(?:Store|Deployer|Policy|Decider|Runtime|Protocol|Struct|Enum|IntEnum|StrEnum|IntFlag|Flag|NamedTuple|TypedDict"
    r"|Exception|Error|Generic|ABC|object|Model|Adapter)$"
)


def files(*roots: Path) -> Iterator[Path]:
    for root in roots:
        for path in [root] if root.is_file() else sorted(root.rglob("*.py")):
            if not any(skipped in str(path) for skipped in SKIPPED):
                yield path


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a file; it must not be changed."""
    return ast.parse(path.read_text())


def definitions(tree: ast.Module) -> Iterator[tuple[ast.AST, str, bool]]:
    """Yield each module, class and function with its name, and whether it is public."""
    yield tree, "module", True

    def walk(node: ast.AST, public: bool, prefix: str) -> Iterator[tuple[ast.AST, str, bool]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                shown = public and not child.name.startswith("_")
                yield child, prefix + child.name, shown
                if isinstance(child, ast.ClassDef):
                    yield from walk(child, shown, f"{prefix}{child.name}.")
            elif isinstance(child, ast.If | ast.Try | ast.With):
                yield from walk(child, public, prefix)

    yield from walk(tree, True, "")


def is_stub(node: ast.AST) -> bool:
    """Return whether a function is an overload or a property setter, which needs no docstring."""
    names = {ast.unparse(each).split(".")[-1] for each in getattr(node, "decorator_list", ())}
    return bool(names & {"overload", "setter", "override"})


def statements(tree: ast.Module) -> int:
    """Return the number of statements of a file, without docstrings."""
    return sum(
        isinstance(node, ast.stmt)
        and not (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        )
        for node in ast.walk(tree)
    )


@cache
def findings(path: Path) -> list[tuple[str, int, str]]:
    """Return (rule, line, what) for one file. Rules that end in a # are plain counts."""
    return list(_findings(path, parsed(path)))


def _findings(path: Path, tree: ast.Module) -> Iterator[tuple[str, int, str]]:
    yield from (
        ("long line", n, line.strip()[:60])
        for n, line in enumerate(path.read_text().splitlines(), 1)
        if len(line) > 100
    )
    yield from (("statement#", 0, "") for _ in range(statements(tree)))
    for node, name, public in definitions(tree):
        line = getattr(node, "lineno", 1)
        last = name.rpartition(".")[2]
        if public and not is_stub(node) and not (last.startswith("__") and last.endswith("__")):
            yield "public#", line, name
            doc = ast.get_docstring(node)  # type: ignore[arg-type]
            if not doc:
                yield "no docstring", line, name
            elif WEAK_BEGINNINGS.match(doc):
                yield "weak beginning", line, f"{name}: {doc.splitlines()[0][:70]}"
        if isinstance(node, ast.ClassDef):
            methods = [
                child
                for child in node.body
                if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
                and not child.name.startswith("_")
            ]
            if len(methods) > 40:
                yield "large class", line, f"{name}: {len(methods)} public methods"
            for base in node.bases:
                yield "base#", line, f"{name}({ast.unparse(base)})"
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == "Any":
            yield "Any", node.lineno, ""


@cache
def classes() -> dict[str, list[str]]:
    """Return where each class of the product is defined, by name."""
    found: dict[str, list[str]] = defaultdict(list)
    for path in files(*PRODUCT):
        for node, name, _ in definitions(parsed(path)):
            if isinstance(node, ast.ClassDef) and "." not in name:
                found[name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    return found


def inheritance() -> Iterator[str]:
    """Yield classes of ours whose base is another class of ours, and no interface and no error."""
    bases: dict[str, set[str]] = defaultdict(set)
    places = []
    for path in files(*PRODUCT):
        for rule, line, what in findings(path):
            if rule == "base#":
                name, _, base = what.rstrip(")").partition("(")
                base = base.split("[")[0].split(".")[-1]
                bases[name.rpartition(".")[2]].add(base)
                places.append((f"{path.relative_to(ROOT)}:{line}: {what}", base))

    def is_a(name: str, kinds: set[str]) -> bool:
        return any(base in kinds or (base != name and is_a(base, kinds)) for base in bases[name])

    ours = classes()
    for place, base in places:
        is_interface = ALLOWED_BASES.search(base) or bases[base] & {"Protocol", "ABC"}
        is_error = is_a(base, {"BaseException", "Exception", "ClipperError"})
        if base in ours and not is_interface and not is_error:
            yield place


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.style", usage=__doc__)
    parser.add_argument("paths", nargs="*", type=Path)
    parser.add_argument("--list", dest="rule")
    settings = parser.parse_args()
    paths = [path.resolve() for path in settings.paths] or [*PRODUCT]
    if settings.rule == "duplicate type":
        for name, places in sorted(classes().items()):
            if len(places) > 1 and not name.startswith("_"):
                print(name, *places)
        return 0
    if settings.rule == "inheritance":
        print(*inheritance(), sep="\n")
        return 0
    table: dict[str, Counter[str]] = defaultdict(Counter)
    for path in files(*paths):
        shown = path.relative_to(ROOT)
        for rule, line, what in findings(path):
            table[str(shown.parent)][rule] += 1
            if rule == settings.rule:
                print(f"{shown}:{line}: {what}")
    if settings.rule:
        return 0
    rules = [
        "statement#",
        "public#",
        "no docstring",
        "weak beginning",
        "Any",
        "long line",
        "large class",
    ]
    table["TOTAL"] = sum(table.values(), Counter())
    print(f"{'':<48}", *(f"{rule:>14}" for rule in rules))
    for folder, counts in table.items():
        print(f"{folder:<48}", *(f"{counts[rule]:>14}" for rule in rules))
    return 0


if __name__ == "__main__":
    sys.exit(main())
