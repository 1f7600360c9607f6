"""A check that the process has free file descriptors.

Libraries in C (libuv, gRPC) abort the process when an event loop gets no descriptors, so the server
checks first and raises.
"""

import os

from clipper.errors import NotStarted


def require_descriptors(count: int, what: str) -> None:
    """Make sure that `count` descriptors can be opened now. Raises NotStarted.

    what: what needs them, for the message: "gRPC".
    """
    opened: list[int] = []
    try:
        for _ in range(count):
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        raise NotStarted(
            f"{what} needs {count} file descriptors to start, and {len(opened)} are free:"
            f" {error.strerror}.",
            hint="Raise the limit: ulimit -n 65536.",
        ) from error
    finally:
        for fd in opened:
            os.close(fd)
