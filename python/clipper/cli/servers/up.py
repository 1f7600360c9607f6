"""`clipper up`: serve what a file declares until a signal."""

import functools
import gc
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.servers.up_on_ray import on_ray, serve_on_ray
from clipper.credential_file import stamp_of
from clipper.errors import ClipperError, without_secrets
from clipper_container import parent_death

if TYPE_CHECKING:
    from clipper.cli.servers.up_on_ray import Placed
    from clipper.config import Config
    from clipper.server import ClipperServer

DEFAULT_FILE = "clipper.toml"
_CHECK_S = 0.5
_SWITCH_S = 0.001
_OLD_COLLECTED = 1000  # collections of younger objects for one of old ones


@click.command(short_help="Serve the models and applications of a TOML file.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option(
    "--http", metavar="HOST:PORT", help="Address for queries over HTTP; replaces http.address."
)
@click.option(
    "--http-workers",
    type=click.IntRange(0, 64),
    metavar="N",
    help="Threads for plain queries; replaces http.workers.",
)
@click.option(
    "--grpc", metavar="HOST:PORT", help="Address for queries over gRPC; replaces grpc.address."
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
    "--require-store",
    is_flag=True,
    help="Fail if the store is unavailable, as server.require_store.",
)
@click.option(
    "--reload",
    "follow",
    is_flag=True,
    help="Watch the file, and apply what it adds or changes.",
)
@click.option(
    "--end-with-parent",
    type=int,
    metavar="PID",
    hidden=True,
    help="End when the thread of process PID that started this ends.",
)
@on_ray
def up(
    file: Path | None,
    http: str | None,
    http_workers: int | None,
    grpc: str | None,
    admin: str | None,
    insecure: bool,
    require_store: bool,
    follow: bool,
    end_with_parent: int | None,
    placed: "Placed | None",
) -> None:
    """Serve the models and applications of a TOML FILE until SIGTERM or Ctrl-C.

    FILE defaults to ./clipper.toml; without it, all settings have their defaults. At the end,
    queries in flight have server.drain_s seconds; a second Ctrl-C does not wait. Without
    http.admin, only commands of this user on this host can manage the server.

    With --on ray, servers that share server.state run on the machines of a Ray cluster, and this
    process forwards the connections at its addresses to those that are ready. Their number follows
    the load. SIGHUP replaces each by a new one; SIGTERM ends all.

    \b
    # clipper.toml
    [server]
    state = ".clipper"
    address = "tcp://127.0.0.1:7000"
    [models.doubler]
    target = "doubler:double"        # the function `double` of doubler.py
    input = "f64[3]"
    [apps.double]
    models = ["doubler"]
    slo_ms = 20
    default = 0

    \b
    clipper up clipper.toml
    clipper up clipper.toml --http 127.0.0.1:8080 --admin 127.0.0.1:8081
    clipper up clipper.toml --http 0.0.0.0:8000 --insecure --on ray --servers 2 --servers-max 8
    """
    from clipper.config import load
    from clipper.server import ClipperServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    path = file_or_default(file)
    seen = stamp_of(path or "")
    read = functools.partial(
        load,
        path,
        http=http,
        workers=http_workers,
        grpc=grpc,
        admin=admin,
        require_store=require_store or None,
    )
    loaded = read()
    if follow and path is None:
        raise click.UsageError("--reload needs a file: clipper up FILE --reload")
    refuse_open(loaded, insecure)
    if placed is not None:
        serve_on_ray(path, loaded, placed, insecure=insecure)
        return
    config = managed(loaded)
    stopping = threading.Event()
    server = ClipperServer(config, ends_by_signal=True)
    server.start()
    try:
        on_first_signal(stopping)
        if end_with_parent:
            parent_death.end_with_parent(end_with_parent, signal.SIGTERM)
        keep_pauses_short()
        click.echo(_greeting(server, path, made_up=not loaded.http.admin and not loaded.http.token))
        if follow:
            _follow(server, path, loaded, seen, read, stopping)
        stopping.wait()
        click.echo(
            f"closing: queries in flight have {config.server.drain_s:g} s (Ctrl-C again: at once)"
        )
    finally:
        server.close()
    click.echo("closed")


def managed(config: "Config") -> "Config":
    """Without http.admin: add a management port on loopback and a token that this user's
    commands find in the server's private folder.
    """
    import secrets

    from msgspec.structs import replace

    if config.http.admin:
        return config
    token = config.http.token or secrets.token_urlsafe(24)
    return replace(
        config, http=replace(config.http, admin="127.0.0.1:0", token=token, admin_tls_cert="off")
    )


def refuse_open(config: "Config", insecure: bool) -> None:
    """Refuse an address that other hosts can reach without authentication, unless it is
    explicitly allowed. Raises: ConfigError.
    """
    from clipper.errors import ConfigError
    from clipper.settings.grpc import grpc_tls
    from clipper.settings.http import unauthenticated_listeners

    if insecure or config.http.insecure:
        return
    for key, address in unauthenticated_listeners(
        config.http, (config.grpc.address, grpc_tls(config.grpc, config.http))
    ):
        hint = (
            "Set http.api_keys_file (created by: clipper key NAME) or http.tls_client_ca, or use"
            " --insecure."
        )
        raise ConfigError(
            f"{key} = {address!r}: any host that reaches this address could send queries.",
            hint=hint,
        )


def _follow(
    server: "ClipperServer",
    path: Path | None,
    config: "Config",
    seen: tuple[int, ...],
    load: "Callable[[], Config]",
    stopping: threading.Event,
) -> None:
    """Watch the file and apply a change once it has been stable for one interval."""
    from clipper.manage.declared import declare_again, declared_twice, left

    known, last = config, seen
    while not stopping.wait(_CHECK_S):
        before = last
        last = stamp_of(path or "")
        # There is none while an editor replaces the file.
        if not last or last == seen or last != before:
            continue
        seen = last
        try:
            new = load()
            for line in [*declare_again(server, known, new), *left(config, new)] or ["no changes"]:
                click.echo(f"{path}: {line}")
            known, config = declared_twice(known, new), new
        except ClipperError as error:
            click.echo(f"{path} has changed, but is not used: {error}", err=True)


def file_or_default(file: Path | None) -> Path | None:
    """Return FILE, else ./clipper.toml if it exists."""
    return file if file is not None else Path(DEFAULT_FILE) if Path(DEFAULT_FILE).exists() else None


def keep_pauses_short() -> None:
    """Exempt start-up objects from garbage collection, collect old objects a hundred times less
    often than usual (with thousands of models that takes 0.1 s, in which all threads stand), and
    switch threads every millisecond instead of Python's five. For clipper's own processes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], _OLD_COLLECTED)
    sys.setswitchinterval(_SWITCH_S)


def on_first_signal(stopping: threading.Event) -> None:
    """Request a graceful stop on SIGTERM or Ctrl-C; a second signal ends the process and its
    containers at once.
    """

    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _way_in(config: "Config", made_up: bool) -> str:
    """Return what a browser needs to log in. A generated token is shown on a terminal only."""
    if config.http.tokens_file:
        return ", which requires a token of http.tokens_file"
    if not config.http.token:
        return ""
    if not made_up:
        return ", which requires http.token"
    return (
        f", which requires the token {config.http.token}"
        if sys.stdout.isatty()
        else " (needs --admin HOST:PORT)"
    )


def _greeting(server: "ClipperServer", file: Path | None, made_up: bool = False) -> str:
    from clipper import __version__
    from clipper.settings.http import admin_tls, query_tls, scheme_of

    view, config = server.catalog.view, server.config
    models = ", ".join(str(model.id) for model in view.models()) or "none yet"
    apps = ", ".join(sorted(view.applications)) or "none yet"
    state = without_secrets(config.server.state) or "memory"
    token = "your token" if config.server.token or not sys.stdout.isatty() else server.token
    lines = [
        f"clipper {__version__} · {file or 'defaults'} · state: {state}",
        f"models: {models}",
        f"applications: {apps}",
        f"containers connect to {server.address}; to start one by hand:",
        (
            f"  CLIPPER_TOKEN='{token}' clipper-container serve MODULE:MODEL --connect"
            f" {server.address} --name NAME"
        ),
    ]
    if server.http_address:
        lines.insert(
            3, f"queries come in at {scheme_of(query_tls(config.http))}://{server.http_address}"
        )
    if server.grpc_address:
        lines.insert(3, f"queries come in over gRPC at {server.grpc_address}")
    if server.admin_address:
        url = f"{scheme_of(admin_tls(config.http))}://{server.admin_address}"
        lines.insert(3, f"management at {url}/admin, or: clipper models; clipper deploy --help")
        if config.http.dashboard:
            lines.insert(3, f"dashboard at {url}/{_way_in(config, made_up)}")
    if not config.server.token:
        lines.append(
            "  (the token changes at each start, unless server.token or server.token_file is set)"
        )
    return "\n".join(lines)
