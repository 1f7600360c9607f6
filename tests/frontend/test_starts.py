"""Frontends that cannot start: start() raises the cause, nothing hangs, and nothing is left."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import clipper
from clipper.component import fast_event_loop
from clipper.component.threads import SystemThreads
from clipper.errors import NotStarted
from tests.frontend.conftest import QUICK, ask

BOTH = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0", "grpc": "127.0.0.1:0"}
ONLY_HTTP = {"http": "127.0.0.1:0", "admin": "127.0.0.1:0"}


def refuse(*_: object, **__: object) -> Any:
    raise MemoryError("injected")


@pytest.mark.parametrize("listeners", [ONLY_HTTP, BOTH], ids=["http", "grpc"])
@pytest.mark.parametrize(
    "place",
    [
        "clipper.manage.http.endpoints.FutureWatcher",
        "uvloop.new_event_loop",
        "clipper.frontend.http.listeners.HttpService",
        "clipper.frontend.http.fast_path.FastPath.open",
        "clipper.frontend.grpc.server.GrpcDispatcher",
    ],
)
def test_an_error_while_a_listener_starts_is_raised_by_start(
    place: str, listeners: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "grpc" in place and listeners is ONLY_HTTP:
        pytest.skip("nothing of gRPC starts")
    state = f"sqlite:{tmp_path}/state"
    with monkeypatch.context() as patched:
        patched.setattr(place, refuse)
        with pytest.raises(MemoryError, match="injected"):
            clipper.start(state=state, **listeners, **QUICK)  # type: ignore[arg-type]
    with clipper.start(state=state, **listeners, **QUICK) as server:  # type: ignore[arg-type]
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200


def test_without_uvloop_all_addresses_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = fast_event_loop()
    loop.close()
    assert type(loop).__module__.startswith("asyncio")
    with clipper.start(**BOTH, **QUICK) as server:  # type: ignore[arg-type]
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200
        with grpc.insecure_channel(server.grpc_address) as channel:
            grpc.channel_ready_future(channel).result(timeout=30)


@pytest.mark.parametrize(
    "name", ["clipper-http", "clipper-http-core", "clipper-http-work-2", "clipper-grpc-work-3",
             "clipper-grpc-manage-1", "clipper-rolling"],
)  # fmt: skip
def test_a_thread_that_the_system_does_not_have_is_raised_by_start(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known, state = SystemThreads.start, f"sqlite:{tmp_path}/state"

    def start(self: SystemThreads, target: Callable[[], None], wanted: str) -> Any:
        if wanted == name:
            raise RuntimeError("can't start new thread")
        return known(self, target, wanted)

    with monkeypatch.context() as patched:
        patched.setattr(SystemThreads, "start", start)
        with pytest.raises(NotStarted, match=name):
            clipper.start(state=state, **BOTH, **QUICK)  # type: ignore[arg-type]
    with clipper.start(state=state, **BOTH, **QUICK) as server:  # type: ignore[arg-type]
        assert ask(server.http_address, "GET", "/v2/health/live").status == 200


WITH_LIMIT = """
import os, resource, signal, sys, urllib.request
import clipper, clipper.frontend.grpc.server
from clipper.errors import ClipperError

def attempt(free):
    os.closerange(3, 4096)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 + free, 3 + free))
    try:
        with clipper.start(http="127.0.0.1:0", admin="127.0.0.1:0", GRPC) as server:
            with urllib.request.urlopen(f"http://{server.http_address}/v2/health/live") as reply:
                return f"serves {reply.status}"
    except (ClipperError, OSError, MemoryError) as error:
        return f"refused: {type(error).__name__}: {error}"

for free in map(int, sys.argv[1:]):
    if not (child := os.fork()):
        signal.alarm(60)
        try:
            print(free, attempt(free), flush=True)
        finally:
            os._exit(0)
    code = os.waitpid(child, 0)[1]
    if code:
        print(free, "ended by itself", code, flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("more", "free"), [("", range(14, 50, 5)), ('grpc="127.0.0.1:0"', range(40, 100, 24))]
)
def test_with_few_descriptors_a_server_starts_and_serves_or_says_what_is_missing(
    more: str, free: range
) -> None:
    """None hangs, none is aborted by a library, and none starts without serving."""
    script = WITH_LIMIT.replace("GRPC", more)
    words = [sys.executable, "-c", script, *map(str, free)]
    found = subprocess.run(words, capture_output=True, text=True, timeout=300, check=True)
    lines = [line for line in found.stdout.splitlines() if re.match(r"\d+ ", line)]
    assert len(lines) == len(free), found.stdout + found.stderr
    assert all(re.match(r"\d+ (serves 200|refused: \w+: )", line) for line in lines), lines
    assert "refused" in lines[0]
    assert "serves" in lines[-1]
