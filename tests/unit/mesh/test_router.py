"""Routing from a name to a lane: a miss is reported once, v-models are resolved, unknown names are
rejected."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.mesh.routing.lookups import LOOKUPS_MAX, Lookups
from clipper.mesh.routing.router import (
    ABSENT_MAX,
    Alias,
    ModelRouter,
    Route,
    core_record,
    is_convertible,
)
from clipper.types import Batching, InputType, Model
from tests.memory_container import wait_until


def routes(
    *known: str, draws: list[float] | None = None
) -> tuple[ModelRouter, list[str], list[str]]:
    missed: list[str] = []
    lookups: list[str] = []

    def make(record: Model, why: Any, admit: Any) -> Any:
        given = {"cores": {record.id: SimpleNamespace(waiting=0)}, "why": why, "admit": admit}
        return SimpleNamespace(**given, slo_us=1e6), SimpleNamespace(**given, slo_us=31e6)

    def find(id: str) -> Model | None:
        return core_record(id, "any", "any") if id in known else None

    def on_miss(route: Route) -> None:
        missed.append(route.id)

    drawn = iter(draws or ())
    rng: Any = SimpleNamespace(random=lambda: next(drawn))
    return ModelRouter(make, find, on_miss, Batching(), rng, lookup=lookups.append), missed, lookups


def query(found: ModelRouter, name: str, slo_us: float = 31e6) -> None:
    resolved: Any = found.resolve(name)
    resolved.admit(slo_us)


def test_a_miss_is_reported_once_until_it_was_served() -> None:
    found, missed, _ = routes("m")
    for _ in range(3):
        query(found, "m")
    assert missed == ["m"]
    found.set_lenders("m", [1])
    query(found, "m")
    assert missed == ["m"]
    found.set_lenders("m", [])
    query(found, "m")
    assert missed == ["m", "m"]


def test_query_that_has_to_wait_for_a_load_gets_the_time_for_it() -> None:
    found, _, _ = routes("m")
    assert found.resolve("m") is found.get("m").cold  # type: ignore[union-attr]
    found.set_lenders("m", [1])
    assert found.resolve("m") is found.get("m").resolved  # type: ignore[union-attr]


def test_uses_are_counted_and_those_that_waited() -> None:
    found, _, _ = routes("m")
    for _ in range(3):
        found.resolve("m")
    found.set_lenders("m", [1])
    found.resolve("m")
    ((route, count),) = found.touched.take()
    assert (route.id, count, route.waited) == ("m", 4, 3)
    assert not list(found.touched.take())
    found.resolve("m")
    assert [count for _, count in found.touched.take()] == [1]


def test_many_threads_make_one_route() -> None:
    found, missed, _ = routes("m")
    threads = [threading.Thread(target=query, args=(found, "m")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 1
    assert set(missed) == {"m"}
    assert sum(count for _, count in found.touched.take()) == 16


def test_a_vmodel_routes_to_its_active_model_or_a_share_to_the_other() -> None:
    found, _, _ = routes("m", "t", draws=[0.1, 0.9])
    found.set_alias("v", Alias("m"))
    assert found.route("v") is found.route("m")
    found.set_alias("v", Alias("m", "t", 0.5))
    assert [found.route("v").id for _ in range(2)] == ["t", "m"]  # type: ignore[union-attr]
    found.set_alias("v", None)
    assert found.route("v") is None


def test_an_unknown_name_is_read_from_the_store_once_for_a_while() -> None:
    found, _, lookups = routes()
    for _ in range(5):
        assert found.resolve("nobody") is None
    assert lookups.count("nobody") == 1
    found.forget_absence("nobody")
    found.resolve("nobody")
    assert lookups.count("nobody") == 2
    for n in range(2 * ABSENT_MAX):
        found.resolve(f"n{n}")
    assert len(found._absent) <= ABSENT_MAX


def test_a_seat_is_for_models_of_the_mesh() -> None:
    found, missed, _ = routes("m")
    assert found.seat("m", 1, "any") is not None
    assert found.seat("m", 2, "any") is None
    assert found.seat("nobody", 1, "any") is None
    assert not missed


def test_what_was_unregistered_is_found_no_more() -> None:
    found, _, _ = routes("m")
    first = found.route("m")
    assert found.forget("m") is first
    assert found.forget("m") is None
    assert found.route("m") is not first


def test_name_is_read_once_at_a_time_and_an_event_loop_waits_once_for_a_read_that_hangs() -> None:
    hangs, count = threading.Event(), []

    def find(name: str) -> None:
        count.append(name)
        hangs.wait(30)

    found = Lookups(find)

    async def query() -> None:
        for n in range(3 * LOOKUPS_MAX):
            found.lookup(f"n{n % (2 * LOOKUPS_MAX)}")

    asyncio.run(query())  # it would take 48 s
    assert len(found._pending) == LOOKUPS_MAX
    hangs.set()
    wait_until(lambda: not found._pending)
    assert count == [f"n{n}" for n in range(LOOKUPS_MAX)]
    found.close()
    found.lookup("late")
    assert not found._pending


def test_event_loop_knows_a_name_once_a_quick_store_has_answered() -> None:
    known: list[str] = []
    found = Lookups(known.append)

    async def query() -> list[str]:
        found.lookup("a")
        return list(known)

    assert asyncio.run(query()) == ["a"]
    found.close()


@pytest.mark.parametrize(
    ("queued", "taken", "fits"),
    [
        ("f64[3]", "f32[3]", True),
        ("i32[3]", "f32[3]", True),
        ("f64[4]", "f32[3]", False),
        ("f64[3,1]", "f32[3]", False),
        ("f64[*]", "f32[3]", True),
        ("str", "f32[3]", False),
        ("f64[3]", "bytes", False),
        ("f64[4]", "any", True),
    ],
)
def test_rows_can_be_sent_to_a_host_that_takes_the_same_shape(
    queued: str, taken: str, fits: bool
) -> None:
    assert is_convertible(InputType.parse(queued), InputType.parse(taken)) == fits
