"""Containers in every language on what a server may ask of them, on what they lack themselves, and
on code of models that throws beside predict()."""

import contextlib
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper_container.model import Model, UserValue
from clipper_container.wire.frames import Kind, control_frame, pack_map
from clipper_container.worker.feedback_queue import FeedbackQueue
from tests.languages.compiled import JAVA, java, java_command
from tests.languages.test_containers import LANGUAGES, QUICK, SLO_MS, program, started_by_hand
from tests.languages.test_hostile_server import frame_named, greeted, received
from tests.memory_container import wait_until
from tests.processes import Program

TOKEN = "t" * 32
# more than what a program still takes, less than the stack of a thread
ROOM_BYTES = {"cpp": 4 << 20, "java": 32 << 20}
EVERY_LANGUAGE = (*LANGUAGES, "python")
LEARNER = """
import clipper_container


class Learner(clipper_container.Model):
    def predict_batch(self, inputs):
        return [0.0] * len(inputs)

    def correct(self, inputs, labels, sessions):
        pass
"""


class Learner(Model):
    """A model that learns nothing from its feedback."""

    def predict_batch(self, inputs: UserValue) -> UserValue:
        return inputs

    def correct(self, inputs: UserValue, labels: UserValue, sessions: UserValue) -> None:
        pass


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def listener(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{tmp_path}/server.sock")
        sock.listen()
        sock.settimeout(30)
        yield sock


def welcome(**fields: object) -> bytes:
    """Return a WELCOME with these fields."""
    return b"".join(control_frame(Kind.WELCOME, pack_map(fields)))


def container(
    language: str, name: str, listener: socket.socket, folder: Path, *words: str
) -> Program:
    """Run a container of a listener; one of Python is always the learner."""
    address = f"unix:{listener.getsockname()}"
    if language == "python":
        (folder / "learner.py").write_text(LEARNER)
        serve = ["serve", "learner:Learner", "--name", "hand", "--connect"]
        return Program(sys.executable, "-m", "clipper_container", *serve, address, folder=folder)
    return started_by_hand(program(language, name, *words), address, "")


# -- the environment


@pytest.mark.parametrize(
    ("name", "value", "most"),
    [
        ("VERSION", "two", 2**63 - 1),
        ("REPLICA", "-1", 2**63 - 1),
        ("BATCH_MAX", "1e3", 2**31 - 1),
        ("BATCH_MAX", "2147483648", 2**31 - 1),
        ("RETRY_SINGLY", "true", 1),
        ("PROTOCOL", "3", 2),
        ("ALL_SERVERS", "yes", 1),
    ],
)
def test_a_variable_that_is_no_number_is_named(
    language: str, name: str, value: str, most: int
) -> None:
    process = started_by_hand(program(language, "noop"), "unix:/none", "", **{name: value})
    assert process.wait() == 2
    assert f"CLIPPER_{name} is '{value}'" in process.output
    assert f"to {most}" in process.output


def test_spaces_around_a_token_of_a_file_are_ignored(
    language: str, listener: socket.socket, tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_bytes(f"  {TOKEN} \r\n".encode())
    address = f"unix:{listener.getsockname()}"
    with started_by_hand(program(language, "noop"), address, "", TOKEN_FILE=str(file)):
        peer, _ = listener.accept()
        with peer:
            header = received(peer, 64)
            hello = received(peer, int.from_bytes(header[40:48], "little"))
        assert b"\xa5token\xd9\x20" + TOKEN.encode() in hello


# -- what a server may ask


@pytest.mark.parametrize("language", EVERY_LANGUAGE)
def test_the_interval_of_heartbeats_has_a_limit(
    language: str, listener: socket.socket, tmp_path: Path
) -> None:
    with container(language, "learner", listener, tmp_path):
        with greeted(listener, welcome(heartbeat_ms=3_600_001)) as peer:
            assert peer.recv(1) == b""
        with greeted(listener, welcome(heartbeat_ms=3_600_000)) as peer:
            peer.sendall(frame_named("predict_f64_vectors"))
            assert received(peer, 64)[5] == Kind.REPLY


@pytest.mark.parametrize("language", EVERY_LANGUAGE)
def test_a_connection_that_is_lost_at_once_is_made_again_before_the_next_heartbeat(
    language: str, listener: socket.socket, tmp_path: Path
) -> None:
    with container(language, "learner", listener, tmp_path):
        for _ in range(8):
            with greeted(listener, welcome(heartbeat_ms=3_600_000)):
                pass


def test_feedback_that_waits_has_a_limit_in_bytes(
    language: str, listener: socket.socket, tmp_path: Path
) -> None:
    frames = 20
    reply = welcome(heartbeat_ms=500, payload_bytes_max=200, accuracy=True)
    with (
        container(language, "learner", listener, tmp_path),
        greeted(listener, reply + frame_named("feedback_digits") * frames) as peer,
    ):
        learned = failed = 0
        while learned + failed < 2 * frames:
            header = received(peer, 64)
            payload = received(peer, int.from_bytes(header[40:48], "little"))
            if header[5] == Kind.ACCURACY:
                learned, failed = struct.unpack("<2Q", payload[:16])
        assert learned >= 2
        assert failed >= frames


def test_feedback_that_waits_in_a_container_in_python_has_a_limit_in_bytes() -> None:
    payload = np.frombuffer(frame_named("feedback_digits")[64:], np.uint8)
    waiting = FeedbackQueue(Learner(), "hand", 2 * payload.nbytes, 1.0)
    for _ in range(5):
        waiting.add(payload)
    assert (len(waiting), waiting.failed) == (2, 6)
    waiting.run_one()
    waiting.add(payload)
    assert (len(waiting), waiting.failed) == (2, 6)


# -- code of a model


def test_a_model_that_throws_beside_predict_serves_on(language: str) -> None:
    with clipper.start(**QUICK) as server:
        server.deploy("stubborn", command=program(language, "learner", "stubborn"), cache=False)
        app = server.app("stubborn", models=["stubborn"], slo_ms=SLO_MS, default=-1.0)
        (before,) = server.stats()["models"]["stubborn:1"]["replicas"]
        for label in range(5):
            answer = app.predict([0.0, 0.0]).result(60)
            app.feedback(answer, label=float(label))
        wait_until(lambda: app.predict([0.0, 0.0]).result(60).output == 5.0)
        (after,) = server.stats()["models"]["stubborn:1"]["replicas"]
        assert (after["pid"], after["state"]) == (before["pid"], "ready")
        for call in ("correct()", "accuracy()"):
            wait_until(lambda call=call: f"{call} failed" in "".join(server.logs("stubborn")))


# -- what a container lacks itself


def address_space_bytes(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmSize:")[1].split()[0]) << 10


def test_a_container_of_several_servers_waits_for_a_thread(language: str, tmp_path: Path) -> None:
    """Its address space has no room for the stack of one until the limit is raised."""
    address = f"unix:{tmp_path}/one.sock"
    variables = {"ADDRESS": address, "TOKEN": TOKEN, "MODEL": "hand", "ALL_SERVERS": "1"}
    environment = {f"CLIPPER_{key}": value for key, value in variables.items()}
    command = program(language, "late")
    if language == "java":
        command.insert(1, "-Xss64m")
    environment["MALLOC_ARENA_MAX"] = "1"
    with Program(*command, environment=environment, until="loads\n") as process:
        most = address_space_bytes(process.pid) + ROOM_BYTES[language]
        resource.prlimit(process.pid, resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
        process.say("go on")
        process.until("no thread for")
        infinity = resource.RLIM_INFINITY
        resource.prlimit(process.pid, resource.RLIMIT_AS, (infinity, infinity))
        with clipper.start(address=address, token=TOKEN, drain_s=0.2) as one:
            wait_until(lambda: "hand:1" in one.stats()["models"])
            assert one.model("hand").predict(np.ones(3), slo_ms=SLO_MS).result(60) == 0.0


# -- connections of Java


def test_a_connection_that_fails_leaves_no_descriptor_open(tmp_path: Path) -> None:
    command = java_command(java(JAVA / "tests"), "clipper.container.Refused")
    words = [*command, f"unix:{tmp_path}/none.sock"]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    first, last = map(int, ran.stdout.split())
    assert last == first


def test_a_server_that_accepts_nobody_is_not_waited_for(tmp_path: Path) -> None:
    place = f"{tmp_path}/full.sock"
    command = java_command(java(JAVA / "tests"), "clipper.container.Refused")
    with socket.socket(socket.AF_UNIX) as full, contextlib.ExitStack() as stack:
        full.bind(place)
        full.listen(0)
        with contextlib.suppress(BlockingIOError):
            for _ in range(100):
                one = stack.enter_context(socket.socket(socket.AF_UNIX))
                one.setblocking(False)
                one.connect(place)
        words = [*command, f"unix:{place}"]
        ran = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert len(set(ran.stdout.split())) == 1
