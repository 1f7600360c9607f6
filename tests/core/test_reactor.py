"""clipper_core.runtime.reactor: the checks of reactor.cpp; and connections to each of the three
loops when the process has no more descriptors."""

import contextlib
import os
import re
import resource
import select
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from clipper_core.engine.engine import Engine
from clipper_core.engine.io_loop import IoLoop
from clipper_core.http.http_server import HttpServer
from clipper_core.params.shard_loop import ShardLoop
from tests.memory_container import wait_until

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCE = Path(__file__).with_name("reactor.cpp")
CHECKS = re.findall(r"^TEST\((\w+)\)", SOURCE.read_text(), re.M)


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("reactor") / "reactor"
    command = [os.environ.get("CXX", "g++"), "-std=c++17", "-O1", "-Wall", "-Wextra"]
    command += [f"-I{ROOT / 'src' / 'clipper_core'}", str(SOURCE), "-o", str(made)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return made


@pytest.mark.parametrize("check", CHECKS)
def test_a_reactor(program: Path, check: str) -> None:
    done = subprocess.run(
        [program, check], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr


# -- the loops

Loop = tuple[Callable[[int], object], Callable[[], None], Callable[[], object]]  # listen, run, stop


def containers() -> Loop:
    loop = IoLoop(Engine(cache_bytes_max=1 << 20, tasks_max=1 << 12))
    return loop.listen, loop.run, loop.stop


def http() -> Loop:
    limits = {
        "header_bytes_max": 4096,
        "body_bytes_max": 4096,
        "pipeline_max": 8,
        "unsent_bytes_max": 4096,
    }
    server = HttpServer(
        [],
        1,
        b"",
        header_s=60,
        idle_s=60,
        connections_max=9,
        finish=repr,
        encode=bytes,
        **limits,
    )
    return server.listen, lambda: server.run(0), server.stop


def shards() -> Loop:
    loop = ShardLoop(hello_us=60_000_000)
    return loop.listen, loop.run, loop.stop


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def reject(loop: Callable[[], Loop], path: str) -> None:
    """Connect three clients while no descriptor is free: each is closed, one from before is not."""
    listen, run, stop = loop()
    with contextlib.ExitStack() as stack:
        early, *late = (
            stack.enter_context(contextlib.closing(socket.socket(socket.AF_UNIX))) for _ in range(4)
        )
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(path)
        listener.listen(8)
        listen(listener.detach())
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        before = open_descriptors()
        early.connect(path)
        wait_until(lambda: open_descriptors() > before, "the first is accepted")
        _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (before + 16, most))
        with contextlib.suppress(OSError):
            while True:
                stack.callback(os.close, os.dup(0))
        for client in late:
            client.settimeout(30)
            client.connect(path)
        assert [client.recv(1) for client in late] == [b""] * 3
        assert not select.select([early], [], [], 0)[0]
        stop()
        thread.join()


@pytest.mark.parametrize("loop", ["containers", "http", "shards"])
def test_connections_beyond_descriptors_are_rejected(tmp_path: Path, loop: str) -> None:
    script = f"from tests.core.test_reactor import *; reject({loop}, {str(tmp_path / 'socket')!r})"
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
