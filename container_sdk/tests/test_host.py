"""The real host process against a node and servers that speak docs/hosts.md and docs/wire.md by
hand."""

from __future__ import annotations

import struct
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest

from container_sdk.tests import fake_server as fake
from container_sdk.tests.fake_node import Node, Refused

MODELS = """
import threading, time
import gc
import numpy as np
from clipper_container import Model, Scored

def total(xs):
    return xs.sum(axis=1)

def picky(xs):
    raise ValueError("not today")

class Named(Model):
    input, output, batch_max, sessions = "f64[2]", "f64", 8, True

    def load(self):
        self.factor = 10.0

    def predict_batch(self, xs, sessions):
        return xs[:, 0] * self.factor + sessions

def slow(xs):
    time.sleep(0.2)
    return xs[:, 0]

def passed_over(xs):
    return [float(gc.get_freeze_count())] * len(xs)

number = 7
"""


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "models.py").write_text(textwrap.dedent(MODELS))
    return tmp_path


@contextmanager
def hosting(folder: Path, *options: str, cwd: Path | None = None) -> Iterator[Node]:
    node = Node(folder, *options, cwd=cwd)
    try:
        yield node
    finally:
        node.printed = node.close()
        assert node.process.returncode == 0, node.printed


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    """Yield a host shared by all tests that unload what they load."""
    folder = tmp_path_factory.mktemp("host")
    (folder / "models.py").write_text(textwrap.dedent(MODELS))
    with hosting(folder) as node:
        node.folder = folder
        yield node


@pytest.fixture
def node(shared: Node) -> Iterator[Node]:
    yield shared
    for model, _ in shared.request("status")["resident"]:
        shared.request("unload", model=model)
    shared.events.clear()
    assert shared.request("status")["connections"] == 0


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[fake.Server]:
    with listening(tmp_path) as server:
        yield server


@contextmanager
def listening(folder: Path) -> Iterator[fake.Server]:
    """Yield a listening server; close it and its accepted connections at the end."""
    folder.mkdir(exist_ok=True)
    server = fake.Server(folder)
    peers: list[fake.Peer] = []
    accept = server.accept
    server.accept = lambda: peers.append(accept()) or peers[-1]
    try:
        yield server
    finally:
        for peer in peers:
            peer.close()
        server.close()


def load(node: Node, model: str, path: str, **more: Any) -> dict[str, Any]:
    return node.request(
        "load", model=model, **{"type": "python", "path": path, "key": str(node.folder), **more}
    )


def serve(node: Node, server: fake.Server, model: str, **welcome: Any) -> fake.Peer:
    n = node.begin("serve", model=model, address=server.address, token="theirs", replica=3)
    peer = server.accept()
    peer.greeting = peer.welcome(**welcome)
    assert node.end(n) == {}
    return peer


def answer(peer: fake.Peer, rows: Any = ((1.0, 2.0), (3.0, 4.0)), id: int = 1) -> list[float]:
    got = peer.request(fake.fixed(np.array(rows), id))
    assert (got.kind, got.id) == (fake.REPLY, id), got
    return got.parts()["rows"].tolist()


def test_hello_of_a_host_has_its_types_and_pid(node: Node) -> None:
    assert node.hello["token"] == "secret"
    assert node.hello["pid"] == node.process.pid
    assert {"python", "packed", "onnx", "skops"} <= set(node.hello["types"])
    assert (node.hello["verb"], node.hello["runtime"]) == ("hello", "clipper/0.1")
    status = node.request("status")
    assert status["resident"] == []
    assert status["capacity_bytes"] > 1 << 28
    assert status["loading_max"] >= 2
    assert status["load_timeout_ms"] == 30_000


def test_only_objects_created_after_the_start_are_garbage_collected(
    node: Node, listener: fake.Server
) -> None:
    load(node, "p", "models:passed_over")
    peer = serve(node, listener, "p", quiet=True)
    assert answer(peer)[0] > 1000
    peer.close()


def test_a_model_is_loaded_served_and_unloaded(node: Node, listener: fake.Server) -> None:
    loaded = load(node, "a", "models:Named")
    assert (loaded["input"], loaded["output"], loaded["concurrency"]) == ("f64[2]", "f64", 1)
    assert loaded["size_bytes"] >= 4096
    assert node.request("size", model="a") == {"size_bytes": loaded["size_bytes"]}
    assert node.request("status")["resident"] == [["a", loaded["size_bytes"]]]
    peer = serve(node, listener, "a", quiet=True)
    expected = {
        "name": "a",
        "version": 1,
        "replica": 3,
        "token": "theirs",
        "input": "f64[2]",
        "batch_max": 8,
        "sessions": True,
    }
    assert {**peer.greeting, **expected, "quiet": True} == peer.greeting
    assert answer(peer) == [10.0, 30.0]
    n = node.begin("unload", model="a")
    assert peer.frame().kind == fake.GOODBYE
    peer.close()
    assert node.end(n) == {}
    assert node.request("status")["resident"] == []
    assert node.events == []  # it was asked to go


def test_two_batches_that_come_together_are_answered_in_turn(
    node: Node, listener: fake.Server
) -> None:
    load(node, "a", "models:total")
    peer = serve(node, listener, "a", quiet=True)
    batches = [np.full((n, 2), float(n)) for n in (1, 3, 700, 9000)]
    peer.sock.sendall(b"".join(fake.fixed(rows, id) for id, rows in enumerate(batches, 1)))
    for id, rows in enumerate(batches, 1):
        got = peer.frame()
        assert (got.kind, got.id) == (fake.REPLY, id)
        assert got.parts()["rows"].tolist() == rows.sum(axis=1).tolist()
    peer.close()
    assert node.event()["why"] == "the server closed the connection"


def test_a_model_that_raises_fails_the_batch_and_continues(
    node: Node, listener: fake.Server
) -> None:
    load(node, "p", "models:picky")
    peer = serve(node, listener, "p", quiet=True)
    for id in (1, 2):
        got = peer.request(fake.fixed(np.zeros((1, 2)), id))
        assert got.kind == fake.FAILURE
        assert b"not today" in got.payload
    peer.close()


def test_heartbeats_are_sent_unless_the_server_declares_quiet(
    node: Node, listener: fake.Server
) -> None:
    load(node, "a", "models:total")
    peer = serve(node, listener, "a", heartbeat_ms=300)
    for _ in range(2):
        assert peer.frame(heartbeats=True).kind == fake.HEARTBEAT
        peer.sock.sendall(fake.frame(fake.HEARTBEAT))
    assert answer(peer) == [3.0, 7.0]
    peer.close()


def test_a_server_that_falls_silent_is_left_unless_it_is_quiet(
    node: Node, listener: fake.Server
) -> None:
    load(node, "a", "models:total")
    peer = serve(node, listener, "a", heartbeat_ms=10)
    assert node.event()["model"] == "a"
    peer.close()


def test_leave_waits_for_the_batch_in_hand_and_sends_goodbye(
    node: Node, listener: fake.Server
) -> None:
    load(node, "s", "models:slow")
    peer = serve(node, listener, "s", quiet=True)
    peer.sock.sendall(fake.fixed(np.ones((1, 2))))
    n = node.begin("leave", model="s", address=listener.address)
    # the batch may not have been read when leave comes
    kinds = {peer.frame().kind, peer.frame().kind}
    assert kinds == {fake.REPLY, fake.GOODBYE}
    peer.sock.sendall(fake.frame(fake.GOODBYE))
    with pytest.raises(EOFError):
        peer.frame()  # it has said so already
    peer.close()
    assert node.end(n) == {}
    assert node.request("leave", model="s", address=listener.address) == {}
    assert node.events == []
    peer = serve(node, listener, "s", quiet=True)  # and again
    assert answer(peer) == [1.0, 3.0]
    peer.close()


def test_a_server_that_sends_goodbye_is_left(node: Node, listener: fake.Server) -> None:
    load(node, "a", "models:total")
    peer = serve(node, listener, "a", quiet=True)
    peer.sock.sendall(fake.frame(fake.GOODBYE))
    assert node.event() == {
        "event": "left",
        "model": "a",
        "address": listener.address,
        "why": "the server sent goodbye",
    }
    assert peer.frame().kind == fake.GOODBYE
    with pytest.raises(EOFError):
        peer.frame()


def test_serve_joins_the_connection_that_is_there(node: Node, listener: fake.Server) -> None:
    load(node, "a", "models:total")
    first = node.begin("serve", model="a", address=listener.address, token="", replica=1)
    second = node.begin("serve", model="a", address=listener.address, token="", replica=1)
    peer = listener.accept()
    peer.welcome(quiet=True)
    assert (
        node.end(first)
        == node.end(second)
        == node.request("serve", model="a", address=listener.address)
        == {}
    )
    assert node.request("status")["connections"] == 1
    peer.close()


def test_a_server_that_refuses_gives_the_reason(node: Node, listener: fake.Server) -> None:
    load(node, "a", "models:total")
    n = node.begin("serve", model="a", address=listener.address)
    peer = listener.accept()
    peer.hello()
    peer.sock.sendall(fake.frame(fake.REFUSE, b"not you"))
    with pytest.raises(Refused, match="not you"):
        node.end(n)
    assert node.request("status")["connections"] == 0
    peer.close()


def test_a_server_that_comes_late_is_dialled_again(node: Node, tmp_path: Path) -> None:
    load(node, "a", "models:total")
    n = node.begin("serve", model="a", address=f"unix:{tmp_path}/s")
    with listening(tmp_path) as server:
        server.accept().welcome(quiet=True)
        assert node.end(n) == {}


@pytest.mark.parametrize("address", ["unix:/nowhere/at/all", "tcp:127.0.0.1:1"])
def test_a_server_that_is_not_there_is_given_up(node: Node, address: str) -> None:
    load(node, "a", "models:total")
    with pytest.raises(Refused, match=r"No such file|refused"):
        node.request("serve", model="a", address=address, timeout_ms=100)
    assert node.request("status")["connections"] == 0


def test_one_batch_at_once_from_several_servers(node: Node, tmp_path: Path) -> None:
    load(node, "s", "models:slow")
    with listening(tmp_path / "1") as one, listening(tmp_path / "2") as other:
        peers = [serve(node, server, "s", quiet=True) for server in (one, other)]
        for peer in peers:
            peer.sock.sendall(fake.fixed(np.ones((1, 2))))
        assert [peer.frame().kind for peer in peers] == [
            fake.REPLY
        ] * 2  # the second was parked, and came out again
        assert [answer(peer, id=2) for peer in peers] == [[1.0, 3.0]] * 2


@pytest.mark.parametrize(
    ("request_", "fault", "why"),
    [
        ({"verb": "dance"}, "none", "unknown verb 'dance'; known: status, load"),
        ({"verb": "load"}, "none", "the request names no model"),
        ({"verb": "load", "model": 7}, "none", "model must be str, not 7"),
        (
            {"verb": "load", "model": "x", "type": "wood"},
            "host",
            "no runtime of this host opens type 'wood'; it opens ",
        ),
        (
            {"verb": "load", "model": "x", "type": "python", "path": "models"},
            "artifact",
            "neither module:attribute nor",
        ),
        (
            {"verb": "load", "model": "x", "type": "python", "path": "models:nothing"},
            "artifact",
            "has no attribute 'nothing'",
        ),
        (
            {"verb": "load", "model": "x", "type": "python", "path": "models:number"},
            "artifact",
            "cannot serve a int",
        ),
        (
            {"verb": "load", "model": "x", "type": "python", "path": "nothing:f"},
            "load",
            "No module named 'nothing'",
        ),
        (
            {"verb": "load", "model": "x", "type": "python", "path": "f:f", "key": "/nowhere"},
            "load",
            "'/nowhere' is not there",
        ),
        (
            {"verb": "load", "model": "x", "type": "onnx", "path": "/nowhere.onnx"},
            "load",
            "/nowhere.onnx",
        ),
        (
            {"verb": "load", "model": "x", "type": "onnx", "path": "PATH/models.py"},
            "artifact",
            "onnxruntime cannot load this",
        ),
        (
            {"verb": "load", "model": "x", "type": "skops", "path": "PATH/models.py"},
            "artifact",
            "are no skops file",
        ),
        (
            {"verb": "load", "model": "x", "type": "packed", "path": "PATH/models.py"},
            "artifact",
            "was not packed by clipper",
        ),
        (
            {"verb": "load", "model": "x", "type": "onnx", "path": "PATH/models.py", "key": "{"},
            "artifact",
            "not a JSON object",
        ),
        (
            {
                "verb": "load",
                "model": "x",
                "type": "onnx",
                "path": "PATH/models.py",
                "key": '{"a":1}',
            },
            "artifact",
            "known: sha256",
        ),
        (
            {
                "verb": "load",
                "model": "x",
                "type": "onnx",
                "path": "PATH/models.py",
                "key": '{"sha256":"00"}',
            },
            "artifact",
            "is not the file that was deployed",
        ),
        ({"verb": "size", "model": "x"}, "none", "model 'x' is not loaded here"),
        (
            {"verb": "serve", "model": "x", "address": "unix:/s"},
            "none",
            "model 'x' is not loaded here",
        ),
        (
            {"verb": "predict_size", "model": "x", "type": "wood"},
            "host",
            "no runtime of this host opens type 'wood'",
        ),
    ],
)
def test_a_request_that_fails_names_the_party_at_fault(
    node: Node, request_: dict[str, Any], fault: str, why: str
) -> None:
    fields = {
        key: value.replace("PATH", str(node.folder))
        for key, value in request_.items()
        if key != "model"
    }
    fields |= {"model": request_["model"]} if "model" in request_ else {}
    if fields.get("type") == "python":
        fields.setdefault("key", str(node.folder))
    with pytest.raises(Refused) as refused:
        node.request(fields.pop("verb"), **fields)
    assert refused.value.args[0] == fault
    assert why in refused.value.args[1]
    assert node.request("status")["resident"] == []


def test_a_load_joins_one_of_the_same_and_clashes_with_another(node: Node) -> None:
    assert node.request("unload", model="nobody") == {}
    both = [
        node.begin("load", model="a", type="python", path="models:total", key=str(node.folder))
        for _ in range(2)
    ]
    assert node.end(both[0]) == node.end(both[1])
    with pytest.raises(Refused, match="is already loaded from 'models:total'; unload it first"):
        load(node, "a", "models:slow")


def test_files_of_one_name_in_two_folders_are_two_modules(
    node: Node, tmp_path: Path, listener: fake.Server
) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(
            f"def f(xs):\n    return [{3.0 if name == 'one' else 2.0}] * len(xs)\n"
        )
        load(
            node,
            name,
            "model.py:f" if name == "one" else "model:f",
            key=str(tmp_path / name),
            input="f64[2]",
        )
    for name, value in (("one", 3.0), ("two", 2.0)):
        peer = serve(node, listener, name, quiet=True)
        assert answer(peer) == [value] * 2
        peer.close()


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<I", 1 << 30),
        struct.pack("<I", 1) + b"\xc1",
        struct.pack("<I", 1) + msgpack.packb(7),
    ],
)
def test_a_node_that_talks_nonsense_is_left(tmp_path: Path, raw: bytes) -> None:
    with hosting(tmp_path) as node:
        node.send(raw)
        assert node.process.wait(60) == 0
    assert "clipper-container host:" in node.printed


def test_it_ends_with_its_node_and_sends_goodbye(code: Path, listener: fake.Server) -> None:
    with hosting(code) as node:
        node.folder = code
        load(node, "a", "models:total")
        peer = serve(node, listener, "a", quiet=True)
        node.process.terminate()
        assert peer.frame().kind == fake.GOODBYE
        peer.close()
        assert node.process.wait(60) == 0


def test_a_load_unloads_others_before(node: Node, listener: fake.Server) -> None:
    load(node, "old", "models:total")
    peer = serve(node, listener, "old")
    new = {"type": "python", "path": "models:total", "key": str(node.folder)}
    n = node.begin("load", model="new", evict=["old", "unknown"], **new)
    assert peer.frame().kind == fake.GOODBYE
    peer.close()
    node.end(n)
    assert [model for model, _ in node.request("status")["resident"]] == ["new"]


def test_a_load_with_a_wrong_list_is_refused(node: Node) -> None:
    for evict in ([7], "m"):
        with pytest.raises(Refused, match="evict must be"):
            load(node, "m", "models:total", evict=evict)
