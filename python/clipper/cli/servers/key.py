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
    help="File to add the hash to.",
)
@click.option(
    "--role",
    type=click.Choice(["read", "train", "manage"]),
    help="Role of a token of params.tokens_file or params.grpc_keys_file.",
)
def key(name: str, path: Path, role: str | None) -> None:
    """Create a key for NAME, print it, and add its hash to a file.

    With the file as the server's http.api_keys_file, queries over HTTP and gRPC need
    `Authorization: Bearer KEY`. As http.tokens_file it contains management tokens, and the history
    shows their names. A running server reads the file again within seconds; delete a line to revoke
    its key. The key is printed only once.

    With --role the file is params.tokens_file or params.grpc_keys_file: `read` may pull rows,
    `train` may also push and create tables, `manage` may do everything.

    \b
    clipper key ann --file api-keys
    clipper key trainers --role train --file params-tokens
    curl -H "Authorization: Bearer $KEY" http://HOST:8000/api
    """
    from clipper.credential_file import line_of, new_key
    from clipper.errors import InvalidInput

    if not name.isprintable() or len(name.split()) != 1 or name.startswith("#"):
        raise InvalidInput(
            f"the key name {name[:60]!r} is not one word of printable characters.",
            hint="Example: clipper key ann --file api-keys",
        )
    made = new_key()
    with open(
        os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600),
        "a",
        encoding="utf-8",
    ) as file:
        file.write(f"{line_of(name, made, role or '')}\n")
    click.echo(made)
    click.echo(
        f"the hash of this key is in {path}, under {name!r}; the key itself is not stored",
        err=True,
    )
