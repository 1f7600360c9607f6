"""Model hosts of simulated nodes that end: what is loaded, where, and what is remembered."""

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from bench.node_simulator.plans import PLAN, SETTINGS
from bench.node_simulator.servers import VirtualHost
from bench.node_simulator.world import World
from clipper.mesh.loading import isolation

PERIODS = msgspec.structs.replace(SETTINGS, failure_s=3600, janitor_s=0.5, reaper_s=0.5)
QUIET = replace(
    PLAN, nodes=2, models=2, rate_per_s=0, vmodels=0, pinned=0, doubled=0, share=4.0,
    settings=PERIODS,
)  # fmt: skip


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Silence the nodes' own logs."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


def end(world: World, host: VirtualHost) -> None:
    """End the process of a host at the next step."""
    world.loop.call_later(0.0, host.run, host.die)


def test_model_that_ended_its_own_host_is_loaded_by_no_node_before_that_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The host takes longer to stop than the periodic tasks of all nodes take to notice."""
    stop = VirtualHost.stop

    async def stop_slowly(host: VirtualHost) -> None:
        await asyncio.sleep(3)
        await stop(host)

    monkeypatch.setattr(VirtualHost, "stop", stop_slowly)
    with World(QUIET) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        (holder,) = world.models()[id].loaded
        (shared,) = world.nodes[holder].hosts
        query = world.query(id, holder)
        end(world, shared)
        world.step(3)
        assert (query.ended_s >= 0, query.why) == (True, "")
        own, loads = world.nodes[holder].hosts[-1], world.loads
        assert {*own.resident} == {id}
        end(world, own)
        world.step(10)
        assert world.models()[id].failures[holder].crashed
        assert not world.models()[id].copies
        assert world.loads == loads
        query = world.query(id)
        world.step(1)
        assert "where it was alone" in query.why


def test_model_that_is_queried_while_its_host_is_started_again_waits_for_it() -> None:
    idle = msgspec.structs.replace(PERIODS, reaper_s=600)  # it loads nothing by itself
    with World(replace(QUIET, nodes=1, settings=idle)) as world:
        known, fresh = world.name(0), world.name(1)
        world.query(known)
        world.step(3)
        (host,) = world.nodes["n0"].hosts
        end(world, host)
        world.step(0.01)
        assert world.loads == 1
        queries = [world.query(id) for id in (known, fresh)]
        world.step(3)
        assert [(query.ended_s >= 0, query.why) for query in queries] == [(True, "")] * 2
        assert not any(model.failures for model in world.models().values())


def test_model_whose_load_takes_longer_than_its_probation_goes_back_to_the_shared_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(isolation, "PROBATION_S", 0.2)
    idle = msgspec.structs.replace(PERIODS, reaper_s=600)
    with World(replace(QUIET, nodes=1, settings=idle)) as world:
        id = world.name(0)
        world.query(id)
        world.step(3)
        node = world.nodes["n0"]
        assert node.node is not None
        shared, loader = node.hosts[0], node.node.joined.loader
        world.slow = 30.0
        query = world.query(id, slo_s=30.0)
        end(world, shared)
        world.step(0.6)
        assert loader.is_loading(id)
        world.step(8)
        assert (query.ended_s >= 0, query.why) == (True, "")
        assert loader.held[id].host is shared
        assert not world.models()[id].failures
