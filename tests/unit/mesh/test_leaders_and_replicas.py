"""Election of the leader of a mesh, and a node's view of replicas that connect and disconnect."""

from types import SimpleNamespace as Object
from typing import Any

import pytest

from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.routing.replica_tracker import ReplicaTracker
from clipper.mesh.routing.router import MESH_VERSION
from clipper.mesh.tasks.election import Election
from clipper.store import MemoryStore
from clipper.types import VersionedModel
from tests.memory_container import wait_until
from tests.unit.mesh.test_node_parts import loop

__all__ = ["loop"]


def test_the_first_candidate_leads_until_it_resigns(loop: NodeLoop) -> None:
    elected: list[str] = []
    with MemoryStore() as store:

        def standing(name: str) -> Election:
            registry: Any = Object(store=store, lease=store.lease(60))
            return Election(name, registry, loop, lambda: elected.append(name))

        first, second = standing("a"), standing("b")
        assert (first.candidate, first.is_leader) == (None, False)
        for one in (first, second):
            loop.run(one.stand())
            assert one.candidate is not None
        wait_until(lambda: first.is_leader)
        assert not second.is_leader
        wait_until(lambda: elected == ["a"])
        loop.run(first.resign())
        assert (first.candidate, first.is_leader) == (None, False)
        wait_until(lambda: second.is_leader)
        wait_until(lambda: elected == ["a", "b"])
        loop.run(first.resign())  # it is none, and nothing happens
        loop.run(second.resign())
        assert not second.is_leader


def test_a_node_without_a_lease_is_no_candidate(loop: NodeLoop) -> None:
    with MemoryStore() as store:
        registry: Any = Object(store=store, lease=None)
        election = Election("a", registry, loop, lambda: None)
        loop.run(election.stand())
        assert (election.candidate, election.is_leader) == (None, False)


class World:
    """A tracker whose loop, host, router and copies record what it does."""

    def __init__(self, **route: Any) -> None:
        self.done: list[tuple[Any, ...]] = []
        counts = {
            "evaluated": 0,
            "failed": 0,
            "submitted": 3,
            "in_flight": 0,
            "replicas": 0,
            **route.pop("counts", {}),
        }
        core = Object(
            index=7,
            waiting=route.pop("waiting", 0),
            engine=Object(model_counts=lambda index: counts),
            describe_input=lambda: "f64[2]",
        )
        flags = {"id": "m", "served": True, "miss_reported": False, "type_known": False}
        self.route: Any = Object(
            core=core, lenders={2, 5}, record=Object(input="any"), **{**flags, **route}
        )
        self.replaces = True
        host: Any = Object(
            replicas=lambda id: [Object(hello=Object(replica=n)) for n in (1, 4)],
            disconnect=lambda id, number: self.done.append(("disconnect", id, number)),
        )
        router: Any = Object(
            get=lambda name: self.route if name == "m" else None,
            set_lenders=lambda name, numbers: self._do("lenders", name, numbers, back=self.route),
            replace=lambda route, input, why: self._do("replace", input, why, back=self.replaces),
        )
        copies: Any = Object(
            connected=lambda route: self._do("connected"), miss=lambda route: self._do("miss")
        )
        self.loop: Any = Object(
            stopping=False,
            call=lambda function, *words: function(*words),
            call_later=lambda after_s, function, *words: self._do("later", after_s, *words),
            tasks=Object(spawn=self._run),
        )
        self.tracker = ReplicaTracker(host, router, copies, self.loop)

    def _do(self, *what: Any, back: Any = None) -> Any:
        self.done.append(what)
        return back

    def _run(self, coroutine: Any) -> None:
        with pytest.raises(StopIteration):
            coroutine.send(None)


def test_replicas_of_other_models_are_none_of_its_own() -> None:
    world = World()
    for id in (VersionedModel("m", MESH_VERSION + 1), VersionedModel("other", MESH_VERSION)):
        assert not world.tracker.on_replicas_changed(id)
    assert world.done == []


@pytest.mark.parametrize("served", [True, False])
def test_replicas_are_counted_and_reported(served: bool) -> None:
    world = World(served=served)
    assert world.tracker.on_replicas_changed(VersionedModel("m", MESH_VERSION))
    assert world.done[0] == ("lenders", "m", {1, 4})
    assert [what[0] for what in world.done[1:]] == (["connected"] if served else ["later"])
    if not served:
        assert (0 < world.done[1][1] < 1, world.done[1][2:]) == (True, (world.route,))
    world.done.clear()
    world.loop.stopping = True
    world.tracker.on_replicas_changed(VersionedModel("m", MESH_VERSION))
    assert len(world.done) == 1


@pytest.mark.parametrize(
    ("route", "stopping", "missed"),
    [
        ({"served": False, "waiting": 2}, False, True),
        ({"served": True, "waiting": 2}, False, False),
        ({"served": False, "waiting": 0}, False, False),
        ({"served": False, "waiting": 2, "miss_reported": True}, False, False),
        ({"served": False, "waiting": 2}, True, False),
    ],
)
def test_rows_that_wait_for_a_disconnected_replica_are_a_miss_once(
    route: dict[str, Any], stopping: bool, missed: bool
) -> None:
    world = World(**route)
    world.loop.stopping = stopping
    for _ in range(2):
        world.tracker._check_waiting(world.route)
    assert world.done == [("miss",)] * missed
    assert world.route.miss_reported == (missed or bool(route.get("miss_reported")))


@pytest.mark.parametrize(
    ("route", "known", "replaced"),
    [
        ({"counts": {"evaluated": 1}}, True, False),
        ({"counts": {"evaluated": 1}, "served": False}, True, False),
        ({}, False, True),
        ({"served": False}, False, False),
        ({"counts": {"submitted": 0}}, False, False),
        ({"counts": {"in_flight": 1}}, False, False),
        ({"counts": {"in_flight": 1, "failed": 1}}, False, True),
        ({"served": False, "counts": {"failed": 1}}, False, True),
        ({"counts": {"evaluated": 1, "failed": 1}}, True, False),
    ],
)
def test_a_provisional_type_is_kept_if_the_model_returned_outputs(
    route: dict[str, Any], known: bool, replaced: bool
) -> None:
    world = World(**route)
    world.tracker.check_row_type(world.route)
    assert world.route.type_known == known
    why = "no output has come of rows of f64[2]"
    id = VersionedModel("m", MESH_VERSION)
    disconnects = [("disconnect", id, 1), ("disconnect", id, 4)]
    done = [what for what in world.done if what[0] in ("replace", "disconnect")]
    assert done == ([("replace", "any", why), *disconnects] if replaced else [])
    assert (len(world.done) > len(done)) == replaced, "replicas are counted again"


def test_replicas_stay_if_the_queue_was_not_replaced() -> None:
    world = World()
    world.replaces = False
    world.tracker.check_row_type(world.route)
    assert [what[0] for what in world.done] == ["replace"]
