"""A set of shards whose supervisor, or the process that forks them, lacks descriptors: what runs
goes on, and what is missing comes up once there are some."""

import contextlib
import errno
import os
import resource
import signal
import socket

import pytest

from clipper.params.local import local_set
from clipper.params.local.local_set import LocalSet
from clipper.processes import ChildState, spawned
from clipper.settings.params import ParamsSettings
from tests.params.conftest import until


@contextlib.contextmanager
def no_descriptors(pid: int):
    """Let a process open nothing more."""
    taken = {int(fd) for fd in os.listdir(f"/proc/{pid}/fd")}
    free = next(fd for fd in range(1 << 16) if fd not in taken)
    limits = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (free, limits[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, limits)


def name(shards, number):
    return local_set._name_of((shards.home, number))


@pytest.fixture
def shards(tmp_path):
    made = LocalSet(ParamsSettings(shards=2, folder=str(tmp_path / "set"), hung_s=0)).start()
    until(lambda: len(made.pids()) == 2)
    yield made
    made.stop(snapshot=False)


def test_the_process_that_forks_lacks_descriptors(shards):
    (fork_server,) = shards._fork_servers.pids
    before = shards.pids()
    with no_descriptors(fork_server):
        os.kill(before[0], signal.SIGKILL)
        until(lambda: shards._supervisor.get(name(shards, 0)).state is ChildState.SHORT)
        assert shards.pids() == {1: before[1]}
    until(lambda: len(shards.pids()) == 2)
    assert shards._fork_servers.pids == [fork_server], "it has not ended"
    assert shards.pids()[1] == before[1]


def test_the_supervisor_lacks_a_descriptor_for_what_was_forked(shards, monkeypatch):
    receive = socket.recv_fds
    left = [2]

    def without_descriptor(*given):
        data, fds, flags, address = receive(*given)
        if fds and left[0]:
            left[0] -= 1
            os.close(fds.pop())
        return data, fds, flags, address

    monkeypatch.setattr(socket, "recv_fds", without_descriptor)
    before = shards.pids()
    os.kill(before[0], signal.SIGKILL)
    until(lambda: shards.pids().get(0) not in (None, before[0]))
    assert left == [0]
    assert shards.pids()[1] == before[1]


def test_an_error_in_the_supervisor_is_not_its_end(shards):
    def fails():
        raise LookupError("a job failed")

    shards._supervisor.post(fails)
    before = shards.pids()
    os.kill(before[1], signal.SIGKILL)
    until(lambda: shards.pids().get(1) not in (None, before[1]))
    assert not shards._supervisor.failure


def test_the_first_fork_server_cannot_be_started(tmp_path, monkeypatch):
    start = spawned.spawn
    left = [2]

    def fails(*given):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EMFILE, "Too many open files")
        return start(*given)

    monkeypatch.setattr(spawned, "spawn", fails)
    made = LocalSet(ParamsSettings(shards=1, folder=str(tmp_path / "set"), hung_s=0)).start()
    try:
        until(lambda: len(made.pids()) == 1)
        assert made._supervisor.get(name(made, 0)).how == "forked"
        assert made.restarts == 0
    finally:
        made.stop(snapshot=False)
