"""`clipper params`: run and manage the shards of a parameter server on this host."""

import contextlib
import os
import re
import select
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.command_group import CommandGroup, with_options
from clipper.cli.output import CommandOutput, dry, with_output, would
from clipper.cli.params.tables import (
    FILE,
    FOLDER,
    TABLE_COMMANDS,
    client_of,
    in_folder,
    of_set,
)
from clipper.cli.servers.end_process import end_process
from clipper.cli.servers.up import file_or_default
from clipper.errors import NoServer
from clipper.log_output import log_to_terminal
from clipper_container import parent_death
from clipper_container.model import UserValue

if TYPE_CHECKING:
    from clipper.params.client.stats_reader import StatsReader
    from clipper.params.shard.server import Beside


@click.group(cls=CommandGroup, short_help="Run a parameter server, and manage its tables.")
def params() -> None:
    """Run a parameter server: shards that hold tables of parameters, which are trained and served
    at the same time.

    \b
    clipper params up --shards 4 --replicas 1
    clipper params ps
    clipper params down
    """


_on_ray = with_options(
    click.option(
        "--ray-address",
        default="auto",
        show_default=True,
        metavar="HOST:PORT",
        help="Address of the Ray cluster.",
    ),
    click.option(
        "--name",
        default="params",
        show_default=True,
        help="On Ray: the actors are NAME-0, NAME-1, ...",
    ),
    click.option(
        "--on",
        "engine",
        type=click.Choice(["ray"]),
        help="Engine that runs the shards.  [this command]",
    ),
)
_placed = with_options(
    click.option(
        "--cpus",
        type=click.FloatRange(0),
        default=1.0,
        help="On Ray: cores reserved for each shard.  [1]",
    ),
    click.option(
        "--together", is_flag=True, help="On Ray: allow a shard and its replica on one machine."
    ),
)


@params.command(short_help="Run a set of shards.")
@click.argument("file", metavar="[FILE]", required=False, type=FILE)
@click.option("--shards", type=click.IntRange(1, 1024), help="Number of shards.  [params.shards]")
@click.option(
    "--replicas",
    type=click.IntRange(0, 7),
    help="Replicas of each shard.  [params.replicas]",
)
@click.option(
    "--replication", type=click.Choice(["waited", "periodic"]), help="[params.replication]"
)
@click.option(
    "--durability",
    type=click.Choice(["memory", "disk"]),
    help="disk: each push is synced to a log.  [params.durability]",
)
@click.option(
    "--folder",
    type=FOLDER,
    help="Folder of addresses, epochs, logs and snapshots.  [params.folder]",
)
@click.option(
    "--address",
    metavar="unix|HOST:PORT",
    help="Address; shard i listens at PORT + i.  [params.address]",
)
@click.option("--metrics", metavar="HOST:PORT", help="Address of GET /metrics.  [params.metrics]")
@click.option(
    "--grpc",
    metavar="HOST:PORT",
    help="Address of gRPC; shard i listens at PORT + i.  [params.grpc]",
)
@_on_ray
@_placed
@click.option(
    "--wait",
    "within_s",
    type=click.FloatRange(1),
    default=120.0,
    help="On Ray: seconds to wait until all serve.  [120]",
)
@dry
@with_output
def up(
    file: Path | None,
    engine: str | None,
    name: str,
    ray_address: str,
    together: bool,
    cpus: float,
    within_s: float,
    output: CommandOutput,
    dry_run: bool,
    **given: UserValue,
) -> None:
    """Start shards as processes, and restart those that end, until this command ends.

    FILE is a TOML file with a section [params]; default: clipper.toml of this folder, if it exists.
    With `--on ray` the shards run on the machines of a Ray cluster and continue after this command
    has ended; --folder must then be on shared storage. `--ray-address local` tries it in a
    temporary Ray cluster.

    \b
    clipper params up --shards 4 --replicas 1 --folder shop
    clipper params up clipper.toml
    clipper params up --on ray --shards 4 --replicas 1 --folder /share/shop
    """
    from clipper.config import load
    from clipper.params.client.stats_reader import StatsReader
    from clipper.params.local.local_set import LocalSet, check_start

    log_to_terminal()
    wanted = {
        key: str(value) if isinstance(value, Path) else value
        for key, value in given.items()
        if value is not None
    }
    settings = load(file_or_default(file), **({"params": wanted} if wanted else {})).params
    _refuse_dry(engine, dry_run)
    if dry_run:
        addresses = check_start(settings)
        text = f"dry run: {settings.shards} shards start in {settings.folder}"
        text += f", each with {settings.replicas} replicas" if settings.replicas else ""
        output.say({"folder": settings.folder, "addresses": addresses}, text)
        return
    if engine:
        if settings.metrics:
            raise click.UsageError(
                "--metrics cannot be combined with --on ray; instead: clipper params metrics"
                " --listen HOST:PORT --folder ..."
            )
        from clipper.cli.params.on_ray import up_on_ray

        up_on_ray(settings, name, ray_address, together=together, cpus=cpus, within_s=within_s)
        return
    ends = _signalled()
    shards = LocalSet(settings).start()
    try:
        shards.wait_ready()
        with _metrics(settings.metrics, lambda: StatsReader(shards.folder)) as page:
            text = (
                f"{settings.shards} shards serve. Workers:"
                f" clipper.params.Client({str(shards.folder)!r}){page}"
            )
            if settings.grpc:
                text += (
                    f"\nBy gRPC: shard 0 at {settings.grpc}, shard i at the port + i. Token: in"
                    f" {shards.folder}/shards.json"
                )
            output.say({"folder": str(shards.folder), "addresses": shards.addresses}, text)
            select.select([ends], [], [])
    finally:
        shards.stop()


def _refuse_dry(engine: str | None, dry_run: bool) -> None:
    """Refuse a dry run on Ray. Raises click.UsageError."""
    if engine and dry_run:
        raise click.UsageError("--dry-run is for a set of this host, not with --on ray.")


def _signalled() -> int:
    """Return a descriptor that is readable when this command is to end."""
    ends, wakes = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.set_wakeup_fd(wakes)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)
    return ends


@contextlib.contextmanager
def _metrics(address: str, reader: "Callable[[], StatsReader]") -> Iterator[str]:
    """Serve the metrics at `address`, if it is given, and yield the line of text that tells
    where."""
    from clipper.params.local.metrics_page import MetricsPage

    if not address:
        yield ""
        return
    reading = reader()
    page = MetricsPage(address, reading.read).start()
    try:
        yield f"  Metrics: http://{page.address}/metrics"
    finally:
        page.stop()
        reading.close()


@params.command(short_help="Show the shards: rows, pushes, replicas.")
@of_set
def ps(folder: Path, output: CommandOutput) -> None:
    """Show each shard: its rows, pushes, replicas, and the snapshots of the set.

    \b
    clipper params ps --folder shop
    """
    import msgspec

    from clipper.cli.params.shown import held
    from clipper.params.client.stats_reader import StatsReader
    from clipper.params.local.live_reshard import home_in, progress, request_in, state_in
    from clipper.params.shard.durability.snapshots import sets_in

    reader = StatsReader(folder, answer_s=5.0)
    found = reader.read()
    reader.close()
    sets = [
        {
            "number": one.number,
            "shards": one.shards,
            "complete": one.complete,
            "rows": sum(p.rows for p in one.parts),
            "nbytes": sum(p.nbytes for p in one.parts),
        }
        for one in sets_in(home_in(folder) / "snapshots")
    ]
    state = state_in(folder) if request_in(folder) else None
    text = held(found, sets) + (f"\n{progress(state)}" if state is not None else "")
    resharding = msgspec.to_builtins(state)
    output.say({"shards": found, "snapshots": sets, "resharding": resharding}, text)


@params.command(short_help="Print or serve the metrics of the shards.")
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help="Serve them at GET /metrics of this address.  [print them once]",
)
@in_folder
def metrics(folder: Path, listen: str | None) -> None:
    """Print the metrics of all shards of a set, or serve them.

    \b
    clipper params metrics --folder shop
    clipper params metrics --folder /share/shop --listen 127.0.0.1:9300
    """
    from clipper.metrics import prometheus
    from clipper.params.client.stats_reader import StatsReader
    from clipper.params.local.metrics_page import samples_of

    if listen is None:
        reader = StatsReader(folder, answer_s=5.0)
        try:
            click.echo(prometheus(samples_of(reader.read())), nl=False)
        finally:
            reader.close()
        return
    ends = _signalled()
    with _metrics(listen, lambda: StatsReader(folder)) as page:
        click.echo(page.strip())
        select.select([ends], [], [])


@params.command(short_help="Write a snapshot of a running set.")
@click.option(
    "--whole", is_flag=True, help="Write everything, not only the changes since the last snapshot."
)
@dry
@of_set
def snapshot(folder: Path, output: CommandOutput, whole: bool, dry_run: bool) -> None:
    """Take a snapshot of every shard, under one number.

    \b
    clipper params snapshot --folder shop
    """
    from clipper.params.local.local_set import snapshot_all
    from clipper_container.params.connection import addresses_in

    addresses, token = addresses_in(folder)
    result = snapshot_all(addresses, token, folder, whole=whole, dry_run=dry_run)
    size = "" if dry_run else f", {result['nbytes']} bytes"
    text = f"{would(dry_run)}snapshot {result['number']}: {result['rows']} rows{size}"
    output.say(result, text)


@params.command(short_help="Restore a snapshot.")
@click.option(
    "--from",
    "source",
    type=FOLDER,
    help="Folder of another set, or of its snapshots.  [this set]",
)
@click.option(
    "--number",
    type=click.IntRange(1),
    help="Number of the snapshot.  [the newest complete one]",
)
@dry
@of_set
def restore(
    folder: Path, output: CommandOutput, source: Path | None, number: int | None, dry_run: bool
) -> None:
    """Select the snapshot that the shards of a stopped set read at their next start. Newer
    snapshots are set aside.

    \b
    clipper params restore --folder shop --number 12
    clipper params restore --folder shop --from backup/shop
    """
    from clipper.params.local.local_set import restore as restored

    result = restored(folder, source or folder, number or 0, dry_run=dry_run)
    output.say(
        {"number": result},
        f"{would(dry_run)}snapshot {result} is what is read at the next start: clipper params up"
        f" --folder {folder}",
    )


@params.command("begin-anew", short_help="Let shards that lost all their data start empty.")
@dry
@of_set
def begin_anew(folder: Path, output: CommandOutput, dry_run: bool) -> None:
    """Let shards that restarted without a replica and a snapshot continue without data.

    Other shards are not affected. Workers push their variables again; rows start untrained.

    \b
    clipper params begin-anew --folder shop
    """
    with client_of(folder) as client:
        result = client.begin_anew(dry_run=dry_run)
    output.say(
        {"begun": result},
        f"{would(dry_run)}shards that start empty: {', '.join(map(str, result)) or 'none'}",
    )


@params.command(short_help="Change the number of shards.")
@click.option(
    "--shards",
    type=click.IntRange(1, 1024),
    required=True,
    help="Number of shards: at once of a set that runs, else at the next start.",
)
@click.option("--no-wait", is_flag=True, help="Do not wait for the end.")
@_on_ray
@_placed
@click.option("--resource", default="", help="On Ray: only machines with this custom resource.")
@dry
@of_set
def reshard(
    folder: Path,
    output: CommandOutput,
    shards: int,
    no_wait: bool,
    engine: str | None,
    name: str,
    ray_address: str,
    together: bool,
    cpus: float,
    resource: str,
    dry_run: bool,
) -> None:
    """Change the number of shards. A set that `clipper params up` or a server runs continues to
    serve meanwhile; the same command again shows how far it is. With the number that it has, all
    rows move to new processes. If the set does not run, each shard reads its part of the last
    snapshots at the next start.

    With `--on ray` this command moves the set to new actors, on other machines if you name a
    `--resource` of theirs.

    \b
    clipper params reshard --folder shop --shards 6
    clipper params reshard --folder /share/shop --shards 4 --on ray --resource new
    """
    _refuse_dry(engine, dry_run)
    if engine:
        from clipper.cli.params.on_ray import resharding_on_ray

        with resharding_on_ray(
            folder.absolute(),
            shards,
            name,
            ray_address,
            together=together,
            cpus=cpus,
            resource=resource,
        ):
            _show_reshard(folder, shards, output, wait=True)
        return
    from clipper.params.local.live_reshard import request
    from clipper.params.local.local_set import reshard as resharded
    from clipper.params.local.local_set import supervisor_of

    if supervisor_of(folder):
        request(folder, shards, dry_run=dry_run)
        if dry_run:
            output.say({"shards": shards}, f"dry run: the rows move to {shards} shards")
        else:
            _show_reshard(folder, shards, output, wait=not no_wait)
        return
    result = resharded(folder, shards, dry_run=dry_run)
    text = (
        f"{would(dry_run)}{shards} shards will read snapshot {result}: clipper params up --folder"
        f" {folder} --shards {shards}"
    )
    output.say({"shards": shards, "number": result}, text)


def _show_reshard(folder: Path, shards: int, output: CommandOutput, *, wait: bool) -> None:
    import msgspec

    from clipper.errors import DoesNotFit
    from clipper.params.local.live_reshard import progress, request_in, state_in

    shown = ""
    while wait and request_in(folder):
        time.sleep(0.1)
        state = state_in(folder)
        text = progress(state) if state is not None else ""
        if text != shown and not output.is_data:
            shown = text
            click.echo(text)
    state = state_in(folder)
    if wait and state is not None and state.phase == "failed":
        raise DoesNotFit(f"the set was not resharded: {state.error}")
    text = (
        f"{shards} shards serve; pushes waited for {state.pause_s:.3f} s."
        if wait and state is not None
        else f"requested: clipper params reshard --shards {shards} --folder {folder} shows it"
    )
    output.say(msgspec.to_builtins(state) if state is not None else {"shards": shards}, text)


@params.command(short_help="Stop the shards that `clipper params up` started.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the end.",
)
@_on_ray
@dry
@of_set
def down(
    folder: Path,
    output: CommandOutput,
    wait_s: float,
    engine: str | None,
    name: str,
    ray_address: str,
    dry_run: bool,
) -> None:
    """Take a snapshot, stop the shards and wait until they have ended. Exit code 1 if they still
    run after --wait.

    \b
    clipper params down --folder shop
    clipper params down --folder /share/shop --on ray
    """
    _refuse_dry(engine, dry_run)
    if engine:
        from clipper.cli.params.on_ray import down_on_ray

        result = down_on_ray(folder.absolute(), name, ray_address)
        output.say(list(result.values()), f"ended {len(result)} shards on Ray")
        return
    from clipper.params.local.local_set import supervisor_of

    pid = supervisor_of(folder)
    if not pid:
        raise NoServer(
            f"no set of shards runs in {folder}.",
            hint="To start one: clipper params up --folder ...",
        )
    if not dry_run:
        end_process(pid, wait_s, f"process {pid} still runs after {wait_s:g} s")
    output.say({"pid": pid}, f"{would(dry_run)}ended the shards of {folder} (process {pid})")


@params.command(short_help="Run one shard of a set.")
@click.argument("number")
@in_folder
@click.option(
    "--keep", type=FOLDER, help="Folder of its epoch and snapshots.  [the folder of the set]"
)
@click.option(
    "--listen",
    metavar="HOST:PORT",
    help=("Address instead of that in shards.json; port 0: any free port, which it writes there."),
)
@click.option(
    "--alive",
    metavar="FILE",
    type=click.Path(path_type=Path),
    help=(
        "Touch FILE while it answers, and FILE.ready while it serves and its replicas are complete."
    ),
)
@click.option("--metrics", metavar="HOST:PORT", help="Address of GET /metrics of this shard.")
@click.option(
    "--end-with-parent",
    type=int,
    metavar="PID",
    hidden=True,
    help="End when the thread of process PID that started this ends.",
)
def shard(
    number: str,
    folder: Path,
    keep: Path | None,
    listen: str | None,
    alive: Path | None,
    end_with_parent: int | None,
    metrics: str | None,
) -> None:
    """Run shard NUMBER of the set that shards.json in its folder describes, until a signal: for
    your own supervisor. NUMBER may be a name that ends with the number.

    \b
    clipper params shard 0 --folder shop
    clipper params shard clipper-params-2 --folder /etc/clipper-params --keep /state --listen
    0.0.0.0:7300
    """
    import msgspec

    from clipper.params.client.stats_reader import StatsReader
    from clipper.params.local.shard_process import config_in
    from clipper.params.shard.server import run

    log_to_terminal()
    digits = re.search(r"[0-9]+$", number)
    if digits is None:
        raise click.BadParameter(f"{number!r} does not end with a number", param_hint="NUMBER")
    if end_with_parent:
        parent_death.end_with_parent(end_with_parent, signal.SIGTERM)
    root = folder.absolute()
    place = config_in(root, int(digits[0]), keep.absolute() if keep is not None else None)
    place = msgspec.structs.replace(
        place, listen=f"tcp:{listen}" if listen else "", alive=alive, book=root
    )
    here: Path | list[str] = root  # the folder holds the actual port
    if not place.listen.endswith(":0"):
        own = f"tcp:{_reached(listen)}" if listen else place.addresses[place.number]
        here = [own if i == place.number else one for i, one in enumerate(place.addresses)]
    with _metrics(metrics or "", lambda: StatsReader(here, token=place.token, only=place.number)):
        code = run(place, _beside(place.settings.grpc), lambda: click.echo("ready"))
    sys.exit(code)


def _beside(grpc: str) -> "Beside":
    if not grpc:
        return contextlib.nullcontext
    from clipper.frontend.params_grpc.server import beside

    return beside


def _reached(listens: str) -> str:
    """Return the address at which this process reaches a listener."""
    host, _, port = listens.rpartition(":")
    return f"{ {'0.0.0.0': '127.0.0.1', '[::]': '[::1]'}.get(host, host) }:{port}"


for _verb in TABLE_COMMANDS:
    params.add_command(_verb)
