"""Addresses that containers connect to: a private unix socket, one at a given path, or a TCP
port.
"""

import contextlib
import errno
import os
import socket
import stat
from dataclasses import dataclass
from pathlib import Path

from clipper.errors import AddressInUse, ConfigError
from clipper.host_port import join_host_port

_BACKLOG = 512
_UNIX_PATH_MAX = 107


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket for containers. fd: non-blocking; the thread that serves it owns it.
    connect: the address for containers: `unix:/path`, `tcp:host:port`.  path: of the unix socket,
    to be removed at the end."""

    fd: int
    connect: str
    path: str = ""

    def remove(self) -> None:
        """Close the socket, and remove its file."""
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def listen(address: str, directory: Path) -> Listener:
    """Listen on `unix` (a socket in `directory`), `unix:PATH` or `tcp://HOST:PORT` (port 0: any
    free one)."""
    if address == "unix":
        return _listen_unix(str(directory / "clipper.sock"))
    if address.startswith("unix:"):
        return _listen_unix(os.path.abspath(address.removeprefix("unix:")))
    return _listen_tcp(address)


def _listen_unix(path: str) -> Listener:
    if len(os.fsencode(path)) > _UNIX_PATH_MAX:
        raise ConfigError(
            f"the socket path {path!r} has more than {_UNIX_PATH_MAX} bytes.",
            hint="Choose a shorter one.",
        )
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise _explain(
            error, path, "Stop it, or choose another path for server.address.", _unix_inode(path)
        ) from None
    server.setblocking(False)
    return Listener(server.detach(), f"unix:{path}", path)


def _remove_if_dead(path: str) -> None:
    """Remove a socket file on which no server answers: it is left over from a server that was
    killed."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):  # connect() is refused by any file
            raise FileExistsError(
                errno.EEXIST, "there is a file of that name, and it is not a socket"
            )
    except FileNotFoundError:
        return
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with probe:
        try:
            probe.connect(path)
        except FileNotFoundError:
            return
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE), path)


def _listen_tcp(address: str) -> Listener:
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((host, int(port)))
        server.listen(_BACKLOG)
    except (OSError, ValueError, OverflowError) as error:
        server.close()
        hint = "Use another port, or port 0 for any free one."
        raise _explain(error, join_host_port(host, port), hint, _tcp_inode(port)) from None
    server.setblocking(False)
    bound = server.getsockname()[1]
    return Listener(server.detach(), f"tcp:{join_host_port(host, bound)}")


def _explain(error: Exception, where: str, hint: str, inode: str) -> AddressInUse | ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{where} is taken{_holder_text(inode)}.", hint=hint)
    why = error.strerror if isinstance(error, OSError) and error.strerror else error
    return ConfigError(f"cannot listen on {where}: {why}.", hint="Correct server.address.")


# -- the owner of an address: Linux lists the inode of each listening socket, and the inodes that
# each process holds, as far as we may read them


def is_free(address: str) -> bool:
    """Return whether a TCP server could listen on HOST:PORT now."""
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
            probe.listen(1)
        except OSError as error:
            return error.errno != errno.EADDRINUSE
    return True


def held_by(address: str) -> str:
    """Return ` by process 4121 (python train.py)`, of the process that listens on the port of
    HOST:PORT, or an empty text if it cannot be found."""
    return _holder_text(_tcp_inode(address.rpartition(":")[2]))


def _tcp_inode(port: str) -> str:
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for words in _rows(table):
            if (
                len(words) > 9
                and words[3] == "0A"
                and port.isdecimal()
                and words[1].endswith(f":{int(port):04X}")
            ):
                return words[9]
    return ""


def _unix_inode(path: str) -> str:
    for words in _rows("/proc/net/unix"):
        if len(words) > 7 and words[3] == "00010000" and words[7] == path:  # it listens
            return words[6]
    return ""


def _rows(table: str) -> list[list[str]]:
    try:
        return [line.split() for line in Path(table).read_text(errors="replace").splitlines()[1:]]
    except OSError:
        return []


def _holder_text(inode: str) -> str:
    """Return ` by process 4121 (python train.py)`, or an empty text if it cannot be found."""
    for link in Path("/proc").glob("[0-9]*/fd/*") if inode else ():
        with contextlib.suppress(OSError):
            if os.readlink(link) == f"socket:[{inode}]":
                command = (
                    (link.parent.parent / "cmdline")
                    .read_bytes()
                    .replace(b"\0", b" ")
                    .decode(errors="replace")
                )
                return f" by process {link.parts[2]} ({command.strip()[:80]})"
    return ""
