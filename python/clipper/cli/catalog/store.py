"""`clipper store`: decide about a store that came back with another content."""

import click

from clipper.cli.output import dry
from clipper.cli.server_command import ServerCommand, with_server
from clipper.errors import InvalidInput


@click.command(short_help="Accept the store as it is, or with what is known.")
@click.option("--restore", is_flag=True, help="Write back what the server knows and it lacks.")
@click.option("--as-is", is_flag=True, help="Drop what the server knows and the store lacks.")
@dry
@with_server
def accept(command: ServerCommand, restore: bool, as_is: bool, dry_run: bool) -> None:
    """Take a store (Redis, etcd, SQLite) whose content does not continue what the server knows for
    the one that it knows: it is empty, older, or another one. Every server of the store follows.

    Until then the server serves what it knows, and refuses changes. `clipper ps` and
    /v2/health/ready say so.

    With --restore, models and applications that the server knows are written back. What is only in
    the store stays, unless the store is an older state of the same. With --as-is, what the store
    lacks is removed from all servers; the file catalog.copy.before in the server's folder keeps it.

    \b
    clipper store accept --restore --dry-run
    clipper store accept --as-is
    """
    if restore == as_is:
        raise InvalidInput(
            "store accept: with what is known here, or as it is?",
            hint="Write --restore or --as-is. --dry-run changes nothing.",
        )
    command.show_change(command.server.accept_store(restore=restore, dry_run=dry_run))
