"""Loading on a node with fake hosts: the order of loads, evictions, and changes of the registry."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from clipper.component import Tasks
from clipper.errors import StoreError
from clipper.mesh.decisions import claims
from clipper.mesh.decisions.load_queue import QueuedLoad
from clipper.mesh.loading.loader import ModelLoader, NotLoadedHere, _Job
from clipper.mesh.loading.model_host import HostStatus, LoadResult
from clipper.mesh.node.registry_watcher import RegistryWatcher
from clipper.mesh.records import Copy, Instance, MeshModel, Policy
from clipper.mesh.registry import Registry
from clipper.mesh.transport.channel import ConnectionLost, RequestFailed
from clipper.settings.mesh import MeshSettings
from clipper.store import KeyChange, MemoryStore
from tests.memory_container import wait_until

SIZE = 100


class FakeHost:
    """A fake host that loads when `gate` lets it. fails: id -> the error to raise."""

    types = ("onnx",)
    status = HostStatus("READY", 1000, 1, 1000, SIZE)

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.unloaded: list[str] = []
        self.served: list[tuple[str, str]] = []
        self.fails: dict[str, RequestFailed] = {}
        self.sizes: dict[str, int] = {}
        self.gate, self.is_ready = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.is_ready.set()

    async def load(
        self, model: MeshModel, timeout_s: float, evict: Sequence[str] = ()
    ) -> LoadResult:
        self.unloaded += evict
        await self.gate.wait()
        if model.id in self.fails:
            raise self.fails[model.id]
        self.loaded.append(model.id)
        return LoadResult(self.sizes.get(model.id, SIZE), 1, "f32[3]", "f32", 2.0)

    async def unload(self, model: str, timeout_s: float) -> None:
        self.unloaded.append(model)

    async def predict_size(self, model: MeshModel) -> int:
        return SIZE

    async def serve(
        self, model: str, address: str, token: str, replica: int, timeout_s: float
    ) -> None:
        self.served.append((model, address))

    async def leave(self, model: str, address: str, timeout_s: float) -> None:
        self.served.remove((model, address))


Test = Callable[[ModelLoader, FakeHost, Registry], Awaitable[Any]]


def with_models(test: Test, *, capacity: int = 10 * SIZE, models: int = 6, **settings: Any) -> None:
    async def run() -> None:
        store = MemoryStore()
        registry = Registry(store, MeshSettings(**settings))
        registry.enter(Instance("a", 1, "", ""))
        for n in range(models):
            registry.register(MeshModel(f"m{n}", "onnx", "x.onnx", policy=Policy(pinned=n == 5)))
        wait_until(lambda: len(registry.models) == models)

        async def call(function: Callable[..., Any], *args: Any) -> Any:
            await asyncio.sleep(0)
            return function(*args)

        host, tasks = FakeHost(), Tasks("the mesh")
        local = ModelLoader("a", 1, registry, registry.settings, [host], capacity, call, tasks)
        try:
            async with asyncio.timeout(20):
                await test(local, host, registry)
        finally:
            await local.stop()
            registry.leave()
            registry.close()
            store.close()

    asyncio.run(run())


def copies(registry: Registry, id: str) -> dict[str, bool]:
    record = registry.read(id)
    assert record is not None
    return {instance: bool(copy.loaded_ms) for instance, copy in record.copies.items()}


def test_simultaneous_queries_load_once() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        await asyncio.gather(*(local.load("m0", 5, waiting=True) for _ in range(50)))
        assert host.loaded == ["m0"]
        assert copies(registry, "m0") == {"a": True}
        record = registry.read("m0")
        assert record is not None
        assert (record.size_bytes, record.input) == (SIZE, "f32[3]")

    with_models(test)


def test_model_that_is_unregistered_while_it_loads_takes_no_memory() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        load = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        while not copies(registry, "m0"):
            await asyncio.sleep(0)
        registry.unregister("m0")
        host.gate.set()
        with pytest.raises(RequestFailed):
            await load
        assert (host.loaded, host.unloaded) == (["m0"], ["m0"])
        assert (len(local.cache), local.cache.used_bytes) == (0, 0)

    with_models(test)


def test_a_model_is_loading_until_its_load_has_ended() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        load = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        await asyncio.sleep(0)
        assert (local.is_loading("m0"), local.is_loading("m1")) == (True, False)
        host.gate.set()
        await load
        assert not local.is_loading("m0")

    with_models(test)


def test_what_somebody_waits_for_goes_first_then_what_was_used_last() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        begun = [asyncio.ensure_future(local.load("m0", 1, waiting=True))]
        await asyncio.sleep(0)
        begun += [asyncio.ensure_future(local.load(f"m{n}", n, waiting=False)) for n in (1, 3, 2)]
        begun += [asyncio.ensure_future(local.load("m4", 0, waiting=True))]
        await asyncio.sleep(0)
        host.gate.set()
        await asyncio.gather(*begun)
        assert host.loaded == ["m0", "m4", "m3", "m2", "m1"]

    with_models(test)


def test_the_least_worthy_makes_room_and_the_pinned_stays() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        local.cache.churn_ms = 0
        for at, id in enumerate(("m5", "m0", "m1")):
            await local.load(id, at, waiting=True)
            local.cache.churn_ms = 0
        await local.load("m2", 9, waiting=True)
        assert host.unloaded == ["m0"]
        assert set(local.held) == {"m5", "m1", "m2"}
        assert copies(registry, "m0") == {}
        assert local.cache.used_bytes == 3 * SIZE

    with_models(test, capacity=3 * SIZE)


def test_a_model_too_big_for_here_leaves_no_claim() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        registry.change("m0", lambda m: MeshModel("m0", "onnx", "x.onnx", size_bytes=99 * SIZE))
        wait_until(lambda: registry.models["m0"].size_bytes)
        with pytest.raises(RequestFailed, match="no room") as failure:
            await local.load("m0", 1, waiting=True)
        assert failure.value.fault == "none"
        assert copies(registry, "m0") == {}
        assert not host.loaded

    with_models(test)


def test_a_load_that_fails_is_reported_with_the_party_at_fault() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.fails = {"m0": RequestFailed("bad file", "artifact"), "m1": ConnectionLost("gone")}
        for id, fault in (("m0", "artifact"), ("m1", "host")):
            with pytest.raises(RequestFailed):
                await local.load(id, 1, waiting=True)
            record = registry.read(id)
            assert record is not None
            assert record.failures["a"].fault == fault
            assert not record.copies
        assert local.cache.used_bytes == 0
        assert local.counts.stats()["load_outcomes"]["artifact"] == 1

    with_models(test)


def test_what_another_has_is_not_loaded() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        other = Instance("b", 2, "", "")
        registry.store.put("mesh/instance/b", b'{"id":"b","number":2,"peers":"","containers":""}')
        wait_until(lambda: "b" in registry.instances)
        from clipper.mesh.decisions import claims

        registry.change(
            "m0",
            lambda m: claims.claimed(
                m, other.id, 1, alive=("b",), copies=1, settings=registry.settings
            ),
        )
        with pytest.raises(NotLoadedHere, match="1 of 1 copies: b"):
            await local.load("m0", 1, waiting=True)
        await local.load("m0", 1, waiting=True, copies=2)
        assert copies(registry, "m0") == {"b": False, "a": True}

    with_models(test)


def test_a_copy_whose_claim_was_taken_away_goes() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        loading = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        while copies(registry, "m0") != {"a": False}:
            await asyncio.sleep(0)
        registry.change("m0", lambda m: MeshModel("m0", "onnx", "x.onnx"))
        host.gate.set()
        with pytest.raises(NotLoadedHere, match="taken away"):
            await loading
        assert host.unloaded == ["m0"]
        assert local.cache.used_bytes == 0

    with_models(test)


def test_who_is_fenced_claims_nothing() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        assert registry.lease is not None
        registry.lease.lost.set()
        with pytest.raises(RequestFailed, match="lease"):
            await local.load("m0", 1, waiting=True)
        assert copies(registry, "m0") == {}

    with_models(test)


def test_what_a_dead_host_held_is_loaded_again_without_a_new_claim() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        await local.load("m0", 1, waiting=True)
        assert [id for id, _ in local.host_lost(host)] == ["m0"]
        assert copies(registry, "m0") == {"a": True}
        local.load_again("m0", 1)
        await local.load("m0", 1, waiting=True)
        assert host.loaded == ["m0", "m0"]
        assert set(local.held) == {"m0"}

    with_models(test)


def test_a_copy_that_is_dropped_before_its_claim_is_written_again_is_not_claimed() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        await local.load("m0", 1, waiting=True)
        registry.change("m0", lambda model: claims.released(model, "a"))
        host.gate.clear()
        claim = asyncio.ensure_future(local.reclaim("m0"))
        await asyncio.sleep(0)  # the change waits now
        await local.drop("m0", "of the test")
        load = asyncio.ensure_future(local.load("m0", 2, waiting=True))
        await claim
        assert not copies(registry, "m0").get("a")  # not loaded, at most loading
        host.gate.set()
        await load
        assert copies(registry, "m0") == {"a": True}

    with_models(test)


def test_a_copy_without_a_claim_is_claimed_again_unless_another_node_has_loaded_it() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        registry.store.put("mesh/instance/b", b'{"id":"b","number":2,"peers":"","containers":""}')
        await local.load("m0", 1, waiting=True)
        registry.change("m0", lambda model: msgspec.structs.replace(model, copies={"b": Copy(1)}))
        await local.reclaim("m0")
        assert copies(registry, "m0") == {"b": False, "a": True}
        registry.change(
            "m0", lambda model: msgspec.structs.replace(model, copies={"b": Copy(1, 2)})
        )
        await local.reclaim("m0")
        assert copies(registry, "m0") == {"b": True}
        assert (list(local.held), host.unloaded) == ([], ["m0"])

    with_models(test)


def test_one_larger_than_was_thought_has_others_go() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.sizes = {"m2": 2 * SIZE}
        for n in range(3):
            local.cache.churn_ms = 0
            await local.load(f"m{n}", n, waiting=True)
        assert local.cache.used_bytes <= 3 * SIZE
        assert "m2" in local.held

    with_models(test, capacity=3 * SIZE)


def test_it_lends_what_it_holds() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        with pytest.raises(NotLoadedHere):
            await local.lend("m0", "unix:/x", "token")
        await local.load("m0", 1, waiting=True)
        await local.lend("m0", "unix:/x", "token")
        assert host.served == [("m0", "unix:/x")]
        await local.unlend("m0", "unix:/x")
        assert not host.served

    with_models(test)


def test_nothing_is_written_once_it_has_stopped() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        loads = [asyncio.ensure_future(local.load(f"m{n}", 1, waiting=True)) for n in range(3)]
        while not registry.models["m0"].copies:
            await asyncio.sleep(0.001)
        await local.stop()
        before = registry.store.revision
        await asyncio.gather(*loads, return_exceptions=True)
        await asyncio.sleep(0.05)
        assert registry.store.revision == before

    with_models(test)


def test_load_whose_loop_has_ended_is_no_failed_load(caplog: pytest.LogCaptureFixture) -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        job = _Job(1, asyncio.get_running_loop().create_future())
        work = local._do(QueuedLoad("m0", 1, 0), job)
        work.send(None)
        work.close()  # as the garbage collector ends the tasks of a killed node
        assert not job.done.done()
        job.done.cancel()

    with_models(test)
    assert not caplog.records


def test_a_model_that_was_unregistered_at_the_end_of_its_load_does_not_stay() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        load = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        while not local.is_loading("m0") or not registry.models["m0"].copies:
            await asyncio.sleep(0.001)
        await local.drop("m0", "it was unregistered")  # its deletion is known before its end
        host.gate.set()
        with pytest.raises(NotLoadedHere, match="unregistered"):
            await load
        assert (host.unloaded, list(local.held), list(local.cache)) == (["m0"], [], [])
        assert copies(registry, "m0") == {}, "nobody may believe the claim of a copy that is gone"
        await local.load("m0", 1, waiting=True)  # it is registered again
        assert list(local.held) == ["m0"]

    with_models(test)


def test_a_model_that_is_unregistered_while_others_make_room_for_it_does_not_stay() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        async def unload(model: str, timeout_s: float) -> None:
            host.unloaded.append(model)
            if model == "m0":
                await local.drop("m1", "it was unregistered")

        await local.load("m0", 1, waiting=True)
        host.sizes["m1"] = 2 * SIZE  # larger than thought: m0 has to go at the end of the load
        host.unload = unload  # type: ignore[method-assign]
        with pytest.raises(NotLoadedHere, match="unregistered"):
            await local.load("m1", 2, waiting=True)
        assert (host.unloaded, list(local.held), list(local.cache)) == (["m0", "m1"], [], [])
        assert copies(registry, "m1") == {}

    with_models(test, capacity=2 * SIZE)


def test_a_model_that_is_loaded_for_another_node_does_not_stay_either() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        gone: Any = SimpleNamespace(
            get=lambda _: None, forget=lambda _: None, forget_absence=lambda _: None
        )
        loop: Any = SimpleNamespace(tasks=SimpleNamespace(spawn=asyncio.ensure_future))
        unused: Any = None
        watcher = RegistryWatcher(registry, gone, local, gone, unused, unused, unused, unused, loop)
        host.gate.clear()
        load = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        while not local.is_loading("m0"):
            await asyncio.sleep(0)
        known = registry.models.record("m0")
        watcher._on_models([KeyChange("m0", known, None, lambda _: None)])
        host.gate.set()
        with pytest.raises(NotLoadedHere, match="unregistered"):
            await load
        assert not local.held

    with_models(test)


def test_what_is_unregistered_while_its_load_waits_is_loaded_if_it_is_registered_again() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        loads = [asyncio.ensure_future(local.load(f"m{n}", 1, waiting=True)) for n in range(2)]
        while not local.queue.waiting:
            await asyncio.sleep(0)
        await local.drop("m1", "it was unregistered")
        host.gate.set()
        await asyncio.gather(*loads)
        assert list(local.held) == ["m0", "m1"]

    with_models(test)


def test_a_loader_that_stops_accepts_nothing_and_ends_what_waits() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        waiting = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        await asyncio.sleep(0)
        local.set_stopping(True)
        with pytest.raises(RequestFailed, match="stopping"):
            await local.load("m1", 1, waiting=True)
        await local.stop()
        with pytest.raises(RequestFailed, match="stopping"):
            await waiting

    with_models(test)


def test_a_load_gives_up_what_it_evicts_once_it_is_claimed() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        await local.load("m0", 1, waiting=True)
        local.cache.churn_ms = 0
        host.gate.clear()
        load = asyncio.ensure_future(local.load("m1", 2, waiting=True))
        while not copies(registry, "m1"):
            await asyncio.sleep(0)
        assert copies(registry, "m0") == {"a": True}, "the claim is written first"
        while copies(registry, "m0"):
            await asyncio.sleep(0)
        assert not load.done()
        host.gate.set()
        await load
        assert (host.loaded, host.unloaded) == (["m0", "m1"], ["m0"])

    with_models(test, capacity=SIZE)


def test_a_load_that_cannot_be_claimed_evicts_nothing() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        def fail(*_: object) -> None:
            raise StoreError("away")

        await local.load("m0", 1, waiting=True)
        local.cache.churn_ms = 0
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(registry.store, "txn", fail)
            with pytest.raises(RequestFailed, match="away"):
                await local.load("m1", 2, waiting=True)
        assert (list(local.held), host.unloaded) == (["m0"], [])
        await local.load("m1", 3, waiting=True)
        assert (list(local.held), host.unloaded) == (["m1"], ["m0"])

    with_models(test, capacity=SIZE)


def test_claims_of_short_loads_go_ahead_and_one_loads_at_a_time() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        local.pace.add(10.0)  # so five may be claimed ahead
        host.gate.clear()
        loads = [asyncio.ensure_future(local.load(f"m{n}", n, waiting=True)) for n in range(6)]
        while len(local._turns) < 5:
            await asyncio.sleep(0)
        assert all(copies(registry, f"m{n}") for n in range(6))
        assert list(local.cache) == ["m0"], "the others have no place"
        loads[1].cancel()  # nobody waits for it: it loads all the same
        local.cache.churn_ms = 0
        host.gate.set()
        await asyncio.gather(*loads, return_exceptions=True)
        while local.loading or len(local.held) < 6:
            await asyncio.sleep(0)
        assert host.loaded == [f"m{n}" for n in range(6)]
        assert (local._placed, len(local._turns)) == (0, 0)

    with_models(test)


def test_loads_that_wait_for_a_place_end_when_the_loader_stops() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        local.pace.add(10.0)
        host.gate.clear()
        loads = [asyncio.ensure_future(local.load(f"m{n}", n, waiting=True)) for n in range(3)]
        while len(local._turns) < 2:
            await asyncio.sleep(0)
        await local.stop()
        found = await asyncio.gather(*loads, return_exceptions=True)
        assert all(isinstance(one, RequestFailed) for one in found)
        assert (local.loading, local._placed, len(local.cache)) == (0, 0, 0)

    with_models(test)


def test_a_load_that_is_wanted_in_any_case_does_not_end_with_its_first_query() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        first = asyncio.ensure_future(local.load("m0", 1, waiting=True))
        await asyncio.sleep(0)
        late = [
            asyncio.ensure_future(local.load(id, 1, waiting=True, wanted=lambda: False))
            for id in ("m1", "m2")
        ]
        await asyncio.sleep(0)
        late.append(asyncio.ensure_future(local.load("m1", 1, waiting=False)))
        await asyncio.sleep(0)
        host.gate.set()
        await first
        found = await asyncio.gather(*late, return_exceptions=True)
        assert (found[0], type(found[1]), found[2]) == (None, NotLoadedHere, None)
        assert host.loaded == ["m0", "m1"]

    with_models(test)


def test_a_load_that_others_have_claimed_evicts_nothing() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        await local.load("m0", 1, waiting=True)
        local.cache.churn_ms = 0
        registry.enter(Instance("b", 2, "", ""))
        claimed = registry.change(
            "m1",
            lambda m: claims.claimed(m, "b", 1, alive="b", copies=1, settings=registry.settings),
        )
        wait_until(lambda: registry.models.get("m1") == claimed)
        with pytest.raises(NotLoadedHere):
            await local.load("m1", 2, waiting=True)
        assert (list(local.held), host.unloaded) == (["m0"], [])

    with_models(test, capacity=SIZE)


def test_a_loader_that_stops_at_once_ends_all_loads() -> None:
    async def test(local: ModelLoader, host: FakeHost, registry: Registry) -> None:
        host.gate.clear()
        loads = [asyncio.ensure_future(local.load(f"m{n}", n, waiting=True)) for n in range(3)]
        for _ in range(20):  # at whatever step
            await asyncio.sleep(0)
            if local.loading and local._records._writing:
                break
        await local.stop()
        found = await asyncio.gather(*loads, return_exceptions=True)
        assert all(isinstance(one, RequestFailed) for one in found)

    with_models(test)
