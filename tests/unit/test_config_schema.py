"""The schema describes each key as the settings do."""

import json
from typing import Any

import msgspec
import pytest
from click.testing import CliRunner

from clipper.cli import main
from clipper.config import describe, load
from clipper.config_schema import schema
from clipper.errors import ConfigError


def table_at(section: str) -> dict[str, Any]:
    name, _, any_name = section.partition(".")
    found: dict[str, Any] = schema()["properties"][name]
    found = found["anyOf"][0] if "anyOf" in found else found
    return found["additionalProperties"] if any_name else found  # type: ignore[no-any-return]


def test_it_has_every_key_and_no_other() -> None:
    known: dict[str, set[str]] = {}
    for info in describe():
        section, _, key = info.key.rpartition(".")
        known.setdefault(section, set()).add(key)
    for section, keys in known.items():
        table = table_at(section)
        assert (set(table["properties"]), table["additionalProperties"]) == (keys, False)
    assert {section.partition(".")[0] for section in known} == set(schema()["properties"])


@pytest.mark.parametrize("info", [one for one in describe() if one.range], ids=lambda one: one.key)
def test_ranges_are_those_that_are_held_to(info: Any) -> None:
    section, _, key = info.key.rpartition(".")
    found = table_at(section)["properties"][key]
    low, _, high = info.range.partition(" to ")
    assert (found["minimum"], found["maximum"]) == (float(low), float(high))
    name, _, any_name = section.partition(".")
    table = {"any": {key: found["maximum"] + 1}} if any_name else {key: found["maximum"] + 1}
    with pytest.raises(ConfigError, match=key):
        load(env={}, **{name: table})


def test_it_is_json_and_names_the_unit() -> None:
    printed = json.loads(CliRunner().invoke(main, ["config", "schema"]).output)
    assert printed == json.loads(msgspec.json.encode(schema()))
    slo = printed["properties"]["apps"]["additionalProperties"]["properties"]["slo_ms"]
    assert slo["description"] == (
        "time from a query to its answer; then the default is returned, in ms"
    )
    assert slo["default"] == 20
