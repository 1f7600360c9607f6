"""Commands that are made from the rows of clipper.manage.verbs.table."""

import operator
from collections.abc import Callable

import click

from clipper.cli.amounts import Share
from clipper.cli.catalog.specification import FORMS, members_of, sentence, with_options_of
from clipper.cli.command_group import Verb as Callback
from clipper.cli.output import dry
from clipper.cli.server_command import ServerCommand, with_server
from clipper.manage.verbs.table import REQUIRED, Argument, Verb


def command_of(verb: Verb) -> click.Command:
    """Return the command of a verb that changes a running server: what the verb requires are its
    arguments, all else its options."""
    needed = [one.name for one in verb.arguments if one.default is REQUIRED]
    call = operator.attrgetter(f"{verb.on}.{verb.method}" if verb.on else verb.method)

    def run(command: ServerCommand, dry_run: bool, **values: object) -> None:
        words = [_parsed(word, values.pop(word)) for word in needed]
        given = {} if verb.spec is None else members_of(verb.spec, values)
        others = [one.name for one in verb.arguments if one.name not in needed]
        given |= {key: values[key] for key in others if values[key] is not None}
        command.show_change(call(command.server)(*words, dry_run=dry_run, **given))

    made = dry(with_server(run))
    if verb.spec is not None:
        made = with_options_of(verb.spec)(made)
    for one in reversed(verb.arguments):
        made = _parameter(one)(made)
    return click.command(
        verb.command.split()[-1],
        short_help=verb.short,
        help=f"{sentence(verb.text)[:-1]}\n\n\b\nclipper {verb.command} {verb.example}",
    )(made)


def _parsed(name: str, value: object) -> object:
    form = FORMS.get(name)
    return form.parse(name, str(value)) if form else value


def _parameter(one: Argument) -> Callable[[Callback], Callback]:
    """Return a decorator that adds an argument, or an option, to a command."""
    is_needed, words = one.default is REQUIRED, one.option
    if is_needed and not words.startswith("--"):
        return click.argument(one.name, metavar=words or None)
    option, _, metavar = (words or f"--{one.name.replace('_', '-')}").partition(" ")
    help_ = sentence(one.text)
    if one.type is bool:
        return click.option(option, one.name, is_flag=True, help=help_)
    if one.name == "share":
        most_open = "exclusiveMaximum" in (one.schema or {})
        type_ = Share(0, 1, min_open=True, max_open=most_open)
        help_ = f"{help_[:-1]}, as 5% or 0.05.  [{one.default:.0%}]"
        return click.option(
            option, one.name, type=type_, default=one.default, metavar="SHARE", help=help_
        )
    default = None if is_needed else one.default
    schema = one.schema or {}
    limits = click.FloatRange(schema.get("minimum"), schema.get("maximum"))
    return click.option(
        option,
        one.name,
        type=limits if one.type is float else click.STRING,
        default=default,
        required=is_needed,
        show_default=bool(default),
        metavar=metavar or None,
        help=help_,
    )
