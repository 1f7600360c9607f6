"""`clipper up`: serve what a file declares until a signal."""

import contextlib
import functools
import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, cast

import click

from clipper.cli.servers.addresses import with_addresses
from clipper.cli.servers.reloading import FollowedFile, SourceWatch
from clipper.cli.servers.systemd import NotifySocket, SystemdService
from clipper.cli.servers.up_on_ray import on_ray, serve_on_ray
from clipper.credentials.credential_file import stamp_of
from clipper.log_output import log_to_terminal
from clipper_container import parent_death

if TYPE_CHECKING:
    from clipper.cli.servers.up_on_ray import Placed
    from clipper.config import Config
    from clipper.manage.rows import ProcessRow
    from clipper.server import ClipperServer

DEFAULT_FILE = "clipper.toml"
_TERMINAL = "/dev/tty"
_LOOK_S = 0.2
# states of models that may become ready
_LOADING = ("loading", "partly ready", "failing")
_PATIENCE_S = 5.0  # for models to load, before the first lines say how to query them
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
    "--require-store",
    is_flag=True,
    help="Fail if the store is unavailable, as server.require_store.",
)
@click.option(
    "--reload",
    "follow",
    is_flag=True,
    help="Watch the file, and the code and files of its models, and apply changes.",
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

    SIGHUP reads the file again, as --reload does when it changes: what holds at once is applied,
    and for the rest a line says that it needs a restart. A server whose terminal is closed ends as
    by SIGTERM.

    FILE defaults to ./clipper.toml; without it, all settings have their defaults. Addresses that
    neither the file nor an option names are 127.0.0.1:8000 for queries and 127.0.0.1:8002 for
    management; if one is taken, the next free of 8010, 8020, ... or 8012, 8022, ... At the end,
    queries in flight have server.drain_s seconds; a second Ctrl-C does not wait. Without
    http.admin, only commands of this user on this host can manage the server, and whoever has the
    link that is printed.

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
    clipper up clipper.toml --http 127.0.0.1:9000 --admin 127.0.0.1:9002
    clipper up clipper.toml --http 0.0.0.0:8000 --insecure --on ray --servers 2 --servers-max 8
    """
    from clipper.config import load

    log_to_terminal()
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
    start = Start(
        with_addresses(loaded),
        str(path or "defaults"),
        made_up=not loaded.http.admin and not loaded.http.token,
        by_hand=True,
        patience_s=_PATIENCE_S,
        with_parent=end_with_parent or 0,
        rereads=True,
    )
    # before the models are read: what changes from now on is noticed
    sources = SourceWatch(loaded.models)
    with start.running() as server:
        file_now = FollowedFile(server, path, seen, loaded, read, start.service, sources)
        file_now.follow(start.stopping, start.asked, watching=follow)


class Start:
    """The start of a server by a command, and its end. Threads: one.

    config: with addresses. title: what is served. made_up: the management token is of this start.
    by_hand: say how to start a container by hand. patience_s: time to wait for the declared models
    before the first lines are printed; those say that a query can be sent. with_parent: process at
    whose end the server ends, or 0. must_load: a model that fails to start ends the command.
    rereads: SIGHUP asks for the file to be read again, and does not end the server.
    """

    def __init__(
        self,
        config: "Config",
        title: str,
        *,
        made_up: bool,
        by_hand: bool = False,
        patience_s: float = float("inf"),
        with_parent: int = 0,
        must_load: bool = False,
        rereads: bool = False,
    ) -> None:
        self._config, self._title = config, title
        self._made_up = made_up
        self._by_hand = by_hand
        self._with_parent = with_parent
        self._patience_s, self._must_load = patience_s, must_load
        # set by the first signal
        self.stopping = threading.Event()
        # set by SIGHUP
        self.asked = threading.Event()
        self._rereads = rereads
        self._service: SystemdService | None = None

    @property
    def service(self) -> SystemdService:
        """The service that tells systemd the state of the running server."""
        assert self._service is not None, "the server is not running"
        return self._service

    @contextlib.contextmanager
    def running(self) -> Iterator["ClipperServer"]:
        """Start the server, print how to use it, and close it at the end of the `with` block.

        Raises: ClipperError of the start; with must_load that of a model.
        """
        from clipper.cli.servers.greeting import greeting
        from clipper.server import ClipperServer

        server = ClipperServer(self._config, ends_by_signal=True)
        self._service = SystemdService(server, NotifySocket())
        with contextlib.closing(server), self._service:
            server.start()
            on_first_signal(self.stopping)
            on_hangup(self.stopping, self.asked if self._rereads else None)
            if self._with_parent:
                parent_death.end_with_parent(self._with_parent, signal.SIGTERM)
            keep_pauses_short()
            self._await_models(server)
            if not self.stopping.is_set():
                click.echo(
                    greeting(server, self._title, made_up=self._made_up, by_hand=self._by_hand)
                )
            yield server
            drain_s = self._config.server.drain_s
            self._service.stopping(drain_s)
            say(f"closing: queries in flight have {drain_s:g} s (Ctrl-C again: at once)")
            server.close()
        say("closed")

    def _await_models(self, server: "ClipperServer") -> None:
        """Wait until the declared models are ready or have failed, and print what is wrong."""
        until_s = time.monotonic() + self._patience_s
        declared = self._config.models.items()
        names = [name for name, model in declared if model.target or model.command]
        rows = _rows(server, names)
        while _loads(rows) and not self.stopping.is_set() and time.monotonic() < until_s:
            self.stopping.wait(_LOOK_S)
            rows = _rows(server, names)
        for name, row in () if self.stopping.is_set() else rows.items():
            if row["state"] in _LOADING:
                click.echo(f"model {name} is not ready yet; to see why: clipper ps")
            elif row["state"] not in ("ready", "stopped"):
                self._complain(server, name, row)

    def _complain(self, server: "ClipperServer", name: str, row: "ProcessRow") -> None:
        """Print what is wrong with a model; with must_load raise it, if it does not run."""
        from clipper.errors import DeployFailed

        try:
            server.wait_ready(0.0, [name])
        except DeployFailed as error:
            if self._must_load:
                raise
            click.echo(f"error: {error}", err=True)
        else:
            click.echo(f"warning: model {name}: {row['error'] or row['state']}", err=True)


def _rows(server: "ClipperServer", names: Collection[str]) -> "dict[str, ProcessRow]":
    """Return the newest version of each of these models, as `clipper ps` shows it."""
    rows = cast("list[ProcessRow]", server.manage.ps())
    return {row["name"]: row for row in rows if row["name"] in names}


def _loads(rows: "Mapping[str, ProcessRow]") -> bool:
    return any(row["state"] in _LOADING for row in rows.values())


def refuse_open(config: "Config", insecure: bool) -> None:
    """Refuse an address that other hosts can reach without authentication, unless it is
    explicitly allowed. Raises: ConfigError.
    """
    from clipper.errors import ConfigError
    from clipper.settings.grpc import grpc_tls, own_address
    from clipper.settings.http import unauthenticated_listeners

    if insecure or config.http.insecure:
        return
    for key, address in unauthenticated_listeners(
        config.http,
        (own_address(config.grpc, config.http), grpc_tls(config.grpc, config.http)),
    ):
        hint = (
            "Set http.api_keys_file (created by: clipper key NAME) or http.tls_client_ca, or use"
            " --insecure."
        )
        raise ConfigError(
            f"{key} = {address!r}: any host that reaches this address could send queries.",
            hint=hint,
        )


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


def on_hangup(stopping: threading.Event, asked: threading.Event | None = None) -> None:
    """Set `asked` on SIGHUP; or `stopping`, if the terminal of this process was closed, or without
    `asked`. A process that `nohup` started is not stopped by it.
    """
    stays = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    had_terminal = _has_terminal()

    def hang_up(*_: object) -> None:
        if asked is not None and (stays or not had_terminal or _has_terminal()):
            asked.set()
        else:
            stopping.set()

    if asked is not None or not stays:
        signal.signal(signal.SIGHUP, hang_up)


def _has_terminal() -> bool:
    try:
        os.close(os.open(_TERMINAL, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError:
        return False
    return True


def say(text: str) -> None:
    """Print a line, unless the terminal was closed."""
    with contextlib.suppress(OSError):
        click.echo(text)
