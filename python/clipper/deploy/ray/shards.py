"""Shards of the parameter server on a Ray cluster: one actor per shard, which keeps its process
running. Needs the extra `ray`.

Ray places the shards with a placement group, one bundle per shard; with replicas no two shares a
machine, since a primary and its copy must not fail together. It restarts an actor elsewhere when
its machine is lost. Rows and gradients do not pass through Ray, and durability comes from copies
and snapshots, not from actors. The set's folder is on a shared file system, where each shard writes
its address.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Final

from clipper.deploy.ray.nodes import (
    NodeProcess,
    NodeStatus,
    actor_options,
    actors_of,
    here,
    statuses,
)
from clipper.errors import AlreadyExists
from clipper.host_port import join_host_port

if TYPE_CHECKING:
    from ray.actor import ActorHandle

NAMESPACE: Final = "clipper-params"
SHARD: Final = (sys.executable, "-m", "clipper", "params", "shard")


def shard_command(name: str, folder: str, host: str, program: Sequence[str] = SHARD) -> list[str]:
    """Return the command line of a shard's process."""
    return [*program, name, "--folder", folder, "--listen", join_host_port(host, 0)]


class RayShard:
    """A Ray actor that keeps one shard's process running. folder: of the set, on a share."""

    def __init__(self, name: str, folder: str) -> None:
        self._folder, self._host = folder, here()
        self._process = NodeProcess(name, shard_command(name, folder, self._host))

    def status(self) -> NodeStatus:
        """Return the status of the process, `folder` and `host`."""
        return {**self._process.status(), "folder": self._folder, "host": self._host}

    def stop(self, grace_s: float) -> NodeStatus:
        """Stop the process; see NodeProcess.stop."""
        return self._process.stop(grace_s)


@dataclass(frozen=True, slots=True)
class RayShards:
    """Parameters of a set on Ray. name: of the set. folder: on a shared file system. apart: no
    two shards on one machine. cpus, resources: of each shard.
    """

    folder: str
    shards: int
    name: str = "params"
    apart: bool = True
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def names(self) -> list[str]:
        """Return the names of the shards."""
        return [f"{self.name}-{number}" for number in range(self.shards)]


def bring_up_shards(ray: ModuleType, plan: RayShards) -> "dict[str, ActorHandle]":
    """Create an actor for each shard that has none; return all by name.

    Raises: AlreadyExists if a set of this name runs with another folder.
    """
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

    before = shards_of(ray, plan.name)
    for one in statuses(ray, before).values():
        if (folder := one.get("folder", plan.folder)) != plan.folder:
            hint = "Give this one another --name, or end that one."
            raise AlreadyExists(
                f"a set {plan.name!r} runs on this Ray cluster, of {folder}.", hint=hint
            )
    group = _group(ray, plan, is_new=not before)
    kind = ray.remote(RayShard)
    return {
        name: kind.options(
            **{
                **actor_options(name, NAMESPACE, plan.cpus, resources=plan.resources),
                "scheduling_strategy": Placed(
                    placement_group=group, placement_group_bundle_index=number
                ),
            }
        ).remote(name, plan.folder)
        for number, name in enumerate(plan.names())
    }


def _group(ray: ModuleType, plan: RayShards, *, is_new: bool) -> object:
    """Return the placement group, which outlives this command."""
    if not is_new:
        return ray.util.get_placement_group(plan.name)
    remove_group(ray, plan.name)  # left by a set that was not taken down
    bundles = [{"CPU": plan.cpus, **plan.resources} for _ in range(plan.shards)]
    strategy = "STRICT_SPREAD" if plan.apart else "SPREAD"
    return ray.util.placement_group(bundles, strategy=strategy, name=plan.name, lifetime="detached")


def remove_group(ray: ModuleType, name: str) -> None:
    """Remove a set's placement group."""
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:
        return
    ray.util.remove_placement_group(group)


def shards_of(ray: ModuleType, name: str) -> "dict[str, ActorHandle]":
    """Return the actors of a set, by name."""
    return actors_of(ray, name, NAMESPACE)
