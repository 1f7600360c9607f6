"""Models in containers of a real engine: served, isolated, limited, killed, built anew, and found
again after their server."""

import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import DeployFailed, NoReplica, ReplicaLost
from tests.images.engines import BASE, PATIENCE_S, QUICK, Engine
from tests.processes import Program


def summed(rows: Any) -> Any:
    return np.asarray(rows).sum(axis=1)


def seen_from_inside(rows: Any) -> list[str]:
    """Report what a model can see and do in its container."""
    import pathlib
    import socket

    found = {"uid": os.getuid(), "links": sorted(name for _, name in socket.if_nameindex())}
    for place in ("/", "/run", "/model", "/opt/model", "/tmp"):
        try:
            pathlib.Path(place, "mine").write_text("x")
            found[place] = "written"
        except OSError:
            found[place] = "refused"
    status = pathlib.Path("/proc/self/status").read_text()
    found["capabilities"] = next(
        line.split()[1] for line in status.splitlines() if line.startswith("CapEff")
    )
    found["words"] = (
        pathlib.Path("/proc/1/cmdline").read_text() + pathlib.Path("/proc/1/environ").read_text()
    )
    return [repr(found)] * len(rows)


@pytest.fixture
def deploy(server: clipper.ClipperServer, request: pytest.FixtureRequest) -> Any:
    """Deploys, and retires after the test."""
    made: list[str] = []

    def do(name: str, model: Any, **settings: Any) -> Any:
        handle = server.deploy(name, model, **settings)
        made.append(handle.name)
        return handle

    yield do
    for name in made:
        server.retire(name, force=True)


def ask(handle: Any, row: Any, until_s: float = PATIENCE_S) -> Any:
    """Query until a container is there; return its prediction."""
    give_up = time.monotonic() + until_s
    while True:
        try:
            return handle.predict(row, slo_ms=30_000).result(60)
        except (NoReplica, ReplicaLost):
            assert time.monotonic() < give_up
            time.sleep(0.02)


def test_a_model_is_served_from_a_container_and_goes_with_its_model(server, engine, deploy) -> None:
    handle = deploy("sums", summed, input="f64[3]", replicas=2, memory_mib=256, cpus=0.5)
    assert handle.predict(np.ones(3)).result(60) == 3.0
    rows = np.arange(60_000.0).reshape(-1, 3)
    assert np.array_equal(handle.predict_many(rows).result(20), rows.sum(axis=1))
    stats = server.stats()["models"]["sums:1"]
    rows = [(row["number"], row["state"], row["restart_count"]) for row in stats["replicas"]]
    assert rows == [(0, "ready", 0), (1, "ready", 0)]
    assert len(engine.containers("sums:1")) == 2
    limits = engine.run(
        "inspect",
        "--format",
        "{{.HostConfig.Memory}} {{.HostConfig.NanoCpus}}",
        engine.containers("sums:1")[0],
    )
    assert limits.split() == [str(256 << 20), "500000000"]
    server.scale("sums", 1)
    assert len(engine.containers("sums:1")) == 1


def test_retiring_removes_the_containers(server, engine) -> None:
    server.deploy("short", summed, input="f64[3]")
    assert engine.containers("short:1")
    server.retire("short")
    assert engine.containers("short:1") == []


def test_a_container_gets_as_little_as_it_needs(server, deploy) -> None:
    found = deploy("inside", seen_from_inside, input="f64[1]").predict(np.ones(1)).result(60)
    seen = eval(found)
    assert seen["uid"] == 10001
    assert seen["links"] == ["lo"]
    assert [seen[place] for place in ("/", "/run", "/model", "/opt/model", "/tmp")] == [
        *["refused"] * 4,
        "written",
    ]
    assert int(seen["capabilities"], 16) == 0
    assert server.token not in seen["words"]
    assert "/run/secrets/clipper_token" in seen["words"]


def test_a_container_killed_under_load_leaves_no_query_without_an_answer(
    server, engine, deploy
) -> None:
    handle = deploy("target", summed, input="f64[3]", replicas=2, cache=False)
    app = server.app("loaded", [handle.name], slo_ms=500, default=-1.0)
    answers, late, stop = [], [], threading.Event()

    def load() -> None:
        while not stop.is_set():
            began = time.monotonic()
            answers.append(app.predict(np.ones(3)).result(60))
            late.append(time.monotonic() - began)

    callers = [threading.Thread(target=load) for _ in range(4)]
    for caller in callers:
        caller.start()
    for victim in engine.containers("target:1"):
        before = len(answers)
        engine.run("kill", "--signal", "KILL", victim)
        until(lambda before=before: len(answers) > before + 200)
    until(lambda: len(server._deployment.containers.of(clipper.VersionedModel("target", 1))) == 2)
    before = len(answers)
    until(lambda: len(answers) > before + 200 and answers[-1].output == 3.0)
    stop.set()
    for caller in callers:
        caller.join(PATIENCE_S)
        assert not caller.is_alive()
    assert len(answers) == len(late)
    assert max(late) < 5
    assert {answer.output for answer in answers} <= {3.0, -1.0}
    assert (
        sum(row["restart_count"] for row in server.stats()["models"]["target:1"]["replicas"]) == 2
    )
    server.remove_app("loaded")


def until(condition: Any) -> None:
    give_up = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_a_crash_loop_ends_and_keeps_the_last_words(server, engine) -> None:
    from clipper_container import Model

    class Broken(Model):
        input = "f64[1]"

        def load(self) -> None:
            raise RuntimeError("no weights here")

        def predict_batch(self, rows: Any) -> Any:
            return rows

    with pytest.raises(
        DeployFailed,
        match=r"(?s)broken:1/0 does not stay up: exit 3; stopped after 3 exits.*no weights here",
    ):
        server.deploy("broken", Broken)
    assert engine.containers("broken:1") == []


def test_a_container_that_takes_too_much_memory_is_reported(server, engine, deploy) -> None:
    def greedy(rows: Any) -> Any:
        if rows[0][0] > 0:
            held = bytearray(400 << 20)
            held[:: 1 << 12] = b"x" * len(held[:: 1 << 12])
        return summed(rows)

    handle = deploy("greedy", greedy, input="f64[1]", memory_mib=128, cache=False)
    assert handle.predict(np.zeros(1)).result(60) == 0.0
    with pytest.raises((ReplicaLost, NoReplica)):
        handle.predict(np.ones(1), slo_ms=60_000).result(60)
    until(
        lambda: any(
            row.get("restart_count") for row in server.stats()["models"]["greedy:1"]["replicas"]
        )
    )
    details = [row.get("detail", "") for row in server.stats()["models"]["greedy:1"]["replicas"]]
    expected = "killed for memory (its limit, memory_mib, is 128)"
    assert expected in details or engine.kind == "podman"  # its API does not tell
    assert ask(handle, np.zeros(1)) == 0.0


def test_an_image_that_cannot_be_built_gives_the_reason(server) -> None:
    with pytest.raises(
        DeployFailed,
        match=r"(?s)the image of model 'nobuild:1' was not built: .*no-such-package-anywhere",
    ):
        server.deploy(
            "nobuild", summed, input="f64[3]", requirements=["no-such-package-anywhere==1.0"]
        )
    assert not [model for model in server.catalog.models() if model.name == "nobuild"]


def test_an_unknown_base_image_is_reported(engine) -> None:
    settings = {**engine.settings, "base": "localhost/not-here:1"}
    starting = clipper.start(deployer=engine.kind, docker=settings, **QUICK)
    with starting as server, pytest.raises(DeployFailed, match="not-here") as raised:
        server.deploy("baseless", summed, input="f64[3]")
    assert "docker.base" in str(raised.value)


def test_a_server_that_closes_does_not_wait_for_a_build(engine, tmp_path) -> None:
    server = clipper.start(deployer=engine.kind, docker=engine.settings, **QUICK)
    # pip tries an index that never answers, within the build's own network
    server.deploy(
        "long",
        summed,
        input="f64[3]",
        wait=False,
        requirements=["--index-url=http://127.0.0.1:9/", "nothing-there"],
    )
    until(lambda: any(stage.stage == "building image" for stage in server.stages("long").values()))
    began = time.monotonic()
    server.close(0)
    assert time.monotonic() - began < 10


SERVER = textwrap.dedent("""
    import sys, time
    import numpy as np
    import clipper

    def summed(rows):
        return np.asarray(rows).sum(axis=1)

    if __name__ == "__main__":
        server = clipper.start(state=sys.argv[1], deployer=sys.argv[2], docker={"socket": sys.argv[3], "base": sys.argv[4],
                               "build_network": "none"})
        server.deploy("kept", summed, input="f64[3]")
        print("ready", flush=True)
        time.sleep(600)
    """)  # noqa: E501


def test_what_a_killed_server_left_is_removed_at_the_next_start(engine, tmp_path) -> None:
    script = tmp_path / "serve.py"
    script.write_text(SERVER)
    words = [
        sys.executable,
        str(script),
        str(tmp_path / "state"),
        engine.kind,
        engine.settings["socket"],
        BASE,
    ]
    Program(*words, until="ready\n").kill()
    (orphan,) = engine.containers("kept:1")
    with clipper.start(state=str(tmp_path / "state"), docker=engine.settings, **QUICK) as server:
        assert ask(server.model("kept"), np.ones(3)) == 3.0
        (now,) = engine.containers("kept:1")
        assert now != orphan
        mount = engine.run("inspect", "--format", "{{range .Mounts}}{{.Source}} {{end}}", now)
        assert re.search(r"/clipper-\w+/secret-", mount)
    assert engine.containers("kept:1") == []


def test_containers_of_a_server_that_lives_are_left_alone(server, engine, deploy) -> None:
    handle = deploy("neighbour", summed, input="f64[3]")
    with clipper.start(deployer=engine.kind, docker=engine.settings, **QUICK) as other:
        other.deploy("mine", summed, input="f64[3]")
        assert len(engine.containers("neighbour:1")) == 1
    assert handle.predict(np.ones(3)).result(60) == 3.0


USER = textwrap.dedent("""
    import json, sys, time
    import numpy as np
    import clipper

    def summed(rows):
        return np.asarray(rows).sum(axis=1)

    if __name__ == "__main__":
        with clipper.start(deployer=sys.argv[1], **json.loads(sys.argv[2])) as server:
            handle = server.deploy("with_it", summed, input="f64[3]")
            print("ready", flush=True)
            sys.stdin.readline()
            while True:
                try:
                    print("answer", handle.predict(np.ones(3)).result(60), flush=True)
                    break
                except clipper.ClipperError:
                    time.sleep(0.02)
    """)


def test_a_container_that_ends_with_its_engine_has_not_failed(engine, tmp_path) -> None:
    # A process of its own: the package docker leaves sockets of connections that are refused to the
    # collector.
    script = tmp_path / "use.py"
    script.write_text(USER)
    once = json.dumps({**QUICK, "restarts_max": 0, "docker": engine.settings})
    words = (sys.executable, script, engine.kind, once)
    with Program(*words, until="ready\n", limit_s=180) as program:
        (before,) = engine.containers("with_it:1")
        engine.daemon.kill()
        engine.daemon.start()
        program.say("now")
        program.until("answer 3.0\n")
        assert before not in engine.containers("with_it:1")
        assert program.wait() == 0


def test_the_health_of_a_container_is_known_to_its_engine(server, engine, deploy) -> None:
    deploy("healthy", summed, input="f64[3]")
    (container,) = engine.containers("healthy:1")
    probe = ["python", "-m", "clipper_container", "healthy", "/tmp/clipper.alive", "--within", "5"]
    until(lambda: is_healthy(engine, container, *probe))


def is_healthy(engine: Engine, container: str, *probe: str) -> bool:
    try:
        engine.run("exec", container, *probe)
    except subprocess.CalledProcessError:
        return False
    return True
