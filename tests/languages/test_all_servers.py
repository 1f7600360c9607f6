"""One container in C++ or Java that serves several servers, which are killed, and come and go."""

import contextlib
import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import clipper
from clipper_container.wire.frames import Kind, control_frame
from tests.languages.test_containers import LANGUAGES, ended, program, started_by_hand
from tests.memory_container import wait_until
from tests.processes import Program, free_ports

PATIENCE_S = 30.0
TOKEN = "t" * 32
# Serves at an address; answers each line of its input once the container is connected.
SERVER = """
import sys, time, clipper
server = clipper.start(address=sys.argv[1], token=sys.argv[2], heartbeat_ms=2000, drain_s=0.2)
print("listens", flush=True)
for line in sys.stdin:
    while server.stats()["models"].get("hand:1", {}).get("has") != 1:
        time.sleep(0.02)
    print(server.model("hand").predict(line.strip(), slo_ms=60_000).result(60), flush=True)
"""


@pytest.fixture(params=LANGUAGES)
def language(request: pytest.FixtureRequest) -> str:
    return str(request.param)


class Server:
    """A server in a process of its own, which can be killed and started again."""

    def __init__(self, address: str) -> None:
        at = address.replace("tcp:", "tcp://")
        self._words = [sys.executable, "-c", SERVER, at, TOKEN]
        self.start()

    def start(self) -> None:
        self.program = Program(*self._words, apart=True)
        assert self.program.line() == "listens"

    def answers(self, text: str) -> None:
        self.program.say(text)
        assert self.program.line() == text

    def kill(self) -> None:
        self.program.kill()


@contextlib.contextmanager
def running(*addresses: str) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        servers = [Server(address) for address in addresses]
        for one in servers:
            stack.callback(one.kill)
        yield servers


def test_a_container_serves_both_servers_through_a_kill_of_each(
    language: str, tmp_path: Path
) -> None:
    """One server is reached over TCP, one over a unix socket."""
    addresses = f"tcp:127.0.0.1:{free_ports(1)[0]}", f"unix:{tmp_path}/clipper.sock"
    alive = tmp_path / "alive"
    command = program(language, "echo", "str", "str")
    with running(*addresses) as (one, other):
        process = started_by_hand(command, ",".join(addresses), TOKEN, ALIVE_FILE=str(alive))
        for killed, stays in ((one, other), (other, one)):
            killed.answers("first")
            stays.answers("second")
            killed.kill()
            stays.answers("while the other is gone")
            killed.start()
            killed.answers("again")
        assert alive.exists()
        well, text = ended(process)
        assert well, text


def test_a_container_that_every_server_rejects_exits_with_the_reason(language: str) -> None:
    with (
        clipper.start(address="tcp://127.0.0.1:0", token=TOKEN) as one,
        clipper.start(address="tcp://127.0.0.1:0", token=TOKEN) as other,
    ):
        addresses = f"{one.address},{other.address}"
        process = started_by_hand(program(language, "noop"), addresses, "another")
        assert process.wait() == 4, process.output
    assert process.output.count("token is missing or wrong") >= 2


def test_an_invalid_address_among_several_ends_the_container(language: str) -> None:
    process = started_by_hand(program(language, "noop"), "tcp:127.0.0.1:1,nowhere", TOKEN)
    assert (process.wait(), "'nowhere'" in process.output) == (2, True), process.output


def test_the_token_is_read_from_a_file(language: str, tmp_path: Path) -> None:
    file, command = tmp_path / "token", program(language, "noop")
    with clipper.start(address="tcp://127.0.0.1:0", token=TOKEN, drain_s=0.2) as one:
        missing = started_by_hand(command, one.address, "", TOKEN_FILE=str(file))
        assert (missing.wait(), str(file) in missing.output) == (2, True), missing.output
        file.write_text(f"{TOKEN}\n")
        process = started_by_hand(command, one.address, "", TOKEN_FILE=str(file))
        wait_until(lambda: "hand:1" in one.stats()["models"], "it is let in", PATIENCE_S)
        assert ended(process)[0]


def test_a_name_that_cannot_be_resolved_is_printed(language: str) -> None:
    name = "x" * 70  # longer than a label of a name may be
    process = started_by_hand(program(language, "noop"), f"tcp:{name}:1", TOKEN, ALL_SERVERS="1")
    process.until(f"cannot resolve {name}")
    well, text = ended(process)
    assert well, text
    assert text.count(f"cannot resolve {name}") == 1


only_root = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("unshare") is None, reason="only root can change names"
)


def with_hosts(language: str, hosts: Path) -> list[str]:
    """Return the command of a container that looks names up in this file, which only it sees."""
    hosts.write_text("127.0.0.1 servers\n")
    within = ["unshare", "--mount", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"']
    return [*within, "sh", *program(language, "echo", "str", "str")]


@only_root
def test_a_rejection_by_a_server_that_left_the_name_does_not_end_the_container(
    language: str, tmp_path: Path
) -> None:
    """The server has left the host name when its rejection arrives."""
    port, hosts = free_ports(1)[0], tmp_path / "hosts"
    command = with_hosts(language, hosts)
    with (
        running(f"tcp:127.0.0.2:{port}") as (stays,),
        socket.create_server(("127.0.0.1", port)) as gone,
    ):
        gone.settimeout(PATIENCE_S)
        process = started_by_hand(command, f"tcp:servers:{port}", TOKEN, ALL_SERVERS="1")
        with gone.accept()[0] as connection:
            assert connection.recv(1 << 16)
            hosts.write_text("127.0.0.2 servers\n")
            connection.sendall(b"".join(control_frame(Kind.REFUSE, b"it goes")))
            stays.answers("the one that is listed")
        well, text = ended(process)
        assert well, text


@pytest.mark.slow
@only_root
def test_all_servers_of_a_name_are_served_as_they_come_and_go(
    language: str, tmp_path: Path
) -> None:
    port, hosts = free_ports(1)[0], tmp_path / "hosts"
    command = with_hosts(language, hosts)
    with running(f"tcp:127.0.0.1:{port}", f"tcp:127.0.0.2:{port}") as (one, other):
        process = started_by_hand(command, f"tcp:servers:{port}", TOKEN, ALL_SERVERS="1")
        one.answers("the only one of the name")
        hosts.write_text("127.0.0.1 servers\n127.0.0.2 servers\n")
        other.answers("one that came later")
        one.answers("beside the first")
        hosts.write_text("127.0.0.2 servers\n")
        one.kill()
        other.answers("the other one is gone")
        well, text = ended(process)
        assert well, text
