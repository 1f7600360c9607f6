"""Containers in C++ and Java connected to a server that sends damaged frames: each closes, and
connects again, and none reserves what a frame announces."""

import random
import socket
import zlib
from pathlib import Path

import pytest

from tests.languages.compiled import CPP, JAVA, SANITIZERS, cpp, java, java_command
from tests.languages.test_vectors import bytes_of, vectors
from tests.processes import Program

LANGUAGES = ("cpp", "java")
CONNECTIONS = 12
GROWTH_KIB_MAX = 100 << 10


@pytest.fixture(params=LANGUAGES)
def command(request):
    if request.param == "cpp":
        return [str(cpp(CPP / "examples" / "noop.cpp", *SANITIZERS))]
    return java_command(java(JAVA / "examples"), "Noop")


@pytest.fixture
def listener(tmp_path):
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"{tmp_path}/server.sock")
        sock.listen()
        sock.settimeout(30)
        yield sock


def frame_named(name):
    return next(
        bytes.fromhex(vector["hex"]) for vector in vectors("frames.json") if vector["name"] == name
    )


def received(peer, size):
    data = b""
    while len(data) < size:
        data += peer.recv(size - len(data)) or pytest.fail("the container closed too early")
    return data


def greeted(listener, welcome):
    """Accept a container, read its HELLO, and send WELCOME; return the connection."""
    peer, _ = listener.accept()
    peer.settimeout(30)
    header = received(peer, 64)
    received(peer, int.from_bytes(header[40:48], "little"))
    peer.sendall(welcome)
    return peer


def wild(numbers):
    """Return a PREDICT with a correct header that announces random sizes, and without a payload."""
    header = bytearray(frame_named("predict_f64_vectors")[:64])
    header[12:16] = numbers.choice((1, 1 << 20, (1 << 32) - 1)).to_bytes(4, "little")
    sizes = (1 << 62, (64 << 20) + 1, 1 << 40, (1 << 64) - 1)
    header[40:48] = numbers.choice(sizes).to_bytes(8, "little")
    header[60:64] = zlib.crc32(header[:60]).to_bytes(4, "little")
    return bytes(header)


def resident_kib(pid):
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0])


def test_a_container_survives_damaged_frames_of_a_server(command, listener):
    numbers = random.Random(5)
    bad = [data for version, data in bytes_of(vectors("refused.json")) if version == 2]
    welcome = frame_named("welcome")
    environment = {"CLIPPER_ADDRESS": f"unix:{listener.getsockname()}", "CLIPPER_MODEL": "m"}
    with Program(*command, environment=environment) as process:
        with greeted(listener, frame_named("refuse")[:30]):
            pass  # REFUSE is cut: no reason to end
        with greeted(listener, welcome) as peer:
            before = resident_kib(process.pid)
            peer.sendall(wild(numbers))
            assert peer.recv(1) == b""
        for i in range(CONNECTIONS):
            with greeted(listener, welcome) as peer:
                damaged = wild(numbers) if i % 2 else numbers.choice(bad)
                peer.sendall(frame_named("predict_f64_vectors") + damaged)
                reply = received(peer, 64)
                assert (reply[5], reply[12:16]) == (5, (2).to_bytes(4, "little"))
                peer.shutdown(socket.SHUT_WR)  # what is too short is lost then
                while peer.recv(4096):
                    pass
        assert resident_kib(process.pid) < before + GROWTH_KIB_MAX
        with greeted(listener, frame_named("refuse")):
            assert process.wait() == 4
    assert "Sanitizer" not in process.output, process.output
