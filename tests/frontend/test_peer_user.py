"""The user at the other end of a loopback connection, and which users may manage without a
token."""

import contextlib
import errno
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator

import pytest

import clipper
from clipper.errors import OutOfMemory
from clipper.frontend.auth import peer_user
from clipper.frontend.auth.peer_user import is_own_grpc_user, is_own_user, user_of
from tests.frontend.conftest import PATIENCE_S, QUICK, ask

OTHER_USER = 65534
REQUEST_SCRIPT = """
import os, socket, sys
os.setuid(int(sys.argv[2]))
line = socket.socket()
host, port = sys.argv[1].split(":")
line.connect((host, int(port)))
line.sendall(b"GET / HTTP/1.1\\r\\nHost: 127.0.0.1\\r\\nConnection: close\\r\\n\\r\\n")
print(line.recv(4096).decode())
"""


@pytest.fixture(params=["127.0.0.1", "::1"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    family = socket.AF_INET6 if ":" in request.param else socket.AF_INET
    with socket.socket(family) as listener:
        try:
            listener.bind((request.param, 0))
        except OSError:
            pytest.skip("this host has no IPv6")
        listener.listen()
        client = socket.create_connection(listener.getsockname()[:2])
        server, _ = listener.accept()
        with client, server:
            yield client, server


def test_the_user_of_a_client_on_this_host_is_known(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, server = pair
    assert user_of(server.getpeername(), server.getsockname()) == os.geteuid()
    assert is_own_user(server.getpeername(), server.getsockname())


def test_a_client_that_has_closed_is_nobody(pair: tuple[socket.socket, socket.socket]) -> None:
    """The kernel would say of its socket that it is root's."""
    client, server = pair
    ends = server.getpeername(), server.getsockname()
    client.close()
    assert user_of(*ends) is None
    assert not is_own_user(*ends)


def test_an_invalid_address_has_no_user() -> None:
    assert user_of(("nowhere", 1), ("127.0.0.1", 2)) is None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("token", ["", "secret"])
def test_another_user_of_this_host_manages_nothing_without_a_token(token: str) -> None:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": token}, **QUICK) as server:
        words = [sys.executable, "-c", REQUEST_SCRIPT, server.admin_address, str(OTHER_USER)]
        found = subprocess.run(
            words, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=True
        ).stdout
        assert found.startswith("HTTP/1.1 401 " if token else "HTTP/1.1 403 ")
        assert ask(server.admin_address, "GET", "/").status == (401 if token else 200)


REGISTER = """
import os, sys
import grpc._channel
address, user, authorization = sys.argv[1:4]
os.setuid(int(user))
with grpc.insecure_channel(address) as channel:
    call = channel.unary_unary("/mmesh.ModelMesh/registerModel")
    said = [("authorization", authorization)] if authorization else []
    try:
        call(b"", metadata=said, timeout=20)
        print("OK")
    except grpc.RpcError as error:
        print(error.code().name, error.details())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
@pytest.mark.parametrize("token", ["", "secret"])
def test_another_user_manages_no_mesh_over_grpc_without_a_token(token: str) -> None:
    pytest.importorskip("grpc")
    options = {"mesh": True, "grpc": "127.0.0.1:0", "http": {"token": token}} | QUICK

    def whoami_text(user: int, authorization: str = "") -> str:
        words = [sys.executable, "-c", REGISTER, server.grpc_address, str(user), authorization]
        return subprocess.run(
            words, capture_output=True, text=True, timeout=6 * PATIENCE_S, check=True
        ).stdout

    with clipper.start(**options) as server:
        if token:
            assert whoami_text(OTHER_USER).startswith("UNAUTHENTICATED")
            assert whoami_text(OTHER_USER, f"Bearer {token}").startswith("INVALID_ARGUMENT")
        else:
            assert "only the server's own user may manage" in whoami_text(OTHER_USER)
            assert whoami_text(os.geteuid()).startswith("INVALID_ARGUMENT"), (
                "that it names no model"
            )


@pytest.mark.parametrize(
    ("peer", "address"), [("unix:", "127.0.0.1:1"), ("ipv4:127.0.0.1:x", "127.0.0.1:1"), ("", "")]
)
def test_a_grpc_peer_without_an_address_has_no_user(peer: str, address: str) -> None:
    assert not is_own_grpc_user(peer, address)


# -- a server that lacks descriptors


def test_a_shortage_of_this_process_is_not_the_clients_fault(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    _, server = pair
    ends = server.getpeername(), server.getsockname()
    with _without_descriptors(), pytest.raises(OutOfMemory, match="Too many open files"):
        is_own_user(*ends)
    assert is_own_user(*ends)


@contextlib.contextmanager
def _without_descriptors() -> Iterator[None]:
    """Let this process open no further file."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                opened.append(os.open(os.devnull, os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for fd in opened:
            os.close(fd)


def test_management_of_the_own_user_under_a_shortage_is_answered_503(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with clipper.start(http={"admin": "127.0.0.1:0"}, **QUICK) as server:
        assert ask(server.admin_address, "GET", "/admin/models").status == 200

        with monkeypatch.context() as short:
            # no protocol: the kernel refuses it as it refuses one more descriptor
            short.setattr(peer_user, "_SHORTAGES", (errno.EPROTONOSUPPORT,))
            short.setattr(peer_user, "_NETLINK_SOCK_DIAG", 31)
            reply = ask(server.admin_address, "GET", "/admin/models")
        assert (reply.status, reply.headers["retry-after"]) == (503, "1")
        assert "cannot find out whose connection this is" in reply.json["error"]
        assert "own user" not in reply.json["error"]
        assert ask(server.admin_address, "GET", "/admin/models").status == 200
