"""Placement of models: each rule by itself, and properties that hold for any instances."""

from collections import Counter
from random import Random
from typing import Any

import msgspec
import pytest

from clipper.mesh.decisions.load_queue import LoadTimes
from clipper.mesh.decisions.placement import (
    BUSY_RATE,
    UPGRADE_MS,
    Constraint,
    InstanceIndex,
    NoPlacement,
    Placement,
    _shortlist,
    _Wish,
    choose,
    constraint_of,
    explain,
    is_full,
)
from clipper.mesh.records import Copy, Instance, MeshModel, Policy

MIB = 1 << 20
NOW = 1_700_000_000_000
SEEN = LoadTimes()


def node(id: str, **fields: Any) -> Instance:
    """Return an empty node with room."""
    options = {
        "number": 1,
        "peers": "",
        "containers": "",
        "capacity_bytes": 1000 * MIB,
        "lru_ms": NOW,
        **fields,
    }
    return Instance(id, **options)


def full_node(id: str, idle_s: int = 0, **fields: Any) -> Instance:
    return node(id, used_bytes=1000 * MIB, models=50, lru_ms=NOW - 1000 * idle_s, **fields)


def model(**fields: Any) -> MeshModel:
    return MeshModel("m", **{"type": "onnx", "size_bytes": 10 * MIB, **fields})


def drawn(wanted: MeshModel, instances: Any, times: int = 60, **options: Any) -> set[str]:
    """Return all nodes that repeated random choices give."""
    rng, options = Random(1), {"constraints": {}, "seen": SEEN, **options}
    found = [choose(wanted, instances, NOW, rng, **options) for _ in range(times)]
    assert all(isinstance(choice, Placement) for choice in found), found
    return {choice.instance for choice in found if isinstance(choice, Placement)}


@pytest.mark.parametrize(
    ("wanted", "bad"),
    [
        (model(), node("bad", stopping=True)),
        (model(), node("bad", types=("skops",))),
        (model(size_bytes=2000 * MIB), node("bad")),
        (model(policy=Policy(requires=("gpu",))), node("bad", labels=("big",))),
        (model(copies={"bad": Copy(1)}), node("bad")),
    ],
)
def test_some_instances_never(wanted: MeshModel, bad: Instance) -> None:
    good = node(
        "good",
        labels=("gpu",),
        types=("onnx",),
        capacity_bytes=4000 * MIB,
        used_bytes=1900 * MIB,
        models=900,
    )
    assert drawn(wanted, [bad, good]) == {"good"}
    assert isinstance(choose(wanted, [bad], NOW, Random(1), constraints={}, seen=SEEN), NoPlacement)


def test_what_was_tried_is_not_tried_again() -> None:
    assert drawn(model(), [node("a"), node("b")], exclude={"a"}) == {"b"}
    refused = choose(model(), [node("a")], NOW, Random(1), constraints={}, seen=SEEN, exclude={"a"})
    assert isinstance(refused, NoPlacement)
    assert refused.retry_ms > 0
    assert "a: it was tried" in refused.why


def test_models_that_can_never_be_placed_are_reported() -> None:
    refused = choose(
        model(size_bytes=9000 * MIB), [node("a")], NOW, Random(1), constraints={}, seen=SEEN
    )
    assert isinstance(refused, NoPlacement)
    assert refused.retry_ms == 0
    nowhere = choose(model(), [], NOW, Random(1), constraints={}, seen=SEEN)
    assert isinstance(nowhere, NoPlacement)
    assert nowhere.retry_ms > 0


def test_constraints_are_by_type_with_a_default() -> None:
    constraints = {"onnx": Constraint(required=("gpu",)), "_default": Constraint(required=("cpu",))}
    instances = [node("g", labels=("gpu",)), node("c", labels=("cpu",))]
    assert drawn(model(), instances, constraints=constraints) == {"g"}
    assert drawn(model(type="skops"), instances, constraints=constraints) == {"c"}
    assert constraint_of("x", {}) == Constraint()


def test_room_comes_before_age_and_few_models_before_many() -> None:
    assert drawn(model(), [full_node("old", 9999), node("room", models=900)]) == {"room"}
    assert drawn(model(), [node("few", models=20), node("many", models=26)]) == {"few"}
    assert drawn(model(), [node("few", models=20), node("near", models=25)]) == {"few", "near"}
    assert drawn(model(), [node("one", models=1), node("ten", models=10)]) == {"one", "ten"}


def test_little_room_beside_much_is_not_as_good() -> None:
    little = node("little", used_bytes=800 * MIB, models=3)
    assert drawn(model(), [node("much", models=3), little]) == {"much"}


def test_an_instance_without_room_for_this_one_is_as_good_as_full() -> None:
    small = node("small", used_bytes=900 * MIB)
    assert drawn(model(size_bytes=200 * MIB), [small, node("large", models=90)]) == {"large"}
    assert drawn(model(size_bytes=200 * MIB), [small]) == {"small"}


def test_model_of_unknown_size_takes_as_much_as_those_that_are_loaded() -> None:
    small = node("small", used_bytes=900 * MIB, models=3)
    large = node("large", used_bytes=700 * MIB, models=5)
    unknown = model(size_bytes=0)
    assert drawn(unknown, [small, large]) == {"large"}
    assert drawn(unknown, [small]) == {"small"}
    assert drawn(unknown, [node("new")]) == {"new"}


@pytest.mark.parametrize(
    ("idle_s", "best_s", "both"),
    [(56, 100, True), (54, 100, False), (910, 1000, True), (890, 1000, False)],
)
def test_of_full_ones_the_longest_unused(idle_s: int, best_s: int, both: bool) -> None:
    """Ages within 45 s, or within a tenth of the best one's age, count as equal."""
    found = drawn(model(), [full_node("other", idle_s), full_node("best", best_s)])
    assert found == ({"best", "other"} if both else {"best"})


def test_labels_that_are_preferred_are_a_wish() -> None:
    wish = model(policy=Policy(prefers=("ssd",)))
    assert drawn(wish, [node("plain"), node("liked", labels=("ssd",), models=400)]) == {"liked"}
    assert drawn(wish, [node("plain")]) == {"plain"}
    assert drawn(wish, [node("plain"), full_node("liked", 10, labels=("ssd",))]) == {"plain"}
    options = {"constraints": {"onnx": Constraint(preferred=("ssd",))}}
    assert drawn(
        model(), [full_node("plain", 1000), full_node("liked", 800, labels=("ssd",))], **options
    ) == {"liked"}
    assert drawn(
        model(), [full_node("plain", 1000), full_node("liked", 600, labels=("ssd",))], **options
    ) == {"plain"}


def test_each_candidate_is_judged_by_its_own_record() -> None:
    """Model-mesh compared all but the best with the deciding instance's own rate, which had just
    begun at nothing."""
    busy = node("busy", rate=100 * BUSY_RATE)
    assert drawn(model(), [node("me", rate=0.0), busy, node("calm", rate=BUSY_RATE)]) == {
        "me",
        "calm",
    }
    assert drawn(model(), [busy]) == {"busy"}


@pytest.mark.parametrize(
    ("ago_s", "rate", "kept"),
    [
        *((1, 31_000, False), (1, 29_000, True), (60, 59_000, True), (60, 61_000, False)),
        *((7200, 79_000, True), (7200, 81_000, False), (90_000, 9_000_000, True)),
    ],
)
def test_the_longer_unused_the_busier_its_place_may_be(ago_s: int, rate: float, kept: bool) -> None:
    found = drawn(
        model(), [node("calm", rate=20_000.0), node("busy", rate=rate)], used_ms=NOW - 1000 * ago_s
    )
    assert found == ({"calm", "busy"} if kept else {"calm"})


def test_a_long_queue_of_loads_is_avoided() -> None:
    assert drawn(model(), [node("short", queued=1, loading_max=1), node("long", queued=9)]) == {
        "short"
    }
    assert drawn(model(), [node("short", queued=1), node("wide", queued=9, loading_max=8)]) == {
        "short",
        "wide",
    }


def test_instances_of_an_older_version_are_about_to_go() -> None:
    """Also where instances have labels: model-mesh's own tracker did not work then."""
    words = ["gpu"]
    old = [
        node(f"old{n}", labels=tuple(words), version="1", started_ms=NOW - 10 * UPGRADE_MS)
        for n in range(2)
    ]
    new = node("new", labels=tuple(words), version="2", started_ms=NOW - 1000, models=99)
    assert drawn(model(), [*old, new]) == {"new"}
    settled = msgspec.structs.replace(new, started_ms=NOW - UPGRADE_MS - 1)
    assert drawn(model(), [*old, settled]) == {"old0", "old1"}
    assert drawn(model(), [*old, msgspec.structs.replace(new, used_bytes=1000 * MIB)]) == {
        "old0",
        "old1",
    }
    elsewhere = msgspec.structs.replace(new, labels=("cpu",))
    assert drawn(model(), [*old, elsewhere]) == {"old0", "old1"}


def test_a_second_copy_goes_to_another_zone_and_host() -> None:
    instances = [
        node("a", zone="1", host="x"),
        node("b", zone="1", host="y"),
        node("c", zone="2", host="z", models=300),
    ]
    assert drawn(model(copies={"a": Copy(1, 2)}), instances) == {"c"}
    assert drawn(model(copies={"a": Copy(1, 2), "c": Copy(1, 2)}), instances) == {"b"}
    one_zone = [node("a", host="x"), node("b", host="x"), node("c", host="z")]
    assert drawn(model(copies={"a": Copy(1, 2)}), one_zone) == {"c"}


def test_quarantine_is_the_last_resort() -> None:
    assert drawn(model(), [node("bad"), node("good", models=500)], avoid={"bad"}) == {"good"}
    assert drawn(model(), [node("bad")], avoid={"bad"}) == {"bad"}


def test_the_local_one_if_it_is_as_good() -> None:
    assert drawn(model(), [node("a"), node("b")], prefer_local="b") == {"b"}
    assert drawn(model(), [node("a"), node("b", models=300)], prefer_local="b") == {"a"}


def test_chance_is_fair() -> None:
    instances, rng = [node(f"i{n}") for n in range(10)], Random(3)
    field = InstanceIndex(instances)
    counts = Counter(
        str(choose(model(), field, NOW, rng, constraints={}, seen=SEEN)).split("'")[1]
        for _ in range(5000)
    )
    assert len(counts) == 10
    assert max(counts.values()) < 1.3 * min(counts.values())


def test_what_was_just_sent_there_counts() -> None:
    field = InstanceIndex([node("a", models=3), node("b", models=3)])
    for _ in range(5):
        field.place("a", 100 * MIB)
    assert drawn(model(), field) == {"b"}


def some_node(rng: Random, id: str) -> Instance:
    capacity = rng.choice([500, 1000, 4000]) * MIB
    return node(
        id,
        capacity_bytes=capacity,
        used_bytes=rng.choice([0, capacity // 2, capacity, capacity - 20 * MIB]),
        models=rng.randrange(60),
        lru_ms=NOW - rng.randrange(10_000_000),
        labels=tuple(label for label in ("gpu", "ssd") if rng.random() < 0.5),
        types=rng.choice([(), ("onnx",), ("skops",)]),
        zone=rng.choice(["1", "2"]),
        host=rng.choice(["x", "y", "z"]),
        rate=rng.choice([0.0, 50.0, 5000.0]),
        queued=rng.randrange(8),
        version=rng.choice(["1", "1", "2"]),
        started_ms=NOW - rng.randrange(2 * UPGRADE_MS),
        stopping=rng.random() < 0.1,
    )


@pytest.mark.parametrize("seed", range(30))
def test_whatever_the_instances_the_choice_is_one_that_can(seed: int) -> None:
    rng = Random(seed)
    instances = [some_node(rng, f"i{n}") for n in range(rng.randrange(1, 40))]
    wanted = model(
        size_bytes=rng.choice([0, 10, 700]) * MIB,
        copies={f"i{n}": Copy(1) for n in rng.sample(range(40), 2)} if rng.random() < 0.5 else {},
        policy=Policy(requires=rng.choice([(), ("gpu",)]), prefers=rng.choice([(), ("ssd",)])),
    )
    exclude, avoid = {f"i{rng.randrange(40)}"}, {f"i{rng.randrange(40)}"}
    options: dict[str, Any] = {"constraints": {}, "seen": SEEN, "exclude": exclude, "avoid": avoid}
    verdicts = {v.instance: v for v in explain(wanted, instances, NOW, **options)}
    assert sorted(verdicts) == sorted(i.id for i in instances)
    for n in range(20):
        choice = choose(wanted, instances, NOW, Random(n), **options)
        if isinstance(choice, NoPlacement):
            assert not any(v.rank >= 0 for v in verdicts.values())
            continue
        chosen = next(i for i in instances if i.id == choice.instance)
        assert not chosen.stopping
        assert chosen.capacity_bytes >= wanted.size_bytes
        assert chosen.id not in exclude | set(wanted.copies)
        assert set(wanted.policy.requires) <= set(chosen.labels)
        if len(instances) <= 24:
            assert verdicts[chosen.id].ok
        if is_full(chosen) and not wanted.copies and not wanted.policy.prefers:
            assert verdicts[chosen.id].why


def test_explain_names_the_instance_that_would_evict_where_no_room_is_left() -> None:
    instances = [node("a", used_bytes=700 * MIB, models=9), node("b", stopping=True)]
    large = model(size_bytes=500 * MIB)
    verdicts = explain(large, instances, NOW, constraints={}, seen=SEEN)
    assert {v.instance for v in verdicts if v.ok} == drawn(large, instances) == {"a"}


@pytest.mark.parametrize("seed", range(20))
def test_a_field_that_changed_is_like_one_made_anew(seed: int) -> None:
    rng, field, known = Random(seed), InstanceIndex(), {}
    for _ in range(200):
        id = f"i{rng.randrange(30)}"
        if rng.random() < 0.3:
            field.remove(id)
            known.pop(id, None)
        else:
            known[id] = some_node(rng, id)
            field.put(known[id])
        if rng.random() < 0.2:
            assert field.replaced(NOW) == InstanceIndex(known.values()).replaced(NOW)
    anew = InstanceIndex(known.values())
    anew.replaced(NOW), field.replaced(NOW)
    assert list(field) == list(anew)
    assert {i.id for i in field} == set(known)
    for n in range(20):
        options: dict[str, Any] = {"constraints": {}, "seen": SEEN}
        assert choose(model(), field, NOW, Random(n), **options) == choose(
            model(), list(known.values()), NOW, Random(n), **options
        )


@pytest.mark.parametrize("seed", range(5))
def test_sums_of_a_field_that_changed_are_those_of_one_made_anew(seed: int) -> None:
    rng, field, known = Random(seed), InstanceIndex(), {}
    for step in range(120):
        id = f"i{rng.randrange(12)}"
        if rng.random() < (0.3 if step < 80 else 0.8):
            field.remove(id)
            known.pop(id, None)
        else:
            known[id] = some_node(rng, id)
            field.put(known[id])
        anew = InstanceIndex(known.values())
        assert (len(field), field._versions) == (len(anew), anew._versions)
        assert (field.typical_bytes, field._models) == (anew.typical_bytes, anew._models)
        assert {one: one in field for one in (id, "none")} == {id: id in known, "none": False}
        assert field.get(id) == known.get(id)


def test_instances_nearly_as_good_as_the_best() -> None:
    wanted = model()
    wish = _Wish(wanted, Constraint(), 10 * MIB, (), frozenset({"r"}), NOW, NOW, 0)

    def listed(*instances: Instance, seed: int = 0) -> list[str]:
        return [one.id for one in _shortlist(instances, wish, Random(seed))]

    def few(counts: list[int], ids: str = "abcdefghijklmnopqrs", **fields: Any) -> list[Instance]:
        return [node(id, models=n, **fields) for id, n in zip(ids, counts, strict=False)]

    assert listed() == []
    assert listed(*few([0, 11])) == ["a"]
    assert listed(*few([0, 10, 11])) == ["a", "b"]
    assert listed(*few([40, 50, 51])) == ["a", "b"]
    assert listed(*few([0, 0]), node("r")) == ["a", "b"]
    assert listed(node("small", capacity_bytes=MIB), *few([3, 14, 15])) == ["a"]
    assert listed(node("a"), node("b", capacity_bytes=249 * MIB), node("c")) == ["a", "c"]
    assert listed(*few([0] * 12)) == list("abcdefghijkl")
    assert listed(full_node("a", 100), full_node("b", 50), node("c")) == ["a"]
    assert listed(full_node("a", 9000), full_node("b", 8100), full_node("c", 8000)) == ["a", "b"]
    assert listed(full_node("a", 9000), node("b", models=1)) == ["a"]
    for seed in range(9):
        drawn = listed(*few([0] * 19), seed=seed)
        assert (drawn[0], len(drawn), len({*drawn})) == ("a", 12, 12)
    each = {id for seed in range(60) for id in listed(*few([0] * 14), seed=seed)}
    assert each == set("abcdefghijklmn")
