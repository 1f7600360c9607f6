"""Commands that send a query or feedback to an application of a running server."""

import json
import sys

import click

from clipper.cli.output import dry, would
from clipper.cli.server_command import ServerCommand, read_json, with_server


@click.command(short_help="Send one query to an application.")
@click.argument("application", metavar="APP")
@click.argument("input", metavar="INPUT")
@click.option("--user", help="User whose policy state applies.")
@click.option("--slo-ms", type=float, help="SLO instead of the application's.")
@with_server
def predict(
    command: ServerCommand, application: str, input: str, user: str | None, slo_ms: float | None
) -> None:
    """Send one INPUT to APP: JSON, a word, or - for stdin.

    \b
    clipper predict digits "[0, 1, 2]"
    """
    text = sys.stdin.read() if input == "-" else input
    given = {key: value for key, value in (("user", user), ("slo_ms", slo_ms)) if value is not None}
    reply = command.server.predict_plainly(application, read_json(text, "the input"), **given)
    why = f"default: {reply['reason']}" if reply["default"] else f"by {','.join(reply['models'])}"
    command.output.show(
        reply,
        lambda: (
            f"{json.dumps(reply['output'])}\t{why} in {reply['latency_us'] / 1000:.2f} ms, id"
            f" {reply['id']}"
        ),
    )


@click.command(short_help="Send feedback for an answer.")
@click.argument("application", metavar="APP")
@click.argument("id")
@click.option("--label", metavar="JSON", help="The correct output.")
@click.option("--correct/--wrong", default=None, help="Whether the answer was right.")
@click.option("--score", type=click.FloatRange(0, 1), help="Quality of the answer.")
@dry
@with_server
def feedback(
    command: ServerCommand,
    application: str,
    id: str,
    label: str | None,
    correct: bool | None,
    score: float | None,
    dry_run: bool,
) -> None:
    """Send the correct result for the answer with this ID, which `clipper predict` prints, to APP.

    \b
    clipper feedback digits 4bde13fa-1 --label 7
    """
    truth = {
        "label": None if label is None else read_json(label, "the label"),
        "correct": correct,
        "score": score,
    }
    given = {key: value for key, value in truth.items() if value is not None}
    counted = command.server.feedback(application, id, dry_run=dry_run, **given)
    said = {
        True: "counted",
        False: "not counted: this answer already has feedback",
        None: "another server gave this answer, and knows whether it counts",
    }
    command.output.say({"counted": counted}, f"{would(dry_run)}{said[counted]}")
