"""Any plain value is read back unchanged by another YAML library."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.yaml_text import to_yaml

yaml = pytest.importorskip("yaml", reason="python tools/fetch.py clients")

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20) | st.sampled_from(
    [
        "",
        "no",
        "Yes",
        "null",
        "~",
        "1",
        "1e3",
        "0x1f",
        "2026-11-21",
        "a: b",
        "- a",
        "#",
        "'",
        '"',
        "\\",
        "=",
        "<<",
        "a\nb\n",
    ]
)
scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | texts
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(texts, inner, max_size=4),
    max_leaves=20,
)


@given(st.dictionaries(texts, values, max_size=4) | st.lists(values, max_size=4))
def test_it_is_read_as_it_was_written(value: object) -> None:
    assert yaml.safe_load(to_yaml(value)) == value


def test_documents_are_kept_apart() -> None:
    assert list(yaml.safe_load_all(to_yaml({"a": 1}, {"b": [{"c": "d"}, []]}))) == [
        {"a": 1},
        {"b": [{"c": "d"}, []]},
    ]


def test_it_is_meant_to_be_read() -> None:
    assert (
        to_yaml({"name": "svm", "ports": ["80:80", {"no": False}], "empty": {}})
        == 'name: svm\nports:\n  - "80:80"\n  - "no": false\nempty: {}\n'
    )
