"""Shards of the parameter server on a Ray cluster: an actor each, which keeps one shard's process
running. Needs the extra `ray`.

Ray chooses the machines, by a placement group of one bundle a shard: with replicas no two on one
machine, since a primary and its replica must not go together. It starts an actor again, elsewhere
if need be, when its machine is lost. An actor has nothing but its process: rows and gradients do
not go through Ray, and what was acknowledged is where it always is, in replicas and snapshots, not
in an actor that Ray calls restarted. The set's folder is on a share: a shard writes there where it
is.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from clipper.deploy.ray_nodes import NodeProcess, actors_of, here, statuses
from clipper.errors import AlreadyExists

NAMESPACE: Final = "clipper-params"
SHARD: Final = (sys.executable, "-m", "clipper", "params", "shard")
_CALLS: Final = 4  # of one actor at once


def shard_command(name: str, folder: str, host: str, program: Sequence[str] = SHARD) -> list[str]:
    """Return the command line of a shard's process."""
    return [*program, name, "--folder", folder, "--listen", f"{host}:0"]


class RayShard:
    """A Ray actor that keeps one shard's process running. folder: of the set, on a share."""

    def __init__(self, name: str, folder: str) -> None:
        self._folder, self._host = folder, here()
        self._process = NodeProcess(name, shard_command(name, folder, self._host))

    def status(self) -> dict[str, Any]:
        """Return the status of the process, `folder` and `host`."""
        return {**self._process.status(), "folder": self._folder, "host": self._host}

    def stop(self, grace_s: float) -> dict[str, Any]:
        """Stop the process; see NodeProcess.stop."""
        return self._process.stop(grace_s)


@dataclass(frozen=True, slots=True)
class RayShards:
    """name: of the set, on this Ray cluster.  folder: on a share.  apart: no two on one machine.
    cpus, resources: of each."""

    folder: str
    shards: int
    name: str = "params"
    apart: bool = True
    cpus: float = 1.0
    resources: Mapping[str, float] = field(default_factory=dict)

    def names(self) -> list[str]:
        return [f"{self.name}-{number}" for number in range(self.shards)]


def bring_up_shards(ray: Any, asked: RayShards) -> dict[str, Any]:
    """An actor for each shard, those that are there already included. -> by name. Raises
    AlreadyExists, of another folder."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placed

    before = shards_of(ray, asked.name)
    for one in statuses(ray, before).values():
        if (folder := one.get("folder", asked.folder)) != asked.folder:
            hint = "Give this one another --name, or end that one."
            raise AlreadyExists(
                f"a set {asked.name!r} runs on this Ray cluster, of {folder}.", hint=hint
            )
    group = _group(ray, asked, is_new=not before)
    kind = ray.remote(RayShard)
    return {
        name: kind.options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=-1,
            max_concurrency=_CALLS,
            num_cpus=asked.cpus,
            resources=dict(asked.resources),
            scheduling_strategy=Placed(placement_group=group, placement_group_bundle_index=number),
        ).remote(name, asked.folder)
        for number, name in enumerate(asked.names())
    }


def _group(ray: Any, asked: RayShards, *, is_new: bool) -> Any:
    """A bundle for each shard, that stays when the command has ended."""
    if not is_new:
        return ray.util.get_placement_group(asked.name)
    remove_group(ray, asked.name)  # of a set that was not taken down
    bundles = [{"CPU": asked.cpus, **asked.resources} for _ in range(asked.shards)]
    strategy = "STRICT_SPREAD" if asked.apart else "SPREAD"
    return ray.util.placement_group(
        bundles, strategy=strategy, name=asked.name, lifetime="detached"
    )


def remove_group(ray: Any, name: str) -> None:
    """The places of a set are others' again."""
    try:
        group = ray.util.get_placement_group(name)
    except ValueError:
        return
    ray.util.remove_placement_group(group)


def shards_of(ray: Any, name: str) -> dict[str, Any]:
    """The actors of a set, by name."""
    return actors_of(ray, name, NAMESPACE)
