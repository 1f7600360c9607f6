"""Discovery of the servers of this user on this host: each writes where it is managed into its
private folder.

Only the owner can read the folder (mode 0700), and so the token in it. The folder is removed with
the server; a lock in it distinguishes a running server from one that was killed.
"""

import contextlib
import os
import tempfile
import urllib.parse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from clipper.errors import NoServer, without_secrets
from clipper.settings.http import is_loopback
from clipper.state_dir import is_alive, write_private

_FILE = "manage.json"
_HINT = "Start one with: clipper up   Or name one: --url http://HOST:PORT, or CLIPPER_URL."
# hosts of a server that listens on all addresses
_EVERYWHERE = ("0.0.0.0", "::")


class Running(msgspec.Struct, frozen=True):
    """A running server, as the commands find it.

    url: of management. queries: of the applications, or empty; grpc: alike, HOST:PORT. state: its
    absolute folder, or a URL, or empty. certificate: the PEM file of the one to expect at `url`, or
    empty. ends_by_signal: in good order, for it is `clipper up` or its like. folder: in which it
    was started. file: its configuration file, absolute, or empty.
    """

    url: str
    pid: int
    token: str = ""
    queries: str = ""
    state: str = ""
    certificate: str = ""
    grpc: str = ""
    ends_by_signal: bool = False
    folder: str = ""
    file: str = ""

    def is_of(self, folder: str) -> bool:
        """Return whether it was started in a folder, or with a file of that folder."""
        return bool(folder) and folder in (self.folder, os.path.dirname(self.file))

    def is_at(self, address: str) -> bool:
        """Return whether it is managed at an address, `HOST:PORT` or a URL, of this host."""
        try:
            own, wanted = _split(self.url), _split(address)
            same_port = own.port is not None and own.port == wanted.port
        except ValueError:
            return False
        if "://" in address and own.scheme != wanted.scheme:
            return False
        host, asked = own.hostname or "", wanted.hostname or ""
        is_here = is_loopback(asked) and (is_loopback(host) or host in _EVERYWHERE)
        return same_port and (asked == host or is_here)

    def __str__(self) -> str:
        words = [f"process {self.pid}"]
        words += [f"started in {self.folder}"] if self.folder else []
        words += [f"state {self.state}"] if self.state else []
        return f"{self.url} ({', '.join(words)})"


def _split(address: str) -> urllib.parse.SplitResult:
    return urllib.parse.urlsplit(address if "://" in address else f"http://{address}")


def current_folder() -> str:
    """Return the current folder; empty if it was removed."""
    try:
        return os.getcwd()
    except OSError:
        return ""


def announce(folder: Path, running: Running) -> None:
    """Write into the server's private folder where it is managed."""
    write_private(folder / _FILE, msgspec.json.encode(running))


def running() -> list[Running]:
    """Return the servers of this user that can be managed, by process."""
    found = []
    for path in Path(tempfile.gettempdir()).glob(f"clipper-*/{_FILE}"):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            if (
                path.stat().st_uid == os.getuid()
                and path.parent.stat().st_uid == os.getuid()
                and is_alive(path.parent)
            ):
                found.append(msgspec.json.decode(path.read_bytes(), type=Running))
    return sorted(found, key=lambda one: one.pid)


def running_at(url: str) -> Running | None:
    """Return the server of this user on this host that is managed at a URL; None if there is none,
    or if it is not clear which."""
    found = [one for one in running() if one.is_at(url)]
    return found[0] if len(found) == 1 else None


def the_one(state: str = "", admin: str = "", folder: str = "") -> Running:
    """Return the server that runs on `state`, or, without, that is managed at `admin`; else the one
    that was started in `folder`, or with a file of it; else, if neither is named, the only one.

    admin: `HOST:PORT`; port 0 names none. folder: absolute; without, a server of the current folder
    is preferred to others, but does not stand in for one that is named. Raises NoServer when there
    is none, or when it is not clear which.
    """
    found = running()
    wanted = without_secrets(state_named(state))  # so it is announced
    admin = "" if admin.endswith(":0") else admin
    at_admin = [one for one in found if admin and one.is_at(admin)]
    in_folder = [one for one in found if one.is_of(folder or current_folder())]
    instead = in_folder if folder else []
    if wanted:  # whatever else has that address serves other models
        fitting = [one for one in found if one.state == wanted] or instead
    elif admin:
        fitting = at_admin or instead
    else:
        fitting = in_folder or found
    for more in (at_admin, in_folder):  # of servers that share a state
        if len(fitting) > 1:
            fitting = [one for one in fitting if one in more] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise NoServer(
            f"{len(fitting)} servers of this user run on this host:\n{_listed(fitting)}",
            hint="Choose: --url URL, or CLIPPER_URL; or run the command in the folder of one.",
        )
    where = f" on the state {wanted}" if wanted else ""
    where = where or (f" at {admin}" if admin else "")
    others = f" Others run:\n{_listed(found)}" if found else ""
    raise NoServer(f"no server of this user runs on this host{where}.{others}", hint=_HINT)


def _listed(servers: Sequence[Running]) -> str:
    return "\n".join(f"  {one}" for one in servers)


def state_named(state: str) -> str:
    """Return a state as it is announced: a folder by its absolute path, everything else as it is
    written."""
    if not state or state == "memory" or "://" in state:
        return "" if state.startswith("memory") else state
    kind, colon, rest = state.partition(":")
    return (
        f"sqlite:{Path(rest).absolute()}"
        if kind == "sqlite" and colon
        else str(Path(state).absolute())
    )
