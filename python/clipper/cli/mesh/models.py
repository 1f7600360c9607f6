"""`clipper mesh`: many models, loaded on demand (docs/mesh.md). The commands call
`clipper.connect().mesh`.
"""

import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.amounts import Share
from clipper.cli.command_group import CommandGroup
from clipper.cli.output import STATE_COLOURS, dry, styled
from clipper.cli.server_command import ServerCommand, until_interrupted, with_server
from clipper.clock import age_of, wall_time_us
from clipper.errors import UnknownModel

if TYPE_CHECKING:
    from clipper.mesh.records import Instance
    from clipper.mesh.reports import MeshEvent, ModelStatus, VModelStatus

_EXIT_FAILED = 1
_BAR = 20  # characters of a full bar

_sync = click.option(
    "--sync", is_flag=True, help="Wait until it is done; exit code 1 if it failed."
)
_owner = click.option("--owner", default="", help="Owner; an object of another owner is refused.")
_limit = click.option(
    "-n",
    "--limit",
    type=click.IntRange(1, 10_000),
    default=100,
    show_default=True,
    help="Maximum number.",
)


@click.group(cls=CommandGroup, short_help="Manage many models that are loaded on first use.")
def mesh() -> None:
    """Manage many models on many nodes: loaded at their first query, evicted when others need the
    memory.

    \b
    clipper mesh register m1 models/m1.onnx      register a model; it is not loaded yet
    clipper predict m1 "[1, 2, 3]"               the first query loads it
    clipper mesh ps                              show the nodes and their memory
    clipper mesh explain m1                      explain where m1 is, and why
    clipper mesh vmodel set best m1              let the name `best` refer to m1
    clipper mesh vmodel set best m2              and to m2, once that is loaded
    """


# -- models


@mesh.command(short_help="Register a model.")
@click.argument("id")
@click.argument("path")
@click.option(
    "--type",
    "type_",
    default="",
    help="Type of the model: onnx, skops, python.  [by the file name]",
)
@click.option("--key", default="", help="Further information for the runtime that loads it.")
@click.option(
    "--input",
    "input_",
    metavar="TYPE",
    default="",
    help="Type of one row, such as f64[3].  [from the loaded model]",
)
@click.option(
    "--output-type", metavar="TYPE", default="", help="Type of one output.  [from the loaded model]"
)
@click.option("--load", is_flag=True, help="Load it now, not at the first query.")
@click.option(
    "--copies-min", type=click.IntRange(min=0), default=0, help="Minimum number of copies."
)
@click.option(
    "--copies-max",
    type=click.IntRange(min=0),
    default=0,
    help="Maximum number of copies; 0: by the load.",
)
@click.option("--pin", is_flag=True, help="Never evict it.")
@click.option(
    "--slo-ms",
    type=click.FloatRange(min=0),
    default=0.0,
    help="SLO against which queueing is compared; 0: that of the mesh.",
)
@click.option(
    "--requires",
    metavar="LABEL",
    multiple=True,
    help="Only on nodes with this label; may be repeated.",
)
@click.option("--prefers", metavar="LABEL", multiple=True, help="Prefer nodes with this label.")
@_owner
@_sync
@dry
@with_server
def register(
    command: ServerCommand,
    id: str,
    path: str,
    type_: str,
    key: str,
    input_: str,
    output_type: str,
    load: bool,
    copies_min: int,
    copies_max: int,
    pin: bool,
    slo_ms: float,
    requires: tuple[str, ...],
    prefers: tuple[str, ...],
    owner: str,
    sync: bool,
    dry_run: bool,
) -> None:
    """Register model ID. PATH is read where it is loaded: a file that every node sees, or
    module:attribute.

    The same once more changes nothing; with another path, type or key it is refused.

    \b
    clipper mesh register m1 models/m1.onnx
    clipper mesh register m2 models/m2.skops --load --sync --copies-min 2
    """
    from clipper.mesh.records import Policy

    policy = Policy(copies_min, copies_max, pin, slo_ms, requires=requires, prefers=prefers)
    here = str(Path(path).absolute()) if Path(path).exists() else path
    found = command.server.mesh.register(
        id,
        here,
        type_,
        key,
        input=input_,
        output=output_type,
        load_now=load or sync,
        sync=sync,
        policy=policy,
        owner=owner,
        dry_run=dry_run,
    )
    _show_model(command, found, sync and not dry_run, dry_run)


@mesh.command(short_help="Unregister models.")
@click.argument("ids", metavar="ID", nargs=-1, required=True)
@dry
@with_server
def unregister(command: ServerCommand, ids: tuple[str, ...], dry_run: bool) -> None:
    """Unregister models and unload their copies. An unknown ID is not an error.

    \b
    clipper mesh unregister m1
    """
    mesh_client = command.server.mesh
    for id in ids:
        mesh_client.unregister(id, dry_run=dry_run)
    text = f"{_would(dry_run)}{{}} is unregistered"
    command.output.show(
        {"unregistered": list(ids), "dry_run": dry_run}, lambda: "\n".join(map(text.format, ids))
    )


@mesh.command(short_help="Show the state of a model and its copies.")
@click.argument("id")
@with_server
def status(command: ServerCommand, id: str) -> None:
    """Show model ID: its source, its state, its copies, and why loads failed. Exit code 1 if it is
    unknown.

    \b
    clipper mesh status m1
    """
    _show_model(command, command.server.mesh.status(id), must=False)


@mesh.command(short_help="Load a model unless it is loaded.")
@click.argument("id")
@_sync
@dry
@with_server
def ensure(command: ServerCommand, id: str, sync: bool, dry_run: bool) -> None:
    """Load model ID unless it is loaded, as a query would. This counts as a use.

    \b
    clipper mesh ensure m1 --sync
    """
    if dry_run:
        _show_model(command, command.server.mesh.status(id), False, dry_run)
        return
    _show_model(command, command.server.mesh.ensure_loaded(id, sync=sync), sync)


@mesh.command("ls", short_help="List models.")
@click.argument("prefix", required=False, default="")
@click.option("--after", metavar="ID", default="", help="Only ids after ID.")
@_limit
@with_server
def list_models(command: ServerCommand, prefix: str, after: str, limit: int) -> None:
    """List models whose ids begin with PREFIX: type, state, nodes, size, last use, last error.

    \b
    clipper mesh ls
    clipper mesh ls churn- -n 20
    """
    found: list[ModelStatus] = command.server.mesh.models(prefix, after, limit)
    rows = [
        (
            one.id,
            one.info.type if one.info else "-",
            one.status,
            ", ".join(sorted(copy.instance for copy in one.copies)) or "-",
            _bytes(_size(one)),
            _ago(one.used_ms),
            one.errors[0] if one.errors else "",
        )
        for one in found
    ]
    more = (
        f"more: clipper mesh ls {f'{prefix} ' if prefix else ''}--after {found[-1].id}"
        if len(found) == limit
        else ""
    )
    head = ("model", "type", "state", "copies in", ">size", ">used", "last error")
    _show_table(
        command,
        found,
        head,
        rows,
        "no models. To register one: clipper mesh register ID PATH",
        more,
    )


@mesh.command("ps", short_help="Show the nodes and their memory.")
@with_server
def instances(command: ServerCommand) -> None:
    """Show the running nodes: memory, number of models, age of the least recently used model.

    A short AGE on all nodes means that models in use evict each other: the mesh needs more memory,
    or another node.

    \b
    clipper mesh ps
    """
    found: list[Instance] = command.server.mesh.instances()
    rows = [
        (
            one.id + (" (stops)" if one.stopping else ""),
            one.host or "-",
            _fullness(one),
            _bytes(one.capacity_bytes),
            str(one.models),
            _ago(one.lru_ms).removesuffix(" ago"),
            f"{one.loading}+{one.queued}",
            f"{one.rate:.0f}",
            " ".join(one.labels) or "-",
            one.zone or "-",
        )
        for one in found
    ]
    head = (
        "node",
        "host",
        "used",
        ">of",
        ">models",
        ">age",
        ">loading",
        ">rate/min",
        "labels",
        "zone",
    )
    _show_table(
        command,
        found,
        head,
        rows,
        "no node is running. To start one: clipper up, with [mesh] enabled = true",
    )


@mesh.command(short_help="Explain where a model is, and why.")
@click.argument("id")
@with_server
def explain(command: ServerCommand, id: str) -> None:
    """Explain this node's decisions about model ID: why its copies are where they are, where
    another would go, and what happens next.

    \b
    clipper mesh explain m1
    """
    found = command.server.mesh.explain(id)
    if command.output.is_data:
        command.output.emit(found)
        return
    click.echo(f"{id}: {styled(found.status)}")
    if found.next:
        click.echo(f"next: {found.next}")
    best_first = sorted(found.verdicts, key=lambda verdict: (not verdict.ok, verdict.rank))
    rows = [(str(one.rank) if one.ok else "-", one.instance, one.why) for one in best_first]
    _print_table(("rank", "node", "were a copy placed now"), rows, "no node is running")
    decided = [(_clock(one.time_ms), one.what, one.why) for one in found.history]
    _print_table(
        ("when", "this node did", "because"), decided, "this node has decided nothing about it"
    )


@mesh.command(short_help="List everything, then each change.")
@click.argument("prefix", required=False, default="")
@with_server
def watch(command: ServerCommand, prefix: str) -> None:
    """List models, v-models and nodes whose ids begin with PREFIX, then each change, until Ctrl-C.

    With -o json, each line is an object. `SYNC` ends the list; `RESET` means that changes were
    missed.

    \b
    clipper mesh watch
    clipper mesh watch m -o json
    """
    with until_interrupted():
        for event in command.server.mesh.watch(prefix):
            if command.output.is_data:
                command.output.emit(event, one_of_many=True)
            else:
                click.echo(_change_text(event))
            sys.stdout.flush()


# -- v-models


@mesh.group(cls=CommandGroup, short_help="Manage v-models: names that refer to models.")
def vmodel() -> None:
    """Manage v-models: clients use the name of a v-model while the model that it refers to changes.

    \b
    clipper mesh vmodel set best m1
    clipper mesh vmodel set best m2 --sync
    clipper mesh vmodel rollback best
    """


@vmodel.command("set", short_help="Create or switch a v-model.")
@click.argument("id")
@click.argument("target")
@click.option("--path", default="", help="Register TARGET with this path first.")
@click.option("--type", "type_", default="", help="Type of the model at --path.")
@click.option(
    "--auto-delete",
    is_flag=True,
    help="With --path: unregister TARGET soon after no v-model refers to it.",
)
@click.option("--update-only", is_flag=True, help="Fail if the v-model does not exist.")
@click.option("--expected", metavar="ID", default="", help="Fail unless it refers to ID now.")
@click.option(
    "--load", is_flag=True, help="Load TARGET now, even if the active model is not loaded."
)
@click.option("--force", is_flag=True, help="Switch at once, even if TARGET is not loaded.")
@click.option(
    "--share",
    type=Share(0, 1),
    default=0.0,
    metavar="SHARE",
    help="Send only this share of the queries to TARGET, as 5% or 0.05.",
)
@_owner
@_sync
@dry
@with_server
def vmodel_set(
    command: ServerCommand,
    id: str,
    target: str,
    path: str,
    type_: str,
    auto_delete: bool,
    update_only: bool,
    expected: str,
    load: bool,
    force: bool,
    share: float,
    owner: str,
    sync: bool,
    dry_run: bool,
) -> None:
    """Let v-model ID refer to model TARGET. It switches when TARGET is loaded as the active model
    is, so that no query fails.

    \b
    clipper mesh vmodel set best m1
    clipper mesh vmodel set best m2 --share 0.1
    clipper mesh vmodel set best m3 --path models/m3.onnx --auto-delete --sync
    """
    from clipper.mesh.reports import Info

    here = str(Path(path).absolute()) if path and Path(path).exists() else path
    found = command.server.mesh.set_vmodel(
        id,
        target,
        owner=owner,
        update_only=update_only,
        model=Info(here, type_) if path else None,
        auto_delete=auto_delete,
        load_now=load,
        force=force,
        sync=sync,
        expected=expected,
        share=share,
        dry_run=dry_run,
    )
    _show_vmodel(command, found, sync and not dry_run, dry_run)


@vmodel.command("delete", short_help="Delete a v-model.")
@click.argument("id")
@_owner
@dry
@with_server
def vmodel_delete(command: ServerCommand, id: str, owner: str, dry_run: bool) -> None:
    """Delete v-model ID. Models that were set with --auto-delete, and that no other v-model refers
    to, are unregistered soon after.

    \b
    clipper mesh vmodel delete best
    """
    command.server.mesh.delete_vmodel(id, owner, dry_run=dry_run)
    command.output.show(
        {"deleted": id, "dry_run": dry_run},
        lambda: f"{_would(dry_run)}v-model {id} is deleted",
    )


@vmodel.command("status", short_help="Show a v-model and its transition.")
@click.argument("id")
@_owner
@with_server
def vmodel_status(command: ServerCommand, id: str, owner: str) -> None:
    """Show the model that v-model ID refers to, and the progress of a transition. Exit code 1 if
    the v-model is unknown.

    \b
    clipper mesh vmodel status best
    """
    _show_vmodel(command, command.server.mesh.vmodel_status(id, owner), must=False)


@vmodel.command("rollback", short_help="Return to the previous model.")
@click.argument("id")
@dry
@with_server
def vmodel_rollback(command: ServerCommand, id: str, dry_run: bool) -> None:
    """Let v-model ID refer to its previous model again.

    \b
    clipper mesh vmodel rollback best
    """
    _show_vmodel(
        command,
        command.server.mesh.rollback_vmodel(id, dry_run=dry_run),
        must=False,
        dry_run=dry_run,
    )


@vmodel.command("ls", short_help="List v-models.")
@click.argument("prefix", required=False, default="")
@_limit
@with_server
def vmodel_list(command: ServerCommand, prefix: str, limit: int) -> None:
    """List the v-models whose ids begin with PREFIX.

    \b
    clipper mesh vmodel ls
    """
    found: list[VModelStatus] = command.server.mesh.vmodels(prefix, "", limit)
    rows = [
        (one.id, one.status, one.active, _target(one), one.owner or "-", one.why) for one in found
    ]
    head = ("name", "state", "active", "target", "owner", "last error")
    _show_table(
        command, found, head, rows, "no v-models. To create one: clipper mesh vmodel set ID MODEL"
    )


# -- printing


def _would(dry_run: bool) -> str:
    return "dry run: " if dry_run else ""


def _show_model(
    command: ServerCommand, found: "ModelStatus", must: bool, dry_run: bool = False
) -> None:
    """Print a model. must: fail if it is not loaded."""
    if found.status == "NOT_FOUND":
        raise UnknownModel(
            f"the mesh has no model {found.id!r}.", hint="clipper mesh ls lists them."
        )
    if command.output.is_data:
        command.output.emit(found)
    else:
        click.echo(_would(dry_run) + "\n".join(_model_lines(found)))
    if must and found.status != "LOADED":
        sys.exit(_EXIT_FAILED)


def _model_lines(found: "ModelStatus") -> Iterator[str]:
    yield f"{found.id}: {styled(found.status)}"
    if found.info is not None:
        info = found.info
        yield (
            f"  {info.type} {info.path}{f' with {info.key}' if info.key else ''}, takes"
            f" {info.input}, gives {info.output}"
        )
        if info.refs:
            yield f"  named by {info.refs} v-model{'s' if info.refs > 1 else ''}"
    for copy in found.copies:
        size = f", {_bytes(copy.size_bytes)}" if copy.size_bytes else ""
        yield (
            f"  {copy.instance}: {styled(copy.state)}"
            f" {_ago(copy.since_ms)}{size}{f': {copy.why}' if copy.why else ''}"
        )
    for error in found.errors:
        yield f"  error: {error}"


def _show_vmodel(
    command: ServerCommand, found: "VModelStatus", must: bool, dry_run: bool = False
) -> None:
    if found.status == "NOT_FOUND":
        from clipper.mesh.decisions.vmodels import UnknownVModel

        raise UnknownVModel(
            f"the mesh has no v-model {found.id!r}.", hint="clipper mesh vmodel ls lists them."
        )
    if command.output.is_data:
        command.output.emit(found)
    else:
        click.echo(
            f"{_would(dry_run)}{found.id}: {styled(found.status)}, refers to {found.active}"
            f" ({found.active_status})"
        )
        if _target(found) != "-":
            click.echo(
                f"  on its way to {_target(found)}"
                f" ({found.target_status}){f': {found.why}' if found.why else ''}"
            )
        if found.previous:
            click.echo(
                f"  previous model {found.previous}: clipper mesh vmodel rollback {found.id}"
            )
    if must and found.status != "DEFINED":
        sys.exit(_EXIT_FAILED)


def _target(found: "VModelStatus") -> str:
    if found.target == found.active:
        return "-"
    return (
        f"{found.target}, {100 * found.share:g} % of the queries" if found.share else found.target
    )


def _change_text(event: "MeshEvent") -> str:
    """Format an event as one line."""
    from clipper.mesh.records import Instance, MeshModel

    if event.kind in ("SYNC", "RESET"):
        return click.style(
            (
                "-- that was all; from now on, what changes"
                if event.kind == "SYNC"
                else "-- read again"
            ),
            dim=True,
        )
    record = event.record
    if record is None:
        return f"{event.revision}  {event.of} {event.id} {click.style('removed', fg='red')}"
    if isinstance(record, MeshModel):
        loaded = ", ".join(record.loaded)
        return (
            f"{event.revision}  model {event.id}"
            f" {styled(record.status())}{f' in {loaded}' if loaded else ''}"
        )
    if isinstance(record, Instance):
        full = f"{_bytes(record.used_bytes)} of {_bytes(record.capacity_bytes)}"
        return f"{event.revision}  node {event.id} {full}, {record.models} models"
    return (
        f"{event.revision}  v-model {event.id} {styled(record.status())} {record.active} ->"
        f" {record.target}"
    )


def _show_table(
    command: ServerCommand,
    found: Sequence[object],
    head: Sequence[str],
    rows: Sequence[Sequence[str]],
    empty: str,
    after: str = "",
) -> None:
    """Print a table. head: titles; a leading > marks a column of numbers."""
    if command.output.is_data:
        command.output.emit(list(found))
        return
    _print_table(head, rows, empty)
    if after:
        click.echo(after)


def _print_table(head: Sequence[str], rows: Sequence[Sequence[str]], empty: str) -> None:
    if not rows:
        click.echo(empty)
        return
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim")
    for title in head:
        table.add_column(
            title.removeprefix(">"), justify="right" if title[0] == ">" else "left", overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(cell, style=STATE_COLOURS.get(cell, "")) for cell in row))
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        # one line per row, for grep and cut
        console.width = 240
    console.print(table)


def _size(one: "ModelStatus") -> int:
    return max(
        (copy.size_bytes for copy in one.copies), default=one.info.size_bytes if one.info else 0
    )


def _fullness(one: "Instance") -> str:
    share = min(1.0, one.used_bytes / one.capacity_bytes) if one.capacity_bytes else 0.0
    full = round(_BAR * share)
    return f"{'█' * full}{'·' * (_BAR - full)} {100 * share:3.0f} %"


def _bytes(n: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if n < 1024:
            return f"{_digits(n)} {unit}" if n else "-"
        n /= 1024  # type: ignore[assignment]
    return f"{_digits(n)} GiB"


def _digits(number: float) -> str:
    return f"{number:.3g}" if number < 999.5 else f"{number:.0f}"


def _ago(time_ms: int) -> str:
    if not time_ms:
        return "-"
    return f"{age_of(wall_time_us() / 1e6 - time_ms / 1000)} ago"


def _clock(time_ms: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(time_ms / 1000))
