"""`clipper key`: API keys."""

import os
from pathlib import Path

import click


@click.command(short_help="Create an API key.")
@click.argument("name")
@click.option(
    "--file",
    "path",
    type=click.Path(dir_okay=False, path_type=Path),
    default="api-keys",
    show_default=True,
    help="http.api_keys_file of the server.",
)
@click.option(
    "--role",
    type=click.Choice(["read", "train", "manage"]),
    help="Of a token of params.tokens_file or grpc_keys_file, for a group of workers.",
)
def key(name: str, path: Path, role: str | None) -> None:
    """Make a key for NAME, print it, and add its hash to a file.

    The file is the server's http.api_keys_file: with it, queries over HTTP and gRPC need
    `Authorization: Bearer KEY`. A server that runs sees the new line within seconds; to take a key
    away, delete its line. The key is shown this once. A file of the same kind is http.tokens_file:
    its keys manage, and the history has their names.

    With --role the file is params.tokens_file or params.grpc_keys_file: `read` may pull rows,
    `train` push and create tables too, `manage` do everything.

    \b
    clipper key ann --file api-keys
    clipper key trainers --role train --file params-tokens
    curl -H "Authorization: Bearer $KEY" http://HOST:8080/api
    """
    from clipper.credential_file import line_of, new_key
    from clipper.errors import InvalidInput

    if not name.isprintable() or len(name.split()) != 1 or name.startswith("#"):
        raise InvalidInput(f"name {name[:60]!r} of a key: one word, without blanks.")
    made = new_key()
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600),
        "a",
        encoding="utf-8",
    ) as file:
        file.write(f"{line_of(name, made, role or '')}\n")
    click.echo(made)
    click.echo(
        f"the hash of this key is in {path}, under {name!r}; the key itself is nowhere but here",
        err=True,
    )
