"""Queries of models that are not loaded, while loads wait: which are refused, and why."""

import asyncio

import msgspec
import pytest

from clipper.errors import Overloaded
from clipper.mesh.decisions.load_queue import LoadPace
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.records import Copy, Instance
from clipper.mesh.registry import Registry
from clipper.mesh.routing.load_admission import LoadAdmission
from clipper.mesh.transport.channel import RequestFailed
from tests.unit.mesh.test_loader import SIZE, FakeHost, with_models

NO_DEADLINE = None


def test_the_pace_is_the_mean_time_of_a_place() -> None:
    pace = LoadPace()
    assert (pace.wait_ms(100, 2), pace.per_second(2)) == (0.0, float("inf"))
    for _ in range(200):
        pace.add(20.0)
    assert (pace.slot_ms, pace.per_second(2)) == (20.0, 100.0)
    assert [pace.wait_ms(ahead, 2) for ahead in (0, 1, 2, 11)] == [0.0, 0.0, 10.0, 100.0]


async def queued(local: ModelLoader, *ids: str) -> None:
    """Start to load models, of which the first keeps the only place."""
    until = local.loading + local.queue.waiting + len(ids)
    for id in ids:
        load = asyncio.ensure_future(local.load(id, 1, waiting=True))
        load.add_done_callback(lambda done: done.cancelled() or done.exception())
    while local.loading + local.queue.waiting < until:
        await asyncio.sleep(0)


def test_a_query_is_refused_whose_load_cannot_be_in_time() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        admission = LoadAdmission(local, registry, registry.settings)
        local.pace.add(100.0)
        admission.check("m3", 1.0)  # a place is free: it is loaded, if not for this query
        host.gate.clear()
        await queued(local, "m0", "m1")
        assert local.forecast_ms("m3") == (200.0, 300.0)
        for deadline_ms in (700.0, 301.0):
            admission.check("m3", deadline_ms)
        with pytest.raises(Overloaded) as refused:
            admission.check("m3", 299.0)
        assert refused.value.retry_after_s == pytest.approx(0.3)
        for part in ("model 'm3'", "1 loads wait in a", "10 in a second", "300 ms", "299 ms"):
            assert part in str(refused.value)
        assert local.counts.loads["refused"].value == 1
        admission.check("m0", 1.0)  # it is being loaded
        with pytest.raises(Overloaded):
            admission.check("m1", 1.0)  # it waits itself
        admission.check("m1", 250.0)
        host.gate.set()

    with_models(test)


def test_without_a_deadline_a_load_waits_so_long_and_no_longer() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        admission = LoadAdmission(local, registry, registry.settings)
        local.pace.add(100.0)
        host.gate.clear()
        await queued(local, "m0", "m1")
        admission.check("m3", NO_DEADLINE)
        await queued(local, "m2")
        with pytest.raises(Overloaded, match=r"mesh\.load_wait_ms is 250"):
            admission.check("m3", NO_DEADLINE)
        host.gate.set()

    with_models(test, load_wait_ms=250.0)


def test_what_another_node_has_or_can_load_is_not_refused() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        admission = LoadAdmission(local, registry, registry.settings)
        local.pace.add(100.0)
        host.gate.clear()
        await queued(local, "m0", "m1")
        busy = Instance("b", 2, "", "", loading=1, queued=50)
        for other, refuses in (
            (busy, True),
            (msgspec.structs.replace(busy, queued=0), False),
            (msgspec.structs.replace(busy, queued=0, types=("torch",)), True),
            (msgspec.structs.replace(busy, queued=0, stopping=True), True),
        ):
            registry.store.put("mesh/instance/b", msgspec.json.encode(other))
            while registry.instances.get("b") != other:
                await asyncio.sleep(0.001)
            try:
                admission.check("m3", 250.0)
                assert not refuses
            except Overloaded:
                assert refuses
        registry.change("m3", lambda m: msgspec.structs.replace(m, copies={"b": Copy(1)}))
        while not registry.models["m3"].copies:
            await asyncio.sleep(0.001)
        admission.check("m3", 250.0)  # b is loading it
        host.gate.set()

    with_models(test)


def test_while_loads_wait_a_model_used_once_does_not_evict_one_used_often() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        admission = LoadAdmission(local, registry, registry.settings)
        await local.load("m0", 1, waiting=True)
        local.cache.churn_ms = 0
        local.cache.touch("m0", 2, 100)
        await local.load("m1", 3, waiting=True)  # nothing waits: it evicts m0
        assert list(local.held) == ["m1"]
        local.pace.slot_ms = 100.0
        host.gate.clear()
        await queued(local, "m2", "m3")
        admission.check("m4", 10_000.0)
        with pytest.raises(Overloaded, match="what it would evict is used more"):
            admission.check("m4", 350.0)
        local.cache.touch("m4", 4, 200)  # it is not loaded, and its uses are remembered
        admission.check("m4", 350.0)
        host.gate.set()

    with_models(test, capacity=SIZE)


def test_a_load_without_a_waiting_query_is_dropped() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        first = asyncio.ensure_future(local.load("m0", 1, waiting=True, wanted=lambda: False))
        unwanted = asyncio.ensure_future(local.load("m1", 1, waiting=True, wanted=lambda: False))
        kept = asyncio.ensure_future(local.load("m2", 1, waiting=True, wanted=lambda: True))
        shared = [
            asyncio.ensure_future(local.load("m3", 1, waiting=True, wanted=lambda: False)),
            asyncio.ensure_future(local.load("m3", 1, waiting=True)),
        ]
        await asyncio.sleep(0)
        host.gate.set()
        with pytest.raises(RequestFailed, match="no request waits for it any more"):
            await unwanted
        await asyncio.gather(first, kept, *shared)  # m0 had begun
        assert sorted(host.loaded) == ["m0", "m2", "m3"]

    with_models(test)
