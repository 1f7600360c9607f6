"""Where containers dial in: a unix socket of this server's own, one at a given path, or a TCP port."""

import contextlib
import errno
import os
import socket
from dataclasses import dataclass
from pathlib import Path

from clipper.errors import AddressInUse, ConfigError

_BACKLOG = 512
_UNIX_PATH_MAX = 107


@dataclass(frozen=True, slots=True)
class Listener:
    """fd: a listening socket, non-blocking; whoever serves it owns it.  connect: what a container is told: `unix:/path`,
    `tcp:host:port`.  path: of the unix socket, to be removed at the end."""

    fd: int
    connect: str
    path: str = ""

    def remove(self) -> None:
        if self.path:
            with contextlib.suppress(OSError):
                os.unlink(self.path)


def listen(address: str, directory: Path) -> Listener:
    """Listen on `unix` (a socket in `directory`), `unix:PATH` or `tcp://HOST:PORT` (port 0: any free one)."""
    if address == "unix":
        return _listen_unix(str(directory / "clipper.sock"))
    if address.startswith("unix:"):
        return _listen_unix(os.path.abspath(address.removeprefix("unix:")))
    return _listen_tcp(address)


def _listen_unix(path: str) -> Listener:
    if len(os.fsencode(path)) > _UNIX_PATH_MAX:
        raise ConfigError(f"the socket path {path!r} has more than {_UNIX_PATH_MAX} bytes.", hint="Choose a shorter one.")
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        _remove_if_dead(path)
        server.bind(path)
        os.chmod(path, 0o600)
        server.listen(_BACKLOG)
    except OSError as error:
        server.close()
        raise _explain(error, path, "Is another server using it?") from None
    server.setblocking(False)
    return Listener(server.detach(), f"unix:{path}", path)


def _remove_if_dead(path: str) -> None:
    """A socket file that nobody answers on is left over from a server that was killed."""
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
    except (OSError, ValueError) as error:
        server.close()
        raise _explain(error, f"{host}:{port}", "Use another port, or port 0 for any free one.") from None
    server.setblocking(False)
    bound = server.getsockname()[1]
    return Listener(server.detach(), f"tcp:{host}:{bound}")


def _explain(error: Exception, where: str, hint: str) -> AddressInUse | ConfigError:
    if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
        return AddressInUse(f"{where} is taken.", hint=hint)
    return ConfigError(f"cannot listen on {where}: {error}.", hint=hint)
