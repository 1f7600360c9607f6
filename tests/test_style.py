"""Counts of what makes the code hard to read: each limit may only shrink.

`python -m tests.style` prints the counts by folder, `--list RULE` the places.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.style import (
    PRODUCT,
    ROOT,
    classes,
    coined_test_names,
    files,
    findings,
    inheritance,
    spoken_texts,
)

# Rule -> how many places of the product may break it. Lower a limit when you mend some.
LIMITS = {
    "no docstring": 0,
    "weak beginning": 0,
    "coined word": 0,
    "coined name": 0,
    "Any": 59,
    "large class": 0,
}
DUPLICATE_TYPES_MAX = 20
INHERITANCE_MAX = 0


@pytest.fixture(scope="module")
def counts() -> Counter[str]:
    return Counter(rule for path in files(*PRODUCT) for rule, _, _ in findings(path))


@pytest.mark.parametrize("rule", LIMITS)
def test_places_that_break_a_rule_become_fewer(rule: str, counts: Counter[str]) -> None:
    assert counts[rule] <= LIMITS[rule], f"python -m tests.style --list '{rule}'"
    assert counts[rule] >= LIMITS[rule], f"lower the limit of {rule!r} to {counts[rule]}"


def test_type_names_stand_for_one_type() -> None:
    names = {name: at for name, at in classes().items() if len(at) > 1 and name[0] != "_"}
    assert len(names) <= DUPLICATE_TYPES_MAX, names


def test_classes_inherit_from_interfaces_only() -> None:
    found = list(inheritance())
    assert len(found) <= INHERITANCE_MAX, "\n".join(found)


def test_texts_for_users_have_no_coined_words() -> None:
    sources = [*files(*PRODUCT), *sorted((ROOT / "dashboard/src").glob("*.js*"))]
    assert [text for path in sources for text in spoken_texts(path)] == []


def test_names_of_tests_have_no_coined_words() -> None:
    tests = files(ROOT / "tests", ROOT / "container_sdk/tests")
    assert [name for path in tests for name in coined_test_names(path)] == []


def test_a_weak_docstring_and_a_coined_word_are_seen(tmp_path: Path) -> None:
    place = tmp_path / "sample.py"
    place.write_text(
        '"""Of modules: nothing."""\nclass Crew:\n'
        "    def hear(self, told):\n        self.heard = told\n"
    )
    found = Counter(rule for rule, _, _ in findings(place))
    assert (found["weak beginning"], found["coined word"], found["no docstring"]) == (1, 2, 2)
    assert found["coined name"] == 2


def test_coined_words_in_texts_and_names_of_tests_are_seen(tmp_path: Path) -> None:
    place, page = tmp_path / "sample.py", tmp_path / "page.jsx"
    place.write_text(
        '"""It says so."""\ndef test_who_asked():\n    "It says so."\n'
        '    raise OSError("it said no")\n'
    )
    page.write_text("<p>\n  Nobody was heard.\n</p>\n")
    assert [*spoken_texts(place)] == ["sample.py:4: it said no"]
    assert [*spoken_texts(page)] == ["page.jsx:2: Nobody was heard."]
    assert [*coined_test_names(place)] == ["sample.py: test_who_asked"]
