"""Messages when a container engine cannot be reached, and which containers are left over; no engine
is needed."""

import contextlib
import dataclasses
import io
import os
import socket
import sys
import threading
import time
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest

from clipper.deploy.deployer import ContainerSpec
from clipper.deploy.deployers import ContainerKinds, placing
from clipper.deploy.docker.daemon import Daemon, EngineAway, Owner, _gpus, close_when
from clipper.deploy.docker.engine_container import describe_end
from clipper.deploy.replicas import ReplicaDeployer
from clipper.errors import DeployFailed, InvalidInput, ShuttingDown
from clipper.processes import ChildState, NoticeKind, Supervisor
from clipper.settings.docker import DockerSettings
from clipper.state_dir import StateDir
from clipper.version import VERSION
from tests.threads import join
from tests.unit.deploy.test_process import Events


def error_text(kind: str, where: str, tmp_path: Path) -> str:
    with pytest.raises(DeployFailed) as raised:
        Daemon(kind, DockerSettings(socket=where), Owner(tmp_path)).start("container")
    return str(raised.value)


@pytest.mark.parametrize(
    ("kind", "command"),
    [("docker", "systemctl start docker"), ("podman", "systemctl start podman.socket")],
)
def test_an_engine_that_does_not_run(kind: str, command: str, tmp_path: Path) -> None:
    where = f"unix://{tmp_path}/not-there.sock"
    text = f"{kind} does not answer at {where}: there is no such socket. Start it: {command}"
    assert error_text(kind, where, tmp_path).startswith(text)


def test_an_engine_that_has_died(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left.sock"))
    assert ": no process listens there. Start it: systemctl start docker." in error_text(
        "docker", f"unix://{tmp_path}/left.sock", tmp_path
    )


def test_an_engine_that_takes_no_more_connections(tmp_path: Path) -> None:
    where, texts = str(tmp_path / "full.sock"), list[str]()

    def call() -> None:
        texts.append(error_text("docker", f"unix://{where}", tmp_path))

    with contextlib.ExitStack() as opened:
        full = opened.enter_context(socket.socket(socket.AF_UNIX))
        full.bind(where)
        full.listen(0)
        with contextlib.suppress(BlockingIOError):
            while True:
                waiting = opened.enter_context(socket.socket(socket.AF_UNIX))
                waiting.setblocking(False)
                waiting.connect(where)
        caller = threading.Thread(target=call, daemon=True)
        caller.start()
        join(caller)
    (text,) = texts
    assert text.startswith(f"docker does not answer at unix://{where}: ")


def test_a_socket_of_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, where: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("clipper.deploy.docker.daemon.socket.socket.connect", refuse)
    text = error_text("docker", f"unix://{tmp_path}/d.sock", tmp_path)
    assert (
        ": no permission. Join its group: sudo usermod -aG docker $USER, then log in again." in text
    )


def test_the_package_is_named_when_it_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "docker", None)
    assert (
        error_text("docker", "", tmp_path)
        == """deployer 'docker' needs the package docker. pip install "clipper-serving[docker]"."""
    )


def test_the_package_is_imported_only_when_it_is_used() -> None:
    import subprocess

    text = "import clipper, sys; clipper.start().close(); sys.exit('docker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", text]).returncode == 0


def test_a_replica_that_cannot_be_started_fails_with_the_reason_and_can_be_started_again(
    tmp_path: Path,
) -> None:
    events = Events()
    settings = DockerSettings(socket=f"unix://{tmp_path}/not-there.sock")
    supervisor = Supervisor()
    supervisor.start()
    containers = ContainerKinds(supervisor, settings, Owner(tmp_path))
    deployer = ReplicaDeployer(supervisor, containers, events)
    spec = ContainerSpec(
        name="svm", target="json:loads", connect="unix:/x", deployer="docker", needs=needs()
    )
    try:
        for _ in range(2):
            deployer.start(spec)
            events.next(NoticeKind.FAILED)
            (status,) = deployer.list()
            assert status.state is ChildState.SHORT, "it is tried until the engine is there"
            assert "there is no such socket" in status.detail
            assert status.pid == 0, "nothing runs"
            assert not deployer.restart("svm", 1, 0, 1)
            deployer.stop("svm")
    finally:
        deployer.close()
        supervisor.end()
    with pytest.raises(ShuttingDown, match="closed"):
        deployer.start(spec)


@pytest.mark.parametrize(
    ("followed", "over", "left_s", "closed"),
    [(False, True, 60.0, True), (False, False, -1.0, True), (True, True, -1.0, False)],
)
def test_a_build_is_cut_off_when_it_is_not_wanted_or_late_and_not_after_its_end(
    followed: bool, over: bool, left_s: float, closed: bool
) -> None:
    ended, stream = threading.Event(), io.BytesIO()
    if followed:
        ended.set()
    close_when(stream, ended, lambda: over, time.monotonic() + left_s)
    assert stream.closed is closed


def needs():
    from clipper.deploy.needs import Needs

    return Needs("json:loads", "module")


def test_containers_of_an_ended_server_are_left_over(tmp_path: Path) -> None:
    here, there = StateDir("memory"), StateDir("memory")
    try:
        mine, other = Owner(here.run), Owner(there.run)
        assert not mine.owns_or_outlived(mine.labels())
        assert not mine.owns_or_outlived(other.labels())
    finally:
        there.close()
    assert mine.owns_or_outlived(other.labels())
    assert not mine.owns_or_outlived({**other.labels(), "clipper.host": "another/1"})
    assert not mine.owns_or_outlived({"clipper.host": mine.labels()["clipper.host"]})
    here.close()


def test_containers_on_a_state_that_is_ours_now_are_left_over(tmp_path: Path) -> None:
    before, now = Owner(tmp_path / "before", "/srv/state"), Owner(tmp_path / "now", "/srv/state")
    elsewhere = {**before.labels(), "clipper.host": "another/1"}
    assert now.owns_or_outlived(elsewhere)
    assert not Owner(tmp_path / "now").owns_or_outlived(elsewhere)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"ExitCode": 0}, "exit 0"),
        ({"ExitCode": 3}, "exit 3"),
        ({"ExitCode": 137}, "killed (SIGKILL)"),
        ({"ExitCode": 139}, "killed (SIGSEGV)"),
        ({"ExitCode": 255}, "exit 255"),
        ({"ExitCode": 137, "OOMKilled": True}, "killed for memory (its limit, memory_mib, is 64)"),
    ],
)
def test_how_a_container_ended(state: dict[str, object], text: str) -> None:
    assert describe_end(state, 64) == text


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("dokcer", 0, 0, ""), "deployer='dokcer' - did you mean 'docker'?"),
        (
            ("process", 512, 0, "all"),
            "gpus is for containers of docker and podman; this model runs in a process.",
        ),
        (("docker", 4, 0, ""), "memory_mib=4: 16 or more"),
        (("docker", 1.5, 0, ""), "memory_mib=1.5: 0 for no limit, or more."),
        (("podman", 0, -1, ""), "cpus=-1: 0 for no limit, or more."),
    ],
)
def test_where_a_model_runs_is_checked(words: tuple[str, int, float, str], text: str) -> None:
    with pytest.raises(InvalidInput) as raised:
        placing(*words)
    assert str(raised.value).startswith(text)


class Engine:
    """A fake of the client of a container engine, which has a container of an ended server.

    options: its security options. failing: what its calls raise, by name.
    """

    def __init__(self, options: object = None) -> None:
        self.options = options
        self.failing: dict[str, Exception] = {}
        self.asked, self.answers = threading.Event(), threading.Event()
        self.answers.set()
        self.removed: list[str] = []
        self.started: list[str] = []

    def info(self) -> dict[str, object]:
        self.asked.set()
        assert self.answers.wait(60)
        self._fail("info")
        return {"SecurityOptions": self.options}

    def containers(self, all: bool, filters: dict[str, str]) -> list[dict[str, object]]:
        self._fail("containers")
        labels = Owner(Path("/ended-1")).labels()
        return [{"Id": "left", "Labels": labels}]

    def remove_container(self, container: str, force: bool) -> None:
        self.removed.append(container)

    def start(self, container: str) -> None:
        self.started.append(container)

    def close(self) -> None:
        """Nothing is open."""

    def _fail(self, call: str) -> None:
        if call in self.failing:
            raise self.failing[call]


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Engine:
    docker = pytest.importorskip("docker", reason="python tools/fetch.py clients")
    engine = Engine()
    monkeypatch.setattr(docker, "APIClient", lambda *where, **words: engine)
    return engine


@pytest.fixture
def daemon(engine: Engine, tmp_path: Path) -> Daemon:
    return Daemon("docker", DockerSettings(socket="tcp://engine:1"), Owner(tmp_path))


def test_an_engine_that_fails_as_it_is_first_asked(engine: Engine, daemon: Daemon) -> None:
    import docker
    import requests

    for call, error, kind in (
        ("info", requests.ConnectionError("it was closed"), EngineAway),
        ("info", docker.errors.APIError("it is broken"), DeployFailed),
        ("containers", requests.Timeout("it is late"), EngineAway),
        ("containers", docker.errors.APIError("it is broken"), DeployFailed),
    ):
        engine.failing = {call: error}
        with pytest.raises(DeployFailed) as raised:
            daemon.start("one")
        assert type(raised.value) is kind
        daemon.kill("one", SIGTERM)
        daemon.remove("one")
    assert (engine.started, engine.removed) == ([], [])


def test_what_is_left_over_is_removed_once_the_engine_answers(
    engine: Engine, daemon: Daemon
) -> None:
    import requests

    engine.failing = {"containers": requests.ConnectionError("it was closed")}
    daemon.remove("one")
    engine.failing = {}
    for _ in range(2):
        daemon.start("one")
    assert (engine.started, engine.removed) == (["one", "one"], ["left"])


def test_close_does_not_wait_for_an_answer(engine: Engine, daemon: Daemon) -> None:
    engine.answers.clear()
    caller = threading.Thread(target=daemon.start, args=("one",))
    caller.start()
    assert engine.asked.wait(60)
    daemon.close()
    engine.answers.set()
    join(caller)
    assert engine.started == ["one"], "the answer came after close()"


def test_the_user_of_a_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    daemon = Daemon("docker", DockerSettings(), Owner(tmp_path))
    monkeypatch.setattr(os, "getgid", lambda: 1001)
    for uid, options, user in (
        (0, ["name=rootless"], "0:0"),
        (1000, ["name=seccomp", "name=rootless"], "0:0"),
        (1000, ["name=seccomp"], "1000:1001"),
        (1000, None, "1000:1001"),
        (0, [], None),
    ):
        monkeypatch.setattr(os, "getuid", lambda uid=uid: uid)
        assert daemon._user_of(Engine(options)) == user


class ContainerMaker:
    """The part of an engine's client by which containers are made."""

    def __init__(self) -> None:
        self.made: list[tuple[dict[str, Any], tuple[Any, ...], dict[str, Any]]] = []
        self.removed: list[str] = []

    def create_host_config(self, **words: Any) -> dict[str, Any]:
        return words

    def remove_container(self, name: str, force: bool) -> None:
        assert force
        self.removed.append(name)
        raise OSError("there is none")

    def create_container(self, *words: Any, **more: Any) -> dict[str, Any]:
        self.made.append((more.pop("host_config"), words, more))
        return {"Id": len(self.made)}


def test_what_a_container_is_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    types = pytest.importorskip("docker.types", reason="python tools/fetch.py clients")
    engine = ContainerMaker()
    monkeypatch.setattr(Daemon, "_api", engine)
    settings = DockerSettings(log_mib=3, tmp_mib=5, processes_max=70)
    few = ContainerSpec(name="m", target="a:b", connect="tcp:0.0.0.0:7", version=2, threads=3)
    many = dataclasses.replace(few, memory_mib=64, cpus=1.5, gpus="0, 2", env={"HOME": "/x"})
    docker = Daemon("docker", settings, Owner(tmp_path))
    assert docker.create("image", few, 4) == "1"
    assert docker.create("image", many, 4) == "2"
    Daemon("podman", settings, Owner(tmp_path)).create("image", few, 0)
    plain, limited, podman = engine.made
    for host, (image, words), more in engine.made:
        assert (image, words[:2]) == ("image", ["--connect", "tcp:127.0.0.1:7"])
        assert words[4:] == ["--threads", "3"]
        assert (host["cap_drop"], host["read_only"]) == (["ALL"], True)
        assert host["security_opt"] == ["no-new-privileges"]
        assert host["tmpfs"] == {"/tmp": "rw,nosuid,nodev,mode=1777,size=5m"}
        assert (host["pids_limit"], host["network_mode"]) == (70, "host")
        assert [one["ReadOnly"] for one in host["mounts"]] == [True]
        assert more["labels"]["clipper.model"] == "m:2"
    assert [words[2:4] for _, (_, words), _ in engine.made] == [
        ["--replica", "4"],
        ["--replica", "4"],
        ["--replica", "0"],
    ]
    limits = ("mem_limit", "memswap_limit", "nano_cpus", "device_requests")
    for host, _, more in (plain, podman):
        assert [host[name] for name in limits] == [None] * 4
        assert more["environment"] == {"HOME": "/tmp", "CLIPPER_VERSION": VERSION}
    devices = [types.DeviceRequest(capabilities=[["gpu"]], device_ids=["0", "2"])]
    assert [limited[0][name] for name in limits] == [64 << 20, 64 << 20, 1_500_000_000, devices]
    assert limited[2]["environment"]["HOME"] == "/x"
    assert plain[0]["log_config"]["Config"] == {"max-size": "3m", "max-file": "1"}
    assert podman[0]["log_config"] is None
    assert engine.removed == [more["name"] for _, _, more in engine.made]
    assert plain[2]["name"].startswith("clipper-m-2-4-")


@pytest.mark.parametrize(
    ("text", "request_"),
    [
        ("all", {"count": -1}),
        ("3", {"count": 3}),
        ("0,2", {"device_ids": ["0", "2"]}),
        ("GPU-1", {"device_ids": ["GPU-1"]}),
    ],
)
def test_devices_that_are_requested(text: str, request_: dict[str, object]) -> None:
    assert _gpus(text) == request_
