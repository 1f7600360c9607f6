"""The source files that a `module:attribute` runs, and a copy of them that belongs to one version.

They are found without running them: the module, what it imports from the same folders, and so on.
Of a package that is imported, all files are taken. Data files are taken if one of these modules
names them ("weights.npy", FOLDER / "data" / "a.csv", os.path.join(FOLDER, "a.csv")).

A version keeps its code: the Python files are copied beside the files of other models, and the
version's containers import the copy. All else in the folder (data, modules whose names are made
at run time) is linked, so that a module finds beside its copy what it finds beside its original.
The folders themselves come after the copy, for hosts that lack it.
"""

import ast
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clipper.deploy.packages.folders import IGNORE_FILES, goes_in, names_under
from clipper.errors import PackagingError

_log = logging.getLogger(__name__)
SUFFIX: Final = ".code"
FILES_MAX: Final = 10_000
SOURCE_BYTES_MAX: Final = 64 << 20
LINKS_MAX: Final = 10_000
WAY_CHARS_MAX: Final = 1024
PARSED_MAX: Final = 1024  # files whose uses are remembered, with their content
_OURS: Final = frozenset({"clipper", "clipper_core", "clipper_container"})


@dataclass(slots=True)
class SourceFiles:
    """Files by the folder they are in: paths relative to it, sorted."""

    files: dict[Path, list[str]] = field(default_factory=dict)

    def add(self, root: Path, names: Iterable[str]) -> None:
        """Add files of a folder."""
        self.files[root] = sorted({*self.files.get(root, ()), *names})

    def has(self, root: Path, name: str) -> bool:
        """Return True if a file of a folder was added."""
        return name in self.files.get(root, ())


def reached(modules: Iterable[str], roots: Sequence[Path]) -> SourceFiles:
    """Return the files that modules need of these folders, in which they are looked up in this
    order, and before installed packages. Nothing is run."""
    found: dict[Path, set[str]] = {}
    seen, left = set(modules), sorted({*modules})
    taken: set[Path] = set()  # modules and packages: thousands of names stand for one package
    while left:
        name = left.pop()
        if name.partition(".")[0] in _OURS:
            continue
        if (place := _place(name, roots)) is None or place[1] in taken:
            continue
        taken.add(place[1])
        root, names = place[0], _names(*place)
        files = found.setdefault(root, set())
        files.update(names)
        if sum(map(len, found.values())) > FILES_MAX:
            raise PackagingError(
                f"module {name!r} reaches more than {FILES_MAX} files of {root}.",
                hint="Put what the model imports into a folder of its own.",
            )
        for one in names:
            if one.endswith(".py"):
                uses = _uses_of(root, one)
                more = uses.modules - seen
                seen |= more
                left += sorted(more)
                files.update(_data(uses.data, root))
    return SourceFiles({root: sorted(names) for root, names in found.items()})


def holds(folders: Sequence[str], module: str) -> bool:
    """Return True if one of these folders has the module."""
    return _find(module, [Path(folder) for folder in folders]) is not None


def defined_in(folders: Sequence[str], module: str) -> set[str] | None:
    """Return the names that the file of a module of these folders defines anywhere, without running
    it; None if it is not there, or may have others (made at run time, or by `import *`)."""
    place = _place(module, [Path(folder) for folder in folders])
    if place is None:
        return None
    file = place[1] / "__init__.py" if place[1].is_dir() else place[1]
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return None
    found = {one.stem for one in place[1].glob("*.py")} if place[1].is_dir() else set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {(one.asname or one.name).partition(".")[0] for one in node.names}
    return None if found & {"*", "__getattr__"} or _is_dynamic(tree) else found


def _is_dynamic(tree: ast.Module) -> bool:
    """Return whether a module may make names at run time."""
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    return not names.isdisjoint(("globals", "vars", "exec", "setattr", "locals"))


def _find(module: str, roots: Sequence[Path]) -> tuple[Path, list[str]] | None:
    """Return the folder that holds a module, and its files there: one, or all of its package."""
    place = _place(module, roots)
    return None if place is None else (place[0], _names(*place))


def _place(module: str, roots: Sequence[Path]) -> tuple[Path, Path] | None:
    """Return the folder that holds a module, and its file there or the folder of its package."""
    for root in roots:
        place = root
        for part in module.split("."):
            place = place / part
            if (place / "__init__.py").is_file():
                return root, place
            if (source := place.with_name(f"{part}.py")).is_file():
                return root, source
            if not place.is_dir():
                break
    return None


def _names(root: Path, place: Path) -> list[str]:
    """Return the files of a place that `_place` found, relative to its root."""
    below = place.relative_to(root)
    if place.suffix == ".py" and place.is_file():
        return [below.as_posix()]
    return [(below / name).as_posix() for name in names_under(place)]


@dataclass(frozen=True, slots=True)
class _Uses:
    """The modules that a Python file may import, by absolute names, and the paths of data files
    that it may name, relative to the folder of its imports."""

    modules: frozenset[str] = frozenset()
    data: frozenset[str] = frozenset()


def _uses_of(root: Path, file: str) -> _Uses:
    """Return what a file uses; nothing if it cannot be read or parsed."""
    try:
        return _uses(file, (root / file).read_bytes())
    except (OSError, SyntaxError, ValueError):
        return _Uses()


@functools.lru_cache(PARSED_MAX)  # most versions share most of their files with others
def _uses(file: str, content: bytes) -> _Uses:
    tree = ast.parse(content)
    inner = {id(node.left) for node in ast.walk(tree) if isinstance(node, ast.BinOp)}
    ways = {_way(node) for node in ast.walk(tree) if id(node) not in inner}
    data = frozenset(filter(None, (_data_of(way, file) for way in ways)))
    return _Uses(frozenset(_imports(tree, file)), data)


def _imports(tree: ast.AST, file: str) -> Iterator[str]:
    """Yield the modules that a file may import, by absolute names."""
    package = [*Path(file).parent.parts]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            if base:
                yield base
            yield from (f"{base}.{alias.name}".lstrip(".") for alias in node.names)


def _data_of(way: str, file: str) -> str:
    """Return the path of data that a Python file may name, relative to the folder of its imports;
    with a slash at its end if it may be a folder; empty if it is no such path."""
    if not way or len(way) > WAY_CHARS_MAX or "\0" in way or os.path.isabs(way):
        return ""
    path = os.path.normpath(os.path.join(os.path.dirname(file), way))
    parts = path.split(os.sep)
    if ".." in parts or not all(map(goes_in, parts)):
        return ""
    return f"{path}/" if "/" in way else path


def _data(paths: Iterable[str], root: Path) -> Iterator[str]:
    """Yield those files among paths of data that are there, and those in folders among them."""
    for path in paths:
        place = os.path.join(root, path.rstrip("/"))
        if os.path.isfile(place):
            yield path.rstrip("/")
        elif path.endswith("/") and path.strip("./") and os.path.isdir(place):
            yield from ((Path(path) / name).as_posix() for name in names_under(Path(place)))


def _way(node: ast.AST) -> str:
    """Return the relative path that an expression ends with: "a.csv"; for FOLDER / "data": "data/";
    "" if there is none."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value.rstrip("/")
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
        left, right = _way(node.left), _way(node.right)
        return f"{left.rstrip('/')}/{right}".lstrip("/") + ("" if "/" in right else "/")
    if (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in ("join", "joinpath")
    ):
        parts = [_way(one).rstrip("/") for one in node.args]
        return "/".join(part for part in parts if part) + "/"
    return ""


def shipped(target: str, roots: Sequence[str]) -> SourceFiles:
    """Return the files of a model's folders of code: those that its module needs of the folder that
    holds it, all files of the others.

    target: `module:attribute`; "" if the model is no module.
    """
    places = [Path(root) for root in dict.fromkeys(roots)]
    module = target.partition(":")[0]
    found = reached([module], places) if module else SourceFiles()
    home = _find(module, places) if module else None
    for place in places:
        if home is None or place != home[0]:
            found.add(place, names_under(place))
    return SourceFiles({place: found.files[place] for place in places if place in found.files})


def imports_in(sources: SourceFiles) -> Iterator[str]:
    """Yield the top-level modules that the Python files among them import."""
    for root, names in sources.files.items():
        for one in names:
            if one.endswith(".py"):
                for module in _uses_of(root, one).modules:
                    yield module.partition(".")[0]


def copied(
    target: str, roots: Sequence[str], name: str, version: int, directory: str | os.PathLike[str]
) -> tuple[str, ...]:
    """Copy the sources of a model; return the folders for its containers' sys.path: the copies,
    then `roots`.

    target: `module:attribute`; "" for a pickle, whose folders of code are copied whole. directory:
    of models' files; the copy is `NAME-VERSION-SHA12.code` in it, a folder for each root.

    Raises: PackagingError; OSError if the copy cannot be written.
    """
    wanted = shipped(target, roots)
    contents = {
        root: {one: (root / one).read_bytes() for one in names if one.endswith(".py")}
        for root, names in wanted.files.items()
    }
    if not any(contents.values()):
        return tuple(roots)
    size = sum(len(content) for files in contents.values() for content in files.values())
    if size > SOURCE_BYTES_MAX or sum(map(len, contents.values())) > FILES_MAX:
        _log.warning(
            "model %s: its folders of code hold %d MiB of Python: they are not copied, and an edit"
            " reaches it when its containers restart",
            name,
            size >> 20,
        )
        return tuple(roots)
    digest = hashlib.sha256()
    for number, files in enumerate(contents.values()):
        for one, content in files.items():
            digest.update(f"{number}\0{one}\0{len(content)}\0".encode() + content)
    whole = f"{name}-{version}-{digest.hexdigest()[:12]}{SUFFIX}"
    place = Path(directory).absolute() / whole
    found = _find(target.partition(":")[0], list(contents)) if target else None
    _write(place, contents, found[0] if found else None)
    copies = [str(place / str(number)) for number in range(len(contents))]
    return (*copies, *roots)


def _write(place: Path, contents: Mapping[Path, Mapping[str, bytes]], home: Path | None) -> None:
    """Write a copy so that it is complete or absent."""
    if place.is_dir():
        return
    place.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(dir=place.parent, prefix=".", suffix=".tmp"))
    try:
        for number, (root, files) in enumerate(contents.items()):
            mirror = _Mirror(root, temporary / str(number), files)
            mirror.write(Path(), root != home)
            if mirror.links > LINKS_MAX:
                _log.warning("%s: %d files are not beside the copy of its sources", root, LINKS_MAX)
        os.rename(temporary, place)
    except OSError:
        shutil.rmtree(temporary, ignore_errors=True)
        if not place.is_dir():  # otherwise another thread was first
            raise


class _Mirror:
    """A second folder with some Python files of a first one, and links to its other files."""

    def __init__(self, root: Path, to: Path, files: Mapping[str, bytes]) -> None:
        self._root, self._to = root, to
        self._files = files
        self._folders = {parent for one in files for parent in Path(one).parents}
        self.links = 0

    def write(self, below: Path, is_deep: bool) -> None:
        """Write one folder. is_deep: folders below it are made, not linked: those of a package,
        and all of a folder that is copied whole."""
        (self._to / below).mkdir()
        for entry in sorted(os.scandir(self._root / below), key=_name_of):
            path = below / entry.name
            if entry.name.startswith(".") and entry.name not in IGNORE_FILES:
                continue
            if (content := self._files.get(path.as_posix())) is not None:
                (self._to / path).write_bytes(content)
            elif entry.name == "__pycache__" or entry.name.endswith(".py"):
                continue
            elif entry.is_dir(follow_symlinks=False) and (is_deep or path in self._folders):
                self.write(path, is_deep or f"{path.as_posix()}/__init__.py" in self._files)
            else:
                self.links += 1
                if self.links <= LINKS_MAX:
                    os.symlink(os.path.abspath(entry.path), self._to / path)


def _name_of(entry: "os.DirEntry[str]") -> str:
    return entry.name


def own_folders(code: Sequence[str]) -> tuple[str, ...]:
    """Return the folders of a model's code that belong to its version: the copies, or all of them
    if it has none."""
    copies = tuple(one for one in code if Path(one).parent.name.endswith(SUFFIX))
    return copies if copies and all(map(os.path.isdir, copies)) else tuple(code)
