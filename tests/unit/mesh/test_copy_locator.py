"""Finding a copy of a queried model: how many copies are requested, and of which nodes."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.component import Tasks
from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.records import Copy, Instance, MeshModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.transport.channel import NOT_LOADED_HERE, ConnectionLost, Message, RequestFailed
from clipper.settings.mesh import MeshSettings
from clipper.store import MemoryStore
from tests.memory_container import wait_until
from tests.unit.mesh.test_loader import FakeHost, with_models

MIB = 1 << 20


class FakePeers:
    """Fake peers that answer `lend` as set for each instance, and keep the requests as (instance,
    load, copies)."""

    def __init__(self, **answers: RequestFailed | None) -> None:
        self.answers = answers
        self.requests: list[tuple[str, bool, int]] = []

    async def request(self, instance: str, verb: str, timeout_s: float, **fields: Any) -> Message:
        self.requests.append((instance, fields["load"], fields["copies"]))
        answer = self.answers[instance]
        if answer is not None:
            raise answer
        return {}


def locator(loader: ModelLoader, peers: FakePeers, registry: Registry, tasks: Tasks) -> CopyLocator:
    return CopyLocator(
        loader,
        peers,  # type: ignore[arg-type]
        registry,
        registry.settings,
        call,
        tasks,
        DecisionLog(),
        lambda: instance("a", 1),
        SimpleNamespace(address="", token_of=lambda model, instance: ""),  # type: ignore[arg-type]
        lambda _: None,
        lambda *_: None,
    )


class FakeRoute:
    """A fake route of a model that is queried here and served nowhere."""

    id, why, used_ms, served = "m", "", 0, False


def instance(id: str, number: int) -> Instance:
    return Instance(id, number, "", "", types=("onnx",), capacity_bytes=100 * MIB)


async def call(function: Any, *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize(
    ("answer", "copies_max"),
    [
        (RequestFailed("it has 1 of 1 copies", NOT_LOADED_HERE), 1),
        (RequestFailed("it is stopping", "none"), 1),
        (RequestFailed("its model host died", "host"), 1),
        (ConnectionLost("no answer within 12 s"), 2),
    ],
)
def test_only_a_holder_that_cannot_be_reached_lets_another_copy_be_made(
    answer: RequestFailed, copies_max: int
) -> None:
    store = MemoryStore()
    registry = Registry(store, MeshSettings())
    registry.enter(instance("a", 1))
    for other in (instance("b", 2), instance("c", 3)):
        other_registry = Registry(store, MeshSettings())
        other_registry.enter(other)
        other_registry.close()
    registry.register(MeshModel("m", "onnx", "x.onnx"))
    record = registry.change(
        "m",
        lambda m: MeshModel(
            m.id, m.type, m.path, copies={"b": Copy(now_ms(), now_ms())}, size_bytes=1
        ),
    )
    assert isinstance(record, MeshModel)
    wait_until(lambda: len(registry.instances) == 3)
    peers = FakePeers(b=answer, c=None)
    tasks = Tasks("the mesh")
    loader = ModelLoader("a", 1, registry, registry.settings, [], 0, call, tasks)
    copies = locator(loader, peers, registry, tasks)
    loader.set_stopping(True)

    async def query() -> None:
        exclude: dict[str, bool] = {}
        route: Any = FakeRoute()
        assert not await copies._from_holders(route, record, exclude)
        copies.choose = lambda *_, **__: type("Choice", (), {"instance": "c", "why": ""})()  # type: ignore[method-assign]
        await copies._placed(route, record, exclude)

    try:
        asyncio.run(query())
    finally:
        registry.leave()
        registry.close()
        store.close()
    assert peers.requests == [("b", False, 1), ("c", True, copies_max)]


@pytest.mark.parametrize("is_started", [False, True])
def test_only_a_load_that_a_query_began_corrects_the_forecast(is_started: bool) -> None:
    async def test(loader: ModelLoader, host: FakeHost, registry: Registry) -> None:
        tasks: Any = SimpleNamespace(spawn=lambda search: search.close())
        copies = locator(loader, FakePeers(), registry, tasks)
        route: Any = SimpleNamespace(id="m0")
        loader.pace.add(0.001)
        host.gate.clear()
        load = asyncio.ensure_future(loader.load("m0", 1, waiting=False))
        if is_started:
            await asyncio.sleep(0)
            assert loader.is_loading("m0")
        copies.miss(route)
        await asyncio.sleep(0.005)
        host.gate.set()
        await load
        copies.connected(route)
        assert (loader.pace.rest_ms == 0) == is_started

    with_models(test)
