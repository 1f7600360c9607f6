"""`clipper node`: nodes as processes, one of which leaves while it is queried."""

import json
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import clipper
from clipper.cli import main
from tests.end_to_end.commands import running
from tests.processes import PATIENCE_S, Program
from tests.store.conftest import RedisServer, own_redis
from tests.threads import join

__all__ = ["own_redis"]
MODELS = "def double(rows):\n    return rows * 2\n"
FILE = """
[server]
drain_s = 1.0
[http]
address = "127.0.0.1:0"
admin = "127.0.0.1:0"
[mesh]
publish_s = 0.05
rate_s = 0.1
drain_s = 20.0
capacity_mib = 256
"""


@pytest.fixture
def here(bare_folder: Path) -> Path:
    (bare_folder / "mine.py").write_text(MODELS)
    (bare_folder / "node.toml").write_text(FILE)
    return bare_folder


def at(node: Program, what: str) -> str:
    """Return an address from the node's output."""
    (line,) = [line for line in node.output.splitlines() if line.startswith(what)]
    return line.removeprefix(what).strip().split(",")[0]


@pytest.fixture
def nodes(here: Path) -> Iterator[list[Program]]:
    words = ("node", "node.toml", "--store", "sqlite:mesh.db", "--peers", "tcp:127.0.0.1:0")
    with running(*words, "--name", "a") as a, running(*words, "--name", "b") as b:
        for node in (a, b):
            node.until("\nready\n")
        yield [a, b]


def infer(url: str, n: float, timeout_s: float = PATIENCE_S) -> Any:
    tensor = {"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [n, 1, 2]}
    body = {"inputs": [tensor], "parameters": {"timeout": int(timeout_s * 1e6)}}
    with urllib.request.urlopen(
        urllib.request.Request(url, json.dumps(body).encode()), timeout=timeout_s
    ) as reply:
        return json.load(reply)["outputs"][0]["data"]


def test_a_node_that_ends_gives_its_models_to_another_and_no_query_fails(
    here: Path, nodes: list[Program]
) -> None:
    with clipper.connect(at(nodes[0], "management at ")) as client:
        client.mesh.register(
            "m1", "mine.py:double", key=str(here), input="f64[3]", load_now=True, sync=True
        )
        (copy,) = client.mesh.status("m1").copies
    leaves, stays = nodes if copy.instance == "a" else nodes[::-1]
    with urllib.request.urlopen(
        f"{at(stays, 'queries come in at ')}/v2/health/ready", timeout=PATIENCE_S
    ) as reply:
        assert reply.status == 200
    url = f"{at(stays, 'queries come in at ')}/v2/models/m1/infer"
    assert infer(url, 5) == [10.0, 2.0, 4.0]  # a hop to the other's host
    stop, wrong, query_count = threading.Event(), [], [0]

    def go_on() -> None:
        while not stop.is_set():
            query_count[0] += 1
            n = float(query_count[0])
            try:
                if (found := infer(url, n)) != [2 * n, 2.0, 4.0]:
                    wrong.append(str(found))
            except (OSError, urllib.error.HTTPError) as error:
                wrong.append(str(error))

    query_thread = threading.Thread(target=go_on)
    query_thread.start()
    try:
        assert leaves.stop() == 0
        before = query_count[0]
        give_up = time.monotonic() + PATIENCE_S
        while query_count[0] < before + 20 and time.monotonic() < give_up:
            time.sleep(0.01)
    finally:
        stop.set()
        join(query_thread)
    assert not wrong
    assert "left: 1 of 1 models moved" in leaves.output
    assert leaves.output.endswith("closed\n")
    with clipper.connect(at(stays, "management at ")) as client:
        (copied,) = client.mesh.status("m1").copies
        assert copied.instance != copy.instance
    assert stays.stop(signal.SIGINT) == 0
    assert "left: no model had to move" in stays.output  # nobody is there to take it


def test_a_node_without_its_store_reports_it_and_ends_on_request(here: Path) -> None:
    pytest.importorskip("redis", reason="pip install 'clipper-serving[redis]'")
    (here / "node.toml").write_text(
        FILE.replace("[server]\n", "[server]\nstate = 'redis://u:secret@127.0.0.1:1/0'\n")
    )
    with running("node", "node.toml", "--name", "a") as node:
        node.until("not ready: it awaits the store redis://u:***@127.0.0.1:1/0. It is tried again.")
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(
                f"{at(node, 'queries come in at ')}/v2/health/ready", timeout=PATIENCE_S
            )
        with refused.value as reply:
            assert json.load(reply)["waiting_for"] == ["the store redis://u:***@127.0.0.1:1/0"]
        assert node.stop() == 0
    assert "secret" not in node.output
    assert "\nready\n" not in node.output


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S):
            return True
    except urllib.error.HTTPError as refused:
        refused.close()
        return False


def test_a_node_is_ready_once_its_store_has_come(here: Path, own_redis: RedisServer) -> None:
    own_redis.kill()
    with running("node", "node.toml", "--store", own_redis.url, "--name", "a") as node:
        node.until("It is tried again")
        own_redis.start()
        node.until("\nready\n")
        url = f"{at(node, 'queries come in at ')}/v2/health/ready"
        node.until(lambda: is_ready(url))
        assert node.stop() == 0
    assert "left: no model had to move" in node.output


def test_a_node_whose_store_does_not_come_ends_with_code_1(here: Path) -> None:
    pytest.importorskip("redis", reason="pip install 'clipper-serving[redis]'")
    (here / "node.toml").write_text(FILE.replace("[mesh]\n", "[mesh]\nenter_s = 0.3\n"))
    with running("node", "node.toml", "--store", "redis://127.0.0.1:1/0", "--name", "a") as node:
        assert node.wait() == 1
    assert "the store redis://127.0.0.1:1/0 did not come within 0.3 s (mesh.enter_s)" in node.output
    assert node.output.endswith("closed\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ((), "the nodes of a mesh need a store"),
        (("--store", "memory://"), "the nodes of a mesh need a store"),
        (("--store", "sqlite:mesh.db"), "--name a"),
        (("--store", "sqlite:mesh.db", "--name", "A b"), "'A' is not allowed"),
        (
            ("--store", "sqlite:mesh.db", "--name", "a", "--http", "0.0.0.0:0"),
            "any host that reaches this address could send queries",
        ),
        (("--store", "sqlite:mesh.db", "--name", "a", "--peers", "here"), "expected tcp:HOST:PORT"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    here: Path, words: tuple[str, ...], why: str
) -> None:
    result = click.testing.CliRunner().invoke(main, ("node", *words), prog_name="clipper")
    assert result.exit_code == (1 if "--http" in words else 2), "2: a wrong command line"
    assert why in result.stderr
    assert not (here / "mesh.db").exists()
