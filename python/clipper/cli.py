"""`clipper VERB`: what a person does with a server from a shell. Verbs import what they need when they run."""

import json
import logging
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from clipper.cli_manage import add_to, export_state
from clipper.errors import ClipperError, did_you_mean

_DEFAULT_FILE = "clipper.toml"
_EXIT_USAGE = 2
_LOOK_S = 0.5
_Stamp = tuple[int, int] | None  # when a file was written, and its size


class Verbs(click.Group):
    """A group that takes a slip of the pen for what it is, and shows an error of ours as a line, not as a traceback."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0] if args else ""
        if verb and not verb.startswith("-") and self.get_command(ctx, verb) is None:
            guess = did_you_mean(verb, self.commands) or "."
            raise click.UsageError(f"no verb {verb!r}{guess} Verbs: {', '.join(sorted(self.commands))}.", ctx)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ClipperError as error:
            click.secho(f"error: {error.message}", fg="red", err=True)
            if error.hint:
                click.echo(error.hint, err=True)
            ctx.exit(_EXIT_USAGE)


def _version() -> str:
    from clipper import __version__

    return __version__


def _print_version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"clipper {_version()}")
        ctx.exit()


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_print_version, help="Show the version."
)
def main() -> None:
    """Predictions from models in any framework, each by its own deadline.

    \b
    clipper demo                    see it work: three models, live
    clipper doctor                  see whether this machine is ready
    clipper up clipper.toml         serve what a file declares
    clipper deploy NAME TARGET      add a model to the server that runs here
    clipper models                  what it serves
    clipper config show             every setting, with its unit and origin
    clipper VERB --help             more about one of them, with an example
    """


# -- demo


@main.command()
@click.option("--seconds", type=click.FloatRange(min=0.1), help="Stop after so long  [10 without a terminal, else at q]")
@click.option(
    "--rate", type=click.FloatRange(1, 5000), default=300, show_default=True, help="Queries a second, on average."
)
@click.option("--state", metavar="DIR", default="", help="Keep the models in DIR; the next demo finds them there.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON, and nothing else, on stdout.")
@click.option("--plot", metavar="FILE.png", default="", help="Draw what was learned, and what happened when, as a PNG.")
def demo(seconds: float | None, rate: float, state: str, as_json: bool, plot: str) -> None:
    """Serve five scikit-learn models of handwritten digits, and watch.

    Trains them on scikit-learn's own scans, starts each in processes of its own, sends queries, and shows what happens:
    rate, latency, batches, cache, and how many answers came by the deadline; and how two policies learn from feedback
    whom to ask (exp3) and whom to believe (stacking). Keys: d makes the best model give wrong labels, and mends it; k kills
    a container, s freezes one for 3 s, v changes the view, + and - the rate, q quits.

    \b
    clipper demo
    clipper demo --seconds 10 --rate 500
    clipper demo --seconds 5 --json | python -m json.tool
    clipper demo --seconds 30 --plot shares.png

    Exit code 1 when nothing was answered, or nonsense. It needs scikit-learn: pip install "clipper-serving[demo]"
    """
    from clipper.demo import Options, run

    sys.exit(run(Options(seconds, rate, state, as_json, _version(), plot)))


# -- up


@main.command(short_help="Serve the models and applications of a TOML file.")
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--http", metavar="HOST:PORT", help="Take queries over HTTP here; instead of http.address.")
@click.option("--grpc", metavar="HOST:PORT", help="Take queries over gRPC here; instead of grpc.address.")
@click.option("--admin", metavar="HOST:PORT", help="Take management over HTTP here; instead of http.admin.")
@click.option("--reload", "follow", is_flag=True, help="Follow the file: what it adds or changes is done at once.")
def up(file: Path | None, http: str | None, grpc: str | None, admin: str | None, follow: bool) -> None:
    """Serve the models and applications of a TOML FILE until SIGTERM or Ctrl-C.

    FILE is ./clipper.toml when not given, or nothing but defaults when there is none. At the end, queries in flight
    have server.drain_s seconds; a second Ctrl-C does not wait. Without http.admin, the commands of this user on this host
    can manage it, and nobody else.

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
    """
    from clipper.config import load
    from clipper.server import ClipperServer

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    path = _file(file)
    seen, loaded = _stamp(path), load(path, http=http, grpc=grpc, admin=admin)
    if follow and path is None:
        raise click.UsageError("--reload needs a file: clipper up FILE --reload")
    config = _managed(loaded)
    stopping = threading.Event()
    server = ClipperServer(config).start()
    try:
        _on_first_signal(stopping)
        click.echo(_greeting(server, path))
        if follow:
            _follow(server, path, loaded, seen, lambda: load(path, http=http, admin=admin), stopping)
        stopping.wait()
        click.echo(f"closing: queries in flight have {config.server.drain_s:g} s (Ctrl-C again: at once)")
    finally:
        server.close()
    click.echo("closed")


def _managed(config: Any) -> Any:
    """Without http.admin: a port of loopback, and a token that this user's commands find in the server's private folder."""
    import secrets

    from msgspec.structs import replace

    if config.http.admin:
        return config
    return replace(config, http=replace(config.http, admin="127.0.0.1:0", token=config.http.token or secrets.token_urlsafe(24)))


def _follow(
    server: Any, path: Path | None, config: Any, seen: _Stamp, load: Callable[[], Any], stopping: threading.Event
) -> None:
    """Look at the file until the end; what has changed, and then stayed so for a look, is done."""
    from clipper.manage.declared import declare_again, left, said_by_both

    known, last = config, seen
    while not stopping.wait(_LOOK_S):
        before, last = last, _stamp(path)
        if last is None or last == seen or last != before:
            continue
        seen = last
        try:
            new = load()
            for line in [*declare_again(server, known, new), *left(config, new)] or ["nothing to do"]:
                click.echo(f"{path}: {line}")
            known, config = said_by_both(known, new), new
        except ClipperError as error:
            click.echo(f"{path} has changed, and is not used: {error}", err=True)


def _stamp(path: Path | None) -> _Stamp:
    try:
        found = path.stat() if path is not None else None
    except OSError:  # an editor is about to put it there again
        return None
    return None if found is None else (found.st_mtime_ns, found.st_size)


def _file(file: Path | None) -> Path | None:
    return file if file is not None else Path(_DEFAULT_FILE) if Path(_DEFAULT_FILE).exists() else None


def _on_first_signal(stopping: threading.Event) -> None:
    """SIGTERM or Ctrl-C asks for a graceful end; the next one gets the default: at once (the containers go with us)."""

    def stop(*_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        stopping.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)


def _greeting(server: Any, file: Path | None) -> str:
    view, config = server.catalog.view, server.config
    models = ", ".join(str(model.id) for model in view.models()) or "none yet"
    apps = ", ".join(sorted(view.applications)) or "none yet"
    state = config.server.state or "memory"
    token = "your token" if config.server.token or not sys.stdout.isatty() else server.token
    lines = [
        f"clipper {_version()} · {file or 'defaults'} · state: {state}",
        f"models: {models}",
        f"applications: {apps}",
        f"containers dial in at {server.address}; one started by hand:",
        f"  CLIPPER_TOKEN='{token}' clipper-container serve MODULE:MODEL --connect {server.address} --name NAME",
    ]
    if server.http_address:
        lines.insert(3, f"queries come in at http://{server.http_address}")
    if server.grpc_address:
        lines.insert(3, f"queries come in over gRPC at {server.grpc_address}")
    if server.admin_address:
        lines.insert(3, f"management at http://{server.admin_address}/admin, or: clipper models; clipper deploy --help")
    if not config.server.token:
        lines.append("  (the token is another one at each start; to keep one, set server.token or server.token_file)")
    return "\n".join(lines)


# -- config


@main.group(cls=Verbs)
def config() -> None:
    """Show or check settings.

    \b
    clipper config show                  what holds here, and why
    clipper config check clipper.toml    is this file right?
    clipper config schema                JSON Schema, for an editor
    CLIPPER_LIMITS__TASKS_MAX=1000 clipper config show
    """


@config.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--changed", is_flag=True, help="Only what is not a default.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def show(file: Path | None, changed: bool, as_json: bool) -> None:
    """Every key with its value, unit, default and origin, as FILE (or ./clipper.toml) and the environment have it.

    \b
    clipper config show clipper.toml --changed
    """
    from clipper.config import load

    rows = [row for row in _settings(load(_file(file))) if not changed or row["origin"] != "default"]
    if as_json:
        click.echo(json.dumps(rows, indent=2))
    else:
        _print_settings(rows)


@config.command()
@click.argument("file", required=False, type=click.Path(dir_okay=False, path_type=Path))
def check(file: Path | None) -> None:
    """Say whether FILE (or ./clipper.toml) can be used; what is wrong, by line and with a suggestion, when not.

    \b
    clipper config check clipper.toml
    error: clipper.toml:14: unknown key 'slo' in [apps.digits] - did you mean 'slo_ms'?
    """
    from clipper.config import load

    chosen = _file(file)
    loaded = load(chosen)
    counted = (("key", loaded.origins), ("model", loaded.models), ("application", loaded.apps))
    counts = ", ".join(f"{len(things)} {noun}{'' if len(things) == 1 else 's'}" for noun, things in counted)
    click.echo(f"ok: {chosen or 'defaults'}: {counts}")


@config.command()
def schema() -> None:
    """Print a JSON Schema of the TOML file, for editors that complete and check.

    \b
    clipper config schema > clipper.schema.json
    """
    from clipper.config_schema import schema as schema_of

    click.echo(json.dumps(schema_of(), indent=2))


def _settings(config: Any) -> list[dict[str, Any]]:
    """A row a key: those of the sections, and for each model and application those of its table."""
    import msgspec

    from clipper.config import describe
    from clipper.store.redis import shown

    rows = []
    for info in describe():
        section, *middle, key = info.key.split(".")
        holders = getattr(config, section)
        tables = {f"{section}.{name}": table for name, table in holders.items()} if middle else {section: holders}
        for prefix, table in tables.items():
            value = getattr(table, key)
            origins = [o for at, o in config.origins.items() if f"{at}.".startswith(f"{prefix}.{key}.")]
            given = shown(value) if key in ("state", "url") else value  # a URL may have a password
            row = {"key": f"{prefix}.{key}", "value": "***" if key == "token" and value else msgspec.to_builtins(given)}
            row |= {"unit": info.unit, "default": msgspec.to_builtins(info.default), "origin": ", ".join(origins[:1])}
            rows.append({**row, "origin": row["origin"] or "default", "text": info.text})
    return rows


def _print_settings(rows: list[dict[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, header_style="dim", border_style="dim")
    for title in ("key", "value", "unit", "default", "origin"):
        table.add_column(title, overflow="fold")
    for row in rows:
        style = "bold" if row["origin"] != "default" else None
        plain = [_plain(row["value"]), row["unit"], _plain(row["default"]), row["origin"]]
        table.add_row(row["key"], *plain, style=style)
    Console(highlight=False, markup=False).print(table)


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return str(value.get("mode", value))
    return value if isinstance(value, str) and value else json.dumps(value)


# -- doctor


@main.command(short_help="Try what a server needs on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def doctor(as_json: bool) -> None:
    """Try what a server needs on this machine: the compiled core, a container that answers, a disk that keeps.

    Each line is ok, warn, fail or skip, with the next step. Exit code 1 when something fails.

    \b
    clipper doctor
    """
    from clipper.doctor import examine

    findings = examine()
    if as_json:
        click.echo(json.dumps([finding._asdict() for finding in findings], indent=2))
    else:
        colours = {"ok": "green", "warn": "yellow", "fail": "red", "skip": None}
        for finding in findings:
            click.echo(f"{click.style(f'{finding.verdict:4}', fg=colours[finding.verdict])}  {finding.text}")
    sys.exit(any(finding.verdict == "fail" for finding in findings))


# -- export


@main.group(cls=Verbs)
def export() -> None:
    """Write what other tools, or another server, read.

    \b
    clipper export state state.json                     models, applications and what was learned; see clipper import
    clipper export grafana > clipper-dashboard.json     import it in Grafana
    clipper export alerts > clipper-alerts.yml          rules for Prometheus
    """


@export.command()
def grafana() -> None:
    """The dashboard, as JSON: Dashboards, New, Import in Grafana. It reads what Prometheus scrapes of GET /metrics.

    \b
    clipper export grafana > clipper-dashboard.json
    """
    from clipper.metrics.grafana import dashboard

    click.echo(json.dumps(dashboard(), indent=2))


@export.command()
def alerts() -> None:
    """Alert rules, as YAML: a file for `rule_files` of prometheus.yml.

    \b
    clipper export alerts > clipper-alerts.yml
    """
    import importlib.resources

    click.echo((importlib.resources.files("clipper.metrics") / "alerts.yml").read_text(), nl=False)


add_to(main)
export.add_command(export_state)
