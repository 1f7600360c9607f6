"""`clipper params up --on ray` and its `down`."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.up import on_first_signal
from clipper.errors import ClipperError, NoServer
from clipper.settings.params import ParamsSettings

if TYPE_CHECKING:
    from clipper.deploy.ray_nodes import NodeStatus

_LOCAL = "local"
_GRACE_S = 120.0  # time for a last snapshot


def up_on_ray(
    settings: ParamsSettings,
    name: str,
    address: str,
    *,
    together: bool,
    cpus: float,
    within_s: float,
) -> None:
    """Start the shards that are missing, and wait until all serve."""
    from clipper.deploy.ray_nodes import join_ray, take_down, wait_ready
    from clipper.deploy.ray_shards import RayShards, bring_up_shards, remove_group
    from clipper.params.local.address_file import prepare

    folder = prepare(settings, "ray")
    stopping = threading.Event()
    ray = join_ray(address)
    on_first_signal(stopping)  # after Ray installed its handlers
    apart = bool(settings.replicas) and not together
    actors = bring_up_shards(ray, RayShards(str(folder), settings.shards, name, apart, cpus))
    try:
        _table(wait_ready(ray, actors, within_s, stopping))
        click.echo(
            f"{settings.shards} shards serve. Workers: clipper.params.Client({str(folder)!r})"
        )
        if address == _LOCAL:
            stopping.wait()
    finally:
        if address == _LOCAL:
            _table(take_down(ray, actors, _GRACE_S))
            remove_group(ray, name)
            ray.shutdown()


def down_on_ray(folder: Path, name: str, address: str) -> "dict[str, NodeStatus]":
    """Stop the set of that folder, with a snapshot of all; return the last statuses. Raises:
    NoServer.
    """
    from clipper.deploy.ray_nodes import join_ray, take_down
    from clipper.deploy.ray_shards import remove_group, shards_of
    from clipper.params.local.local_set import snapshot_all
    from clipper_container.params.connection import addresses_in

    ray = join_ray(address)
    actors = shards_of(ray, name)
    if not actors:
        raise NoServer(
            f"no set {name!r} runs on that Ray cluster.",
            hint="To start one: clipper params up --on ray ...",
        )
    try:
        snapshot_all(*addresses_in(folder), folder)
    except ClipperError as error:
        click.echo(f"no snapshot of all shards: {error}", err=True)
    found = take_down(ray, actors, _GRACE_S)
    remove_group(ray, name)
    return found


def _table(found: "Mapping[str, NodeStatus]") -> None:
    for name, one in sorted(found.items()):
        click.echo(f"{name}  {one['state']:16}  {one.get('host', '')}".rstrip())
