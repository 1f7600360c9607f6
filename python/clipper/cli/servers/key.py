"""`clipper key`: API keys and tokens, in files that servers read."""

import os
from pathlib import Path

import click

from clipper.cli.command_group import CommandGroup
from clipper.cli.output import CommandOutput, dry, table, with_output

_file = click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="api-keys",
    show_default=True,
    help="File with the hashes of the keys.",
)


@click.group(cls=CommandGroup, default="create", short_help="Create, list and revoke API keys.")
def key() -> None:
    """Create, list and revoke the keys of a file, of which it has the hashes only. A running server
    reads the file again within seconds.

    \b
    clipper key create ann --file api-keys
    clipper key list --file api-keys
    clipper key revoke ann --file api-keys
    """


@key.command(short_help="Create a key; the word `create` is optional.")
@click.argument("name")
@_file
@click.option(
    "--role",
    type=click.Choice(["read", "train", "manage"]),
    help="Role of a token of params.tokens_file or params.grpc_keys_file.",
)
@click.option(
    "--container",
    metavar="MODEL[:VERSION]",
    help="Print a token for a container of this model that is started by hand.",
)
@click.option("--rate", default="", help="Most requests to each application: 500/s, 30/min, 9/h.")
@click.option("--share", default="", help="Share of a model that is overloaded: 30%.")
@click.option("--priority", default="", help="Of its queries: 1, the highest, to 3.")
@click.option("--apps", default="", help="Applications that the key is for, with commas; all.")
@click.option("--groups", default="", help="Groups of its owner, with commas, for the logs.")
@dry
@with_output
def create(
    name: str,
    path: Path,
    role: str | None,
    container: str | None,
    rate: str,
    share: str,
    priority: str,
    apps: str,
    groups: str,
    dry_run: bool,
    output: CommandOutput,
) -> None:
    """Create a key for NAME, print it, and add its hash to a file.

    With the file as the server's http.api_keys_file, queries over HTTP and gRPC need
    `Authorization: Bearer KEY`. As http.tokens_file it contains management tokens, and the history
    shows their names. The key is printed only once.

    With --role the file is params.tokens_file or params.grpc_keys_file: `read` may pull rows,
    `train` may also push and create tables, `manage` may do everything.

    With --container nothing is written: the token is made with the server's own (`server.token` of
    ./clipper.toml, or CLIPPER_SERVER__TOKEN) and is valid while that is. A container sends it in
    CLIPPER_TOKEN; it may serve that model alone, over one connection to each server.

    \b
    clipper key create ann --file api-keys
    clipper key create trainers --role train --file params-tokens
    clipper key create shop --rate 500/s --apps digits,fraud
    clipper key create shop --share 30% --priority 1
    clipper key create gpu-1 --container digits:3
    curl -H "Authorization: Bearer $KEY" http://HOST:8000/api
    """
    from clipper.credentials.credential_file import line_of, new_key
    from clipper.credentials.key_limits import KeyLimits
    from clipper.errors import InvalidInput

    if not name.isprintable() or len(name.split()) != 1 or name.startswith("#"):
        raise InvalidInput(
            f"the key name {name[:60]!r} is not one word of printable characters.",
            hint="Example: clipper key create ann --file api-keys",
        )
    if container is not None:
        token = _container_token(name, container)
        output.say({"name": name, "key": token, "dry_run": dry_run}, token)
        return
    limits = KeyLimits.of(rate, _listed(apps), _listed(groups), share, priority)
    if role is not None and limits.words:
        raise InvalidInput(
            "a token with a role has no limits.", hint="Remove --role or the limits."
        )
    if dry_run:
        output.say({"name": name, "dry_run": True}, f"dry run: a key of {name} is added to {path}")
        return
    made = new_key()
    try:
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600),
            "a",
            encoding="utf-8",
        ) as file:
            file.write(f"{line_of(name, made, role or '', limits)}\n")
    except OSError as error:
        raise InvalidInput(
            f"cannot write {path}: {error.strerror or error}.", hint="Name another with --file."
        ) from None
    output.say({"name": name, "key": made, "dry_run": False}, made)
    click.echo(
        f"the hash of this key is in {path}, under {name!r}; the key itself is not stored",
        err=True,
    )


def _listed(text: str) -> list[str]:
    return [one.strip() for one in text.split(",") if one.strip()]


def _container_token(name: str, container: str) -> str:
    """Return the token of a container that is started by hand. Raises: InvalidInput."""
    from clipper.cli.servers.up import file_or_default
    from clipper.config import load
    from clipper.credentials.container_tokens import made_by_hand
    from clipper.errors import InvalidInput
    from clipper.types import VersionedModel

    secret = load(file_or_default(None)).server.token
    if not secret:
        raise InvalidInput(
            "a token for a container needs the server's own, and server.token is not set.",
            hint="Set server.token or CLIPPER_SERVER__TOKEN to that of the server.",
        )
    model = VersionedModel.parse(container)
    return made_by_hand(secret, name, model.name, model.version or 0)


@key.command("list", short_help="List the owners of keys.")
@_file
@with_output
def list_keys(path: Path, output: CommandOutput) -> None:
    """List the names in a file of keys, with their roles and limits.

    \b
    clipper key list --file api-keys
    """
    from clipper.credentials.credential_file import owners_in

    owners = owners_in(path)
    rows = [owner._asdict() for owner in owners]
    lines = [(owner.name, owner.role or "-", owner.limits or "-") for owner in owners]
    output.say(rows, table([("NAME", "ROLE", "LIMITS"), *lines], f"{path} has no keys"))


@key.command(short_help="Revoke the keys of a name.")
@click.argument("name")
@_file
@dry
@with_output
def revoke(name: str, path: Path, dry_run: bool, output: CommandOutput) -> None:
    """Remove the keys of NAME from a file. Running servers refuse them within seconds.

    \b
    clipper key revoke ann --file api-keys
    """
    from clipper.credentials.credential_file import revoke_in

    count = revoke_in(path, name, dry=dry_run)
    keys = "1 key" if count == 1 else f"{count} keys"
    text = f"{'dry run: ' if dry_run else ''}{keys} of {name} removed from {path}"
    output.say({"name": name, "revoked": count, "dry_run": dry_run}, text)
