"""Counts of what makes the code hard to read: each limit may only shrink.

`python -m tests.style` prints the counts by folder, `--list RULE` the places.
"""

from collections import Counter
from pathlib import Path

import pytest

from tests.style import PRODUCT, classes, files, findings, inheritance

# Rule -> how many places of the product may break it. Lower a limit when you mend some.
LIMITS = {"no docstring": 0, "weak beginning": 0, "Any": 55, "large class": 0}
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
    own = "python/clipper_client/own_errors.py"  # errors of clipper, where it is not installed
    places = {name: [a for a in at if not a.startswith(own)] for name, at in classes().items()}
    names = {name: at for name, at in places.items() if len(at) > 1 and name[0] != "_"}
    assert len(names) <= DUPLICATE_TYPES_MAX, names


def test_classes_inherit_from_interfaces_only() -> None:
    found = list(inheritance())
    assert len(found) <= INHERITANCE_MAX, "\n".join(found)


def test_a_weak_docstring_and_a_missing_one_are_seen(tmp_path: Path) -> None:
    place = tmp_path / "sample.py"
    place.write_text(
        '"""Of modules: nothing."""\nclass Sample:\n'
        "    def read(self, place):\n        self.place = place\n"
    )
    found = Counter(rule for rule, _, _ in findings(place))
    assert (found["weak beginning"], found["no docstring"]) == (1, 2)
