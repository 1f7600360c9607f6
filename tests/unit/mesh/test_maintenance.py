"""Maintenance decisions: each finding of the janitor and the reaper, and what an instance publishes
and moves."""

from typing import Any

import msgspec
import pytest

from clipper.mesh.decisions import maintenance
from clipper.mesh.decisions.maintenance import (
    BadRecord,
    ExpireFailure,
    LoadCopy,
    MeshView,
    Move,
    PublishUse,
    RemoveClaim,
    StepVModel,
    UnloadCopy,
    UnregisterUnnamed,
)
from clipper.mesh.decisions.usage import Usage
from clipper.mesh.decisions.vmodels import LINGER_MS, LoadVModelTarget
from clipper.mesh.records import Copy, Failure, Instance, MeshModel, Policy, VModel
from clipper.settings.mesh import MeshSettings

MIB = 1 << 20
NOW = 1_700_000_000_000
HOUR = 3_600_000
SETTINGS = MeshSettings()


def node(id: str, used: int = 0, **fields: Any) -> Instance:
    return Instance(
        id,
        1,
        "",
        "",
        **{
            "capacity_bytes": 1000 * MIB,
            "used_bytes": used * MIB,
            "lru_ms": NOW - 10 * HOUR,
            **fields,
        },
    )


NODES = (node("a"), node("b"), node("c"))
LOADED = Copy(NOW - HOUR, NOW - HOUR + 100, MIB)


def some(id: str, *holders: str, **fields: Any) -> MeshModel:
    return MeshModel(
        id, "onnx", copies=dict.fromkeys(holders, LOADED), used_ms=NOW, size_bytes=MIB, **fields
    )


def view_of(*models: MeshModel, **fields: Any) -> MeshView:
    return MeshView(
        "a", fields.pop("instances", NODES), [(model.id, model) for model in models], **fields
    )


def janitor(view: MeshView, now_ms: int = NOW) -> list[maintenance.Action]:
    return maintenance.janitor(view, now_ms, SETTINGS)


def test_what_is_as_it_should_be_is_left_alone() -> None:
    assert janitor(view_of(some("m", "a"), resident={"m": (MIB, NOW)})) == []
    assert (
        janitor(view_of(MeshModel("m", "onnx", copies={"a": Copy(NOW - 9)}), loading={"m"})) == []
    )


def test_the_registry_and_the_memory_are_made_the_same() -> None:
    assert janitor(view_of(some("m", "a"))) == [RemoveClaim("a", "m", "it is not loaded here")]
    assert janitor(view_of(some("m", "b"), resident={"m": (1, NOW)})) == [
        UnloadCopy("m", "the registry does not know it here")
    ]
    assert janitor(view_of(resident={"m": (1, NOW)})) == [
        UnloadCopy("m", "the registry does not know it here")
    ]
    started = MeshModel("m", "onnx", copies={"a": Copy(NOW - 59_000)})
    assert janitor(view_of(started)) == []
    assert janitor(view_of(started, resident={"m": (1, NOW)}, loading={"m"})) == []
    assert janitor(view_of(started, resident={"m": (1, NOW)})) == [
        UnloadCopy("m", "the registry does not know it here")
    ]
    assert janitor(view_of(started), NOW + 2000) == [RemoveClaim("a", "m", "it is not loaded here")]


def test_one_corrupt_entry_does_not_end_the_round() -> None:
    """Model-mesh's janitor returned at the first corrupt time stamp."""
    bad: Any = msgspec.structs.replace(
        some("bad", "a"), copies={"a": Copy("yesterday", 1), "b": LOADED}
    )  # type: ignore[arg-type]
    view = MeshView(
        "a",
        NODES,
        [("x", None), ("bad", bad), ("m", some("m", "a"))],
        resident={"bad": (1, "never")},
    )  # type: ignore[dict-item]
    found = janitor(view)
    assert [type(action) for action in found] == [BadRecord, BadRecord, RemoveClaim]
    assert found[0] == BadRecord("x", "its record cannot be read")
    reaped = maintenance.reaper(
        MeshView("a", NODES, [("x", None), ("bad", bad), ("m", some("m", "gone"))]), NOW, SETTINGS
    )
    assert reaped[0] == BadRecord("x", "its record cannot be read")
    assert reaped[-1] == RemoveClaim("gone", "m", "its instance is gone", gone=True)


def test_failures_are_forgotten_in_ten_minutes() -> None:
    failures = {"a": Failure(NOW - 600_000, "x", "host"), "b": Failure(NOW - 599_999, "x", "host")}
    assert janitor(view_of(some("m", failures=failures))) == [ExpireFailure("m", ("a",))]


def test_last_uses_are_written_lazily() -> None:
    old = msgspec.structs.replace(some("m", "a"), used_ms=NOW - 6 * HOUR)
    assert janitor(view_of(old, resident={"m": (1, NOW)})) == []
    assert janitor(view_of(old, resident={"m": (1, NOW + 1)})) == [PublishUse("m", NOW + 1)]


def test_spare_copies_go_from_one_instance_and_not_too_many_at_once() -> None:
    tight = tuple(msgspec.structs.replace(i, used_bytes=i.capacity_bytes) for i in NODES)
    models = [some(f"m{n}", "a", "b") for n in range(9)]
    resident = {model.id: (10 * MIB, NOW - 3 * HOUR) for model in models}
    models = [msgspec.structs.replace(model, used_ms=NOW - 3 * HOUR) for model in models]
    by_node = {}
    for me in ("a", "b"):
        view = MeshView(me, tight, [(model.id, model) for model in models], resident=resident)
        by_node[me] = [action for action in janitor(view) if isinstance(action, UnloadCopy)]
    assert not by_node["a"]
    assert [action.spare for action in by_node["b"]] == [True] * 5


def test_more_copies_of_what_is_used_much() -> None:
    usage = {"hot": Usage(NOW, 5000), "cold": Usage(NOW, 1), "away": Usage(NOW, 9999)}
    view = view_of(some("hot", "a"), some("cold", "a"), some("away"), usage=usage)
    found = maintenance.rates(view, NOW, SETTINGS)
    assert [(action.model, action.copies) for action in found if isinstance(action, LoadCopy)] == [
        ("hot", 3)
    ] * 2


def test_what_the_dead_left_is_forgotten() -> None:
    failed = some("f", failures={"gone": Failure(NOW, "x", "host"), "b": Failure(NOW, "x", "host")})
    found = maintenance.reaper(view_of(some("m", "a", "gone"), failed), NOW, SETTINGS)
    assert found == [
        RemoveClaim("gone", "m", "its instance is gone", gone=True),
        ExpireFailure("f", ("gone",)),
    ]
    stuck = MeshModel("m", "onnx", copies={"b": Copy(NOW - 121_000)})
    assert maintenance.reaper(view_of(stuck), NOW, SETTINGS) == [
        RemoveClaim("b", "m", "its load has never ended")
    ]


def test_what_was_to_go_with_its_vmodel_goes() -> None:
    here = msgspec.structs.replace(
        some("m", "a", auto_delete=True, policy=Policy(copies_min=2)), used_ms=NOW - LINGER_MS
    )
    assert maintenance.reaper(view_of(here), NOW, SETTINGS) == [UnregisterUnnamed("m")]
    for stays in ({"refs": 1}, {"auto_delete": False}, {"used_ms": NOW - LINGER_MS + 1}):
        assert UnregisterUnnamed("m") not in maintenance.reaper(
            view_of(msgspec.structs.replace(here, **stays)), NOW, SETTINGS
        )


def test_copies_that_a_policy_requires() -> None:
    found = maintenance.reaper(
        view_of(some("m", "a", policy=Policy(copies_min=3)), some("p", policy=Policy(pinned=True))),
        NOW,
        SETTINGS,
    )
    assert [(action.model, action.copies) for action in found if isinstance(action, LoadCopy)] == [
        ("m", 3),
        ("m", 3),
        ("p", 1),
    ]
    bad = some(
        "p", policy=Policy(pinned=True), failures={i: Failure(NOW, "x", "artifact") for i in "ab"}
    )
    assert maintenance.reaper(view_of(bad), NOW, SETTINGS) == []


def test_names_on_their_way_go_on() -> None:
    models = {"m1": some("m1", "a"), "m2": some("m2")}
    names = [VModel("v", "m1", "m2"), VModel("w", "m1", "m1")]
    found = maintenance.reaper(MeshView("a", NODES, vmodels=names, read=models.get), NOW, SETTINGS)
    assert found == [StepVModel("v", LoadVModelTarget("m2", 1, "0 of 1 copies are loaded"))]


@pytest.mark.parametrize(
    ("loaded", "newer_ms", "expected"),
    [
        (0, 0, 43),  # half of the 100 places less an eighth of them
        (80, 0, 3),
        (100, 0, 0),
        (100, 21 * 60_000, 5),  # a twentieth replaces models that were used much earlier
    ],
)
def test_free_places_are_filled_as_free_memory_is(
    loaded: int, newer_ms: int, expected: int
) -> None:
    """A node that may load no further model has no room, however much memory is free."""
    nodes = (node("a", models=loaded, models_max=100, lru_ms=NOW - newer_ms),)
    waking = [MeshModel(f"m{n}", "onnx", size_bytes=1, used_ms=NOW) for n in range(200)]
    found = maintenance.reaper(view_of(waking=waking, instances=nodes), NOW, SETTINGS)
    assert len(found) == expected


def test_free_memory_is_filled_by_half_above_a_reserve() -> None:
    """Half of what is left of 3000 MiB after a reserve of 375, so 1312 MiB, is filled."""
    waking = [MeshModel(f"m{n}", "onnx", size_bytes=100 * MIB, used_ms=NOW - n) for n in range(40)]
    waking[3] = msgspec.structs.replace(waking[3], failures={"a": Failure(NOW)})
    found = maintenance.reaper(view_of(waking=waking), NOW, SETTINGS)
    assert len(found) == 13
    assert [action.model for action in found[:4] if isinstance(action, LoadCopy)] == [
        "m0",
        "m1",
        "m2",
        "m4",
    ]


def test_full_memory_is_replaced_by_little_and_only_by_what_is_newer() -> None:
    """Models replace at most 5 % of 3000 MiB, and only those that were used later than the oldest
    by a third of its age, and by at least twenty minutes."""
    tight = tuple(msgspec.structs.replace(i, used_bytes=i.capacity_bytes) for i in NODES)
    edge = NOW - 10 * HOUR + 10 * HOUR // 3
    for used_ms, expected in ((edge + 1000, 3), (edge - 1000, 0)):
        waking = [
            MeshModel(f"m{n}", "onnx", size_bytes=50 * MIB, used_ms=used_ms) for n in range(9)
        ]
        assert (
            len(maintenance.reaper(view_of(waking=waking, instances=tight), NOW, SETTINGS))
            == expected
        )
    busy = tuple(msgspec.structs.replace(i, queued=51) for i in NODES)
    assert maintenance.reaper(view_of(waking=waking, instances=busy), NOW, SETTINGS) == []


@pytest.mark.parametrize(
    ("change", "enough"),
    [
        ({"used_bytes": 190}, False),
        ({"used_bytes": 240}, True),
        ({"models": 110}, False),
        ({"models": 116}, True),
        ({"rate": 599.0}, False),
        ({"rate": 601.0}, True),
        ({"lru_ms": NOW - HOUR + 200_000}, False),
        ({"lru_ms": NOW - HOUR + 240_000}, True),
        ({"capacity_bytes": 1015}, False),
        ({"capacity_bytes": 1030}, True),
        ({"labels": ("gpu",)}, True),
        ({"queued": 1}, False),
        ({"queued": 2}, True),
    ],
)
def test_changes_that_are_worth_a_write(change: dict[str, Any], enough: bool) -> None:
    published = Instance(
        "a",
        1,
        "",
        "",
        capacity_bytes=1000,
        used_bytes=195,
        models=100,
        lru_ms=NOW - HOUR,
        rate=500.0,
    )
    now = msgspec.structs.replace(published, **change)
    assert maintenance.worth_publishing(published, now, NOW - 2000, NOW, SETTINGS) is enough
    assert not maintenance.worth_publishing(published, now, NOW - 1999, NOW, SETTINGS)
    assert maintenance.worth_publishing(published, now, NOW - 160_000, NOW, SETTINGS)
    assert not maintenance.worth_publishing(published, published, 0, NOW, SETTINGS)
    later = NOW + HOUR  # published by a clock that has been set back since
    assert maintenance.worth_publishing(published, now, later, NOW, SETTINGS) is enough
    assert maintenance.worth_publishing(
        published, msgspec.structs.replace(published, stopping=True), NOW, NOW, SETTINGS
    )


def test_becoming_full_is_always_worth_a_write() -> None:
    published = Instance("a", 1, "", "", capacity_bytes=1000, used_bytes=949)
    assert maintenance.worth_publishing(
        published, msgspec.structs.replace(published, used_bytes=951), NOW - 2000, NOW, SETTINGS
    )


def test_an_instance_that_stops_moves_what_it_holds_alone_and_waits_for_what_is_in_use() -> None:
    models = (
        some("new", "a"),
        some("both", "a", "b"),
        some("old", "a"),
        some("pin", "a", policy=Policy(pinned=True)),
    )
    resident = {
        "new": (1, NOW - 5),
        "both": (2, NOW),
        "old": (3, NOW - HOUR),
        "pin": (4, NOW - 2 * HOUR),
    }
    expected = [
        Move("new", NOW - 5, True, 1),
        Move("old", NOW - HOUR, False, 3),
        Move("pin", NOW - 2 * HOUR, True, 4),
    ]
    assert maintenance.migration(view_of(*models, resident=resident), NOW) == expected
    stopping = (NODES[0], msgspec.structs.replace(NODES[1], stopping=True))
    assert (
        len(maintenance.migration(view_of(*models, resident=resident, instances=stopping), NOW))
        == 4
    )


def test_what_was_evicted_goes_elsewhere_while_others_have_memory() -> None:
    model = some("m", "a")
    assert maintenance.evicted(model, "a", NODES, NOW, SETTINGS) is not None
    assert maintenance.evicted(some("m", "a", "b"), "a", NODES, NOW, SETTINGS) is None
    assert maintenance.evicted(some("m", "b"), "a", NODES, NOW, SETTINGS) is None
    assert maintenance.evicted(model, "a", NODES[:1], NOW, SETTINGS) is None
    assert maintenance.evicted(model, "a", (NODES[0], node("b", used=951)), NOW, SETTINGS) is None
    recent = MeshModel("m", "onnx", copies={"a": Copy(NOW - 59_000, NOW)})
    assert maintenance.evicted(recent, "a", NODES, NOW, SETTINGS) is None
