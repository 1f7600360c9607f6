"""Mutants and the comparison of test functions, on small files."""

import ast
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from tests.compare_tests import match
from tests.covering import RECORD, Covering, choose, functions_of
from tests.mutants import (
    ROOT,
    Judge,
    Mutant,
    Relevance,
    Verdict,
    all_mutants,
    failed_test,
    mutants_of,
    read_equivalent,
    score,
    text_of_line,
)

# those of a fresh clone: what this machine has measured differs with its load
TIMES: dict[str, float] = json.loads((ROOT / "tests" / "times.json").read_text())
CODE = b'''"""A text with 1 < 2."""
LIMIT = 3
_log = None


class Queue:
    size: int = 4

    async def take(self, n: int = 1, wait=False) -> int:
        """Take n < 2."""
        if n < 2 and not wait:
            return await self.next(n + 1)
        self.size -= n
        _log.info("took %d", 5)
        self.done(*zip(self.a, self.b, strict=True))
        raise ValueError(f"{n == 2}")
'''


def test_each_kind_of_change_is_made_in_functions_only() -> None:
    found = {(mutant.line, mutant.old, mutant.new) for mutant in mutants_of("queue.py", CODE)}
    assert found == {
        (11, "n < 2 and not wait", "(n < 2 or not wait)"),
        (11, "n < 2", "n <= 2"),
        (11, "2", "3"),
        (11, "2", "1"),
        (11, "not wait", "(wait)"),
        (12, "return await self.next(n + 1)", "await self.next(n + 1)"),
        (12, "await self.next(n + 1)", "self.next(n + 1)"),
        (12, "n + 1", "(n - 1)"),
        (12, "1", "2"),
        (12, "1", "0"),
        (13, "self.size -= n", "pass"),
        (15, "self.done(*zip(self.a, self.b, strict=True))", "pass"),
    }
    assert {mutant.function for mutant in mutants_of("queue.py", CODE)} == {"Queue.take"}
    for mutant in mutants_of("queue.py", CODE):
        assert CODE[mutant.start : mutant.end].decode() == mutant.old


def test_every_mutant_of_a_module_compiles() -> None:
    path = "python/clipper/serving/query/dispatch.py"
    text = (Path(__file__).resolve().parent.parent / path).read_bytes()
    mutants = all_mutants(path)
    assert len(mutants) > 50
    for mutant in mutants:
        compile(text[: mutant.start] + mutant.new.encode() + text[mutant.end :], path, "exec")


def test_the_score_counts_timeouts_as_kills_and_leaves_equivalent_mutants_out() -> None:
    mutant = Mutant("queue.py", 1, "f", 0, 1, "a", "b")
    kinds = ["killed", "timeout", "survived", "survived", "equivalent"]
    assert score([Verdict(mutant, kind, "", 0.0) for kind in kinds]) == 0.5
    assert score([]) == 1.0


def test_a_failed_test_is_named_without_its_parameters() -> None:
    shown = (
        "1 passed\nFAILED tests/a.py::B::test_c[-1, 'x y'] - assert 1 == 2\nFAILED tests/d.py::e"
    )
    assert failed_test(shown) == "tests/a.py::B::test_c"
    assert failed_test("ERROR tests/a.py - ImportError") == "tests/a.py"
    assert failed_test("no tests ran in 1 s") == ""


def test_the_test_files_of_a_module_come_first() -> None:
    relevance = Relevance(TIMES)
    for path, expected in (
        ("python/clipper/store/journal.py", "tests/store/test_journal.py"),
        ("python/clipper/frontend/inference/codec.py", "tests/frontend/test_v2_tensors.py"),
        ("container_sdk/src/clipper_container/gpu/ladder.py", "container_sdk/tests/test_gpu.py"),
    ):
        files = relevance.files(all_mutants(path)[0])
        assert expected in files[:2], files


def test_the_tests_of_a_mutant_run_its_function_and_take_a_minute() -> None:
    relevance, covering = Relevance(TIMES), Covering.read()
    for path in ("python/clipper/store/journal.py", "python/clipper/cli/mesh/models.py"):
        for mutant in all_mutants(path)[::20]:
            tests, seconds = relevance.tests(mutant)
            known = covering.tests.get(f"{path} {mutant.function}", [])
            assert known, mutant
            assert tests[0].partition("::")[0] in {test.partition("::")[0] for test in known}
            assert round(seconds, 6) <= 60 or len(tests) == 1
            files = [test.partition("::")[0] for test in tests]
            assert len(set(files)) == 1 + sum(a != b for a, b in pairwise(files))


def test_a_function_of_which_no_test_is_on_record_is_shown_the_tests_of_its_neighbours() -> None:
    relevance, covering = Relevance(TIMES), Covering.read()
    path = "python/clipper/store/journal.py"
    methods = {
        t for name in covering.tests if f"{path} Journal." in name for t in covering.tests[name]
    }
    added = Mutant(path, 1, "Journal.added", 0, 0, "", "")
    of_class = [test for test in relevance.tests(added)[0] if "::" in test]
    assert of_class
    assert set(of_class) <= methods
    assert [
        test for test in relevance.tests(Mutant(path, 1, "added", 0, 0, "", ""))[0] if "::" in test
    ]
    killed = "container_sdk/src/clipper_container/forking/fork_server.py"
    tests, _ = relevance.tests(all_mutants(killed)[0])
    assert "tests/unit/deploy/test_fork_servers.py" in tests


def test_a_test_that_was_renamed_since_it_was_recorded_stands_for_its_file() -> None:
    path, file = "python/clipper/store/journal.py", "tests/unit/test_clock.py"
    relevance = Relevance({})
    relevance._covering = Covering(
        {f"{path} Journal.close": [f"{file}::test_a", f"{file}::test_b"]},
        {f"{file}::test_a": 0.1, f"{file}::test_b": 0.1, file: 0.2},
    )
    tests, _ = relevance.tests(Mutant(path, 1, "Journal.close", 0, 0, "", ""))
    assert tests.count(file) == 1
    assert not [test for test in tests if "::" in test]


def test_words_of_what_is_changed_count() -> None:
    path, relevance = "python/clipper/store/journal.py", Relevance({})
    last = relevance.files(Mutant(path, 1, "f", 0, 0, "", ""), 1000)[-1]
    rare = min(relevance._words[last], key=lambda word: (relevance._files_with[word], -len(word)))
    assert relevance.files(Mutant(path, 1, "f", 0, 0, f"{rare}()", ""), 1000)[-1] != last


def test_an_equivalent_mutant_may_be_that_of_one_line_alone() -> None:
    path = "python/clipper/params/shard/durability/disk_log.py"
    rows = [row for row in read_equivalent() if row["path"] == path and "line" in row]
    judge = Judge([FakeCopy(set(), set())], rows)
    kinds = {
        (text_of_line(mutant).strip()[:12], judge.judge(mutant).kind)
        for mutant in all_mutants(path)
        if (mutant.function, mutant.old, mutant.new) == ("DiskLog._commit", "0", "1")
    }
    assert {line for line, kind in kinds if kind == "equivalent"} == {"head = RECOR"}
    assert ("flags = (MOR", "survived") in kinds


class FakeCopy:
    """A fake copy in which some tests always fail, and others only while a mutant is made."""

    def __init__(self, always: set[str], mutated: set[str]) -> None:
        self.root, self._always, self._mutated = ROOT, always, mutated
        self._failing = always
        self.ran: list[list[str]] = []

    def mutate(self, mutant: Mutant) -> None:
        self._failing = self._always | self._mutated

    def restore(self) -> None:
        self._failing = self._always

    def run(self, tests: list[str], limit_s: float) -> tuple[str, str]:
        self.ran.append(tests)
        out = {tests[i + 1] for i, word in enumerate(tests) if word == "--deselect"}
        shown = {*tests} - out
        failed = [one for one in sorted(self._failing) if {one, one.partition("::")[0]} & shown]
        failed = [one for one in failed if one not in out]
        return ("killed", failed[0]) if failed else ("survived", "")


def test_what_fails_on_the_unchanged_copy_too_is_no_kill() -> None:
    mutant = all_mutants("python/clipper/store/journal.py")[0]
    own = "tests/store/test_journal.py"
    for always, mutated, kind in (
        (set[str](), {f"{own}::test_b"}, "killed"),
        ({f"{own}::test_a"}, {f"{own}::test_b"}, "killed"),
        ({f"{own}::test_a"}, set[str](), "survived"),
        ({own}, {f"{own}::test_b"}, "survived"),  # the file cannot be imported
    ):
        copy = FakeCopy(always, mutated)
        verdict = Judge([copy], []).judge(mutant)
        assert (verdict.kind, own in copy.ran[0]) == (kind, True), copy.ran
        assert verdict.why == (f"{own}::test_b" if kind == "killed" else "")


def test_what_is_recorded_is_read_as_it_was_written(tmp_path: Path) -> None:
    tests = {"a.py A.f": ["t/x.py::one", "t/x.py"], "a.py g": ["t/x.py::T::two"], "b.py h": []}
    seconds = {"t/x.py": 3.0, "t/x.py::one": 0.5, "t/x.py::T::two": 2.0, "t/y.py::no": 1.0}
    Covering(tests, seconds).write(tmp_path / "record")
    again = Covering.read(tmp_path / "record")
    assert again.tests == tests
    assert again.seconds == {name: seconds[name] for name in seconds if name != "t/y.py::no"}
    Covering.read().write(tmp_path / "record")
    assert (tmp_path / "record").read_text() == RECORD.read_text()


def test_each_line_has_a_test_and_cheap_ones_come_first() -> None:
    seconds = Counter({"slow": 70.0, "quick": 0.1, "broad": 0.1, "other": 1.0})
    functions = Counter({"slow": 1, "quick": 1, "broad": 900, "other": 1})
    lines = {1: {"slow", "quick", "broad"}, 2: {"quick", "other"}, 3: {"slow"}}
    assert choose(lines, seconds, functions) == ["quick", "other", "broad", "slow"]
    assert choose({1: {"slow", "quick"}}, seconds, functions) == ["quick"]
    text = (
        "def f():\n    def g():\n        pass\nclass A:\n  if 1:\n    def h(self):\n      return 1"
    )
    assert dict(functions_of(ast.parse(text))) == {
        "f": range(2, 4),
        "f.g": range(3, 4),
        "A.h": range(7, 8),
    }


def test_moved_and_renamed_functions_are_distinguished_from_removed_ones(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder, text in (
        (
            old,
            "def test_a():\n    x = 1\n    assert x\ndef test_b():\n    assert 2\ndef test_c(): "
            "pass\n",
        ),
        (new, "def test_b():\n    assert 3\ndef test_d():\n    x = 1\n    assert x\n"),
    ):
        folder.mkdir()
        (folder / "test_x.py").write_text(text)
    gone, added = (
        {"test_x.py::test_a", "test_x.py::test_b", "test_x.py::test_c"},
        {"test_x.py::test_b", "test_x.py::test_d"},
    )
    assert match(gone, added, old, new) == {
        "test_x.py::test_a": "test_x.py::test_d",
        "test_x.py::test_b": "test_x.py::test_b",
    }
