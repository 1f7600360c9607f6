"""A group of verbs: it guesses at a slip of the pen, and shows an error of ours as a line."""

from typing import Any

import click

from clipper.errors import ClipperError, did_you_mean

EXIT_FAILED = 1  # click exits with 2 for a command line that is wrong


class CommandGroup(click.Group):
    """A group that takes a slip of the pen for what it is, and shows an error of ours as a line,
    not as a traceback."""

    def __init__(self, *args: Any, default: str | None = None, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self._default = default

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if self._default and args and args[0] not in (*self.commands, "-h", "--help"):
            args = [self._default, *args]
        return super().parse_args(ctx, args)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        verb = args[0] if args else ""
        if verb and not verb.startswith("-") and self.get_command(ctx, verb) is None:
            guess = did_you_mean(verb, self.commands) or "."
            raise click.UsageError(
                f"no verb {verb!r}{guess} CommandGroup: {', '.join(sorted(self.commands))}.", ctx
            )
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ClipperError as error:
            click.secho(f"error: {error.message}", fg="red", err=True)
            if error.hint:
                click.echo(error.hint, err=True)
            ctx.exit(EXIT_FAILED)
