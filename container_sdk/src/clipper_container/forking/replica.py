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
from collections.abc import Sequence

from clipper_container.forking import Message
from clipper_container.forking.fork_server import Parent

REQUEST_BYTES_MAX = 200_000  # a packet fits the usual send buffer
TITLE_BYTES_MAX = 4096
_LIBRARIES = ("openblas", "libgomp", "libiomp", "libomp", "mkl_rt", "libblis")
_SEEDS = (("numpy.random", "seed"), ("torch", "seed"))  # functions that take a random seed
_SETTERS = (
    "omp_set_num_threads",
    "openblas_set_num_threads",
    "openblas_set_num_threads64_",
    "scipy_openblas_set_num_threads",
    "scipy_openblas_set_num_threads64_",
    "MKL_Set_Num_Threads",
    "bli_thread_set_num_threads",
)


def become(fds: Sequence[int], parent: Parent) -> int:
    """Run a replica in a child that was just forked: an entry of a fork server.

    fds: for its output, and the SOCK_SEQPACKET socket by which its deployer sends {"arguments",
    "environment", "folder", "title"}, with the descriptor of the folder, and then reads reports.
    Where the arguments hold "PARENT", the process id of the fork server is put.
    """
    from clipper_container.__main__ import main

    output, control = fds
    request, folders = received(control)
    if request is None:
        return 0  # the deployer has given up, or has ended
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.environ.clear()
    os.environ.update(request["environment"])
    with contextlib.suppress(OSError):  # it may have been removed
        os.chdir(folders[0] if folders else request["folder"])
        for folder in folders:
            os.close(folder)
        if parent.safe_path:
            sys.path.insert(0, os.getcwd())
    reseed()
    set_title(request["title"])
    words = [str(parent.pid) if word == "PARENT" else word for word in request["arguments"]]
    sys.argv[1:] = words
    words += ["--report-fd", str(control)]
    return main(words, frozenset(sys.modules), parent.restore)


def received(control: int) -> tuple[Message | None, list[int]]:
    """Read what a child is to do, and the descriptors for it; None at the end of the stream: the
    requesting process has given up, or has ended.
    """
    connection = socket.socket(fileno=control)  # no further descriptor may be free
    try:
        data, folders, _, _ = socket.recv_fds(
            connection, REQUEST_BYTES_MAX, 1, socket.MSG_CMSG_CLOEXEC
        )
    finally:
        connection.detach()
    found: Message | None = json.loads(data) if data else None
    return found, folders


def reseed() -> None:
    """Give the global generators of the libraries that are loaded a state of their own; Python
    reseeds `random` in every fork.
    """
    for module, name in _SEEDS:
        seed = getattr(sys.modules.get(module), name, None)
        if seed is not None:
            seed()


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
