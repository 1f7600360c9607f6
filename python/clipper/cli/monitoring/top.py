"""`clipper top`: a live display of a server."""

import contextlib
import re
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from clipper.cli.server_command import ServerCommand, with_server, write_text
from clipper.errors import ClipperError, InvalidInput

if TYPE_CHECKING:
    from clipper.cli.monitoring.top_state import ServerReadings
    from clipper.manage.stream import Stream

_TICK_S = 0.2
_AGAIN_S = 0.5  # between attempts to reconnect
_FIRST_S = 10.0  # for the first reading
_SVG_WIDTH = 132


@click.command(short_help="Show throughput, latency and models of a server, live.")
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option("--svg", metavar="FILE.svg", help="Write the last frame as a picture.")
@with_server
def top(command: ServerCommand, once: bool, svg: str | None) -> None:
    """Show a server live: queries and their outcomes, p50 and p99 with the SLO, and the models with
    their queues, batches, memory and errors.

    The small bars show the last seconds; a full bar of p99 is the SLO, or the maximum. It continues
    after a restart of the server. Keys: q quits, p pauses, s sorts the models by the next column.

    \b
    clipper top
    clipper top --url http://10.0.0.7:8002 --token $TOKEN
    clipper top --once -o json
    """
    if svg and not Path(svg).absolute().parent.is_dir():
        raise InvalidInput(
            f"there is no folder for --svg {svg}.", hint="Create the folder, or name another file."
        )
    from clipper.cli.monitoring.top_state import ServerReadings

    where: str = command.server.url
    watched = ServerReadings()
    reader = _Reader(command, watched)
    reader.start()
    try:
        reader.wait_for_first(_FIRST_S)
        if once or command.output.is_data or not (sys.stdin.isatty() and sys.stdout.isatty()):
            _print_frame(command, watched, where)
        else:
            _live(watched, where)
        if svg:
            _write_svg(svg, watched, where)
    except KeyboardInterrupt:
        pass
    finally:
        reader.stop()


class _Reader:
    """Follows the server's event stream on a thread, across its restarts."""

    def __init__(self, command: ServerCommand, watched: "ServerReadings") -> None:
        self._command, self._watched = command, watched
        self._ending, self._first = threading.Event(), threading.Event()
        self._failed: ClipperError | None = None
        self._stream: Stream | None = None
        self._thread = threading.Thread(target=self._run, name="clipper-top", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ending.set()
        if self._stream is not None:
            self._stream.hang_up()
        self._thread.join()

    def wait_for_first(self, patience_s: float) -> None:
        """Wait for the first reading. Raises the error of the first attempt."""
        self._first.wait(patience_s)
        if self._failed is not None:
            raise self._failed

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                self._follow()
            except ClipperError as error:
                if not self._first.is_set():
                    self._failed = error
                self._first.set()
                self._watched.lose(error.message)
            self._ending.wait(_AGAIN_S)

    def _follow(self) -> None:
        server = self._command.server
        with contextlib.closing(server.stream()) as stream:
            self._stream = stream
            if self._ending.is_set():
                return
            for name, data in stream:
                if name == "now" or not self._watched.models:
                    self._watched.models = server.ps()
                self._watched.take(name, data)
                if self._watched.readings > 1 or self._watched.rows:
                    self._first.set()


def _print_frame(command: ServerCommand, watched: "ServerReadings", where: str) -> None:
    from rich.console import Console

    from clipper.cli.monitoring.top_screen import screen

    if command.output.is_data:
        frame = {
            "url": where,
            "server": _plain(watched),
            "applications": watched.applications(),
            "models": watched.model_rows(),
        }
        command.output.emit(frame)
        return
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _SVG_WIDTH)
    console.print(screen(watched, where, console.width, keys=False))


def _plain(watched: "ServerReadings") -> dict[str, object]:
    return {key: watched.about.get(key) for key in ("version", "pid", "state", "started_us")}


def _live(watched: "ServerReadings", where: str) -> None:
    from rich.console import Console
    from rich.live import Live

    from clipper.cli.monitoring.top_screen import SORTS, screen
    from clipper.keys import Keys

    sort, paused = 0, False
    console = Console(highlight=False)
    with Keys(sys.stdin) as keys, Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            if not paused:
                live.update(screen(watched, where, console.width, SORTS[sort]), refresh=True)
            for key in keys.pressed(_TICK_S):
                if key in "qQ\x1b":
                    return
                if key in "sS":
                    sort = (sort + 1) % len(SORTS)
                if key in "pP ":
                    paused = not paused
                    live.update(
                        screen(watched, where, console.width, SORTS[sort], paused), refresh=True
                    )


def _write_svg(path: str, watched: "ServerReadings", where: str) -> None:
    import io

    from rich.console import Console

    from clipper.cli.monitoring.top_screen import screen

    console = Console(
        record=True, width=_SVG_WIDTH, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(screen(watched, where, console.width, keys=False))
    svg = console.export_svg(title="clipper top")
    write_text(path, re.sub(r',\s*url\("[^)]*\) format\("[^)]*\)', "", svg))  # fonts of the web
    click.echo(f"wrote {path} at {time.strftime('%H:%M:%S')}", err=True)
