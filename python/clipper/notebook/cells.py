"""Servers and versions by the cell that has started them.

A cell that runs again closes the servers that it started before, and retires the versions that it
deployed before in favour of those that it has deployed now; without that, each run would leave a
process.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from clipper.errors import ClipperError
from clipper.notebook.shown import SHOWN
from clipper.server import ClipperServer
from clipper.types import VersionedModel

_Parent = Callable[[], Mapping[str, Mapping[str, str]]]


class _Formats(Protocol):
    """The form of objects for one type of content."""

    def for_type(self, kind: type, shown: Callable[..., str], /) -> object:
        """Show objects of a class by a function."""


class _Displays(Protocol):
    """The forms in which a session shows objects, by type of content."""

    formatters: Mapping[str, _Formats]


class _Events(Protocol):
    """The events of a session."""

    def register(self, name: str, call: Callable[[object], None], /) -> None:
        """Call a function at each event of a name."""


class Shell(Protocol):
    """The parts of a session of IPython that are used here. user_ns: its variables; `In` has the
    texts of the cells."""

    display_formatter: _Displays
    events: _Events
    user_ns: Mapping[str, Sequence[str]]


class Cells:
    """Keeps the servers and versions that each cell has started. Threads: that of the session.

    shell: IPython's.
    """

    def __init__(self, shell: Shell) -> None:
        self._shell = shell
        self._servers: dict[str, list[weakref.ref[ClipperServer]]] = {}
        self._deployed: dict[str, list[tuple[weakref.ref[ClipperServer], VersionedModel]]] = {}
        self._known: weakref.WeakKeyDictionary[ClipperServer, frozenset[VersionedModel]]
        self._known = weakref.WeakKeyDictionary()

    def register(self) -> None:
        """Show objects as HTML, and look after the end of each cell."""
        formats = self._shell.display_formatter.formatters["text/html"]
        for kind, shown in SHOWN.items():
            formats.for_type(kind, shown)
        self._shell.events.register("post_run_cell", self.end_cell)

    def close_earlier(self) -> None:
        """Close the servers that this cell has started before."""
        for each in self._servers.pop(self._cell(), ()):
            if (server := each()) is not None:
                server.close()

    def started(self, server: ClipperServer) -> None:
        """Note a server that this cell has started."""
        self._servers.setdefault(self._cell(), []).append(weakref.ref(server))
        self._known[server] = _in_service(server)

    def end_cell(self, _: object = None) -> None:
        """Retire the versions that this cell has deployed before, where it has deployed newer ones
        of their names, and print a line for each."""
        cell = self._cell()
        new = [
            (server, model)
            for server, known in list(self._known.items())
            for model in sorted(_in_service(server) - known, key=str)
        ]
        if not new:
            return
        for each, model in self._deployed.pop(cell, ()):
            server = each()
            newer = [one for at, one in new if at is server and one.name == model.name]
            if server is not None and newer:
                with contextlib.suppress(ClipperError):
                    server.retire(model)
                    sys.stdout.write(f"{model} is retired: this cell has deployed {newer[-1]}\n")
        self._deployed[cell] = [(weakref.ref(server), model) for server, model in new]
        for server, _ in new:
            self._known[server] = _in_service(server)

    def _cell(self) -> str:
        """Return the id of the cell that runs, where the front end gives it one, else its text."""
        parent: _Parent | None = getattr(self._shell, "get_parent", None)
        found = parent().get("metadata", {}).get("cellId") if parent is not None else ""
        return str(found or self._shell.user_ns["In"][-1])


def _in_service(server: ClipperServer) -> frozenset[VersionedModel]:
    return frozenset(model.id for model in server.catalog.view.models())


def cells_of_session() -> Cells | None:
    """Return the cells of this IPython session, which are registered once; None outside of one."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    if shell is None:
        return None
    cells = _sessions.get(shell)
    if cells is None:
        cells = _sessions[shell] = Cells(shell)
        cells.register()
    return cells


_sessions: "weakref.WeakKeyDictionary[Shell, Cells]" = weakref.WeakKeyDictionary()
