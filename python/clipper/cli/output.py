"""The format of what commands print: a table for people, or JSON or YAML for programs."""

import json
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import click

from clipper.cli.command_group import EXIT_FAILED, Verb
from clipper.errors import ClipperError

TABLE: Final = "table"
# `text` is what `table` was called
_FORMATS: Final = (TABLE, "json", "yaml", "text")
STATE_COLOURS: Final = {
    "ready": "green",
    "failed": "red",
    "held": "red",
    "failing": "red",
    "LOADED": "green",
    "DEFINED": "green",
    "LOADING": "yellow",
    "TRANSITIONING": "yellow",
    "LOADING_FAILED": "red",
    "TRANSITION_FAILED": "red",
    "NOT_FOUND": "red",
}


dry = click.option(
    "--dry-run",
    is_flag=True,
    help="Run all checks and print what would change, but change nothing.",
)


def would(dry_run: bool) -> str:
    """Return the words before what a command prints: of a dry run that it is one."""
    return "dry run: " if dry_run else ""


class CommandOutput:
    """Prints the results of a command in the format of -o. Threads: one.

    is_data: the format is for programs.
    """

    def __init__(self, form: str) -> None:
        self._form = form
        self.is_data = form not in (TABLE, "text")

    def show(self, value: object, text: Callable[[], str]) -> None:
        """Print a value as data, or as the given text."""
        if self.is_data:
            self.emit(value)
        else:
            click.echo(text())

    def say(self, value: object, text: str) -> None:
        """Print a value as data, or a text."""
        if self.is_data:
            self.emit(value)
        else:
            click.echo(text)

    def emit(self, value: object, *, one_of_many: bool = False, to_errors: bool = False) -> None:
        """Print a value as data. one_of_many: of several, as one line of JSON, or as a document of
        YAML. to_errors: on standard error."""
        import msgspec

        plain = msgspec.to_builtins(value)
        if self._form != "yaml":
            click.echo(json.dumps(plain, indent=None if one_of_many else 2), err=to_errors)
            return
        from clipper.yaml_text import to_yaml

        start = "---\n" if one_of_many else ""
        click.echo(f"{start}{to_yaml(plain)}", nl=False, err=to_errors)

    def fail(self, error: ClipperError) -> NoReturn:
        """Print an error as data on standard error, as management over HTTP does, and exit with
        EXIT_FAILED."""
        found = {
            "error": str(error),
            "type": f"urn:clipper:error:{error.slug}",
            "detail": error.message,
            "hint": error.hint,
        }
        self.emit(found, to_errors=True)
        sys.exit(EXIT_FAILED)


def with_output(verb: Verb) -> Verb:
    """Add -o to a command, which receives its output. `--json`, its form before, stays. A
    ClipperError of the command is printed in that format too."""

    def with_format(form: str, as_json: bool, **words: object) -> None:
        output = CommandOutput("json" if as_json else form)
        try:
            verb(output=output, **words)
        except ClipperError as error:
            if not output.is_data:
                raise
            output.fail(error)

    with_format.__doc__, with_format.__name__ = verb.__doc__, verb.__name__
    with_format.__click_params__ = getattr(verb, "__click_params__", [])  # type: ignore[attr-defined]
    old = click.option("--json", "as_json", is_flag=True, hidden=True, help="The same as -o json.")
    new = click.option(
        "-o",
        "--output",
        "form",
        type=click.Choice(_FORMATS),
        metavar="table|json|yaml",
        default=TABLE,
        help="Output format.",
    )
    return old(new(with_format))


def table(rows: Sequence[Sequence[object]], empty: str) -> str:
    """Format rows as aligned columns; the first is the head. A state has its colour, which
    `click.echo` leaves out where no terminal shows it. Lines are not wrapped."""
    if len(rows) < 2:
        return empty
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    return "\n".join(_line(row, widths, coloured=number > 0) for number, row in enumerate(cells))


def _line(row: Sequence[str], widths: Sequence[int], *, coloured: bool) -> str:
    padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
    padded[-1] = padded[-1].rstrip()
    if coloured:
        both = zip(padded, row, strict=True)
        padded = [text.replace(cell, styled(cell), 1) if cell else text for text, cell in both]
    return "  ".join(padded).rstrip()


def styled(state: str) -> str:
    """Return a state in its colour; other text as it is."""
    colour = STATE_COLOURS.get(state)
    return click.style(state, fg=colour) if colour else state


def state_colour(state: str) -> str:
    """Return the colour of a state."""
    return STATE_COLOURS.get(state, "yellow")
