"""`clipper registry`: copy the catalog from one store to another."""

import sys
from pathlib import Path

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import CommandOutput, dry, with_output, would
from clipper.errors import ConfigError
from clipper.store import STATE_FILE, Store, copying, open_store

_EXIT_DIFFERENT = 1
_SHOWN = 5


@click.group(cls=CommandGroup, short_help="Copy the catalog from one store to another.")
def registry() -> None:
    """Copy the catalog (models, applications, v-models, learned state) from one store to another.

    A store is named as in `state`: a folder, sqlite:FILE, redis://HOST:PORT/DB,
    etcd://HOST:PORT,HOST:PORT/PREFIX.

    \b
    clipper registry copy ./state etcd://h1:2379,h2:2379/clipper --verify
    """


@registry.command(short_help="Copy a store.")
@click.argument("source", metavar="SRC")
@click.argument("target", metavar="DST")
@click.option(
    "--verify", is_flag=True, help="Read both stores again and compare; exit code 1 if they differ."
)
@click.option("--prefix", default="", help="Only keys with this prefix, such as catalog/ or mesh/.")
@click.option(
    "--replace", is_flag=True, help="Make DST equal to SRC: overwrite and delete what differs."
)
@click.option("--follow", is_flag=True, help="Then keep copying changes of SRC, until Ctrl-C.")
@dry
@with_output
def copy(
    source: str,
    target: str,
    verify: bool,
    prefix: str,
    replace: bool,
    follow: bool,
    dry_run: bool,
    output: CommandOutput,
) -> None:
    """Copy all records of SRC into DST, which must be empty.

    Keys and values are copied; revisions start again. Records with a lease (of running nodes) are
    not copied: the nodes write them again. Packed models are in the server's `folder`, not in its
    store: copy them too. To move a server: copy with --follow --verify, stop the server, press
    Ctrl-C, start it with the new `state`.

    \b
    clipper registry copy ./state redis://127.0.0.1:6379/0 --verify
    clipper registry copy redis://127.0.0.1:6379/0 etcd://h1:2379,h2:2379/clipper --verify
    """
    if dry_run and (verify or follow):
        raise click.UsageError("a dry run copies nothing to verify or to follow.")
    opened = open_store if not dry_run or _is_there(target) else _empty_store
    with _existing(source) as ours, opened(target) as theirs:
        copied = copying.copy(ours, theirs, prefix, replace=replace, dry_run=dry_run)
        if not output.is_data:
            click.echo(
                f"{would(dry_run)}copied {copied.records} records at revision {copied.revision}"
                f" from {ours.name} to {target if dry_run else theirs.name}"
            )
            if copied.leased:
                click.echo(
                    f"{copied.leased} records with a lease are not copied: running nodes write them"
                    " again"
                )
        if follow:
            _follow(ours, theirs, copied.revision, prefix)
        different = copying.different(ours, theirs, prefix) if verify else []
        if output.is_data:
            fields = ("records", "leased", "written", "deleted", "revision")
            counts = {name: getattr(copied, name) for name in fields}
            output.emit({**counts, "different": different})
        elif verify:
            click.echo(
                f"{len(different)} records differ: {', '.join(different[:_SHOWN])}"
                if different
                else "both stores are equal"
            )
    if different:
        sys.exit(_EXIT_DIFFERENT)


def _existing(state: str) -> Store:
    """Open the store of that name; a missing one is not created."""
    if state in ("", "memory", "memory://") or not _is_there(state):
        raise ConfigError(
            f"there is no store {state!r}.",
            hint="SRC is a folder with state.db, sqlite:FILE, redis:// or etcd://.",
        )
    return open_store(state)


def _is_there(state: str) -> bool:
    """Return whether opening the store of that name makes no file."""
    kind, _, rest = state.partition(":")
    file = Path(rest.removeprefix("//")) if kind == "sqlite" else Path(state) / STATE_FILE
    return "://" in state.removeprefix("sqlite://") or file.is_file()


def _empty_store(state: str) -> Store:
    """Return an empty store in the place of one that is not there."""
    return open_store("memory")


def _follow(source: Store, target: Store, revision: int, prefix: str) -> None:
    click.echo("copying changes; Ctrl-C ends it", err=True)

    def show(count: int) -> bool:
        if count:
            click.echo(f"copied {count} changes", err=True)
        return True

    try:
        copying.follow(source, target, revision, prefix, on_change=show)
    except KeyboardInterrupt:
        click.echo("ended", err=True)
