"""The table of faults: each row names tests that exist, and docs/faults.md is made of it."""

from pathlib import Path

import pytest

from tests.faults.table import PAGE, names_of_tests, page, problems, read, read_all


def test_every_test_of_the_table_exists_and_ids_are_unique() -> None:
    wrong = list(problems(read_all()))
    assert not wrong, "\n".join(wrong)


def test_the_page_equals_the_table() -> None:
    assert PAGE.read_text() == page(read_all()), "run: python -m tests.faults --write"


GOOD = (
    '[[fault]]\nid = "X1"\nwhat = "It broke."\nnow = "It works."\ntests ='
    ' ["tests/test_a.py::test_it"]\n'
)


def test_a_missing_test_and_a_repeated_id_are_reported(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_a.py").write_text(
        "def helper(): ...\nclass TestB:\n    async def test_c(self): ...\n"
    )
    (tmp_path / "one.toml").write_text(GOOD)
    (tmp_path / "two.toml").write_text(GOOD.replace("::test_it", "::TestB::test_c[1-2]"))
    assert list(problems(read_all(tmp_path), tmp_path)) == [
        "one.toml: X1: there is no test tests/test_a.py::test_it",
        "two.toml: the id X1 is used in one.toml as well",
    ]
    assert names_of_tests(tmp_path / "tests" / "test_a.py") == {"TestB::test_c"}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (GOOD.replace('["tests/test_a.py::test_it"]', "[]"), "must name at least one test"),
        (GOOD.replace('"It works."', '" "'), "now must be a sentence"),
        (GOOD + 'since = "1"\n', "unknown keys: since"),
        (GOOD.replace("[[fault]]", "[[faults]]"), "written as"),
    ],
)
def test_an_incomplete_entry_is_refused(tmp_path: Path, text: str, reason: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ValueError, match=reason):
        read(tmp_path / "bad.toml")


def test_rows_are_sorted_by_number_and_cells_are_escaped(tmp_path: Path) -> None:
    second = GOOD.replace("X1", "X10").replace("It broke.", "a | b\\nc")
    (tmp_path / "x.toml").write_text(
        'title = "Things"\n' + second + GOOD.replace("X1", "X2") + 'figure = "3 ms."\n'
    )
    text = page(read_all(tmp_path))
    assert "## Things" in text
    assert text.index("| X2 | It broke. | It works. 3 ms. |") < text.index("| X10 | a \\| b c |")
