"""The memory that the bodies of requests under way take, of all connections together."""

from clipper_core.http.http_server import HttpServer


class BodyMemory:
    """Counts the bytes of request bodies, from their arrival until their requests are answered.

    Small requests that the compiled server holds until they are complete count too, once it is
    given as `core_server`. Threads: the event loop's.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0
        self.core_server: HttpServer | None = None

    def take(self, size: int) -> bool:
        """Take `size` bytes; return whether there was room."""
        in_core = self.core_server.kept if self.core_server is not None else 0
        if self.held + in_core + size > self.bytes_max:
            return False
        self._add(size)
        return True

    def grow(self, size: int) -> None:
        """Count `size` bytes that are there already, such as those of a body that was inflated."""
        self._add(size)

    def give_back(self, size: int) -> None:
        """Give back bytes that were taken."""
        self._add(-size)

    def _add(self, size: int) -> None:
        if size:
            self.held += size
            if self.core_server is not None:
                self.core_server.kept_outside = self.held
