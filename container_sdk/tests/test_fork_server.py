"""A fork server that lacks descriptors or gets what is no request: its children go on."""

import errno
import importlib
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import time

import pytest

ENTRY = "clipper_container.forking.replica:become"


class ForkServer:
    """A fork server, and requests to it."""

    def __init__(self, *words):
        self.connection, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [sys.executable, "-P", *(words or ("-m", "clipper_container")), "fork-server"]
            self.process = subprocess.Popen(words, stdin=theirs.fileno(), stderr=subprocess.DEVNULL)
        self.connection.settimeout(60)
        self.number = 0

    def request(self):
        """Request a child; return the answer, its pidfd or None, and our end of its socket."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.number += 1
        null = os.open(os.devnull, os.O_WRONLY)
        message = json.dumps({"id": self.number, "entry": ENTRY}).encode()
        socket.send_fds(self.connection, [message], [null, theirs.fileno()])
        os.close(null)
        theirs.close()
        answer, fds = self.read()
        return answer, fds, ours

    def read(self):
        data, fds, _, _ = socket.recv_fds(self.connection, 1 << 18, 4)
        return json.loads(data), fds

    def close(self):
        self.connection.close()
        assert self.process.wait(60) == 0


@pytest.fixture
def server():
    made = ForkServer()
    yield made
    made.close()


def children(pid: int) -> list[int]:
    with open(f"/proc/{pid}/task/{pid}/children") as file:
        return [int(word) for word in file.read().split()]


def lives(pid_fd: int) -> bool:
    return not select.select([pid_fd], [], [], 0)[0]


@pytest.mark.parametrize("free", range(5))
def test_without_descriptors_it_refuses_and_its_children_live(server, free):
    answer, (pid_fd,), control = server.request()
    pid = server.process.pid
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    holes = [fd for fd in range(64) if fd not in taken]
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (holes[free], limits[1]))
    refused, fds, other = server.request()
    other.close()
    if "error" in refused:
        assert refused["own"], refused
    else:  # this is enough
        assert free >= 3
        (fd,) = fds
        os.close(fd)
        assert server.read()[0]["code"] == 0
    assert lives(pid_fd)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)
    later, (later_fd,), later_control = server.request()
    assert later["pid"] != answer["pid"]
    for fd, socket_ in ((pid_fd, control), (later_fd, later_control)):
        socket_.close()
        assert server.read()[0]["code"] == 0
        os.close(fd)


FAILS_ONCE = """
import errno, os, socket, sys
from clipper_container.__main__ import main

def fails_once(place, name, code):
    real = getattr(place, name)

    def call(*given, **named):
        setattr(place, name, real)
        raise OSError(code, os.strerror(code))

    setattr(place, name, call)

fails_once({place}, {name!r}, errno.{code})
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(
    ("place", "name", "code"),
    [
        ("os", "listdir", "EMFILE"),
        ("os", "fork", "ENOMEM"),
        ("os", "pidfd_open", "ENFILE"),
        ("socket", "send_fds", "ENOBUFS"),
        ("socket", "send_fds", "ETOOMANYREFS"),
    ],
)
def test_a_request_that_fails_anywhere_is_answered_and_leaves_no_child(place, name, code):
    server = ForkServer("-c", FAILS_ONCE.format(place=place, name=name, code=code))
    refused, fds, control = server.request()
    assert (refused["id"], refused.get("own"), fds) == (1, True, [])
    if name == "send_fds":  # the end of the child that nobody knows
        assert server.read()[0]["code"] == -signal.SIGKILL
    assert children(server.process.pid) == []
    control.close()
    made, (pid_fd,), control = server.request()
    assert children(server.process.pid) == [made["pid"]]
    control.close()
    assert server.read()[0]["code"] == 0
    os.close(pid_fd)
    server.close()


def test_a_child_takes_no_further_descriptor_to_read_what_it_is_to_do(monkeypatch):
    from clipper_container.forking.replica import received

    def none_is_free(fd):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", none_is_free)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(b'{"title": "x"}')
        assert received(theirs.fileno()) == ({"title": "x"}, [])
        theirs.send(b"later")
        assert ours.recv(9) == b"later", "it stays open"


def test_an_import_for_which_something_lacks_is_no_reason_not_to_fork(monkeypatch):
    from clipper_container.forking import preload

    def lacks(name):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(preload, "unsafe_now", str)  # a test has threads
    monkeypatch.setattr(importlib, "import_module", lacks)
    made = preload.Imports()
    made.preload(["any"])
    assert len(made) == 0


def test_what_is_no_request_ends_nothing(server):
    answer, (pid_fd,), control = server.request()
    known = os.listdir(f"/proc/{server.process.pid}/fd")
    for data in (b"{", b"[]", b"{}", b'{"id": 1}', b'{"id": 1, "entry": "a:b", "c": 1}', b'"x"'):
        socket.send_fds(server.connection, [data], [pid_fd])
    time.sleep(0.5)
    assert lives(pid_fd)
    assert server.process.poll() is None
    assert os.listdir(f"/proc/{server.process.pid}/fd") == known
    assert children(server.process.pid) == [answer["pid"]], "none is forked for what is none"
    os.kill(answer["pid"], signal.SIGKILL)
    codes = []
    while -signal.SIGKILL not in codes:
        codes.append(server.read()[0].get("code"))
    control.close()
    os.close(pid_fd)


def test_forks_draw_numbers_of_their_own(monkeypatch):
    torch = pytest.importorskip("torch", reason="pip install torch")
    import numpy.random

    from clipper_container.forking.replica import reseed

    def draw():
        torch.manual_seed(1)
        numpy.random.seed(1)
        reseed()
        return float(torch.rand(1)), float(numpy.random.rand())

    first, second = draw(), draw()
    assert first[0] != second[0]
    assert first[1] != second[1]
