"""Options and output shared by the commands that talk to a running server."""

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import click

from clipper.cli.command_group import with_options
from clipper.cli.output import CommandOutput, with_output
from clipper.cli.servers.up import file_or_default
from clipper.errors import InvalidInput

if TYPE_CHECKING:
    from clipper.manage.client import Client
    from clipper.manage.rows import ChangeResult

EXIT_INTERRUPTED = 130


class Sought(NamedTuple):
    """The server that a command is about. state, admin: server.state and http.admin of
    ./clipper.toml; empty if there is no file. folder: the current one."""

    state: str
    admin: str
    folder: str


def sought() -> Sought:
    """Return the server that commands in this folder are about. Raises ConfigError."""
    from clipper.config import load
    from clipper.manage.running import current_folder

    config = load(file_or_default(None))
    return Sought(config.server.state, config.http.admin, current_folder())


def _connected(url: str | None, token: str | None, ca: str | None) -> "Client":
    """Return a client of the server of --url or CLIPPER_URL, else of the one that ./clipper.toml
    names, else of the one that was started in this folder, else of the only one."""
    from clipper.manage.client import connect

    if url or os.environ.get("CLIPPER_URL"):
        return connect(url, token, ca=ca)
    return connect(token=token, ca=ca, **sought()._asdict())


class ServerCommand:
    """The connection options of a command, and its output."""

    def __init__(
        self, url: str | None, token: str | None, ca: str | None, output: CommandOutput
    ) -> None:
        self.output = output
        self._url, self._token, self._ca = url, token, ca

    @property
    def url(self) -> str:
        """Return the URL that --url or CLIPPER_URL names; empty for a server that is looked for."""
        return self._url or os.environ.get("CLIPPER_URL", "")

    @property
    def server(self) -> "Client":
        """Return a client of the server. Raises: NoServer."""
        return _connected(self._url, self._token, self._ca)

    def show_change(self, change: "ChangeResult") -> None:
        """Print what a command changed, or would change."""
        self.output.show(change, lambda: _change_text(change))


def with_server(verb: Callable[..., None]) -> Callable[..., None]:
    """Add --url, --token, --ca and -o to a command, which receives a ServerCommand."""

    def with_connection(
        url: str | None, token: str | None, ca: str | None, output: CommandOutput, **words: object
    ) -> None:
        verb(ServerCommand(url, token, ca, output), **words)

    with_connection.__doc__, with_connection.__name__ = verb.__doc__, verb.__name__
    with_connection.__click_params__ = getattr(verb, "__click_params__", [])  # type: ignore[attr-defined]
    connected = with_options(
        click.option(
            "--ca",
            metavar="FILE",
            help="PEM file of the CA that signed the server's certificate.  [CLIPPER_CA]",
        ),
        click.option(
            "--token",
            metavar="TOKEN",
            help=(
                "http.token of the server, or a token of http.tokens_file.  [CLIPPER_ADMIN_TOKEN]"
            ),
        ),
        click.option(
            "--url",
            metavar="URL",
            help=(
                "Management URL of the server.  [CLIPPER_URL; else the server of this "
                "folder, else the only one of this user]"
            ),
        ),
    )
    return connected(with_output(with_connection))


# -- printing and reading


def _change_text(change: "ChangeResult") -> str:
    """Return what changed, or would, in words."""
    from clipper.manage.change_words import lines_of

    lines = [f"{'dry run: ' if change['dry_run'] else ''}{change['message']}"]
    if change.get("warning"):
        lines.append(f"warning: {change['warning']}")
    lines += [f"  {line}" for line in lines_of(change["changed"])]
    return "\n".join(lines)


def short(value: object) -> str:
    """Shorten a text to a number of characters."""
    if (
        isinstance(value, list)
        and value
        and all(isinstance(one, dict) and set(one) == {"name", "version"} for one in value)
    ):
        value = [
            one["name"] if one["version"] is None else f"{one['name']}:{one['version']}"
            for one in value
        ]
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


@contextlib.contextmanager
def until_interrupted() -> Iterator[None]:
    """End the command quietly, by Ctrl-C or when nobody reads its output any more."""
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(EXIT_INTERRUPTED)
    except BrokenPipeError:  # for example `| head`
        sys.stderr.close()
        sys.exit(0)


def write_text(path: str, text: str) -> None:
    """Write a file. Raises InvalidInput if it cannot be written."""
    try:
        Path(path).write_text(text)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {path}: {error.strerror or error}.", hint="Name another file."
        ) from None


def read_json(text: str, what: str) -> object:
    """Parse a value as JSON; text that is not JSON is returned as it is."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        if text[:1] in "[{":
            raise InvalidInput(
                f"{what} {text[:60]!r} is not JSON.", hint="Quote it for the shell: '[1, 2, 3]'."
            ) from None
        return text


def bounds(text: str) -> int | tuple[int, int]:
    """Parse `N` or `MIN-MAX` as replica counts."""
    least, dash, most = text.partition("-")
    if not (least.isdecimal() and (most.isdecimal() if dash else True)):
        raise InvalidInput(
            f"replicas {text!r} is not a number or MIN-MAX.",
            hint="Examples: 2; 1-4 scales with the load.",
        )
    if dash and int(most) < int(least):
        raise InvalidInput(
            f"replicas {text!r}: the second number, the most, is below the first.",
            hint="Examples: 2; 1-4 scales with the load.",
        )
    return (int(least), int(most)) if dash else int(least)
