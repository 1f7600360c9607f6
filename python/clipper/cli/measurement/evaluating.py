"""`clipper evaluate`: what other policies would have achieved on the logged feedback."""

import datetime
import urllib.parse
from pathlib import Path

import click
import msgspec

from clipper.cli.output import table
from clipper.cli.server_command import ServerCommand, with_server
from clipper.cli.servers.up import file_or_default
from clipper.clock import wall_time_us
from clipper.config import load
from clipper.errors import InvalidInput
from clipper.selection.learning.off_policy import Estimate, Evaluation
from clipper.serving.feedback.evaluation import QUERIES_MAX, evaluate_journal

HEAD = ("POLICY", "ACCURACY (DR)", "SNIPS", "IPS", "QUERIES", "EFFECTIVE", "NOTE")


@click.command(
    "evaluate", short_help="Estimate from feedback what another policy would have achieved."
)
@click.argument("application")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    required=True,
    help="Policy to evaluate, with settings if any; may be given several times.",
)
@click.option("--folder", metavar="DIR", default="", help="State folder.  [that of ./clipper.toml]")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=QUERIES_MAX,
    show_default=True,
    help="Use only this many of the newest feedbacks.",
)
@click.option(
    "--since",
    metavar="TIME",
    default="",
    help=("Use only newer feedback: 90m, 12h, 7d, or a date and time such as 2026-01-31T08:00."),
)
@with_server
def evaluate(
    command: ServerCommand,
    application: str,
    policies: tuple[str, ...],
    folder: str,
    last: int,
    since: str,
) -> None:
    """Estimate the accuracy that other policies would have had for APPLICATION.

    Reads the feedback in the journal of a server's state folder: of --folder, or of ./clipper.toml;
    that server may run. With --url, or without such a folder, a running server is asked, about its
    newest feedback. The running policy must have chosen at random (exp3, squarecb, ab, ...) or
    queried all models (ensemble, stacking, ...). DR: doubly robust; SNIPS and IPS: inverse
    propensity scoring, with and without normalization; each with a 95 % interval. A small EFFECTIVE
    beside QUERIES means that the log rarely has what the policy would choose.

    \b
    clipper evaluate digits --policy squarecb --since 7d
    clipper evaluate digits --policy 'exp3(eta=0.05)' --policy thompson -o json
    """
    start = since_of(since, wall_time_us() / 1e6)
    place = _journal_of(folder) if folder or not command.url else None
    if place is not None:
        found = [evaluate_journal(place, application, policy, last, start) for policy in policies]
    elif since:
        raise InvalidInput(
            "--since needs the state folder of the server.",
            hint="Name it with --folder DIR, or use --last N instead.",
        )
    else:
        found = [_asked(command, application, policy, last) for policy in policies]
    if command.output.is_data:
        named = zip(policies, found, strict=True)
        rows = [{**msgspec.to_builtins(each), "policy": policy} for policy, each in named]
        command.output.emit(rows)
        return
    lines = [_line(policy, each) for policy, each in zip(policies, found, strict=True)]
    if (logged := found[0].logged) is not None:
        count = str(found[0].queries)
        lines.insert(0, ("(as it ran)", _shown(logged), "", "", count, count, "measured"))
    click.echo(table([HEAD, *lines], ""))


def _journal_of(folder: str) -> Path | None:
    """Return the folder with the journal: the one given, else that of ./clipper.toml; None if it
    names none on this host."""
    configured = load(file_or_default(None)).server
    named = folder or configured.folder
    if not named and (configured.state in ("", "memory") or "://" in configured.state):
        return None
    place = Path((named or configured.state).removeprefix("sqlite:"))
    return place if place.is_dir() else place.parent


def _asked(command: ServerCommand, application: str, policy: str, last: int) -> Evaluation:
    """Return what a running server estimates."""
    from clipper.manage.verbs.table import EVALUATED_MAX

    words = {"policy": policy, "count": min(last, EVALUATED_MAX)}
    where = f"/admin/applications/{urllib.parse.quote(application)}/evaluation"
    found = command.server.request("GET", f"{where}?{urllib.parse.urlencode(words)}")
    return msgspec.convert(found, Evaluation)


def since_of(text: str, now: float) -> float:
    """Return a Unix time in seconds from an age (`90m`, `12h`, `7d`) or a date; 0 for an empty one.

    A date without a zone is of this machine's zone. Raises InvalidInput.
    """
    if not text:
        return 0.0
    seconds = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}.get(text[-1])
    try:
        if seconds is not None:
            return now - seconds * float(text[:-1])
        return datetime.datetime.fromisoformat(text).timestamp()
    except ValueError:
        raise InvalidInput(
            f"--since {text!r} is neither an age nor a date.",
            hint="Write 90m, 12h, 7d, or 2026-01-31T08:00.",
        ) from None


def _line(policy: str, found: Evaluation) -> tuple[str, ...]:
    return (
        policy,
        _shown(found.dr),
        _shown(found.snips),
        _shown(found.ips),
        str(found.queries),
        f"{found.effective:.0f}",
        f"{found.skipped} skipped" if found.skipped else "",
    )


def _shown(estimate: Estimate) -> str:
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"
