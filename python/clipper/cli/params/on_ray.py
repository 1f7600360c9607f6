"""`clipper params up --on ray`, its `reshard` and its `down`."""

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import click
import msgspec

from clipper.cli.servers.up import on_first_signal
from clipper.cli.servers.up_on_ray import print_nodes
from clipper.errors import AlreadyExists, ClipperError, NoServer
from clipper.params.local.address_file import (
    UNKNOWN_ADDRESS,
    read_address_file,
    write_address_file,
)
from clipper.params.local.live_reshard import (
    LiveReshard,
    complete_move,
    home_in,
    number_of,
    request,
    request_in,
    sets_of,
)
from clipper.params.shard.resharding.decision import decide
from clipper.settings.params import ParamsSettings
from clipper.state_dir import lock_file

if TYPE_CHECKING:
    from clipper.deploy.ray.nodes import NodeStatus

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
    from clipper.deploy.ray.nodes import join_ray, take_down, wait_ready
    from clipper.deploy.ray.shards import RayShards, bring_up_shards, remove_group
    from clipper.params.local.address_file import prepare

    folder = prepare(settings, "ray")
    home = home_in(folder)
    if home != folder:
        write_address_file(home, read_address_file(folder))
    stopping = threading.Event()
    ray = join_ray(address)
    on_first_signal(stopping)  # after Ray installed its handlers
    apart = bool(settings.replicas) and not together
    plan = RayShards(str(home), settings.shards, _actors(name, home), apart, cpus)
    actors = bring_up_shards(ray, plan)
    try:
        print_nodes(wait_ready(ray, actors, within_s, stopping))
        click.echo(
            f"{settings.shards} shards serve. Workers: clipper.params.Client({str(folder)!r})"
        )
        if address == _LOCAL:
            stopping.wait()
    finally:
        if address == _LOCAL:
            print_nodes(take_down(ray, actors, _GRACE_S))
            remove_group(ray, plan.name)
            ray.shutdown()


class RaySet:
    """The supervisor of a set on Ray while its rows move to other actors (see
    `live_reshard.SetHost`). An actor restarts its shard by itself, so this is needed only then.
    Threads: any.

    apart: no two shards on one machine. cpus: of each. resource: that the new machines have; empty:
    any machine. Raises AlreadyExists: another process moves the set.
    """

    def __init__(
        self, ray: ModuleType, folder: Path, name: str, *, apart: bool, cpus: float, resource: str
    ) -> None:
        self._ray, self._name, self._apart, self._cpus = ray, name, apart, cpus
        self._resources = {resource: 0.001} if resource else {}
        self._ends = threading.Event()
        self.folder = folder
        taken = AlreadyExists(f"another process moves the set in {folder}.")
        self._lock = lock_file(folder / "lock", taken)
        self._end_others()
        self.home = home_in(folder)
        content = read_address_file(folder)
        self.settings = msgspec.convert(content["settings"], ParamsSettings)
        self.token = content["token"]

    def _end_others(self) -> None:
        """Complete what an earlier command has decided, and end what it has left."""
        homes = sorted(sets_of(self.folder), key=number_of)
        decided = [home for home in homes if decide(home, "abort") == "commit"]
        newest = int(read_address_file(self.folder).get("generation", 0))
        later = [home for home in decided if number_of(home) > newest]
        serves = later[-1] if later else home_in(self.folder)
        for home in (self.folder, *homes):
            if home != serves:
                self.end_set(home)
        complete_move(self.folder)

    @property
    def addresses(self) -> list[str]:
        """The addresses of the shards that serve."""
        return read_address_file(self.home)["addresses"]

    def addresses_of(self, home: Path, settings: ParamsSettings) -> list[str]:
        """Return the addresses of a set before its shards have written theirs."""
        return [UNKNOWN_ADDRESS] * settings.shards

    def start_set(self, home: Path, shards: int) -> None:
        """Create the actors of another set."""
        from clipper.deploy.ray.shards import RayShards, bring_up_shards

        name = _actors(self._name, home)
        plan = RayShards(str(home), shards, name, self._apart, self._cpus, self._resources)
        bring_up_shards(self._ray, plan)

    def end_set(self, home: Path) -> None:
        """End the actors of a set, with their shards."""
        from clipper.deploy.ray.nodes import take_down
        from clipper.deploy.ray.shards import remove_group, shards_of

        name = _actors(self._name, home)
        take_down(self._ray, shards_of(self._ray, name), _GRACE_S)
        remove_group(self._ray, name)

    def retire_set(self, home: Path) -> None:
        """Do nothing: a shard of a set that has moved refuses all, also after a restart."""

    def serve(self, home: Path, settings: ParamsSettings, addresses: list[str]) -> None:
        """Have another set as the one that serves."""
        self.settings, self.home = settings, home

    def ends(self, wait_s: float) -> bool:
        """Wait, and tell whether `close` was called."""
        return self._ends.wait(wait_s)

    def stop(self) -> None:
        """Have `ends` return True."""
        self._ends.set()

    def close(self) -> None:
        """Release the lock of the folder."""
        os.close(self._lock)


@contextlib.contextmanager
def resharding_on_ray(
    folder: Path,
    shards: int,
    name: str,
    address: str,
    *,
    together: bool,
    cpus: float,
    resource: str,
) -> Iterator[None]:
    """Request a number of shards, and move the set while the context lasts and until it is done."""
    from clipper.deploy.ray.nodes import join_ray

    before, content = request_in(folder), read_address_file(folder)
    if content.get("engine") != "ray":
        hint = "To start one: clipper params up --on ray ..."
        raise NoServer(f"no set in {folder} was started on Ray.", hint=hint)
    replicas = int(content.get("settings", {}).get("replicas", 0))
    apart = bool(replicas) and not together
    one = RaySet(join_ray(address), folder, name, apart=apart, cpus=cpus, resource=resource)
    with contextlib.closing(one):
        if request_in(folder) or before != shards:  # else an earlier command has decided it
            request(folder, shards)
        moves = threading.Thread(target=LiveReshard(one).reshard_if_requested, daemon=True)
        moves.start()
        try:
            yield
            moves.join()
        finally:
            one.stop()
            moves.join()


def down_on_ray(folder: Path, name: str, address: str) -> "dict[str, NodeStatus]":
    """Stop the set of that folder, with a snapshot of all; return the last statuses. Raises:
    NoServer.
    """
    from clipper.deploy.ray.nodes import join_ray, take_down
    from clipper.deploy.ray.shards import remove_group, shards_of
    from clipper.params.local.local_set import snapshot_all
    from clipper_container.params.connection import addresses_in

    ray = join_ray(address)
    names = [_actors(name, home) for home in (folder, *sets_of(folder))]
    actors = {key: one for each in names for key, one in shards_of(ray, each).items()}
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
    for each in names:
        remove_group(ray, each)
    return found


def _actors(name: str, home: Path) -> str:
    """Return what the names of a set's actors begin with. home: folder of its shards."""
    return f"{name}.{number_of(home)}" if number_of(home) else name
