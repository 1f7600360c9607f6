"""`clipper node`: run one node of a mesh until a signal; its models are moved elsewhere first."""

import contextlib
import functools
import secrets
import signal
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clipper.cli.amounts import Size
from clipper.cli.servers.addresses import with_addresses
from clipper.cli.servers.reloading import FollowedFile, SourceWatch
from clipper.cli.servers.systemd import NotifySocket, SystemdService
from clipper.cli.servers.up import (
    keep_pauses_short,
    on_first_signal,
    on_hangup,
    refuse_open,
    say,
)
from clipper.credentials.credential_file import stamp_of
from clipper.log_output import log_to_terminal
from clipper.types import UserValue, check_name
from clipper_container import parent_death
from clipper_container.backoff import Backoff

if TYPE_CHECKING:
    from clipper.config import Config
    from clipper.mesh.node.node import MeshNode
    from clipper.mesh.reports import MigrationProgress
    from clipper.server import ClipperServer

_CHECK_S: Final = 0.1
_PROGRESS_S: Final = 1.0
_PATIENT_S: Final = 5.0
_RETRY_S_MIN, _RETRY_S_MAX = 0.5, 5.0
_EXIT_GIVEN_UP: Final = 1


@click.command(short_help="Run a node of a mesh.")
@click.argument(
    "file", required=False, type=click.Path(dir_okay=False, exists=True, path_type=Path)
)
@click.option(
    "--store",
    metavar="URL",
    help="Store that the nodes of this mesh share: etcd://, redis://, sqlite:FILE.",
)
@click.option(
    "--peers",
    metavar="ADDRESS",
    help="Address for other nodes, tcp:HOST:PORT; replaces mesh.peers.",
)
@click.option(
    "--name", metavar="NAME", help="Name of this node, the same at each start; replaces mesh.name."
)
@click.option(
    "--advertise",
    metavar="HOST",
    help="Host by which other nodes reach this one; replaces mesh.advertise.",
)
@click.option(
    "--label",
    "labels",
    multiple=True,
    metavar="WORD",
    help="Label of this node, such as gpu; may be repeated.",
)
@click.option(
    "--zone",
    metavar="ZONE",
    help="Zone of this node; copies are spread over zones. Replaces mesh.zone.",
)
@click.option(
    "--capacity",
    "--capacity-mib",
    "capacity_mib",
    type=Size(),
    metavar="SIZE",
    help="Memory for models, as 8Gi; a number alone is MiB.  [half of what it may use]",
)
@click.option(
    "--http", metavar="HOST:PORT", help="Address for queries over HTTP; replaces http.address."
)
@click.option(
    "--grpc",
    metavar="HOST:PORT",
    help="Address for gRPC (http: that of HTTP); replaces grpc.address.",
)
@click.option(
    "--admin", metavar="HOST:PORT", help="Address for management over HTTP; replaces http.admin."
)
@click.option(
    "--insecure",
    is_flag=True,
    help="Accept queries from other hosts without keys, as http.insecure.",
)
@click.option(
    "--end-with-parent",
    type=int,
    metavar="PID",
    hidden=True,
    help="Leave when the thread of process PID that started this ends.",
)
def node(
    file: Path | None, insecure: bool, end_with_parent: int | None, **given: UserValue
) -> None:
    """Run a node of a mesh until SIGTERM or Ctrl-C. Nodes that share a store form one mesh: each
    accepts every query, and loads the model or forwards the query to a node that has it.

    FILE is a TOML file with further settings. The line `ready` means that models can be loaded
    here. At the end, recently used models are first loaded elsewhere, for up to mesh.drain_s
    seconds, while queries continue; a second Ctrl-C does not wait. SIGHUP reads FILE again: what
    holds at once is applied, and for the rest a line says that it needs a restart.

    \b
    clipper node --store etcd://10.0.0.5:2379 --peers tcp:10.0.0.1:7001 --http 127.0.0.1:8000
    clipper node --store sqlite:/var/lib/clipper/mesh.db --name a
    clipper node node.toml --label gpu --zone north
    """
    log_to_terminal()
    seen = stamp_of(file or "")
    read = functools.partial(_configured, file, given)
    loaded = read()
    config = with_addresses(_reachable(_apart(loaded)), http=False)
    refuse_open(config, insecure)
    stopping, asked = threading.Event(), threading.Event()
    on_first_signal(stopping)
    on_hangup(stopping, asked)
    if end_with_parent:
        parent_death.end_with_parent(end_with_parent, signal.SIGTERM)
    server = _started(config, stopping)
    if server is None:
        click.echo("closed")
        return
    service = SystemdService(server, NotifySocket())
    with contextlib.closing(server), service:
        click.echo(_greeting(server))
        mesh = server.mesh
        is_ready = _ready(mesh, stopping)
        keep_pauses_short()
        if is_ready:
            click.echo("ready")
            sources = SourceWatch(loaded.models)
            file_now = FollowedFile(server, file, seen, loaded, read, service, sources)
            file_now.follow(stopping, asked, watching=False)
        service.stopping(config.mesh.drain_s + config.server.drain_s)
        if not mesh.awaits:
            _drain(mesh, config.mesh.drain_s)
        say(f"closing: queries in flight have {config.server.drain_s:g} s (Ctrl-C again: at once)")
        server.close()
    say("closed")
    if mesh.given_up:
        sys.exit(_EXIT_GIVEN_UP)


def _started(config: "Config", stopping: threading.Event) -> "ClipperServer | None":
    """Start the server and return it once it runs, even if it had to wait for its store. Return
    None when it is to end before."""
    from clipper.errors import StoreError
    from clipper.server import ClipperServer

    backoff = Backoff(_RETRY_S_MIN, _RETRY_S_MAX)
    while True:
        server = ClipperServer(config, ends_by_signal=True)
        try:
            return server.start()
        except StoreError as error:
            server.close()
            click.echo(f"not ready: {error.message} It is tried again.")
        except BaseException:
            server.close()
            raise
        if stopping.wait(backoff.next_s()):
            return None


def _configured(file: Path | None, given: dict[str, UserValue]) -> "Config":
    """Return the configuration of this node as its file and options state it. Raises UsageError if
    the nodes have no common store."""
    from clipper.config import load

    words = ("peers", "name", "advertise", "zone", "capacity_mib")
    mesh = {"enabled": True, **{word: given[word] for word in words if given[word] is not None}}
    mesh |= {"labels": given["labels"]} if given["labels"] else {}
    ways = {name: given[name] for name in ("http", "grpc", "admin")}
    try:
        check_name(given["name"] or "a", "node")
    except ValueError as error:
        raise click.UsageError(str(error)) from None
    if peers := given["peers"]:
        _check_peers(peers)
    # protected by a token: see _reachable
    config = load(file, state=given["store"], mesh=mesh, server={"insecure": True}, **ways)
    if config.server.state in ("", "memory", "memory://"):
        raise click.UsageError(
            "the nodes of a mesh need a store: --store etcd://HOST:2379, or sqlite:FILE on one host"
        )
    return config


def _apart(config: "Config") -> "Config":
    """Set a folder of its own for this node, beside the file that the nodes of one host share."""
    from msgspec.structs import replace

    kind, _, file = config.server.state.partition(":")
    if kind != "sqlite" or config.server.folder:
        return config
    if not config.mesh.name:
        raise click.UsageError(
            "nodes that share a SQLite file need different names, for their folders: --name a"
        )
    folder = Path(file.removeprefix("//")).absolute().parent / f"node-{config.mesh.name}"
    return replace(config, server=replace(config.server, folder=str(folder)))


def _check_peers(peers: str) -> None:
    kind, _, where = peers.partition(":")
    host, colon, port = where.rpartition(":")
    if not (kind == "unix" and where) and not (
        kind == "tcp" and colon and host and port.isdecimal() and int(port) <= 65535
    ):
        raise click.UsageError(
            f"--peers {peers!r}: expected tcp:HOST:PORT (port 0: any free port) or unix:/path"
        )


def _reachable(config: "Config") -> "Config":
    """Set the address and the token of this start with which the hosts of other nodes connect."""
    from msgspec.structs import replace

    server, peers = config.server, config.mesh.peers
    if peers.startswith("tcp:") and "server.address" not in config.origins:
        host = peers.removeprefix("tcp:").rpartition(":")[0]
        server = replace(server, address=f"tcp://{host}:0")
    token = server.token or secrets.token_urlsafe(24)
    return replace(config, server=replace(server, token=token, insecure=False))


def _ready(mesh: "MeshNode", stopping: threading.Event) -> bool:
    """Wait until this node is in the registry with the types that it loads. Return False when it is
    to end before, or has given up."""
    began = printed_s = time.monotonic()
    shown = ""
    while awaits := mesh.awaits or _lacks(mesh):
        if mesh.given_up:
            click.echo(f"not ready: it awaits {awaits}.")
            return False
        if mesh.awaits and awaits != shown:
            shown = awaits
            click.echo(f"not ready: it awaits {awaits}. It is tried again.")
        if stopping.wait(_CHECK_S):
            return False
        if time.monotonic() - printed_s > _PATIENT_S:
            printed_s = time.monotonic()
            click.echo(f"not ready after {printed_s - began:.0f} s: it awaits {awaits}")
    return True


def _lacks(mesh: "MeshNode") -> str:
    here = any(one.id == mesh.instance and one.types for one in mesh.instances())
    return "" if here else "the store, or the processes that hold models"


def _drain(mesh: "MeshNode", drain_s: float) -> None:
    """Print the progress of the drain, at most once a second, and its result."""
    printed_s = 0.0

    def progress(now: "MigrationProgress") -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s > _PROGRESS_S:
            printed_s = time.monotonic()
            click.echo(f"leaving: {_moved(now)}")

    click.echo(
        f"leaving: models used lately are loaded elsewhere, for up to {drain_s:g} s (Ctrl-C again:"
        " at once)"
    )
    click.echo(f"left: {_moved(mesh.drain(progress))}")


def _moved(now: "MigrationProgress") -> str:
    if not now.total:
        return "no model had to move"
    failed = f", {now.failed} could not" if now.failed else ""
    return (
        f"{now.done} of {now.total} models moved{failed}{f', {now.left} to go' if now.left else ''}"
    )


def _greeting(server: "ClipperServer") -> str:
    from clipper import __version__
    from clipper.errors import without_secrets
    from clipper.manage.running import state_named
    from clipper.settings.http import admin_tls, query_tls, scheme_of

    config = server.config
    lines = [
        f"clipper {__version__} · node {server.mesh.instance} · store:"
        f" {without_secrets(state_named(config.server.state))}"
    ]
    if server.http_address:
        lines.append(
            f"queries come in at {scheme_of(query_tls(config.http))}://{server.http_address}"
        )
    if server.grpc_address:
        lines.append(f"queries come in over gRPC at {server.grpc_address}")
    if server.admin_address:
        lines.append(
            f"management at {scheme_of(admin_tls(config.http))}://{server.admin_address}, or:"
            " clipper mesh --help"
        )
    lines.append(f"hosts of models dial in at {server.address}")
    return "\n".join(lines)
