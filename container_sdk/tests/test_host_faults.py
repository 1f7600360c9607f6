"""Faults of a host: loads that hang, models too big, batches that do not end; and what
runs beside what."""

from __future__ import annotations

import gc
import textwrap
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest

from clipper_container.host.model_cache import CachedModel, ModelCache, RequestFailed
from clipper_container.host.server_connection import Gate
from clipper_container.host.server_connections import ServerConnections
from clipper_container.host.timers import Timers
from clipper_container.host.work_record import WorkRecord
from clipper_container.model import as_model
from clipper_container.runtime import Artifact, Loaded, Runtime
from clipper_container.wire.transport import Disconnected
from clipper_container.worker.evaluation import Evaluator
from clipper_container.worker.handshake import ContainerOptions
from container_sdk.tests import fake_server as fake
from container_sdk.tests.fake_node import Refused
from container_sdk.tests.test_host import answer, hosting, listening, load, serve

RUNTIMES = """
import gc
import threading
import time
import weakref
from pathlib import Path
from clipper_container import Model
from clipper_container.runtime import ArtifactError, Loaded, Runtime

def wait_for(path):
    while not Path(path).exists():
        time.sleep(0.005)

class Echo(Model):
    input = "f64[2]"

    def __init__(self, here):
        self.here, self.lock, self.inside, self.most = here, threading.Lock(), 0, 0

    def predict_batch(self, xs):
        with self.lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        if xs[0, 0] < 0:
            wait_for(self.here / "go")
        if xs[0, 0] == 3:
            time.sleep(0.1)
        while xs[0, 0] == 2 and self.most < 2:
            time.sleep(0.005)
        with self.lock:
            self.inside -= 1
        return [float(self.most)] * len(xs)

class Deep(Model):
    input = "f64[2]"

    def __init__(self, here=None):
        if here is not None:
            self.part = Deep()
            self.part.inner = inner = Deep()
            inner.me, inner.block = inner, b"x" * (8 << 20)
            weakref.finalize(inner, (here / "freed").touch)
            gc.collect()  # it is an old object now

    def predict_batch(self, xs):
        return xs[:, 0]

class Here(Runtime):
    types = ("echo", "pair", "hang", "bad", "huge", "large", "exit", "far", "circle", "deep")

    def load(self, artifact):
        here = Path(artifact.path)
        with open(here / "log", "a") as log:
            log.write(f"load {artifact.model}\\n")
        if artifact.type == "hang":
            wait_for(here / "go")
        if artifact.type == "bad":
            raise ArtifactError("cracked")
        if artifact.type == "exit":
            raise SystemExit("not here")
        sizes = {"huge": 1 << 50, "far": 12345, "circle": 33 << 20, "deep": 8 << 20}
        model = Echo(here)
        if artifact.type == "circle":
            model.me = model
            weakref.finalize(model, (here / "freed").touch)
        if artifact.type == "deep":
            model = Deep(here)
        return Loaded(model, sizes.get(artifact.type, 0), 2 if artifact.type == "pair" else 1, inside=artifact.type != "far")

    def unload(self, artifact, loaded):
        with open(Path(artifact.path) / "log", "a") as log:
            log.write(f"unload {artifact.model}\\n")

    def predict_size(self, artifact):
        return 1 << 50 if artifact.type == "large" else 0
"""  # noqa: E501


@pytest.fixture
def node(tmp_path: Path):
    (tmp_path / "mine.py").write_text(textwrap.dedent(RUNTIMES))
    with hosting(
        tmp_path, "--runtime", "mine:Here", "--loading-max", "2", "--load-s", "0.1", cwd=tmp_path
    ) as node:
        node.folder = tmp_path
        yield node


@pytest.fixture
def listener(tmp_path: Path):
    with listening(tmp_path / "server") as server:
        yield server


def mine(node, model, type, **more):
    patient = {} if type == "hang" else {"timeout_ms": 60_000}  # the host's is 100 ms
    return load(node, model, str(node.folder), type=type, key="", **(patient | more))


def log(node):
    return (node.folder / "log").read_text().splitlines()


def test_a_runtime_of_ones_own_goes_before_those_built_in(node, listener) -> None:
    assert node.hello["types"][:8] == [
        "echo",
        "pair",
        "hang",
        "bad",
        "huge",
        "large",
        "exit",
        "far",
    ]
    assert mine(node, "e", "echo")["size_bytes"] >= 4096
    assert mine(node, "f", "far")["size_bytes"] == 12345
    assert answer(serve(node, listener, "e", quiet=True)) == [1.0, 1.0]
    assert node.request("unload", model="f") == {}
    assert log(node) == ["load e", "load f", "unload f"]


@pytest.mark.parametrize(
    ("type", "fault", "why", "unloaded"),
    [
        ("bad", "artifact", "cracked", False),
        ("exit", "load", "SystemExit: not here", False),
        ("huge", "host", "occupies 1125899906842624 bytes; the capacity of this host", True),
        ("large", "host", "needs about 1125899906842624 bytes; the capacity of this host", False),
    ],
)
def test_a_load_that_fails_leaves_nothing(node, type, fault, why, unloaded) -> None:
    for _ in range(2):
        with pytest.raises(Refused) as refused:
            mine(node, "x", type)
        assert refused.value.args[0] == fault
        assert why in refused.value.args[1]
    assert node.request("status")["resident"] == []
    if type != "large":
        assert log(node) == (["load x", "unload x"] if unloaded else ["load x"]) * 2
    assert mine(node, "x", "echo")["size_bytes"] > 0


def test_loads_that_hang_are_given_up_and_others_go_on_until_the_host_is_failing(node) -> None:
    give_up = time.monotonic() + 60.0
    while node.request("status")["state"] == "STARTING":
        assert time.monotonic() < give_up
    for i in range(3):
        assert node.request("status")["state"] == "READY"
        with pytest.raises(Refused, match=r"'h\d' did not load within 0.1 s"):
            mine(node, f"h{i}", "hang")
        assert mine(node, f"e{i}", "echo")["took_ms"] < 5000
    status = node.request("status")
    assert (status["state"], status["loading"]) == ("FAILING", 0)
    assert sorted(model for model, _ in status["resident"]) == ["e0", "e1", "e2"]
    (node.folder / "go").touch()  # they come to an end after all: nothing of them is kept
    again = mine(node, "h0", "hang", timeout_ms=10_000)
    assert again["size_bytes"] > 0
    while len([line for line in log(node) if line.startswith("unload h")]) < 3:
        node.request("status")


def test_unload_ends_a_load_that_runs_and_one_that_waits(node) -> None:
    loads = [
        node.begin("load", model=name, type="hang", path=str(node.folder), timeout_ms=20_000)
        for name in ("a", "b", "c")
    ]
    while node.request("status")["loading"] < 1:
        pass
    unloads = [node.begin("unload", model=name) for name in ("a", "b", "c")]
    # once it is gone
    again = node.begin("load", model="a", type="echo", path=str(node.folder), timeout_ms=60_000)
    node.request("status")  # requests are taken in turn: those before this one have been
    (node.folder / "go").touch()
    for n in loads:
        with pytest.raises(Refused, match="was unloaded meanwhile"):
            node.end(n)
    for n in unloads:
        assert node.end(n) == {}
    assert node.end(again)["size_bytes"] > 0
    assert [model for model, _ in node.request("status")["resident"]] == ["a"]
    found = log(node)
    assert "load c" not in found  # its turn had not come
    assert found.count("load a") == found.count("unload a") + 1
    assert found.count("load b") == found.count("unload b")


def test_as_many_batches_at_once_as_the_runtime_allows(node, tmp_path: Path) -> None:
    for model, type in (("one", "echo"), ("two", "pair")):
        assert mine(node, model, type)["concurrency"] == (2 if type == "pair" else 1)
        with (
            listening(tmp_path / f"{model}1") as first,
            listening(tmp_path / f"{model}2") as second,
        ):
            peers = [serve(node, server, model, quiet=True) for server in (first, second)]
            rows = np.array([[2.0 if type == "pair" else 3.0, 0.0]])
            for peer in peers:
                peer.sock.sendall(fake.fixed(rows))
            assert [peer.frame().parts()["rows"].tolist() for peer in peers] == [
                [2.0 if type == "pair" else 1.0]
            ] * 2
            n = node.begin("unload", model=model)
            for peer in peers:
                peer.close()
            assert node.end(n) == {}


def test_a_model_that_hangs_in_a_batch_holds_up_no_other(node, listener, tmp_path: Path) -> None:
    for model in ("stuck", "well"):
        mine(node, model, "echo")
    with listening(tmp_path / "other") as other:
        stuck, well = (
            serve(node, listener, "stuck", quiet=True),
            serve(node, other, "well", quiet=True),
        )
        stuck.sock.sendall(fake.fixed(np.array([[-1.0, 0.0]])))
        assert [answer(well, id=id) for id in (1, 2)] == [[1.0, 1.0]] * 2
        with pytest.raises(Refused, match=r"a batch of model 'stuck' did not end within 0.05 s"):
            node.request("unload", model="stuck", timeout_ms=50)
        assert [model for model, _ in node.request("status")["resident"]] == ["well"]
        assert mine(node, "stuck", "echo")["size_bytes"] > 0  # another copy of it
        (node.folder / "go").touch()
        assert {stuck.frame().kind, stuck.frame().kind} == {fake.GOODBYE, fake.REPLY}


def test_unload_waits_for_the_batch_in_hand(node, listener) -> None:
    mine(node, "a", "echo")
    peer = serve(node, listener, "a", quiet=True)
    peer.sock.sendall(fake.fixed(np.array([[-1.0, 0.0]])))
    while node.request("status")["connections"] != 1:
        pass
    n = node.begin("unload", model="a")
    assert "unload a" not in log(node)
    (node.folder / "go").touch()
    assert {peer.frame().kind, peer.frame().kind} == {fake.REPLY, fake.GOODBYE}
    peer.close()
    assert node.end(n) == {}
    assert log(node) == ["load a", "unload a"]


def test_a_model_that_was_unloaded_is_in_no_cycle() -> None:
    """A host loads hundreds of models a second; the garbage collector would stop all threads to
    free cycles."""

    class Plain(Runtime):
        types = ("plain",)

        def load(self, artifact: Artifact) -> Loaded:
            return Loaded(as_model(len), 1)

    timers = Timers()
    connections = ServerConnections(timers, lambda *_: None)
    cache = ModelCache([Plain()], connections, timers, 1 << 30, 1, WorkRecord())
    gc.collect()
    gc.disable()
    try:
        for i in range(20):
            unloads = [cache.unload(f"m{i - 1}")]
            assert cache.load_after(unloads, Artifact(f"m{i}", "plain"), 5.0).result(60)
        del unloads
        kinds = [type(one) for one in gc.get_objects()]  # isinstance asks objects that answer oddly
    finally:
        gc.enable()
        cache.close()
        connections.close()
        timers.close()
    assert kinds.count(CachedModel) <= 2  # the last, and one in the loader's hands
    assert kinds.count(Future) < 20


def test_of_two_loads_of_one_name_after_an_unload_the_other_file_is_refused() -> None:
    started, may_end = threading.Event(), threading.Event()

    class Slow(Runtime):
        types = ("slow",)

        def load(self, artifact: Artifact) -> Loaded:
            return Loaded(as_model(len), 1)

        def unload(self, artifact: Artifact, loaded: Loaded) -> None:
            started.set()
            may_end.wait(60)

    timers = Timers()
    connections = ServerConnections(timers, lambda *_: None)
    cache = ModelCache([Slow()], connections, timers, 1 << 30, 1, WorkRecord())
    try:
        assert cache.load(Artifact("m", "slow", "old"), 5.0).result(60)
        unloading = threading.Thread(target=cache.unload, args=("m",))
        unloading.start()
        assert started.wait(60)
        first, second = (cache.load(Artifact("m", "slow", path), 5.0) for path in ("new", "other"))
        may_end.set()
        unloading.join(60)
        assert first.result(60)
        with pytest.raises(RequestFailed, match="already loaded from 'new'"):
            second.result(60)
    finally:
        cache.close()
        connections.close()
        timers.close()


@pytest.mark.parametrize("name", ["x" * 64, "a..b"], ids=["long", "empty"])
def test_a_server_whose_name_is_invalid_is_given_up(name: str) -> None:
    timers = Timers()
    connections = ServerConnections(timers, lambda *_: None)
    try:
        evaluator, options = Evaluator(as_model(len), "m"), ContainerOptions("m")
        serving = connections.serve(evaluator, Gate(1), f"tcp:{name}:80", options, 0.05)
        assert isinstance(serving.exception(60), Disconnected)
        assert connections.count() == 0
    finally:
        connections.close()
        timers.close()


def test_a_class_that_is_no_runtime_is_rejected(tmp_path: Path) -> None:
    import subprocess
    import sys

    words = [
        sys.executable,
        "-m",
        "clipper_container",
        "host",
        "--control",
        "unix:/nowhere",
        "--runtime",
        "json:JSONDecoder",
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "json:JSONDecoder is not a clipper_container.runtime.Runtime" in done.stderr


def test_what_a_large_model_leaves_in_circles_is_found_soon(node) -> None:
    load(node, "c", str(node.folder), type="circle")
    assert not (node.folder / "freed").exists()
    node.request("unload", model="c")
    until = time.monotonic() + 20.0
    while not (node.folder / "freed").exists():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_what_a_cycle_deep_in_models_keeps_is_found_when_memory_has_grown(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(textwrap.dedent(RUNTIMES))
    with hosting(tmp_path, "--runtime", "mine:Here", "--capacity-mib", "32", cwd=tmp_path) as node:
        node.folder = tmp_path
        for n in range(100):
            mine(node, f"d{n}", "deep")
            node.request("unload", model=f"d{n}")
            if (tmp_path / "freed").exists():
                break
            time.sleep(0.1)
        assert (tmp_path / "freed").exists()
