"""A proxy that cuts connections after some bytes of an answer."""

import contextlib
import socket
import threading

from tests.threads import join


class CuttingProxy:
    """Passes bytes on to a port of this host, and resets the first `cuts` connections on which more
    than `after` bytes came back. cut: how many so far. passed: bytes passed back."""

    def __init__(self, to: int, cuts: int, after: int) -> None:
        self._to, self._cuts, self._after = to, cuts, after
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.cut = self.passed = 0
        self._open: list[socket.socket] = []
        self._thread = threading.Thread(target=self._accept, daemon=True)

    def __enter__(self) -> "CuttingProxy":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        join(self._thread)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._to))
                self._open += [client, server]
                threading.Thread(target=self._pass, args=(client, server), daemon=True).start()
                threading.Thread(target=self._back, args=(server, client), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)

    def _back(self, source: socket.socket, sink: socket.socket) -> None:
        came = 0
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                came += len(data)
                self.passed += len(data)
                sink.sendall(data)
                if came > self._after and self.cut < self._cuts:
                    self.cut += 1
                    break
            for one in (source, sink):
                one.shutdown(socket.SHUT_RDWR)
