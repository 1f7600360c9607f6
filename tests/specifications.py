"""Generate what follows from the specifications and from the verbs:
`python/clipper/spec/keywords.py`, `python/clipper/manage/verbs/calls.pyi`, and the tables of
options in docs/managing.md.

`python tests/test_docs.py` writes them.
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import msgspec

from clipper.settings.streams import ModelStreamSettings, StreamSettings
from clipper.spec.application import ApplicationSpec
from clipper.spec.field import DOORS, Door, SpecField, at, fields
from clipper.spec.model import ModelSpec
from clipper.spec.table import ALTERABLE, TableSpec
from tests import verb_stubs

ROOT = Path(__file__).resolve().parent.parent
SPEC = ROOT / "python" / "clipper" / "spec"
KEYWORDS = SPEC / "keywords.py"
CALLS = ROOT / "python" / "clipper" / "manage" / "verbs" / "calls.pyi"
PAGE = ROOT / "docs" / "managing.md"
SPECIFICATIONS: dict[str, type[msgspec.Struct]] = {
    "a model": ModelSpec,
    "an application": ApplicationSpec,
    "a table": TableSpec,
}
# type: its specification, the door whose keywords it has, what they are
TYPES: dict[str, tuple[type[msgspec.Struct], Door, str]] = {
    "StreamKeywords": (StreamSettings, "python", "Keywords of ClipperServer.stream()."),
    "ModelStreamKeywords": (
        ModelStreamSettings,
        "python",
        "Keywords of ClipperServer.models_from().",
    ),
    "StreamMembers": (StreamSettings, "http", "Members of the body of a new stream over HTTP."),
    "ModelStreamMembers": (
        ModelStreamSettings,
        "http",
        "Members of the body of a new stream of models over HTTP.",
    ),
    "TableKeywords": (TableSpec, "python", "Settings of a new table, beside its name and dim."),
    "TableAlterations": (TableSpec, "python", "Settings of a table that can be changed."),
    "ModelKeywords": (ModelSpec, "python", "Keywords of ClipperServer.deploy()."),
    "SentModelKeywords": (ModelSpec, "client", "Keywords of the client's deploy()."),
    "ModelMembers": (ModelSpec, "http", "Members of the body of a deployment over HTTP."),
    "ApplicationKeywords": (
        ApplicationSpec,
        "python",
        "Keywords of ClipperServer.app() and of the client's set_application().",
    ),
}
HEAD = '''"""Keywords of functions that take a specification, for editors and type checkers.

`python tests/test_docs.py` writes this module from the fields of the specifications.
"""

import os
from collections.abc import Mapping, Sequence
from typing import Literal, TypedDict

from clipper.schema import Schema
from clipper.spec.model import Reads
from clipper.types import Batching, InputType, Similar, UserValue
'''


def annotations(kind: type[msgspec.Struct]) -> dict[str, str]:
    """Return the type of each field as its module writes it."""
    module = sys.modules[kind.__module__].__file__ or ""
    tree = ast.parse(Path(module).read_text())
    classes = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    (body,) = [node.body for node in classes if node.name == kind.__name__]
    found = {}
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
            assert isinstance(node.target, ast.Name)
            assert isinstance(node.annotation.slice, ast.Tuple)
            found[node.target.id] = ast.unparse(node.annotation.slice.elts[0]).replace("'", '"')
    return found


def keywords_module() -> str:
    """Return the text of `clipper.spec.keywords`."""
    parts = [HEAD]
    for name, (kind, door, text) in TYPES.items():
        types = annotations(kind)
        lines = [
            f"    {key}: {one.python or types[one.name]}\n"
            for key, one in at(kind, door).items()
            if (key, door) not in POSITIONAL and key in ONLY.get(name, (key,))
        ]
        parts.append(f'\n\nclass {name}(TypedDict, total=False):\n    """{text}"""\n\n')
        parts += lines
    return "".join(parts)


def generated() -> dict[Path, str]:
    """Return the whole texts of the files that follow from the specifications, in part or whole."""
    page = PAGE.read_text()
    for name, kind in SPECIFICATIONS.items():
        begin, end = f"<!-- options of {name}: begin -->", f"<!-- options of {name}: end -->"
        head, rest = page.split(begin)
        page = f"{head}{begin}\n\n{options_table(kind)}\n\n{end}{rest.partition(end)[2]}"
    return {KEYWORDS: keywords_module(), CALLS: verb_stubs.stub(), PAGE: page}


POSITIONAL = {
    ("model", "python"),
    ("model", "client"),
    ("model", "http"),
    ("models", "python"),
    ("name", "python"),
    ("dim", "python"),
    ("app", "python"),
    ("url", "python"),
}
ONLY = {"TableAlterations": ALTERABLE}


def cells(one: SpecField, door: Door) -> str:
    """Return what a door calls a field, or a dash."""
    if door in one.without:
        return "-"
    name = one.names.get(door, one.name)
    if door == "command" and name.islower() and not name.startswith("-"):
        name = f"--{name.replace('_', '-')}"
    return f"`{name.split()[0]}`"


def options_table(kind: type[msgspec.Struct]) -> str:
    """Return the table of a specification: a row for each field, and why doors lack some."""
    lines = [
        "| Python, client, HTTP | file | command | unit | range | meaning |",
        "|---|---|---|---|---|---|",
    ]
    lines += [" ".join(f"| {cell}" if cell else "|" for cell in row) + " |" for row in rows(kind)]
    reasons = list(lacking(kind))
    return "\n".join([*lines, "", "What a way in lacks, and why:", "", *reasons])


def rows(kind: type[msgspec.Struct]) -> Iterator[tuple[str, ...]]:
    for one in fields(kind):
        http = cells(one, "http")
        bounds = ""
        if one.bounds is not None:
            bounds = " to ".join(f"{bound:,}".replace(",", " ") for bound in one.bounds)
        yield (http, cells(one, "file"), cells(one, "command"), one.unit, bounds, one.text)


def lacking(kind: type[msgspec.Struct]) -> Iterator[str]:
    """Yield a line for each field that some doors lack, with the reasons, and one for doors that
    have none."""
    everywhere = [door for door in DOORS if all(door in one.without for one in fields(kind))]
    for door in everywhere:
        yield f"- everything: {WORDS[door]}: {fields(kind)[0].without[door]}."
    for one in fields(kind):
        reasons: dict[str, list[str]] = {}
        for door in DOORS:
            if door in one.without and door not in everywhere:
                reasons.setdefault(one.without[door], []).append(WORDS[door])
        said = "; ".join(f"{', '.join(doors)}: {why}" for why, doors in reasons.items())
        if said:
            text = f"- `{one.names.get('http', one.name)}`: {said}."
            yield textwrap.fill(text, 100, subsequent_indent="  ")


WORDS: dict[Door, str] = {
    "python": "Python",
    "http": "HTTP",
    "client": "client",
    "file": "file",
    "command": "command",
}
