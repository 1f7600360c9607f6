"""The group class of all commands: suggestions for typing errors, and errors without traceback."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import click

from clipper.errors import ClipperError, did_you_mean
from clipper.foreign_text import printable

_HELP_CHARS_MAX = 100
EXIT_FAILED = 1  # click exits with 2 for an invalid command line
Verb = Callable[..., None]


class CommandGroup(click.Group):
    """A group that suggests the intended command after a typing error and prints a ClipperError as
    one line.

    default: command that is assumed when the first argument names none. sections: names of the
    commands, by the titles under which its help has them; those of none have the title Others.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        default: str | None = None,
        sections: Mapping[str, Sequence[str]] | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(name, **settings)
        self.default = default
        self._sections = sections or {}

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Insert the default command."""
        is_named = bool(args) and args[0] in (*self.commands, "-h", "--help")
        if self.default and not is_named and (args or not self.no_args_is_help):
            args = [self.default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command, or fail with a suggestion."""
        verb = args[0] if args else ""
        if verb and not verb.startswith("-") and self.get_command(ctx, verb) is None:
            guess = did_you_mean(verb, self.commands) or "."
            names = ", ".join(sorted(self.commands))
            more = "" if self._sections else f" Commands: {names}."
            raise click.UsageError(f"no command {verb!r}{guess}{more}", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the commands, by section where there are any."""
        if not self._sections:
            super().format_commands(ctx, formatter)
            return
        said = {name for names in self._sections.values() for name in names}
        others = [name for name in self.list_commands(ctx) if name not in said]
        width = max(map(len, self.commands))
        for title, names in {**self._sections, "Others": others}.items():
            rows = [(f"{name:{width}}", _short_help(self.commands[name])) for name in names]
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)

    def invoke(self, ctx: click.Context) -> object:
        """Run the command; print a ClipperError and its hint, and exit with EXIT_FAILED. Nothing is
        coloured where NO_COLOR is set."""
        if os.environ.get("NO_COLOR"):
            ctx.color = False
        try:
            return super().invoke(ctx)
        except ClipperError as error:
            click.secho(f"error: {printable(error.message)}", fg="red", err=True)
            if error.hint:
                click.echo(printable(error.hint), err=True)
            ctx.exit(EXIT_FAILED)


def _short_help(command: click.Command) -> str:
    return command.get_short_help_str(_HELP_CHARS_MAX)


def with_options(*options: Callable[[Verb], Verb]) -> Callable[[Verb], Verb]:
    """Return a decorator that adds options to a command. Its help has the last one first."""

    def add(verb: Verb) -> Verb:
        for option in options:
            verb = option(verb)
        return verb

    return add
