"""The rules of the code: imports, stubs, names and calls. A rule that is not tested here is not
enforced.

Each test lists what breaks its rule, with the place and what to do instead.
"""

import ast
import functools
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

from tests.style import parsed

ROOT = Path(__file__).resolve().parent.parent
CORE = ROOT / "src" / "clipper_core"
PACKAGE = ROOT / "python" / "clipper"
CLIENT = ROOT / "python" / "clipper_client"
SDK = ROOT / "container_sdk" / "src" / "clipper_container"

# -- the arrows, bottom first: a module may import from the rows below its own, never from its own
# row, never up.
#    docs/architecture.md draws them. The packages of the core say in their __init__.pxd what they
#    may import.

PYTHON_LAYERS: tuple[tuple[str, ...], ...] = (
    ("version", "host_port"),
    ("errors", "clock", "keys", "log_output", "foreign_text", "yaml_text", "child_environment"),
    ("component",),
    ("processes",),
    ("schema",),
    ("types",),
    ("spec",),
    ("settings", "options", "credentials", "state_dir"),
    ("config", "selection", "store", "metrics", "tls"),
    ("catalog", "config_schema"),
    ("serving",),
    ("mesh", "params", "deploy"),
    ("frontend",),
    ("manage",),
    ("server",),
    ("notebook",),
    ("load",),
    ("cli",),
    ("__init__", "__main__"),
)
CORE_USERS = {
    "frontend",
    "load",
    "serving",
    "manage",
    "params",
    "selection",
    "store",
    "metrics",
    "notebook",
    "server",
    "types",
    "__init__",
}
SDK_USERS = {
    "component",
    "catalog",
    "deploy",
    "frontend",
    "manage",
    "mesh",
    "metrics",
    "processes",
    "serving",
    "store",
    "server",
    "cli",
    "errors",
    "params",
    "schema",
    "__init__",
    "__main__",
}

MODULES_MAX = 18  # of one folder

BANNED_NAMES = {
    "utils": "a noun for what it holds",
    "util": "a noun for what it holds",
    "common": "the module whose idea it is",
    "helpers": "the module whose idea it is",
    "manager": "the verb it performs, as a noun",
    "constants": "the module whose limits they are",
    "base": "the noun of the interface",
    "misc": "a noun for what it holds",
}

LIBRARY = ("python/", "container_sdk/src/")
SERVER = ("python/",)
SPEAKING = (
    "python/clipper/cli",
    "python/clipper/__main__.py",
    "container_sdk/src/",
)
UNPACKING = (  # they run in the model's own process
    "container_sdk/src/clipper_container/adapters/",
    "container_sdk/src/clipper_container/loading/",
)

SUPERVISED = "clipper.processes: a Supervisor, or run_once"
# commands of the terminal that ask a program once, with a limit, and have no server
ASKING = (
    "python/clipper/cli/servers/doctor.py",
    "python/clipper/deploy/kubernetes/helm.py",
    "python/clipper/load/machine.py",
)

# call -> (where it is banned, except there, what to do instead)
BANNED_CALLS: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    "pickle.loads": (
        LIBRARY,
        UNPACKING,
        "never unpickle in the server; a model's own process calls cloudpickle.loads",
    ),
    "pickle.load": (
        LIBRARY,
        UNPACKING,
        "never unpickle in the server; a model's own process calls cloudpickle.load",
    ),
    "cloudpickle.loads": (SERVER, (), "only a model's own process unpickles"),
    "cloudpickle.load": (SERVER, (), "only a model's own process unpickles"),
    "marshal.loads": (LIBRARY, (), "msgspec or msgpack"),
    "eval": (LIBRARY, (), "ast.literal_eval, or a table of functions"),
    "exec": (LIBRARY, (), "importlib.import_module"),
    "os.system": (LIBRARY, (), SUPERVISED),
    "os.fork": (
        LIBRARY,
        ("container_sdk/src/clipper_container/forking/fork_server.py",),
        SUPERVISED,
    ),
    "os.posix_spawn": (LIBRARY, (), SUPERVISED),
    "multiprocessing.Process": (LIBRARY, (), SUPERVISED),
    "asyncio.create_subprocess_exec": (LIBRARY, (), SUPERVISED),
    "asyncio.create_subprocess_shell": (LIBRARY, (), SUPERVISED),
    "subprocess.Popen": (LIBRARY, ("python/clipper/processes/spawned.py",), SUPERVISED),
    "subprocess.run": (LIBRARY, ASKING, SUPERVISED),
    "subprocess.call": (LIBRARY, (), SUPERVISED),
    "subprocess.check_call": (LIBRARY, (), SUPERVISED),
    "subprocess.check_output": (LIBRARY, (), SUPERVISED),
    "?.prctl": (  # of ctypes.CDLL(None)
        LIBRARY,
        ("container_sdk/src/clipper_container/parent_death.py",),
        "clipper_container.parent_death",
    ),
    "yaml.load": (LIBRARY, (), "tomllib.load"),
    "time.time": (
        LIBRARY,
        ("python/clipper/clock.py",),
        "clock.now_us for deadlines; clock.wall_us for records",
    ),
    "time.time_ns": (
        LIBRARY,
        ("python/clipper/clock.py",),
        "clock.now_us for deadlines; clock.wall_us for records",
    ),
    "print": (LIBRARY, SPEAKING, "logging"),
    "asyncio.get_event_loop": (LIBRARY, (), "asyncio.get_running_loop"),
    "os._exit": (SERVER, (), "return, and let the threads be joined"),
}

BANNED_CORE = {
    r"\bassert\b": "CHECK(ok, text): asserts in noexcept functions only print",
    r"\batomic_thread_fence\b": (
        "acquire and release on the variable: the race detector cannot follow fences"
    ),
    r"\bwith gil\b": "return a Status; the loop thread never takes the GIL",
    r"(?<![\w.])include\s+[\"']": "cimport: names must come from somewhere",
    r"\btime\.time\b": "a now_us argument",
}

UNFINISHED = ("TO" + "DO", "FIX" + "ME", "X" * 3, "HA" + "CK")
MARKERS = re.compile(rf"\b(?:{'|'.join(UNFINISHED)})\b")
SKIPPED = ("build", "dist", "__pycache__", ".egg-info", "node_modules")
TEXT = {
    ".py",
    ".pyx",
    ".pxd",
    ".pyi",
    ".hpp",
    ".md",
    ".toml",
    ".sh",
    ".svg",
    ".allow",
    ".json",
    ".in",
    "",
}


def source_files() -> list[Path]:
    found = []
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(f for f in folders if not f.startswith(".") and not f.endswith(SKIPPED))
        found += [
            Path(folder, name)
            for name in sorted(names)
            if name[0] != "." and Path(name).suffix in TEXT
        ]
    return [*found, *(ROOT / ".ci").glob("*")]


FILES = source_files()
CODE = [path for path in FILES if path.suffix in {".py", ".pyx", ".pxd", ".pyi", ".hpp"}]


def at(path: Path, line: int = 0) -> str:
    return f"{path.relative_to(ROOT)}{f':{line}' if line else ''}"


def python_files(*roots: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in CODE:
        if path.suffix == ".py" and any(path.is_relative_to(root) for root in roots):
            yield path, parsed(path)


def rank_in(layers: tuple[tuple[str, ...], ...], name: str) -> int | None:
    return next((rank for rank, row in enumerate(layers) if name in row), None)


# -- arrows


def unit_of(path: Path) -> str:
    """Return the room of a file of the package: `serving` for
    python/clipper/serving/query/stats.py, `types` for types.py."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return each imported module of a file as a full dotted name; `from clipper import x` counts
    as clipper.x."""
    inside = path.relative_to(PACKAGE.parent).parts[:-1] if path.is_relative_to(PACKAGE) else ()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(inside[: len(inside) - node.level + 1]) if node.level else ""
            module = ".".join(part for part in (base, node.module) if part)
            if module in ("clipper", "clipper_core"):
                yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)
            else:
                yield node.lineno, module


def forbidden_python_import(unit: str, target: str) -> str:
    """Return why a file of `unit` may not import `target`; the empty string if it may."""
    root, _, rest = target.partition(".")
    below = rest.split(".")[0]
    if root == "clipper_core":
        return "" if unit in CORE_USERS else f"only {', '.join(sorted(CORE_USERS))} import the core"
    if root == "clipper_container":
        return (
            ""
            if unit in SDK_USERS
            else f"only {', '.join(sorted(SDK_USERS))} know the container SDK"
        )
    if root != "clipper" or not below or below == unit:
        return ""
    mine, theirs = rank_in(PYTHON_LAYERS, unit), rank_in(PYTHON_LAYERS, below)
    if theirs is None:  # a public name such as clipper.ClipperServer, or a room without a row
        known = (PACKAGE / below).is_dir() or (PACKAGE / f"{below}.py").is_file()
        return (
            f"{below} has no row in PYTHON_LAYERS"
            if known
            else "import it from the module that defines it"
        )
    if mine is not None and theirs >= mine:
        return f"{below} is not below {unit}"
    return ""


def test_arrows_of_the_package() -> None:
    wrong = []
    for path, tree in python_files(PACKAGE):
        unit = unit_of(path)
        if rank_in(PYTHON_LAYERS, unit) is None:
            wrong.append(f"{at(path)}: give {unit} a row in PYTHON_LAYERS")
        speaks_for_all = unit in ("__init__", "__main__", "cli")
        for line, target in imports_of(path, tree):
            why = forbidden_python_import(unit, target)
            if why and not (speaks_for_all and why.startswith("import it from")):
                wrong.append(f"{at(path, line)}: imports {target}: {why}")
    assert not wrong, "\n".join(wrong)


def test_the_sdk_stands_alone() -> None:
    wrong = [
        f"{at(path, line)}: imports {target}: the SDK lives where no server is installed"
        for path, tree in python_files(SDK)
        for line, target in imports_of(path, tree)
        if target.split(".")[0] in ("clipper", "clipper_core")
    ]
    assert not wrong, "\n".join(wrong)


def test_the_query_client_stands_alone() -> None:
    """The query client runs where neither the server nor any package is installed. It looks by name
    for numpy and the errors of the server, which it uses if they are there."""
    wrong = [
        f"{at(path, line)}: imports {target}: the query client has the standard library"
        for path, tree in python_files(CLIENT)
        for line, target in imports_of(path, tree)
        if target.split(".")[0] not in {*sys.stdlib_module_names, "clipper_client"}
    ]
    assert not wrong, "\n".join(wrong)


CORE_IMPORT = re.compile(
    r"^\s*(?:from\s+clipper_core((?:\.\w+)*)\s+c?import\s+(\w+)|c?import\s+clipper_core\.([\w.]+))",
    re.M,
)
HPP_INCLUDE = re.compile(r'^\s*#include\s+"([\w/]+)\.hpp"', re.M)
PACKAGE_IMPORT = re.compile(r"^\s*(?:from|c?import)\s+clipper\b(?!_)", re.M)
MAY_IMPORT = re.compile(r"^# May import: (.+)\.$", re.M)


def core_modules() -> dict[str, list[Path]]:
    """Return the .pyx, .pxd and .hpp files of each module of the core, by its dotted name."""
    found: dict[str, list[Path]] = {}
    for path in CODE:
        if path.is_relative_to(CORE) and path.suffix in (".pyx", ".pxd", ".hpp"):
            name = ".".join(path.relative_to(CORE).with_suffix("").parts)
            if path.stem != "__init__":
                found.setdefault(name, []).append(path)
    return found


def core_imports(text: str) -> set[str]:
    """Return the dotted names of the core's modules that a .pyx, .pxd or .hpp refers to."""
    named = set()
    for base, name, module in CORE_IMPORT.findall(text):
        parts = (module or base or name).strip(".").split(".")
        named.add(".".join(parts if len(parts) > 1 or module or not base else [*parts, name]))
    return named | {include.replace("/", ".") for include in HPP_INCLUDE.findall(text)}


def may_import(package: str) -> set[str]:
    """Return the packages of the core that a package may import, as its __init__.pxd declares."""
    found = MAY_IMPORT.search((CORE / package / "__init__.pxd").read_text())
    assert found, f"src/clipper_core/{package}/__init__.pxd: no line `# May import: ...`"
    return set() if found[1] == "nothing" else set(found[1].split(", "))


def first_cycle(graph: dict[str, set[str]]) -> list[str]:
    """Return the nodes along a cycle of the graph; empty if there is none."""
    left = {node: targets & graph.keys() for node, targets in graph.items()}
    while ends := [node for node, targets in left.items() if not targets]:
        for node in ends:
            del left[node]
        for targets in left.values():
            targets -= set(ends)
    path: list[str] = []
    while left and (not path or path[-1] not in path[:-1]):
        path.append(min(left[path[-1]] if path else left))
    return path[path.index(path[-1]) :] if path else []


def test_packages_of_the_core_import_what_their_pages_declare() -> None:
    wrong, used = [], set()
    for name, paths in core_modules().items():
        package = name.partition(".")[0]
        for path in paths:
            text = path.read_text()
            if PACKAGE_IMPORT.search(text):
                wrong.append(f"{at(path)}: the core knows nothing of the package above it")
            for target in core_imports(text):
                other = target.partition(".")[0]
                used.add((package, other))
                if other not in {package, *may_import(package)}:
                    wrong.append(f"{at(path)}: {package} does not declare that it imports {other}")
    packages = {name.partition(".")[0] for name in core_modules()}
    for package in sorted(packages):
        unused = {other for other in may_import(package) if (package, other) not in used}
        wrong += [f"{package} declares {other} and does not import it" for other in unused]
    assert not wrong, "\n".join(wrong)
    cycle = first_cycle({package: may_import(package) for package in packages})
    assert not cycle, f"packages of the core import each other: {' -> '.join(cycle)}"


def test_modules_of_the_core_have_no_import_cycle() -> None:
    modules = core_modules()
    graph = {
        name: set().union(*(core_imports(path.read_text()) for path in paths)) - {name}
        for name, paths in modules.items()
    }
    gone = {target for targets in graph.values() for target in targets} - graph.keys()
    assert not gone, f"imported, but not in src/clipper_core: {', '.join(sorted(gone))}"
    cycle = first_cycle(graph)
    assert not cycle, f"modules of the core import each other: {' -> '.join(cycle)}"


def test_every_compiled_module_has_its_page_and_its_stub() -> None:
    wrong = [
        f"{at(path)}: no {path.stem}{suffix} beside it"
        for path in sorted(CORE.rglob("*.pyx"))
        for suffix in (".pxd", ".pyi")
        if not path.with_suffix(suffix).exists()
    ]
    assert not wrong, "\n".join(wrong)


# -- names and calls


def test_every_file_is_named_for_what_it_holds() -> None:
    wrong = [
        f"{at(path)}: {part!r} says nothing; take {BANNED_NAMES[part]}"
        for path in FILES
        for part in [*path.relative_to(ROOT).parts[:-1], path.stem]
        if part in BANNED_NAMES
    ]
    assert not wrong, "\n".join(wrong)


def crowded(modules: Iterable[Path]) -> list[str]:
    """Return the folders that have more than MODULES_MAX of these modules."""
    counts = Counter(path.parent for path in modules)
    return [
        f"{at(folder)}: {count} modules, of {MODULES_MAX} at most: group what changes together"
        for folder, count in counts.items()
        if count > MODULES_MAX
    ]


def test_no_folder_has_too_many_modules() -> None:
    product_roots = (PACKAGE, CLIENT, SDK, CORE)
    product = [
        path
        for path in CODE
        if path.suffix in {".py", ".pyx"} and any(map(path.is_relative_to, product_roots))
    ]
    wrong = crowded(path for path in product if path.stem != "__init__")
    assert not wrong, "\n".join(wrong)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    return f"{dotted(node.value)}.{node.attr}" if isinstance(node, ast.Attribute) else "?"


def calls_in(tree: ast.Module) -> Iterator[tuple[ast.Call, str]]:
    """Yield each call, with the full name of what is called."""
    renamed = {  # import x as y, from x import y
        alias.asname or alias.name: (
            f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            head, dot, rest = dotted(node.func).partition(".")
            yield node, renamed.get(head, head) + dot + rest


def banned_calls(path: Path, tree: ast.Module) -> Iterator[str]:
    place = path.relative_to(ROOT).as_posix()
    for node, name in calls_in(tree):
        where, but, instead = BANNED_CALLS.get(name, ((), (), ""))
        if place.startswith(where) and not place.startswith(but or ("\0",)) and where:
            yield f"{at(path, node.lineno)}: {name}: {instead}"
        if any(
            k.arg == "shell" and getattr(k.value, "value", False) is True for k in node.keywords
        ):
            yield f"{at(path, node.lineno)}: shell=True: subprocess.run with a list"


def test_no_banned_call() -> None:
    libraries = [ROOT / place for place in LIBRARY]
    wrong = [
        line
        for path in CODE
        if path.suffix == ".py"
        and (any(map(path.is_relative_to, libraries)) or "shell" in path.read_text())
        for line in banned_calls(path, parsed(path))
    ]
    assert not wrong, "\n".join(wrong)


DOCSTRING = re.compile(r'(?s)"""(.*?)"""')


def test_no_banned_word_in_the_core() -> None:
    wrong = []
    for path in CODE:
        if not path.is_relative_to(CORE) or path.suffix not in (".pyx", ".pxd", ".hpp"):
            continue
        text = DOCSTRING.sub(lambda found: "\n" * found[0].count("\n"), path.read_text())
        comment = "//" if path.suffix == ".hpp" else "#"
        for number, line in enumerate(text.splitlines(), 1):
            code = line.split(comment)[0] if not line.lstrip().startswith("#include") else ""
            wrong += [
                f"{at(path, number)}: {so}"
                for word, so in BANNED_CORE.items()
                if re.search(word, code)
            ]
    assert not wrong, "\n".join(wrong)


def test_no_textual_include() -> None:
    wrong = [f"{at(path)}: make it a module, cimported by name" for path in CORE.rglob("*.pxi")]
    assert not wrong, "\n".join(wrong)


def test_nothing_is_left_over() -> None:
    wrong = [
        f"{at(path, number)}: {found[0]}: do it, or write down in docs/roadmap.md what is missing"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := MARKERS.search(line))
    ]
    assert not wrong, "\n".join(wrong)


def test_no_path_of_one_machine() -> None:
    places = {ROOT, ROOT.parent, Path.home()} - {Path("/"), Path("/tmp")}
    here = [f"{place}/" for place in places]
    someones = re.compile("|".join([*map(re.escape, here), r"/ho" r"me/\w", r"/Us" r"ers/\w"]))
    wrong = [
        f"{at(path, number)}: {found[0]}: a path of one machine"
        for path in FILES
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if (found := someones.search(line))
    ]
    assert not wrong, "\n".join(wrong)


# -- what tests replace

SOURCES = (PACKAGE.parent, CORE.parent, SDK.parent, ROOT)  # where the modules lie
OURS = ("clipper", "clipper_client", "clipper_core", "clipper_container", "bench", "tests")


def module_file(name: str) -> Path | None:
    """Return the file of one of our modules: the .pyi of a compiled one."""
    for source in SOURCES:
        path = source.joinpath(*name.split("."))
        for file in (path / "__init__.py", path.with_suffix(".py"), path.with_suffix(".pyi")):
            if file.is_file():
                return file
    return None


def bound_names(body: list[ast.stmt]) -> set[str]:
    """Return the names that the statements of a module or class bind, attributes of `self`
    included."""
    found = set()
    for node in (each for statement in body for each in ast.walk(statement)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.alias):
            found.add((node.asname or node.name).split(".")[0])
    return found


@functools.cache
def module_names(file: Path) -> tuple[ast.Module, set[str]]:
    tree = parsed(file)
    return tree, bound_names(tree.body)


def is_missing(dotted: str) -> bool:
    """Return whether a dotted name of ours leads to a module or class without that attribute."""
    parts = dotted.split(".")
    for end in range(len(parts) - 1, 0, -1):
        if (file := module_file(".".join(parts[:end]))) is None:
            continue
        name, *inner = parts[end:]
        if module_file(".".join(parts[: end + 1])) is not None:
            return False
        tree, names = module_names(file)
        if name not in names:
            return True
        kind = next((c for c in tree.body if isinstance(c, ast.ClassDef) and c.name == name), None)
        return bool(kind and inner and not kind.bases) and inner[0] not in bound_names(kind.body)
    return parts[0] in OURS


def replaced_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Return line and dotted name of what `setattr` replaces: by its full name, or as an attribute
    of something imported from us."""
    imported = {
        alias.asname or alias.name: (
            f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
        )
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom)
        for alias in node.names
        if isinstance(node, ast.Import) or (node.module and not node.level)
    }
    for node in ast.walk(tree):
        if not (isinstance(node, ast.Call) and dotted(node.func).endswith(".setattr")):
            continue
        first, *others = node.args
        if isinstance(first, ast.Constant):
            name = str(first.value)
        elif others and isinstance(others[0], ast.Constant):
            head, dot, rest = dotted(first).partition(".")
            name = f"{imported.get(head, '?')}{dot}{rest}.{others[0].value!s}"
        else:
            continue
        if name.split(".")[0] in OURS and "?" not in name:
            yield node.lineno, name


def test_what_tests_replace_exists() -> None:
    tests = [path for path in CODE if path.suffix == ".py" and "tests" in path.parts]
    wrong = [
        f"{at(path, line)}: {name} does not exist (renamed?)"
        for path in tests
        if ".setattr(" in path.read_text()
        for line, name in replaced_names(parsed(path))
        if is_missing(name)
    ]
    assert not wrong, "\n".join(wrong)


DRAWS = {"numpy.random.default_rng", "random.Random"}
WEIGHTS = re.compile(
    r"(torch\.)?nn\.(Linear|Bilinear|Conv\dd|Embedding|GRU|LSTM|RNN|Transformer\w*"
    r"|MultiheadAttention)"
)


def unseeded(path: Path, tree: ast.Module) -> Iterator[str]:
    """Yield the generators of numbers without a seed, and the layers with random weights in a
    module that sets no seed."""
    calls = [*calls_in(tree)]
    is_seeded = any(name.endswith("manual_seed") for _, name in calls)
    for node, name in calls:
        if (name in DRAWS and not node.args) or (WEIGHTS.fullmatch(name) and not is_seeded):
            yield f"{at(path, node.lineno)}: {name}: give a seed, a test is the same each time"


def test_random_numbers_have_a_seed() -> None:
    rooms = [ROOT / "tests", ROOT / "bench", ROOT / "container_sdk" / "tests"]
    wrong = [
        line
        for path in CODE
        if path.suffix == ".py" and any(map(path.is_relative_to, rooms))
        if re.search(r"default_rng\(\)|Random\(\)|\bnn\.", path.read_text())
        for line in unseeded(path, parsed(path))
    ]
    assert not wrong, "\n".join(wrong)


# -- the rules notice what they are for


@pytest.mark.parametrize(
    ("unit", "target", "allowed"),
    [
        ("serving", "clipper_core.engine.engine", True),
        ("catalog", "clipper_core.engine.engine", False),
        ("catalog", "clipper.store.memory", True),
        ("store", "clipper.catalog.catalog", False),
        ("errors", "clipper.types", False),
        ("frontend", "clipper.manage", False),
        ("load", "clipper_container", False),
        ("serving", "numpy", True),
    ],
)
def test_an_arrow_is_judged(unit: str, target: str, allowed: bool) -> None:
    assert (forbidden_python_import(unit, target) == "") is allowed


def test_a_core_import_is_seen() -> None:
    text = (
        "from clipper_core.runtime.ring cimport Ring\n  from clipper_core.scheduling cimport lane\n"
        'cimport clipper_core.wire.codec\n#include "runtime/machine.hpp"\n'
    )
    assert core_imports(text) == {
        "runtime.ring",
        "scheduling.lane",
        "wire.codec",
        "runtime.machine",
    }


def test_a_cycle_is_found() -> None:
    assert first_cycle({"a": {"b"}, "b": set(), "c": {"a", "b"}}) == []
    assert first_cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}) == ["b", "c", "b"]


def test_a_folder_with_too_many_modules_is_seen() -> None:
    modules = [PACKAGE / "store" / f"module{i}.py" for i in range(MODULES_MAX + 1)]
    assert crowded(modules[1:]) == []
    assert len(crowded(modules)) == 1


def test_a_banned_call_is_seen() -> None:
    source = (
        "import time as t\nfrom pickle import loads\nt.time()\nloads(b'')\nrun('x',"
        " shell=True)\nprint(1)\n"
    )
    seen = list(banned_calls(PACKAGE / "server.py", ast.parse(source)))
    assert [line.split(": ")[1] for line in seen] == [
        "time.time",
        "pickle.loads",
        "shell=True",
        "print",
    ]
    assert not list(banned_calls(PACKAGE / "cli" / "shell.py", ast.parse("print(1)")))


def test_a_name_that_is_replaced_and_does_not_exist_is_seen() -> None:
    source = (
        "from clipper.store.redis import store\nfrom clipper.mesh.registry import Registry\n"
        "m.setattr(store, 'RedisStore', 1)\nm.setattr(store, 'NoStore', 1)\n"
        "m.setattr('clipper.mesh.registry.NONE', 1)\nm.setattr(Registry, 'register', 1)\n"
        "m.setattr(Registry, 'no_method', 1)\nm.setattr('sys.argv', [])\n"
    )
    seen = [name for _, name in replaced_names(ast.parse(source)) if is_missing(name)]
    assert seen == [
        "clipper.store.redis.store.NoStore",
        "clipper.mesh.registry.NONE",
        "clipper.mesh.registry.Registry.no_method",
    ]


def test_what_has_no_seed_is_seen() -> None:
    source = (
        "import numpy as np\nimport random\nfrom torch import nn\nnp.random.default_rng()\n"
        "np.random.default_rng(1)\nrandom.Random()\nrandom.Random(7)\nnn.Linear(3, 2)\n"
        "nn.Embedding.from_pretrained(rows)\nnn.Dropout(0.5)\n"
    )
    path = ROOT / "tests" / "test_it.py"
    seen = [line.split(": ")[1] for line in unseeded(path, ast.parse(source))]
    assert seen == ["numpy.random.default_rng", "random.Random", "torch.nn.Linear"]
    seeded = f"{source}torch.manual_seed(0)\n"
    assert len([*unseeded(path, ast.parse(seeded))]) == 2
