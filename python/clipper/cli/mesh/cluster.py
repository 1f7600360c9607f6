"""`clipper cluster`: nodes of a mesh on many machines, placed and restarted by Ray."""

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.amounts import Size
from clipper.cli.command_group import CommandGroup, with_options
from clipper.cli.output import CommandOutput, with_output
from clipper.cli.servers.up import on_first_signal
from clipper.cli.servers.up_on_ray import print_nodes, runtime_env_option
from clipper_container.model import UserValue

if TYPE_CHECKING:
    from clipper.deploy.ray.nodes import NodeStatus

_LOCAL = "local"
_GRACE_S = 60.0


@click.group(cls=CommandGroup, short_help="Run nodes of a mesh on many machines, by Ray.")
def cluster() -> None:
    """Run nodes of a mesh on many machines. An engine (Ray) selects the machines and restarts lost
    nodes. Queries do not pass through it.

    \b
    clipper cluster up --on ray --store etcd://10.0.0.5:2379/clipper --nodes 3
    clipper cluster ps --on ray
    clipper cluster down --on ray
    """


_shared = with_options(
    click.option(
        "--on",
        "engine",
        type=click.Choice(["ray"]),
        required=True,
        help="Engine that runs the nodes.",
    ),
    click.option(
        "--mesh",
        default="mesh",
        show_default=True,
        metavar="NAME",
        help="Name of the mesh; its nodes are NAME-1, NAME-2, ...",
    ),
    click.option(
        "--address",
        default="auto",
        show_default=True,
        metavar="HOST:PORT",
        help="Address of the Ray cluster.",
    ),
)


@cluster.command(short_help="Start the nodes that do not run yet.")
@click.argument(
    "file", required=False, type=click.Path(dir_okay=False, exists=True, path_type=Path)
)
@_shared
@click.option(
    "--store", required=True, metavar="URL", help="Store that the nodes share: etcd://, redis://."
)
@click.option(
    "--nodes", type=click.IntRange(1, 10_000), default=3, show_default=True, help="Number of nodes."
)
@click.option(
    "--cpus",
    type=click.FloatRange(0),
    default=1.0,
    show_default=True,
    help="Cores that Ray reserves for each node.",
)
@click.option(
    "--gpus",
    type=click.FloatRange(0),
    default=0.0,
    help="GPUs that Ray reserves for each node; such nodes have the label gpu.",
)
@click.option(
    "--resource",
    "resources",
    multiple=True,
    metavar="NAME=AMOUNT",
    help="Custom resource of Ray for each node.",
)
@click.option(
    "--label", "labels", multiple=True, metavar="WORD", help="Label of the nodes; may be repeated."
)
@click.option(
    "--capacity",
    "--capacity-mib",
    "capacity_mib",
    type=Size(),
    metavar="SIZE",
    help="Memory for models of each, as 8Gi; a number alone is MiB.",
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=0,
    help="HTTP port of each node.  [any free port]",
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Accept queries from other hosts without keys, as `clipper node`.",
)
@runtime_env_option
@click.option(
    "--wait",
    "within_s",
    type=click.FloatRange(1),
    default=120.0,
    help="Seconds to wait until all are ready.  [120]",
)
@with_output
def up(
    file: Path | None,
    engine: str,
    mesh: str,
    address: str,
    within_s: float,
    resources: tuple[str, ...],
    store: str,
    labels: tuple[str, ...],
    capacity_mib: int | None,
    insecure: bool,
    output: CommandOutput,
    **given: UserValue,
) -> None:
    """Start the nodes of a mesh that do not run yet, and wait until all are ready. They continue
    after this command has ended, and are restarted when they are lost. `clipper cluster down` stops
    them.

    FILE is a TOML file with further settings, at the same path on every machine. `--address local`
    tries it in a temporary Ray cluster, which ends with this command.

    \b
    clipper cluster up --on ray --store etcd://10.0.0.5:2379/clipper --nodes 3
    clipper cluster up --on ray --store redis://10.0.0.5:6379/0 --nodes 2 --gpus 1 --label big
    """
    from clipper.deploy.ray.nodes import (
        RayCluster,
        actors_of,
        bring_up,
        join_ray,
        take_down,
        wait_ready,
    )

    words = [
        *([str(file.absolute())] if file else []),
        "--store",
        store,
        *(["--insecure"] if insecure else []),
    ]
    words += [word for label in labels for word in ("--label", label)]
    words += ["--capacity-mib", str(capacity_mib)] if capacity_mib else []
    ray_cluster = RayCluster(
        mesh=mesh, words=tuple(words), resources=dict(map(_amount, resources)), **given
    )
    stopping = threading.Event()
    ray = join_ray(address)
    on_first_signal(stopping)  # after Ray installed its handlers
    actors = {**actors_of(ray, mesh), **bring_up(ray, ray_cluster)}
    try:
        _show_nodes(wait_ready(ray, actors, within_s, stopping), output)
        if address == _LOCAL:
            stopping.wait()
    finally:
        if address == _LOCAL:
            _ended(take_down(ray, actors, _GRACE_S), output)
            ray.shutdown()


@cluster.command(short_help="Show the nodes and their state.")
@_shared
@with_output
def ps(engine: str, mesh: str, address: str, output: CommandOutput) -> None:
    """The nodes of a mesh: where they run, whether they are ready, how often they were started.
    With -o json, the last lines of each node, too.

    \b
    clipper cluster ps --on ray
    """
    from clipper.deploy.ray.nodes import actors_of, join_ray, statuses

    ray = join_ray(address)
    found = statuses(ray, actors_of(ray, mesh))
    _show_nodes(found, output)
    if not found and not output.is_data:
        click.echo("no node of that mesh")


@cluster.command(short_help="Stop the nodes.")
@_shared
@click.option(
    "--grace",
    "grace_s",
    type=click.FloatRange(0),
    default=_GRACE_S,
    show_default=True,
    help="Seconds that each node has to end.",
)
@with_output
def down(engine: str, mesh: str, address: str, grace_s: float, output: CommandOutput) -> None:
    """Stop all nodes of a mesh at once. Its models stay in the store, and the same mesh can be
    started again.

    \b
    clipper cluster down --on ray
    """
    from clipper.deploy.ray.nodes import actors_of, join_ray, take_down

    ray = join_ray(address)
    _ended(take_down(ray, actors_of(ray, mesh), grace_s), output)


def _amount(text: str) -> tuple[str, float]:
    name, _, amount = text.partition("=")
    try:
        return name, float(amount or 1)
    except ValueError:
        raise click.UsageError(f"--resource {text!r}: expected NAME=AMOUNT") from None


def _show_nodes(found: "Mapping[str, NodeStatus]", output: CommandOutput) -> None:
    if output.is_data:
        output.emit(list(found.values()))
    else:
        print_nodes(found)


def _ended(found: "Mapping[str, NodeStatus]", output: CommandOutput) -> None:
    if output.is_data:
        output.emit(list(found.values()))
        return
    for name, one in sorted(found.items()):
        left = next((line for line in reversed(one["lines"]) if line.startswith("left:")), "")
        click.echo(f"{name}  {one['state']}  {left}".rstrip())
    click.echo(f"{len(found)} nodes ended" if found else "no node of that mesh")
