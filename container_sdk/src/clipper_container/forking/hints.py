"""Which modules a model will import, found without running its code."""

from __future__ import annotations

import ast
import json
import os
import sys
from collections.abc import Iterable, Iterator, Sequence

from clipper_container.forking import Message
from clipper_container.forking.preload import NOT_BEFORE_A_FORK
from clipper_container.loading import files
from clipper_container.loading.kinds import KINDS
from clipper_container.loading.targets import MAGIC, PACKED
from clipper_container.shortage import is_own

HEAD_BYTES_MAX = 1 << 18
SOURCES_MAX = 64
SOURCE_BYTES_MAX = 1 << 20
_TORCH_IMPORTS = ("torch",)
_COMMON = frozenset({"clipper", "clipper_core", "clipper_container", "numpy", "__main__", ""})


def imports_of(target: str, code: Sequence[str], folder: str) -> tuple[str, ...]:
    """Return names of modules that a model imports, as far as its file or source tells.

    target, code: as for `load_target`. folder: where the model runs. A packed file names them in
    its first line; of a `module:attribute` the import statements of its source, and of the local
    modules which that imports, are read.

    Raises: OSError if this process lacks what it takes to read them.
    """
    if target.endswith(PACKED):
        about = _head(target)
        found = [*_imports_of_kind(str(about.get("kind"))), *about.get("imports", ())]
    elif ":" not in target:
        found = [*_imports_of_kind(files.kind_by_name(target))]
    else:
        folders = [one if os.path.isdir(one) else os.path.dirname(one) for one in code]
        found = _of_source(target.partition(":")[0], [*folders, folder])
    return tuple(dict.fromkeys(name for name in map(str, found) if top_level([name])))


def _imports_of_kind(kind: str) -> Sequence[str]:
    """Return the modules that a kind of packed models imports; `torch` is a module by value."""
    if kind == "torch":
        return _TORCH_IMPORTS
    return KINDS[kind].imports if kind in KINDS else ()


def top_level(names: Iterable[str]) -> frozenset[str]:
    """Return the packages of these modules that are worth importing before a fork."""
    tops = {name.partition(".")[0] for name in names}
    return frozenset(tops - _COMMON - sys.stdlib_module_names - NOT_BEFORE_A_FORK.keys())


def _head(path: str) -> Message:
    try:
        with open(path, "rb") as file:
            head = file.readline(HEAD_BYTES_MAX)
        found = json.loads(head.removeprefix(MAGIC))
    except (OSError, ValueError) as error:
        if is_own(error):
            raise
        return {}
    return found if isinstance(found, dict) else {}


def _of_source(module: str, folders: Sequence[str]) -> list[str]:
    found: list[str] = []
    seen, left = {module}, [module]
    while left and len(seen) <= SOURCES_MAX:
        source = _source(left.pop(), folders)
        if source is None:
            continue
        for name in _imported(source):
            found.append(name)
            if name not in seen:
                seen.add(name)
                left.append(name)
    return found


def _source(module: str, folders: Sequence[str]) -> ast.AST | None:
    """Parse a module of one of the folders; None if there is none."""
    path = module.replace(".", os.sep)
    for folder in folders:
        for name in (f"{path}.py", os.path.join(path, "__init__.py")):
            try:
                with open(os.path.join(folder, name), "rb") as file:
                    return ast.parse(file.read(SOURCE_BYTES_MAX))
            except (OSError, SyntaxError, ValueError) as error:
                if is_own(error):
                    raise
    return None


def _imported(source: ast.AST) -> Iterator[str]:
    for node in ast.walk(source):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
