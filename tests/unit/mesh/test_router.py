"""Routing from a name to a lane: a miss is reported once, v-models are resolved, unknown names are
rejected."""

import asyncio
import gc
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
from tests.threads import join


def routes(
    *known: str, draws: list[float] | None = None
) -> tuple[ModelRouter, list[str], list[str]]:
    missed: list[str] = []
    lookups: list[str] = []

    host: Any = SimpleNamespace(
        new_core=lambda record: SimpleNamespace(waiting=0),
        applications=lambda model: tuple(
            SimpleNamespace(cores={model.record.id: model.core}, model=model, slo_us=slo_us)
            for slo_us in (1e6, 31e6)
        ),
    )

    def find(id: str) -> Model | None:
        return core_record(id, "any", "any") if id in known else None

    def on_miss(route: Route) -> None:
        missed.append(route.id)

    drawn = iter(draws or ())
    rng: Any = SimpleNamespace(random=lambda: next(drawn))
    return (
        ModelRouter(host, find, on_miss, Batching(), rng, lookup=lookups.append),
        missed,
        lookups,
    )


def query(found: ModelRouter, name: str, slo_us: float = 31e6) -> None:
    resolved: Any = found.application(name)
    resolved.model.admit(slo_us)


def test_queries_and_applications_see_one_model_in_a_route() -> None:
    found, missed, _ = routes("m")
    route, named = found.resolve("m"), found.application("m")
    assert route is not None
    assert named is not None
    for model in (route, named.model):  # type: ignore[attr-defined]
        assert (model.record.name, model.core, model.is_on_demand) == ("m", route.core, True)
        found.set_lenders("m", [])
        assert not model.is_ready
        assert model.reason().startswith("it was not loaded by the deadline")
        count = route.queries
        model.touch()
        assert route.queries == count + 1
        model.admit(31_000_000)
        found.set_lenders("m", [1])
        assert (model.is_ready, model.reason()) == (True, "")
    assert missed == ["m", "m"]


def test_the_model_of_a_route_that_is_gone_says_why() -> None:
    found, missed, _ = routes("m")
    model: Any = found.application("m").model  # type: ignore[union-attr]
    found.forget("m")
    list(found.touched.take())
    gc.collect()
    model.touch()
    model.admit(1)
    assert (model.is_ready, model.reason(), missed) == (False, "it was unregistered", [])


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
    assert found.application("m") is found.get("m").cold  # type: ignore[union-attr]
    found.set_lenders("m", [1])
    assert found.application("m") is found.get("m").resolved  # type: ignore[union-attr]


def test_uses_are_counted_and_those_that_waited() -> None:
    found, _, _ = routes("m")
    for _ in range(3):
        found.application("m")
    found.set_lenders("m", [1])
    found.application("m")
    ((route, count),) = found.touched.take()
    assert (route.id, count, route.waited) == ("m", 4, 3)
    assert not list(found.touched.take())
    found.application("m")
    assert [count for _, count in found.touched.take()] == [1]


def test_many_threads_make_one_route() -> None:
    found, missed, _ = routes("m")
    threads = [threading.Thread(target=query, args=(found, "m")) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
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
        assert found.application("nobody") is None
    assert lookups.count("nobody") == 1
    found.forget_absence("nobody")
    found.application("nobody")
    assert lookups.count("nobody") == 2
    for n in range(2 * ABSENT_MAX):
        found.application(f"n{n}")
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
    found.start()

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
    found.start()

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
