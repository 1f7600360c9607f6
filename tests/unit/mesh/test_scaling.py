"""Each rule for the number of copies, by itself, with its numbers."""

from typing import Any

import pytest

from clipper.mesh.decisions import scaling
from clipper.mesh.decisions.placement import Constraint, InstanceIndex
from clipper.mesh.decisions.usage import Usage, UsageCounter, together
from clipper.mesh.records import Copy, Instance, MeshModel, Policy
from clipper.settings.mesh import MeshSettings

MIB = 1 << 20
NOW = 1_700_000_000_000
HOUR = 3_600_000
SETTINGS = MeshSettings()


def cluster(
    count: int = 6, full: bool = False, idle_ms: int = 100 * HOUR, **fields: Any
) -> InstanceIndex:
    return InstanceIndex(
        Instance(
            f"i{n}",
            n,
            "",
            "",
            capacity_bytes=1000 * MIB,
            used_bytes=1000 * MIB * full,
            lru_ms=NOW - idle_ms,
            **fields,
        )
        for n in range(count)
    )


def held(count: int, ago_ms: int = HOUR, **policy: Any) -> MeshModel:
    copies = {f"i{n}": Copy(NOW - ago_ms - 100, NOW - ago_ms) for n in range(count)}
    return MeshModel("m", "onnx", copies=copies, size_bytes=MIB, policy=Policy(**policy))


def wanted(
    model: MeshModel, usage: Usage, instances: InstanceIndex | None = None, **options: Any
) -> int:
    return scaling.decide(
        model, usage, cluster() if instances is None else instances, NOW, SETTINGS, **options
    ).copies


def test_nothing_is_loaded_unasked() -> None:
    assert wanted(held(0), Usage()) == 0
    assert wanted(held(0, copies_min=2), Usage()) == 2
    assert wanted(held(0, pinned=True), Usage()) == 1
    assert wanted(held(1, copies_max=1), Usage(rate=90_000)) == 1
    assert wanted(held(3, copies_max=2), Usage()) == 2
    assert wanted(held(1, copies_min=99), Usage()) == 6


def test_regular_use_makes_a_second_copy() -> None:
    assert wanted(held(1), Usage(NOW, 1, regular=True)) == 2
    assert wanted(held(1), Usage(NOW, 1, regular=False)) == 1
    assert wanted(held(2), Usage(NOW, 1, regular=True)) == 2
    assert wanted(held(1), Usage(NOW, 1, regular=True), cluster(full=True, idle_ms=5 * HOUR)) == 1
    assert wanted(held(1), Usage(NOW, 1, regular=True), cluster(full=True, idle_ms=7 * HOUR)) == 2


@pytest.mark.parametrize(
    ("copies", "rate", "expected"),
    [
        *((1, 1999, 1), (1, 2000, 2), (1, 2001, 2), (1, 4001, 3), (1, 90_000, 3)),
        *((2, 3999, 2), (2, 4000, 3), (2, 5000, 3), (2, 90_000, 4), (6, 90_000, 6)),
    ],
)
def test_by_rate(copies: int, rate: float, expected: int) -> None:
    assert wanted(held(copies), Usage(NOW, rate)) == expected


@pytest.mark.parametrize(("places", "expected"), [(4, 3), (5, 3), (7, 4), (12, 5)])
def test_two_at_once_in_any_case_and_a_third_of_the_instances(places: int, expected: int) -> None:
    """The number differs from model-mesh: four or five instances gave one at once there, as those
    that were excluded were subtracted twice."""
    assert wanted(held(1), Usage(NOW, 10**6), cluster(places)) == expected


def test_not_while_another_copy_begins() -> None:
    busy = Usage(NOW, 10_000)
    assert wanted(held(2, ago_ms=25_000), busy, assumed_ms=3000) == 2
    assert wanted(held(2, ago_ms=27_000), busy, assumed_ms=3000) == 4
    loading = MeshModel("m", "onnx", copies={"i0": Copy(1, 2), "i1": Copy(NOW)})
    assert wanted(loading, busy) == 2


def test_by_queueing_against_the_slo() -> None:
    assert wanted(held(1), Usage(NOW, 60, queue_ms=301)) == 2
    assert wanted(held(1), Usage(NOW, 60, queue_ms=299)) == 1
    assert wanted(held(1, slo_ms=100), Usage(NOW, 60, queue_ms=31)) == 2
    assert wanted(held(1, slo_ms=100), Usage(NOW, 600, queue_ms=31, service_ms=300)) == 3


def test_concurrency_lowers_the_limit_of_a_copy() -> None:
    """The limit is 90 % of what two queries at once of 200 ms give: 540 a minute."""
    model = held(1, concurrency=2)
    assert wanted(model, Usage(NOW, 539, service_ms=200)) == 1
    assert wanted(model, Usage(NOW, 541, service_ms=200)) == 2
    assert scaling.may_grow(model, Usage(NOW, 541, service_ms=200), SETTINGS)
    assert not scaling.may_grow(model, Usage(NOW, 539, service_ms=200), SETTINGS)


def test_the_second_copy_goes_when_idle_and_earlier_where_memory_is_short() -> None:
    """The second copy is removed if it is unused for ten hours; where memory is short, for a tenth
    of the cache's age."""
    tight = cluster(full=True, idle_ms=10 * HOUR)
    assert wanted(held(2), Usage(NOW - HOUR - 1), tight) == 1
    assert wanted(held(2), Usage(NOW - HOUR + 1), tight) == 2
    assert wanted(held(2), Usage(NOW - HOUR - 1), cluster(idle_ms=10 * HOUR)) == 2
    assert wanted(held(2), Usage(NOW - 10 * HOUR - 1), cluster(full=True, idle_ms=1000 * HOUR)) == 1
    assert wanted(held(2, copies_min=2), Usage(NOW - HOUR - 1), tight) == 2
    free = cluster(idle_ms=1000 * HOUR)
    assert wanted(held(2, ago_ms=20 * HOUR), Usage(NOW - 10 * HOUR + 1), free) == 2
    assert wanted(held(2, ago_ms=20 * HOUR), Usage(NOW - 10 * HOUR - 1), free) == 1


def test_the_second_copy_stays_while_its_use_is_heavy() -> None:
    """If models are loaded and evicted often, a tenth of the cache's age is less than the time to
    the next report."""
    tight, rounds = cluster(full=True, idle_ms=10_000), 3 * int(SETTINGS.rate_s * 1000)
    assert wanted(held(2), Usage(NOW - 2000), tight) == 1
    assert wanted(held(2), Usage(NOW - 2000, heavy_ms=NOW - rounds), tight) == 2
    assert wanted(held(2), Usage(NOW - 2000, heavy_ms=NOW - rounds - 1), tight) == 1
    assert wanted(held(2, ago_ms=rounds), Usage(NOW - 2000), tight) == 2
    assert wanted(held(2, ago_ms=rounds + 1), Usage(NOW - 2000), tight) == 1
    assert not scaling.is_heavy(held(2), Usage(rate=1333), SETTINGS)
    assert scaling.is_heavy(held(2), Usage(rate=1334), SETTINGS)
    assert not scaling.is_heavy(held(4), Usage(rate=3999), SETTINGS)


def test_one_of_more_goes_after_a_calm_that_is_a_length_of_time() -> None:
    """Model-mesh took a point in time for a length here, and so always waited five hours; and it
    asked for *recent* heavy use."""
    tight = cluster(full=True, idle_ms=5 * HOUR)  # calm: half an hour
    quiet = Usage(NOW, 100, heavy_ms=NOW - HOUR // 2 - 1)
    assert wanted(held(4), quiet, tight) == 3
    assert wanted(held(4), Usage(NOW, 100, heavy_ms=NOW - HOUR // 2 + 1), tight) == 4
    assert (
        wanted(
            held(4), Usage(NOW, 100, heavy_ms=NOW - 9 * 60_000), cluster(full=True, idle_ms=HOUR)
        )
        == 4
    )
    assert (
        wanted(
            held(4), Usage(NOW, 100, heavy_ms=NOW - 11 * 60_000), cluster(full=True, idle_ms=HOUR)
        )
        == 3
    )
    assert wanted(held(4, ago_ms=29 * 60_000), quiet, tight) == 4
    assert wanted(held(4), Usage(NOW, 3999), tight) == 3
    assert wanted(held(4), Usage(NOW, 4001), tight) == 4
    assert wanted(held(4), Usage(NOW, 100, waiting=2), tight) == 4
    assert wanted(held(4), quiet, cluster(idle_ms=5 * HOUR)) == 3, "also where memory is free"


def test_only_instances_that_could_hold_it_count() -> None:
    labelled = cluster(3, labels=("gpu",))
    for instance in cluster(9):
        if instance.id not in labelled:
            labelled.put(instance)
    assert wanted(held(1), Usage(NOW, 10**6), labelled) == 4
    assert (
        wanted(held(1), Usage(NOW, 10**6), labelled, constraint=Constraint(required=("gpu",))) == 3
    )
    unreachable = MeshModel("m", "onnx", copies={"dead": Copy(1, 2)})
    assert wanted(unreachable, Usage(NOW, 10**6)) == 0


def test_all_nodes_select_the_same_copy_to_remove() -> None:
    instances = [
        Instance("a", 1, "", "", zone="1", capacity_bytes=10, used_bytes=1),
        Instance("b", 2, "", "", zone="2", capacity_bytes=10, used_bytes=9),
        Instance("c", 3, "", "", zone="3", capacity_bytes=10, used_bytes=5),
    ]
    copies = {id: Copy(1, 2) for id in "abc"}
    assert scaling.spare(MeshModel("m", "onnx", copies=copies), instances) == "b"
    assert scaling.spare(MeshModel("m", "onnx", copies=copies), instances[::-1]) == "b"
    assert (
        scaling.spare(
            MeshModel("m", "onnx", copies={"a": Copy(1, 2), "dead": Copy(1, 2)}), instances
        )
        == ""
    )


# -- what is counted


def test_rates_are_of_the_time_between_readings() -> None:
    uses = UsageCounter()
    uses.read(NOW)
    for n in range(50):
        uses.note("m", NOW + 100 * n, waited_ms=4, served_ms=2 if n % 2 else 0)
    found = uses.read(NOW + 10_000)
    assert set(found) == {"m"}
    assert found["m"].rate == 300
    assert (found["m"].queue_ms, found["m"].service_ms) == (4, 2)
    assert (uses.last("m", NOW).rate, uses.last("m", NOW).queue_ms) == (300, 4)
    assert uses.read(NOW + 20_000) == {}
    assert (uses.last("m", NOW).used_ms, uses.last("m", NOW).rate) == (NOW + 4900, 0)
    uses.heavy("m", NOW + 5)
    uses.note("m", NOW + 20_001)
    assert uses.read(NOW + 30_000)["m"].heavy_ms == NOW + 5


@pytest.mark.parametrize("jump_ms", [-HOUR, 0, HOUR])
def test_a_clock_that_is_set_changes_no_rate(jump_ms: int) -> None:
    uses = UsageCounter()
    uses.read(NOW, 100.0)
    uses.note("m", NOW, count=50)
    assert uses.read(NOW + jump_ms, 110.0)["m"].rate == 300


@pytest.mark.parametrize(
    ("minutes", "regular"),
    [(1, False), (6, False), (7, True), (25, True), (40, True), (41, False), (90, False)],
)
def test_regular_is_now_and_seven_to_forty_minutes_ago(minutes: int, regular: bool) -> None:
    uses, start = UsageCounter(), NOW // 60_000 * 60_000
    uses.note("m", start)
    uses.note("m", start + 60_000 * minutes)
    assert uses.read(start + 60_000 * minutes)["m"].regular is regular


def test_report_that_comes_late_counts_in_its_own_minute() -> None:
    uses, start = UsageCounter(), NOW // 60_000 * 60_000
    uses.note("m", start + 8 * 60_000)
    uses.note("m", start + 1, count=3)
    found = uses.read(start + 8 * 60_000)["m"]
    assert (found.used_ms, found.regular, found.rate) == (start + 8 * 60_000, True, 4.0)


def test_what_is_not_used_is_forgotten() -> None:
    uses = UsageCounter()
    uses.note("old", NOW)
    uses.read(NOW + HOUR)
    assert uses.last("old", NOW) == Usage()
    uses.note("m", NOW)
    uses.forget("m")
    assert uses.read(NOW + 2 * HOUR) == {}


def test_several_nodes_together() -> None:
    found = together([Usage(5, 10, False, 3, 2, 1, 7), Usage(9, 20, True, 1, 4, 2, 6)])
    assert found == Usage(9, 30, True, 3, 4, 3, 7)
