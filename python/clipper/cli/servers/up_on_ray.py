"""`clipper up --on ray`: servers of one store on a Ray cluster, behind one address."""

import hashlib
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from clipper.cli.command_group import with_options
from clipper.errors import ConfigError, NoServer
from clipper.settings.grpc import own_address
from clipper_container.model import UserValue

if TYPE_CHECKING:
    from clipper.config import Config
    from clipper.deploy.ray.nodes import NodeStatus
    from clipper.deploy.ray.servers import RayServerGroup, RayServers

LOCAL: Final = "local"
_CHECK_S: Final = 0.2
_MARGIN_S: Final = 15.0  # besides drain_s, before a server is killed


@dataclass(frozen=True, slots=True)
class Placed:
    """Values of the options of `--on ray`. See RayServers."""

    address: str
    servers: int
    most: int
    cpus: float
    gpus: float
    runtime_env: Mapping[str, UserValue]
    within_s: float


def on_ray(verb: Callable[..., None]) -> Callable[..., None]:
    """Add the options of `--on ray` to a command, which receives `placed`, or None without it."""

    @wraps(verb)
    def with_placed(
        engine: str | None,
        address: str,
        servers: int,
        servers_max: int,
        cpus: float,
        gpus: float,
        runtime_env: Mapping[str, UserValue],
        within_s: float,
        **given: UserValue,
    ) -> None:
        placed = Placed(
            address, servers, max(servers, servers_max), cpus, gpus, runtime_env, within_s
        )
        verb(placed=placed if engine else None, **given)

    return with_options(
        click.option(
            "--wait",
            "within_s",
            type=click.FloatRange(1),
            default=120.0,
            help="With --on: seconds in which a server must become ready.  [120]",
        ),
        runtime_env_option,
        click.option(
            "--gpus",
            type=click.FloatRange(0),
            default=0.0,
            help="With --on: GPUs that Ray reserves for each server.",
        ),
        click.option(
            "--cpus",
            type=click.FloatRange(0, min_open=True),
            default=1.0,
            help="With --on: cores that Ray reserves for each server.  [1]",
        ),
        click.option(
            "--servers-max",
            type=click.IntRange(0, 1000),
            default=0,
            help="With --on: most servers under load.  [--servers]",
        ),
        click.option(
            "--servers",
            type=click.IntRange(1, 1000),
            default=2,
            help="With --on: number of servers.  [2]",
        ),
        click.option(
            "--ray-address",
            "address",
            default="auto",
            metavar="HOST:PORT",
            help="With --on: address of the Ray cluster; local: one inside this process.  [auto]",
        ),
        click.option(
            "--on",
            "engine",
            type=click.Choice(["ray"]),
            help="Engine that runs several servers on several machines.",
        ),
    )(with_placed)


def _read_runtime_env(
    _: click.Context, _option: click.Parameter, file: str
) -> Mapping[str, UserValue]:
    if not file:
        return {}
    try:
        found = json.loads(Path(file).read_text())
    except (OSError, ValueError) as error:
        raise click.BadParameter(f"cannot read {file}: {error}") from None
    if not isinstance(found, dict):
        raise click.BadParameter(f"{file} must contain a JSON object")
    return found


# its value is the content of a JSON file
runtime_env_option = click.option(
    "--runtime-env",
    metavar="FILE",
    default="",
    callback=_read_runtime_env,
    help="With --on: JSON file with a runtime_env of Ray (working_dir, pip, env_vars).",
)


def serve_on_ray(path: Path | None, config: "Config", placed: Placed, *, insecure: bool) -> None:
    """Run servers of a configuration on Ray until SIGTERM or Ctrl-C. Raises: ConfigError, NoServer.

    path: of the configuration file, at the same path on every machine, or in the working_dir of
    the runtime_env.
    """
    from clipper.cli.servers.up import on_first_signal
    from clipper.deploy.ray.ingress import Ingress
    from clipper.deploy.ray.nodes import join_ray
    from clipper.deploy.ray.servers import RayServerGroup

    _check(config)
    stopping, upgrading = threading.Event(), threading.Event()
    ray = join_ray(placed.address)
    ingress = Ingress(_listen(config))
    try:
        on_first_signal(stopping)  # after Ray installed its handlers
        signal.signal(signal.SIGHUP, lambda *_: upgrading.set())
        plan = plan_of(path, config, placed, insecure=insecure)
        group = RayServerGroup(ray, plan, ingress, click.echo)
        try:
            print_nodes(group.wait_ready(group.names, placed.within_s, stopping))
            for port, address in ingress.addresses.items():
                click.echo(f"{port} of all servers at {address}")
            click.echo("ready")
            _follow(group, placed, config.server.scale_interval_ms / 1000, stopping, upgrading)
        finally:
            print_nodes(group.close())
            click.echo("closed")
    finally:
        ingress.close()
        if placed.address == LOCAL:
            ray.shutdown()


def _follow(
    group: "RayServerGroup",
    placed: Placed,
    interval_s: float,
    stopping: threading.Event,
    upgrading: threading.Event,
) -> None:
    """Follow where the servers are, their load, and the signals, until the end."""
    scaled_s = time.monotonic()
    while not stopping.wait(_CHECK_S):
        group.check()
        try:
            if upgrading.is_set():
                upgrading.clear()
                group.upgrade(placed.within_s, stopping)
                click.echo("upgraded")
            elif time.monotonic() - scaled_s > interval_s:
                scaled_s = time.monotonic()
                group.spread(placed.within_s, stopping)
                if placed.most > placed.servers:
                    group.follow_load()
        except NoServer as error:
            click.echo(f"a server could not be replaced, and the others go on: {error}")


def _check(config: "Config") -> None:
    state = config.server.state
    if ":" not in state or state.startswith("memory:"):
        raise ConfigError(
            f"server.state = {state!r} is not a store that several servers share.",
            hint="Set it to the URL of a Redis or etcd: redis://10.0.0.5:6379/0.",
        )
    if not config.http.address:
        raise ConfigError("http.address is empty.", hint="Add --http 127.0.0.1:8000.")
    if config.http.tls_client_ca:
        raise ConfigError(
            "http.tls_client_ca is set, and the ingress has no certificate to show to servers.",
            hint="Remove it, and use http.api_keys_file.",
        )
    if config.http.admin and not (config.http.token or config.http.tokens_file):
        raise ConfigError(
            "http.admin is set without a token that all servers share.",
            hint="Set http.token or http.tokens_file.",
        )


def _listen(config: "Config") -> dict[str, str]:
    addresses = {
        "http": config.http.address,
        "grpc": own_address(config.grpc, config.http),
        "admin": config.http.admin,
    }
    return {port: address for port, address in addresses.items() if address}


def plan_of(path: Path | None, config: "Config", placed: Placed, *, insecure: bool) -> "RayServers":
    """Return the parameters of the servers of a configuration."""
    from clipper.deploy.ray.servers import TOKEN, RayServers
    from clipper.serving.models.scaling import Rule

    shipped = "working_dir" in placed.runtime_env
    words = [] if path is None else [str(path) if shipped else str(path.absolute())]
    words += ["--insecure"] if insecure else []
    ours = {key: text for key, text in os.environ.items() if key.startswith("CLIPPER_")}
    ours |= {
        TOKEN: config.http.token or secrets.token_urlsafe(24),
        "CLIPPER_SERVER__STATE": config.server.state,
    }
    store = hashlib.sha256(config.server.state.encode()).hexdigest()[:12]
    return RayServers(
        f"clipper-servers-{store}",
        placed.servers,
        placed.most,
        tuple(words),
        ("http", "admin", *(["grpc"] if own_address(config.grpc, config.http) else [])),
        ours,
        config.server.folder,
        cpus=placed.cpus,
        gpus=placed.gpus,
        runtime_env=placed.runtime_env,
        drain_s=config.server.drain_s + _MARGIN_S,
        rule=Rule.of(config.server),
    )


def print_nodes(found: "Mapping[str, NodeStatus]") -> None:
    """Print a line for each process on Ray: its name, its state, where it is, and its starts."""
    for name, one in sorted(found.items()):
        where = one.get("http") or one.get("host", "")
        again = f"  started {one['starts']} times" if one.get("starts", 0) > 1 else ""
        click.echo(f"{name}  {one['state']:16}  {where}{again}".rstrip())
