"""A server with few file descriptors, and clients that take all that they can get."""

import contextlib
import json
import os
import signal
import socket
import sys
import time
import urllib.request

import pytest

from tests.processes import Program

SERVER = """
import resource, sys, threading
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
import clipper
server = clipper.start(state=sys.argv[1], http="127.0.0.1:0", grpc="127.0.0.1:0",
                       address="tcp://127.0.0.1:0", restart_ms_max=200)
server.deploy("m", lambda rows: rows.sum(axis=1), input="f64[1]", cache=False)
server.app("a", models=["m"], slo_ms=2000)
print(server.http_address, server.grpc_address, server.address.removeprefix("tcp:"), flush=True)
sys.stdin.read()
server.close()
"""


def answer(address: str) -> object:
    body = json.dumps({"input": [1.0 + time.time() % 1]}).encode()
    request = urllib.request.Request(f"http://{address}/api/a/predict", body)
    with urllib.request.urlopen(request, timeout=60) as reply:
        return json.load(reply)


def flood(address: str, count: int) -> list[socket.socket]:
    host, _, port = address.rpartition(":")
    made = []
    for _ in range(count):
        one = socket.socket()
        one.settimeout(5)
        try:
            one.connect((host, int(port)))
        except OSError:
            one.close()
        else:
            made.append(one)
    return made


@pytest.mark.parametrize("kind", ["http", "grpc", "containers"])
def test_a_container_comes_back_while_idle_connections_take_all_descriptors(tmp_path, kind):
    with (
        contextlib.ExitStack() as idle,
        Program(sys.executable, "-c", SERVER, tmp_path, apart=True) as process,
    ):
        http, grpc, containers = process.line().split()
        until(lambda: answer(http)["default"] is False)
        busy = {"http": http, "grpc": grpc, "containers": containers}[kind]
        made = flood(busy, 400)
        if kind == "http":  # those of its own are refused; a query had its connection before
            made.pop().close()
        for one in made:
            idle.enter_context(one)
        (pid,) = models_of(process.pid)
        os.kill(pid, signal.SIGKILL)
        until(lambda: models_of(process.pid) not in ([], [pid]))
        if kind != "http":
            until(lambda: answer(http)["default"] is False)
        idle.close()
        until(lambda: answer(http)["default"] is False)
        process.end_input()
        assert process.wait() == 0


def until(is_so) -> None:
    give_up = time.monotonic() + 60
    while True:
        try:
            if is_so():
                return
        except OSError:
            pass
        assert time.monotonic() < give_up
        time.sleep(0.05)


def models_of(server: int) -> list[int]:
    """Return the processes of models below a server."""
    parents, titles = {}, {}
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            with open(f"/proc/{name}/cmdline", "rb") as file:
                titles[int(name)] = file.read()
        except OSError:
            continue
    return [
        pid
        for pid, title in titles.items()
        if b"m:1/0" in title and server in (parents[pid], parents.get(parents[pid]))
    ]
