"""Discovery of the servers of this user on this host: each writes where it is managed into its
private folder.

Only the owner can read the folder (mode 0700), and so the token in it. The folder is removed with
the server; a lock in it distinguishes a running server from one that was killed.
"""

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from clipper.errors import NoServer, without_secrets
from clipper.state_dir import is_alive, write_private

_FILE = "manage.json"
_HINT = "Start one with: clipper up   Or name one: --url http://HOST:PORT, or CLIPPER_URL."


class Running(msgspec.Struct, frozen=True):
    """A running server, as the commands find it. url: of management.  queries: of the applications,
    or empty; grpc: alike, HOST:PORT.  state: its absolute folder, or a URL, or empty.  certificate:
    the PEM file of the one to expect at `url`, or empty.  ends_by_signal: in good order, for it is
    `clipper up`."""

    url: str
    pid: int
    token: str = ""
    queries: str = ""
    state: str = ""
    certificate: str = ""
    grpc: str = ""
    ends_by_signal: bool = False


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


def the_one(state: str = "") -> Running:
    """Return the server that runs on `state`; without, the only one. Raises NoServer when there is
    none, or when it is not clear which."""
    found = running()
    wanted = without_secrets(state_named(state))  # so it is announced
    fitting = [one for one in found if one.state == wanted] if wanted else found
    if len(fitting) == 1:
        return fitting[0]
    if len(fitting) > 1:
        choices = "; ".join(
            f"{one.url} (process {one.pid}{', state ' + one.state if one.state else ''})"
            for one in fitting
        )
        raise NoServer(
            f"{len(fitting)} servers of this user run on this host: {choices}.",
            hint="Choose: --url URL, or CLIPPER_URL.",
        )
    where = f" on the state {wanted}" if wanted else ""
    others = f" Others run: {', '.join(one.url for one in found)}." if found else ""
    raise NoServer(f"no server of this user runs on this host{where}.{others}", hint=_HINT)


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
