"""`clipper init` writes a first project; `clipper down` stops the server that `clipper up`
started.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.output import CommandOutput, dry, with_output, would
from clipper.cli.servers.end_process import end_process
from clipper.errors import ClipperError, InvalidInput, NoServer

if TYPE_CHECKING:
    from clipper.cli.server_command import Sought
    from clipper.manage.running import Running

_MODEL = '''"""A first model. `clipper up` serves what clipper.toml names."""

import numpy as np


def total(rows):
    """rows: an array of shape (n, 3), one row per query of the batch. Returns n outputs."""
    return np.asarray(rows).sum(axis=1)
'''
_TOML = """# clipper up                                 serves this file
# clipper predict total "[1, 2, 3]"          sends a query
# clipper config show                        lists every setting, with its unit and default

[server]
state = ".clipper"                # folder of what is deployed and learned

# [http]                          # addresses other than these, which are used if they are free:
# address = "127.0.0.1:8000"      # queries
# admin = "127.0.0.1:8002"        # management, and the dashboard

[models.total]
target = "model:total"            # the function `total` of model.py, in its own process
input = "f64[3]"                  # one row: three numbers. Others: str, bytes, f32[28,28], i32[*]
replicas = 1                      # processes; 1-4 in `clipper scale total 1-4` follows the load
# requirements = "requirements.txt"   # its own Python environment

[apps.total]
models = ["total"]                # of several models, a policy combines or selects
slo_ms = 50                       # every query is answered within so many milliseconds,
default = 0                       # if necessary with this
# policy = "exp3"                 # learns from feedback which model to use; docs/selection.md
"""


@click.command(short_help="Write a first clipper.toml and a working model.")
@click.argument(
    "folder", required=False, default=".", type=click.Path(file_okay=False, path_type=Path)
)
@dry
@with_output
def init(folder: Path, dry_run: bool, output: CommandOutput) -> None:
    """Write a commented clipper.toml and model.py into FOLDER (default: here). Existing files are
    never overwritten.

    \b
    clipper init shop && cd shop
    clipper up
    clipper predict total "[1, 2, 3]"
    """
    files = {"clipper.toml": _TOML, "model.py": _MODEL}
    there = [name for name in files if (folder / name).exists()]
    if there:
        raise InvalidInput(
            f"{folder / there[0]} already exists.",
            hint="Name another folder: clipper init FOLDER",
        )
    names = [str(folder / name) for name in files]
    if dry_run:
        output.say({"files": names}, f"dry run: would write {' and '.join(names)}")
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            with open(folder / name, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise InvalidInput(
            f"cannot write {error.filename}: {error.strerror}.", hint="Name another folder."
        ) from None
    go = "" if folder == Path(".") else f"cd {folder} && "
    output.say({"files": names}, f"wrote {' and '.join(names)}. Next: {go}clipper up")


@click.command(short_help="Stop the server that `clipper up` started.")
@click.option("--now", is_flag=True, help="Do not wait for queries in flight.")
@click.option(
    "--wait",
    "wait_s",
    type=click.FloatRange(0, 3600),
    default=60.0,
    show_default=True,
    help="Seconds to wait for the end.",
)
@click.option(
    "--url",
    metavar="URL",
    envvar="CLIPPER_URL",
    help="Management URL of the server.  [CLIPPER_URL; else the server of this folder]",
)
@dry
@with_output
def down(now: bool, wait_s: float, url: str | None, dry_run: bool, output: CommandOutput) -> None:
    """Stop the server of this folder, or of --url, and wait for its end.

    Queries in flight have server.drain_s seconds. Only servers that `clipper up`, `serve` or `node`
    started are stopped; a server inside your own program ends with it. Exit code 1 if it still runs
    after --wait.

    \b
    clipper down
    clipper down --now
    clipper down --url http://127.0.0.1:8012
    """
    from clipper.cli.server_command import sought
    from clipper.manage.running import running_at

    found = running_at(url) if url else _of_this_folder(sought())
    if found is None:
        raise NoServer(
            f"no server of this user on this host is managed at {url}.",
            hint="clipper down ends no others: end it where it runs.",
        )
    if not found.ends_by_signal:
        raise ClipperError(
            f"the server at {found.url} is part of process {found.pid}, not of `clipper up`.",
            hint=f"End that process: kill {found.pid}",
        )
    ended = {"url": found.url, "pid": found.pid}
    text = f"{would(dry_run)}ended the server at {found.url} (process {found.pid})"
    if dry_run:
        output.say(ended, text)
        return
    still = f"process {found.pid} is still closing after {wait_s:g} s: clipper down --now"
    try:
        end_process(found.pid, wait_s, still, now=now)
    except ProcessLookupError:
        raise NoServer(
            f"the server at {found.url} (process {found.pid}) has already ended."
        ) from None
    output.say(ended, text)


def _of_this_folder(wanted: "Sought") -> "Running":
    """Return the server that ./clipper.toml names, or that was started in this folder. Raises
    NoServer, which names the only other one: that is not ended by mistake."""
    from clipper.manage.running import the_one

    found = the_one(*wanted)
    if wanted.state or wanted.admin or found.is_of(wanted.folder):
        return found
    raise NoServer(
        f"no server was started in this folder. Another one runs:\n  {found}",
        hint=f"To end that one: clipper down --url {found.url}",
    )
