"""Every change of the catalog has an entry, whoever writes it; a dry run has none."""

import random

import msgspec
import pytest

from clipper.catalog.catalog import Catalog
from clipper.errors import AlreadyExists, UnknownModel
from clipper.store import MemoryStore
from clipper.store.history import (
    ENTRIES_MAX,
    HistoryEntry,
    audit_context,
    default_actor,
    entries,
    plain,
)
from clipper.types import InputType, Model


def test_each_change_has_its_author_action_and_former_value() -> None:
    with MemoryStore() as store, Catalog(store, follow=False, wall_us=lambda: 7) as catalog:
        catalog.register(Model("svm", 1, InputType("f64", (64,))))
        with audit_context("ann", "challenge"):
            catalog.register_application("digits", ["svm"], default=b"x")
        catalog.update_application("digits", slo_ms=5.0)
        catalog.update_application("digits", slo_ms=5.0)  # it is so already
        catalog.unregister_application("digits")
        with pytest.raises(UnknownModel):
            catalog.retire_model("svn")
        found = entries(store)
        assert [(entry.number, entry.time_us, entry.verb) for entry in found] == [
            (1, 7, "deploy"), (2, 7, "challenge"), (3, 7, "set"), (4, 7, "remove"),
        ]  # fmt: skip
        assert [entry.actor for entry in found] == [
            default_actor(),
            "ann",
            default_actor(),
            default_actor(),
        ]
        (one,) = plain(found[2])["changed"]
        assert (one["key"], one["before"]["slo_ms"], one["after"]["slo_ms"]) == (
            "application/digits",
            20.0,
            5.0,
        )
        (removed,) = plain(found[3])["changed"]
        assert removed["after"] is None
        assert [entry.number for entry in entries(store, 2)] == [3, 4]


def test_a_rehearsal_checks_and_writes_nothing() -> None:
    with MemoryStore() as store, Catalog(store, follow=False) as catalog:
        model = catalog.register(Model("svm", 1, InputType("f64", (64,))))
        before = store.range("")
        with audit_context("ann", "deploy", dry=True) as rehearsal:
            catalog.register(Model("svm", 2, InputType("f64", (64,))))
            with pytest.raises(AlreadyExists):
                catalog.register(model)
        assert [one.key for one in rehearsal.entries[0].changed] == ["model/svm/2", "scale/svm/2"]
        assert len(rehearsal.entries) == 1
        assert store.range("") == before


def test_the_last_are_kept_and_numbers_go_on() -> None:
    """Compare with a list of what was written, through restarts of the catalog."""
    rng, wrote = random.Random(7), 0
    with MemoryStore() as store:
        for _ in range(4):
            with Catalog(store, follow=False) as catalog:
                for _ in range(rng.randrange(100, 500)):
                    wrote += 1
                    name = f"a{wrote % 3}"
                    if name in catalog.view.applications:
                        catalog.unregister_application(name)
                    else:
                        catalog.register_application(name)
        kept = [entry.number for entry in entries(store)]
        assert kept == list(range(max(1, wrote - ENTRIES_MAX + 1), wrote + 1))
        assert len(store.range("history/")[0]) <= ENTRIES_MAX


def test_what_cannot_be_kept_or_read_is_left_out() -> None:
    with MemoryStore() as store, Catalog(store, follow=False) as catalog:
        catalog.register_application("long", default="x" * 100_000)
        store.put("catalog/application/odd", b"no JSON")
        catalog.refresh()
        catalog.unregister_application("odd")
        store.put("history/0999", b"no JSON")
        first, second = entries(store)
        assert msgspec.json.decode(first.changed[0].after) == "(too long to keep)"
        assert msgspec.json.decode(second.changed[0].before) == "(not readable)"
        assert isinstance(first, HistoryEntry)
        assert len(msgspec.json.encode(first)) < 1000
