"""`clipper bench`: measure how fast an application answers at a given rate."""

import contextlib
import shlex
import sys
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.output import table
from clipper.cli.server_command import (
    EXIT_INTERRUPTED,
    ServerCommand,
    with_server,
    write_text,
)
from clipper.clock import seconds_in
from clipper.errors import InvalidInput, PackagingError
from clipper.host_port import join_host_port

if TYPE_CHECKING:
    from clipper.load.measurement import Measurement
    from clipper.load.runs import MakeTarget, OnProgress, RunPlan
    from clipper.manage.rows import ApplicationRow
    from clipper.types import InputType

_RATE_MAX = 1e6
_SECRETS = ("--token", "--key")
_UNANSWERED, _RECENT = 5, 100_000  # clipper.load.measurement.QueryOutcome, of the last so many
_CHANNELS_MAX = 8  # gRPC channels; each carries many calls at once


def seconds_of(_: object, __: object, text: str) -> float:
    """Parse a duration: 10s, 500ms, 2m; a plain number is seconds."""
    with contextlib.suppress(ValueError):
        if 0 < (seconds := seconds_in(text)) <= 3600:
            return seconds
    raise click.BadParameter(f"{text!r} is not a time from 1ms to 60m. Example: 10s, 500ms, 2m.")


def _rates(_: object, __: object, text: str | None) -> list[float]:
    try:
        rates = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        rates = [0.0]
    if not all(0 < rate <= _RATE_MAX for rate in rates):
        raise click.BadParameter(f"{text!r} is not a list of rates. Example: --rates 100,200,400.")
    return rates


@click.command(short_help="Measure latency and goodput of an application at a rate.")
@click.argument("application", metavar="APP")
@click.option(
    "--rate",
    type=click.FloatRange(0.1, _RATE_MAX),
    default=100.0,
    show_default=True,
    help="Queries per second.",
)
@click.option(
    "--rates", callback=_rates, metavar="R1,R2,..", help="Several rates, one after another."
)
@click.option(
    "--search",
    is_flag=True,
    help="Find the highest rate at which 99 % get a model's answer within the SLO.",
)
@click.option(
    "--for",
    "seconds",
    callback=seconds_of,
    default="10s",
    show_default=True,
    help="Duration of each rate.",
)
@click.option(
    "--slo-ms",
    type=click.FloatRange(0.01, 1e6),
    help="SLO after which an answer is late.  [the application's]",
)
@click.option(
    "--input",
    "text",
    default="random",
    show_default=True,
    metavar="random|FILE|JSON",
    help="Inputs of the queries.",
)
@click.option(
    "--cached",
    is_flag=True,
    help="Let the cache answer inputs that come again.  [each query is new to it]",
)
@click.option(
    "--steady", is_flag=True, help="Send at even intervals instead of random ones (Poisson)."
)
@click.option(
    "--connections",
    type=click.IntRange(1, 10_000),
    default=512,
    show_default=True,
    help="Maximum number of connections.",
)
@click.option("--grpc", is_flag=True, help="Use gRPC instead of HTTP.")
@click.option("--to", "address", metavar="HOST:PORT", help="Query address.  [that of the server]")
@click.option(
    "--key",
    envvar="CLIPPER_API_KEY",
    help="API key, if the server requires one.  [CLIPPER_API_KEY]",
)
@click.option(
    "--html", "html_", metavar="FILE.html", help="Write a report with charts; it needs no network."
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    default=1,
    show_default=True,
    help="Random seed of times and inputs.",
)
@with_server
def bench(
    command: ServerCommand,
    application: str,
    rate: float,
    rates: list[float],
    search: bool,
    seconds: float,
    slo_ms: float | None,
    text: str,
    cached: bool,
    steady: bool,
    connections: int,
    grpc: bool,
    address: str | None,
    key: str | None,
    html_: str | None,
    seed: int,
) -> None:
    """Send queries to APP at a fixed rate, and report latency and goodput.

    The load is open loop: the time of each query is fixed before the first one is sent, and latency
    counts from that time, also when the connection, the server or this program is late. Inputs are
    generated from the application's input type and are new to the cache, unless --cached is given.
    Failures and defaults are counted separately. If this program cannot keep the rate, the report
    says so. Ctrl-C prints what was measured so far.

    \b
    clipper bench digits --rate 500 --for 10s
    clipper bench digits --rates 100,200,400,800 --for 5s --html report.html
    clipper bench digits --search --slo-ms 20 --for 3s
    clipper bench digits --input queries.jsonl --grpc -o json

    FILE: .npy (a row an input), .json (a list), .jsonl (an input a line), .csv (numbers), .txt (a
    string a line). Exit code 1 when no query got a model's answer, 130 after Ctrl-C.
    """
    from clipper.load.machine import machine
    from clipper.load.runs import RunPlan, search_rate, sweep

    if html_ and not Path(html_).absolute().parent.is_dir():
        raise InvalidInput(
            f"there is no folder for --html {html_}.",
            hint="Create the folder, or name another file.",
        )
    record = command.server.application(application)
    plan = RunPlan(seconds, slo_ms or record["slo_ms"], steady, seed=seed)
    target, where = _target(command, record, text, cached, connections, grpc, address, key, seed)
    verdict = ""
    with _progress(plan, quiet=command.output.is_data) as on_progress:
        if search:
            found = search_rate(target, plan, rate, _RATE_MAX, on_progress)
            steps = sorted(found.steps, key=lambda step: step.rate)
            keeps = (
                f"{found.rate:.0f} queries a second keep"
                if found.rate
                else "no rate that was tried keeps"
            )
            verdict = f"{keeps} p99 within {plan.slo_ms:g} ms; {found.why}."
        else:
            steps = sweep(target, plan, rates or [rate], on_progress)
    summary: dict[str, object] = {
        "application": application,
        "to": where,
        "command": command_line(),
        "steps": [step.summary() for step in steps],
        "machine": machine(),
        **({"highest_rate": found.rate, "why": found.why} if search else {}),
    }
    command.output.show(summary, lambda: _report(steps, plan, where, verdict))
    if html_:
        _write(
            html_,
            application,
            steps,
            [line for line in (verdict, f"to {where}") if line],
            machine(),
        )
        click.echo(f"wrote {html_}", err=True)
    if steps[-1].interrupted:
        sys.exit(EXIT_INTERRUPTED)
    sys.exit(0 if any(step.counts()["ok"] + step.counts()["missing"] for step in steps) else 1)


def _target(
    command: ServerCommand,
    record: "ApplicationRow",
    text: str,
    cached: bool,
    connections: int,
    grpc: bool,
    address: str | None,
    key: str | None,
    seed: int,
) -> "tuple[MakeTarget, str]":
    """Return the target of the queries: the server's own address unless given; its management
    address if it has no other.
    """
    from clipper.load.http_target import HttpTarget
    from clipper.load.inputs import rows_of
    from clipper.types import InputType

    type_, name, server = InputType.parse(record["input"]), record["name"], command.server
    rows = rows_of(text, type_, seed)
    host = urllib.parse.urlsplit(server.url).hostname or "127.0.0.1"
    if grpc:
        at = address or _seen_from(host, server.about()["grpc"])
        if not at:
            raise InvalidInput(
                "this server has no gRPC address.",
                hint="Start it with: clipper up --grpc http",
            )
        return _over_grpc(at, name, rows, type_, connections, not cached, key or ""), f"grpc://{at}"
    at = address or _seen_from(host, server.about()["http"])
    if at:
        url = at if "://" in at else f"http://{at}"
        bearer = [("Authorization", f"Bearer {key}")] if key else []
        return (
            lambda: HttpTarget(
                f"{url}/api/{name}/predict", rows, connections, bearer, not cached, server.tls
            ),
            url,
        )
    headers = [(key, value) for key, value in server.headers.items() if key == "Authorization"]
    url = f"{server.url}/admin/applications/{name}/predict"
    where = f"{server.url} (management: http.address is empty)"
    return lambda: HttpTarget(url, rows, connections, headers, not cached, server.tls), where


def _over_grpc(
    at: str,
    name: str,
    rows: list[object],
    type_: "InputType",
    connections: int,
    fresh: bool,
    key: str,
) -> "MakeTarget":
    try:
        from clipper.load.grpc_target import GrpcTarget
    except ImportError as error:
        raise PackagingError(
            f"gRPC is not installed: {error}.", hint="Run: pip install grpcio protobuf"
        ) from None
    return lambda: GrpcTarget(at, name, rows, type_, min(connections, _CHANNELS_MAX), fresh, key)


def _seen_from(host: str, address: str) -> str:
    """Replace a wildcard address by the host through which management was reached."""
    scheme, there, rest = address.rpartition("://")
    name, _, port = rest.rpartition(":")
    if name not in ("0.0.0.0", "[::]", "::"):
        return address
    return f"{scheme}{there}{join_host_port(host, port)}"


@contextlib.contextmanager
def _progress(plan: "RunPlan", quiet: bool) -> "Iterator[OnProgress]":
    """Show a progress line on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        yield lambda measured, elapsed_s: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[text]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task, rate = bar.add_task("", total=plan.seconds, text=""), 0.0

        def show(measured: "Measurement", elapsed_s: float) -> None:
            nonlocal task, rate
            if measured.rate != rate:
                rate = measured.rate
                bar.reset(task, description=f"{rate:.0f} a second")
            sent = measured.total
            waiting = measured.outcomes.count(_UNANSWERED, -_RECENT)
            bar.update(
                task,
                completed=min(elapsed_s, plan.seconds),
                text=f"{sent} sent, {waiting} under way",
            )

        yield show


def _report(steps: "list[Measurement]", plan: "RunPlan", where: str, verdict: str) -> str:
    from clipper.load import page

    lines = [
        f"to {where}, {plan.seconds:g} s each, SLO {plan.slo_ms:g} ms,"
        f" {'evenly' if plan.steady else 'Poisson'}"
    ]
    rows = [page.HEAD, *(page.row_of(step) for step in steps)]
    if len(steps) == 1:
        lines += [f"  {name:<11} {value}" for name, value in zip(*rows, strict=True)]
    else:
        lines.append(table(rows, ""))
    lines += [f"note: {remark}" for remark in page.remarks(steps)]
    return "\n".join([*lines, verdict] if verdict else lines)


def _write(
    path: str,
    application: str,
    steps: "list[Measurement]",
    advice: list[str],
    where: dict[str, str],
) -> None:
    from clipper.load import page

    rows = [page.HEAD, *(page.row_of(step) for step in steps)]
    text = page.page(
        f"clipper bench {application}",
        command_line(),
        [*advice, *page.remarks(steps)],
        rows,
        page.charts_of(steps),
        where,
    )
    write_text(path, text)


def command_line() -> str:
    """Return the command as typed, without secrets."""
    words = ["clipper", *sys.argv[1:]]
    secret = {i + 1 for i, word in enumerate(words) if word in _SECRETS}
    shown = ("..." if i in secret else word for i, word in enumerate(words))
    return shlex.join(
        f"{name}=..." if equals and name in _SECRETS else word
        for word in shown
        for name, equals, _ in [word.partition("=")]
    )
