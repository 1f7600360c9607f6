"""Changes the code in small ways and counts how many of the changes the tests notice.

    python -m tests.mutants                    50 mutants, seed 1, two at a time
    python -m tests.mutants --seed 7 --count 10
    python -m tests.mutants --only python/clipper/mesh --list

A mutant is one change of one function of python/clipper or container_sdk/src: a comparison flipped,
a condition negated, `and` swapped with `or`, a number moved by one, True and False swapped, a
statement, `return` or `await` dropped. Texts for people, `raise`, `assert` and the `strict=True` of
zip, an assertion too, are left alone. Each is made in a copy of the checkout, where a minute of
tests is run until one fails: first those that run the function (tests/covering.txt, see
tests.covering), the whole file of one that has another name since; then the test files that name
what the module defines and what the mutant changes. A test that kills a mutant must pass on the
unchanged copy. A mutant that makes tests take longer than the limit is killed too,
if they do not take as long on the unchanged copy. tests/mutants.toml lists mutants that change
nothing ("equivalent"). The exit status is 0 if at least 90 % of the others are killed.
"""

import argparse
import ast
import hashlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

from tests.covering import SOURCES, Covering, test_files
from tests.run import descendants, kill_all, read_times

ROOT = Path(__file__).resolve().parent.parent
SCORE_MIN = 0.9
LIMIT_S = 120.0  # of the tests of a mutant, and LIMIT_TIMES their time; longer is a kill
LIMIT_TIMES = 5.0
TESTS_MAX_S = 60.0  # expected duration of the tests that a mutant is shown
FILES_MAX = 12
NEIGHBOURS_MAX = 30  # tests of other functions, for a function of which none is on record
FILE_DEFAULT_S = 3.0

FLIPPED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
}
LOGGING = re.compile(r"^(self\.)?_?log(ger)?\.|^logging\.|^warnings\.")


@dataclass(frozen=True)
class Mutant:
    """One change. path: relative to the checkout. function: the one that is changed. start, end:
    offsets in the file. old, new: text."""

    path: str
    line: int
    function: str
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:70] for text in (self.old, self.new))
        return f"{self.path}:{self.line} {self.function}: {old}  ->  {new}"


@dataclass(frozen=True)
class Verdict:
    mutant: Mutant
    kind: str  # killed, timeout, survived, equivalent
    why: str
    seconds: float


# -- making mutants


def mutants_of(path: str, text: bytes) -> Iterator[Mutant]:
    """Return all changes that can be made to the functions of a file."""
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for function, node in nodes_in_functions(ast.parse(text)):
        for new in changes(node):
            assert isinstance(node, ast.expr | ast.stmt)
            assert node.end_lineno is not None
            assert node.end_col_offset is not None
            start, end = (
                starts[node.lineno - 1] + node.col_offset,
                starts[node.end_lineno - 1] + node.end_col_offset,
            )
            yield Mutant(path, node.lineno, function, start, end, text[start:end].decode(), new)


def nodes_in_functions(tree: ast.AST, name: str = "") -> Iterator[tuple[str, ast.AST]]:
    """Yield the statements and expressions of function bodies, with the function's name; no
    annotations, defaults or decorators."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{name}.{child.name}".lstrip(".")
            in_function = not isinstance(child, ast.ClassDef)
            for statement in child.body:
                if in_function:
                    yield from nodes_of(statement, inner)
                elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    yield from nodes_in_functions(ast.Module([statement], []), inner)


def nodes_of(node: ast.AST, function: str) -> Iterator[tuple[str, ast.AST]]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield from nodes_in_functions(ast.Module([node], []), function)
        return
    if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert) or is_logging(node):
        return  # texts for people
    if isinstance(node, ast.keyword) and ast.unparse(node) == "strict=True":
        return  # an assertion of zip, whose arguments are equally long
    yield function, node
    for field, value in ast.iter_fields(node):
        if field == "annotation":
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from nodes_of(child, function)


def is_logging(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and bool(LOGGING.match(ast.unparse(node.value)))
    )


def changes(node: ast.AST) -> Iterator[str]:
    """Yield the texts by which a node can be replaced."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in FLIPPED:
        yield ast.unparse(ast.Compare(node.left, [FLIPPED[type(node.ops[0])]()], node.comparators))
    elif isinstance(node, ast.BoolOp):
        swapped = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(swapped, node.values))})"
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.IfExp):
        yield f"({ast.unparse(ast.IfExp(node.test, node.orelse, node.body))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in ARITHMETIC:
        yield f"({ast.unparse(ast.BinOp(node.left, ARITHMETIC[type(node.op)](), node.right))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1)
        yield repr(node.value - 1) if node.value > 0 else repr(node.value + 2)
    elif (
        isinstance(node, ast.Await | ast.Return)
        and node.value is not None
        and not is_none(node.value)
    ):
        yield ast.unparse(node.value)
    elif is_droppable(node):
        yield "pass"


def is_droppable(node: ast.AST) -> bool:
    """Return whether a statement has an effect beyond its function, or is `continue` or `break`."""
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await)
    if isinstance(node, ast.Assign):
        return isinstance(node.targets[0], ast.Attribute | ast.Subscript)
    return isinstance(node, ast.AugAssign | ast.Continue | ast.Break)


def is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def all_mutants(only: str) -> list[Mutant]:
    found: list[Mutant] = []
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            place = path.relative_to(ROOT).as_posix()
            if place.startswith(only):
                found += mutants_of(place, path.read_bytes())
    return found


def sample(candidates: list[Mutant], seed: int, count: int) -> list[Mutant]:
    """Choose mutants by a hash of the seed and of the change itself, so that a mutant stays in the
    sample while other code changes and survivors can be taken up one after another."""
    times: Counter[str] = Counter()  # how often the same change has come in the same function

    def rank(mutant: Mutant) -> bytes:
        text = "\n".join((mutant.path, mutant.function, mutant.old, mutant.new))
        times[text] += 1
        return hashlib.sha256(f"{seed}\n{times[text]}\n{text}".encode()).digest()

    return sorted(candidates, key=rank)[:count]


# -- which tests concern a module


class Relevance:
    """Finds the test files that concern a mutant: those that import its module, or name what the
    module defines and what the function says. A word counts for more the fewer test files have it
    (the inverse document frequency of text search).

    times: seconds of each test file; None: those of this machine, or else of a fresh clone.
    """

    def __init__(self, times: dict[str, float] | None = None) -> None:
        self._texts = {path: (ROOT / path).read_text() for path in test_files()}
        self._words = {
            path: Counter(re.findall(r"\w+", text)) for path, text in self._texts.items()
        }
        self._files_with = Counter(word for words in self._words.values() for word in words)
        self._times = read_times(ROOT) if times is None else times
        self._covering = Covering.read()

    def tests(self, mutant: Mutant) -> tuple[list[str], float]:
        """Choose a minute of tests: those that run the function, the file that is named after its
        module (processes that are killed record nothing), then the most relevant files.

        Returns the tests, those of a file beside each other, and the seconds that they should take.
        """
        chosen: dict[str, list[str]] = {}  # file -> tests
        total = 0.0
        module = Path(mutant.path).stem
        own = [path for path in self._texts if is_named_after(path, module)]
        own_s = sum(map(self._seconds, own))
        if not own or own_s > TESTS_MAX_S / 2:
            own, own_s = [], 0.0
        for test in self._recorded(mutant):
            path, _, name = test.partition("::")
            if name and f"def {name.rpartition('::')[2]}(" not in self._texts.get(path, ""):
                test = path  # it was renamed since it was recorded: all of its file
            seconds = self._covering.seconds[test]
            if test in chosen.get(path, []):
                continue
            if path in self._texts and (not total or total + seconds <= TESTS_MAX_S - own_s):
                chosen.setdefault(path, []).append(test)
                total += seconds
        for path in (*own, *self.files(mutant, TESTS_MAX_S - total - own_s)):
            if path not in chosen.get(path, []):
                chosen.setdefault(path, []).append(path)
                total += self._seconds(path)
        return [test for tests in chosen.values() for test in tests], total

    def _recorded(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the function; if none is on record, those that run other
        methods of its class, or else other functions of its file, the shortest first."""
        recorded = self._covering.tests
        if exact := recorded.get(f"{mutant.path} {mutant.function}"):
            return exact
        for beginning in (mutant.function.rpartition(".")[0] + ".", ""):
            near = f"{mutant.path} {beginning}"
            named = {test for name in recorded if name.startswith(near) for test in recorded[name]}
            if found := {test for test in named if "::" in test}:
                by_time = sorted(found, key=lambda test: (self._covering.seconds[test], test))
                return by_time[:NEIGHBOURS_MAX]
        return []

    def files(self, mutant: Mutant, max_s: float = TESTS_MAX_S) -> list[str]:
        """Choose test files of a module, the most relevant first, of at most max_s seconds."""
        text = (ROOT / mutant.path).read_bytes()
        tree = ast.parse(text)
        place = mutant.path.removeprefix("python/").removeprefix("container_sdk/src/")
        dotted = place.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        package, _, module = dotted.rpartition(".")
        defined = {
            n.name
            for n in tree.body
            if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        }
        near = {part for part in mutant.function.split(".") if not part.startswith("_")}
        said = set(re.findall(r"\w{4,}", self._source(text, tree, mutant)))
        changed = {word.strip("_") for word in re.findall(r"\w{4,}", mutant.old)}
        imported = re.compile(
            rf"(from|import) {re.escape(dotted)}\b|from {re.escape(package)} import .*\b{module}\b"
        )
        folders = set(package.split("."))

        def rare(words: Counter[str], word: str) -> float:
            return min(words[word], 3) * math.log(len(self._words) / (self._files_with[word] or 1))

        def weight(path: str) -> float:
            words = self._words[path]
            named = (
                sum(rare(words, name) for name in defined)
                + 3 * sum(rare(words, name) for name in near)
                + 2 * rare(words, module)
                + sum(rare(words, word) for word in said) / 4
                + 2 * sum(rare(words, word) for word in changed)
            )
            beside = 3 * len(folders.intersection(Path(path).parts))
            same = 25 * is_named_after(path, module)
            reads = 15 * bool(imported.search(self._texts[path]))
            return (named + beside + same + reads) / (1 + self._seconds(path) / 10)

        weights = {path: weight(path) for path in self._words}
        chosen, total = [], 0.0
        for path in sorted(weights, key=lambda path: weights[path], reverse=True):
            if (
                weights[path] <= 1
                or len(chosen) == FILES_MAX
                or total + self._seconds(path) > max_s
            ):
                continue
            chosen.append(path)
            total += self._seconds(path)
        return chosen

    def _source(self, text: bytes, tree: ast.Module, mutant: Mutant) -> str:
        """Return the text of the function (or of its class's method) that a mutant changes."""
        found = ""
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
                and node.lineno <= mutant.line <= (node.end_lineno or 0)
                and node.name in mutant.function.split(".")
            ):
                found = ast.get_source_segment(text.decode(), node) or ""
        return found

    def _seconds(self, path: str) -> float:
        return self._times.get(path, FILE_DEFAULT_S)


def is_named_after(test: str, module: str) -> bool:
    """Tell whether a test file is named after a module, or after several of its kind."""
    return Path(test).stem.removesuffix("s") == f"test_{module}".removesuffix("s")


# -- running them


class Copy:
    """A copy of the checkout in which mutants are made, one after another."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout.split("\n")
        for place in [
            *filter(None, listed),
            *(str(so.relative_to(ROOT)) for so in ROOT.glob("src/clipper_core/**/*.so")),
        ]:
            if (ROOT / place).is_file():
                (root / place).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / place, root / place)
        (root / ".venv").symlink_to(ROOT / ".venv")

        self._changed: dict[str, bytes] = {}  # the original text of files that are mutated now

    def mutate(self, mutant: Mutant) -> None:
        path = self.root / mutant.path
        text = self._changed[mutant.path] = path.read_bytes()
        assert text[mutant.start : mutant.end].decode() == mutant.old, (
            f"{mutant.path} changed after the start"
        )
        path.write_bytes(text[: mutant.start] + mutant.new.encode() + text[mutant.end :])

    def restore(self) -> None:
        for path, text in self._changed.items():
            (self.root / path).write_bytes(text)
        self._changed.clear()

    def run(self, tests: list[str], limit_s: float) -> tuple[str, str]:
        """Run tests until one fails. Returns (killed | survived | timeout, the test that
        failed)."""
        paths = [str(self.root / source) for source in ("python", "src", "container_sdk/src")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-x",
            "-q",
            "--no-header",
            "--tb=no",
            "-p",
            "no:cacheprovider",
            *tests,
        ]
        process = subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return "timeout", f"{limit_s:g} s"
        finally:
            kill_all(
                [*descendants(process.pid), *([process.pid] if process.poll() is None else [])]
            )
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        if process.returncode in (0, 5):
            return "survived", ""
        return "killed", failed_test(output) or f"exit status {process.returncode}"


def failed_test(output: str) -> str:
    """Return the first test function or file that pytest says has failed, without its parameters,
    whose text may hold anything; "" if there is none."""
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.M)
    return failed[1] if failed else ""


class Changed(Protocol):
    """A checkout in which a mutant can be made and tests be run, as a Copy."""

    root: Path

    def mutate(self, mutant: Mutant) -> None: ...
    def restore(self) -> None: ...
    def run(self, tests: list[str], limit_s: float) -> tuple[str, str]: ...


class Judge:
    """Runs the tests of mutants. Threads: any; each call takes one of the copies."""

    def __init__(self, copies: Sequence[Changed], equivalent: list[dict[str, str]]) -> None:
        self._free: SimpleQueue[Changed] = SimpleQueue()
        for copy in copies:
            self._free.put(copy)
        self._relevance = Relevance()
        self._equivalent = equivalent
        self._unfit: set[str] = set()  # tests that fail on the unchanged copy
        self._fit: set[str] = set()
        self._lock = threading.Lock()

    def judge(self, mutant: Mutant) -> Verdict:
        begun = time.monotonic()
        for row in self._equivalent:
            if (row["path"], row["function"], row["old"], row["new"]) == (
                mutant.path,
                mutant.function,
                mutant.old,
                mutant.new,
            ) and row.get("line", "") in text_of_line(mutant):
                return Verdict(mutant, "equivalent", row["why"], 0.0)
        copy = self._free.get()
        try:
            kind, why = self._run(copy, mutant)
        finally:
            copy.restore()
            self._free.put(copy)
        return Verdict(mutant, kind, why, time.monotonic() - begun)

    def _run(self, copy: Changed, mutant: Mutant) -> tuple[str, str]:
        tests, seconds = self._relevance.tests(mutant)
        limit_s = LIMIT_S + LIMIT_TIMES * seconds
        while True:
            with self._lock:
                left_out = [word for test in sorted(self._unfit) for word in ("--deselect", test)]
                shown = [test for test in tests if test.partition("::")[0] not in self._unfit]
            if not shown:
                return "survived", "its tests cannot be run"
            copy.mutate(mutant)
            kind, test = copy.run([*shown, *left_out], limit_s)
            copy.restore()
            if kind == "timeout" and copy.run([*shown, *left_out], limit_s)[0] == kind:
                return "survived", f"the unchanged copy takes {limit_s:.0f} s too"
            if kind != "killed" or test in self._fit:
                return kind, test
            is_test = (copy.root / test.partition("::")[0]).is_file()
            if copy.run([test] if is_test else [*shown, *left_out], limit_s)[0] == "survived":
                with self._lock:
                    self._fit.update([test] if is_test else [])
                return kind, test
            if not is_test:
                return "survived", f"the tests cannot be run: {test}"
            with self._lock:
                self._unfit.add(test)  # and once more, without it


# -- the command


def text_of_line(mutant: Mutant) -> str:
    """Return the line that a mutant changes, as it is in the checkout."""
    return (ROOT / mutant.path).read_text().splitlines()[mutant.line - 1]


def read_equivalent() -> list[dict[str, str]]:
    rows: list[dict[str, str]] = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text()).get(
        "equivalent", []
    )
    return rows


def score(verdicts: list[Verdict]) -> float:
    counts = Counter(verdict.kind for verdict in verdicts)
    real = len(verdicts) - counts["equivalent"]
    return (counts["killed"] + counts["timeout"]) / real if real else 1.0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", usage=(__doc__ or "").replace("%", "%%")
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="a folder or file below the checkout")
    parser.add_argument(
        "--list", action="store_true", help="print the mutants and their test files; run nothing"
    )
    chosen = parser.parse_args()
    candidates = all_mutants(chosen.only)
    mutants = sample(candidates, chosen.seed, chosen.count)
    if chosen.list:
        relevance = Relevance()
        for mutant in mutants:
            print(mutant, *relevance.tests(mutant)[0], sep="\n    ")
        return 0
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    print(f"{len(mutants)} of {len(candidates)} mutants, seed {chosen.seed}", flush=True)
    verdicts = []
    with (
        tempfile.TemporaryDirectory(prefix="clipper-mutants-") as scratch,
        ThreadPoolExecutor(chosen.jobs) as pool,
    ):
        copies = []
        for i in range(chosen.jobs):
            (Path(scratch) / str(i)).mkdir()
            copies.append(Copy(Path(scratch) / str(i)))
        judge = Judge(copies, read_equivalent()).judge
        for done in as_completed([pool.submit(judge, mutant) for mutant in mutants]):
            verdict = done.result()
            verdicts.append(verdict)
            print(
                f"{verdict.kind:<10} {verdict.mutant}  [{verdict.why}, {verdict.seconds:.0f} s]",
                flush=True,
            )
    counts = Counter(verdict.kind for verdict in verdicts)
    print(*(f"{count} {kind}" for kind, count in sorted(counts.items())), sep=", ")
    print(
        f"score {100 * score(verdicts):.0f} % of {len(verdicts) - counts['equivalent']} mutants"
        " that are not equivalent"
    )
    return int(score(verdicts) < SCORE_MIN)


if __name__ == "__main__":
    sys.exit(main())
