"""Turns a forked child into a replica: the output, environment and limits that a process of its own
would have been started with.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence

from clipper_container.forking import Message

REQUEST_BYTES_MAX = 200_000  # a packet fits the usual send buffer
TITLE_BYTES_MAX = 4096
_LIBRARIES = ("openblas", "libgomp", "libiomp", "libomp", "mkl_rt", "libblis")
_SETTERS = (
    "omp_set_num_threads",
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "MKL_Set_Num_Threads",
    "bli_thread_set_num_threads",
)


def become(
    fds: Sequence[int], run: Callable[[Sequence[str]], int], fork_server: int, safe_path: bool
) -> int:
    """Run a replica in a child that was just forked. Returns its exit code.

    fds: for its output, and the SOCK_SEQPACKET socket by which its deployer sends {"arguments",
    "environment", "folder", "title"} and then reads reports. run: runs the command line.
    fork_server: process id of the parent, which is put where the arguments hold "PARENT".
    safe_path: whether sys.path lacks the working directory.
    """
    output, control = fds
    request = _request(control)
    if request is None:
        return 0  # the deployer has given up, or has ended
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    with contextlib.suppress(OSError):
        os.chdir(request["folder"])
        if safe_path:
            sys.path.insert(0, os.getcwd())
    reseed()
    set_title(request["title"])
    words = [str(fork_server) if word == "PARENT" else word for word in request["arguments"]]
    sys.argv[1:] = words
    return run([*words, "--report-fd", str(control)])


def _request(control: int) -> Message | None:
    """Read the request; None at the end of the stream."""
    with socket.socket(fileno=os.dup(control)) as connection:
        data = connection.recv(REQUEST_BYTES_MAX)
    found: Message | None = json.loads(data) if data else None
    return found


def reseed() -> None:
    """Give numpy's global generator a state of its own; Python reseeds `random` in every fork."""
    generator = getattr(sys.modules.get("numpy.random"), "seed", None)
    if generator is not None:
        generator()


def set_title(title: str) -> None:
    """Show `title` in `ps` instead of the command line of the fork server, shortened to its
    length.
    """
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/self/stat", "rb") as at:
        fields = at.read().rpartition(b")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        room = end - start
        if 1 < room <= TITLE_BYTES_MAX:
            ctypes.memmove(start, title.encode()[: room - 1].ljust(room, b"\0"), room)


def limit_loaded_threads(threads: int) -> None:
    """Set the thread limit of BLAS, OpenMP and torch where they were loaded under another one."""
    for path in _mapped(_LIBRARIES):
        with contextlib.suppress(OSError):
            library = ctypes.CDLL(path, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
            for name in _SETTERS:
                if hasattr(library, name):
                    getattr(library, name)(ctypes.c_int(threads))
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.set_num_threads(threads)


def _mapped(names: Sequence[str]) -> set[str]:
    """Return the mapped files whose names contain one of `names`."""
    found = set()
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if any(name in os.path.basename(path) for name in names):
                found.add("/" + path)
    return found
