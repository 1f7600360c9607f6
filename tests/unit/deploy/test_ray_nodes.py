"""A node that is kept running: what an actor on Ray does, without Ray."""

import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import pytest

from clipper.deploy.ray.ingress import host_port
from clipper.deploy.ray.nodes import NodeProcess, RayCluster, node_addresses, node_command
from clipper.deploy.ray.servers import server_addresses
from clipper.deploy.ray.shards import shard_command
from clipper.errors import ConfigError

PATIENCE_S = 30.0
NODE = """
import signal, subprocess, sys, threading
stopping = threading.Event()
if "deaf" in sys.argv:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, lambda *_: stopping.set())
print("queries come in at http://127.0.0.1:8000, with keys", flush=True)
if "broken" in sys.argv:
    sys.exit("error: no such store")
print(*sys.argv[1:], flush=True)
if "forks" in sys.argv:
    child = subprocess.Popen(["sleep", "90"], start_new_session=True)
    print(f"child {child.pid}", flush=True)
print("ready", flush=True)
stopping.wait()
print("left: 3 of 3 models moved", flush=True)
"""


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., NodeProcess]]:
    (tmp_path / "node.py").write_text(NODE)
    made = []

    program = (sys.executable, str(tmp_path / "node.py"))

    def start(*words: str) -> NodeProcess:
        made.append(NodeProcess("mesh-1", node_command("mesh-1", words, program)))
        return made[-1]

    yield start
    for one in made:
        one.stop(0.1)


def until(node: NodeProcess, is_so: Callable[[dict[str, object]], bool]) -> dict[str, object]:
    give_up = time.monotonic() + PATIENCE_S
    while not is_so(found := node.status()):
        assert time.monotonic() < give_up, found
        time.sleep(0.01)
    return found


def test_it_is_ready_when_it_reports_it_and_leaves_on_request(
    make: Callable[..., NodeProcess],
) -> None:
    node = make("--store", "etcd://h:1")
    found = until(node, lambda one: one["state"] == "ready")
    assert (found["http"], found["starts"]) == ("http://127.0.0.1:8000", 1)
    words = f"--store etcd://h:1 --name mesh-1 --end-with-parent {os.getpid()}"
    assert words in found["lines"]  # type: ignore[operator]
    ended = node.stop(PATIENCE_S)
    assert (ended["state"], ended["pid"], ended["starts"]) == ("ended", 0, 1)
    assert ended["lines"][-2:] == ["left: 3 of 3 models moved", "stopped: exit 0"]
    assert node.stop(PATIENCE_S)["state"] == "ended"


def test_it_is_started_again_when_it_is_killed(make: Callable[..., NodeProcess]) -> None:
    node = make()
    found = until(node, lambda one: one["state"] == "ready")
    os.kill(int(str(found["pid"])), signal.SIGKILL)
    again = until(node, lambda one: one["starts"] == 2 and one["state"] == "ready")
    assert again["pid"] != found["pid"]
    assert "exited: killed (SIGKILL)" in again["lines"]  # type: ignore[operator]


def test_one_that_cannot_start_is_tried_again_and_gives_the_reason(
    make: Callable[..., NodeProcess],
) -> None:
    node = make("broken")
    found = until(node, lambda one: int(str(one["starts"])) > 2)
    assert "error: no such store" in found["lines"]  # type: ignore[operator]
    assert found["state"] != "ready"
    assert node.stop(PATIENCE_S)["state"] == "ended"


def test_one_that_does_not_leave_is_killed(make: Callable[..., NodeProcess]) -> None:
    node = make("deaf")
    until(node, lambda one: one["state"] == "ready")
    assert node.stop(0.1)["lines"][-1] == "stopped: killed (SIGKILL)"


def test_names() -> None:
    assert RayCluster("prod", 3).names() == ["prod-1", "prod-2", "prod-3"]


def test_without_ray_the_command_that_installs_it_is_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from clipper.deploy.ray.nodes import join_ray

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ConfigError, match="Ray is not installed"):
        join_ray("auto")


@pytest.mark.parametrize("host", ["fd00::7", "10.0.0.7", "machine-7"])
def test_addresses_of_a_host_are_read_as_they_are_written(host: str) -> None:
    """An IPv6 address is put in brackets: without them its URL would name another host."""
    peers, http = node_addresses(host, 8000)[1::2]
    assert host_port(http) == (host, 8000)
    assert peers.startswith("tcp:")
    own = [peers.removeprefix("tcp:"), *server_addresses(host, ("http", "grpc"))[1::2]]
    own.append(shard_command("params-0", "/share", host)[-1])
    assert [host_port(address) for address in own] == [(host, 0)] * 4


def test_a_child_that_holds_the_output_hides_no_death(make: Callable[..., NodeProcess]) -> None:
    """Runs a child in a session of its own, so that it does not end with the node."""
    node = make("forks")
    found = until(node, lambda one: one["state"] == "ready")
    try:
        os.kill(int(str(found["pid"])), signal.SIGKILL)
        found = until(node, lambda one: one["starts"] == 2 and one["state"] == "ready")
    finally:
        for line in cast("list[str]", found["lines"]):
            if line.startswith("child "):
                os.kill(int(line.removeprefix("child ")), signal.SIGKILL)


def test_a_program_that_cannot_be_started_is_tried_until_it_can(tmp_path: Path) -> None:
    program = tmp_path / "program"
    node = NodeProcess("mesh-1", node_command("mesh-1", (), (str(program),)))
    try:
        until(node, lambda one: any("not started: [Errno 2]" in line for line in one["lines"]))  # type: ignore[attr-defined]
        program.write_text(f"#!/bin/sh\nexec {sys.executable} -c '{NODE}' \"$@\"\n")
        program.chmod(0o700)
        until(node, lambda one: one["state"] == "ready")
    finally:
        node.stop(PATIENCE_S)


def test_the_process_that_is_a_server_gets_what_servers_need(
    make: Callable[..., NodeProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPPER_MESH__LABELS", "a")
    monkeypatch.setenv("DATABASE_URL", "postgres://u:p@h/d")
    found = until(make(), lambda one: one["state"] == "ready")
    with open(f"/proc/{found['pid']}/environ", "rb") as file:
        names = {entry.partition(b"=")[0] for entry in file.read().split(b"\0")}
    assert b"CLIPPER_MESH__LABELS" in names
    assert b"DATABASE_URL" not in names
