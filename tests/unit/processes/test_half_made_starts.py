"""Each call that may fail for a shortage, in a start of each kind, fails once: what was half made
is undone, the start is made again, and nothing else is concerned.
"""

import builtins
import contextlib
import errno
import io
import os
import selectors
import socket
import subprocess
import threading
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue

import pytest

from clipper.deploy import ContainerSpec
from clipper.processes import NoticeKind, RestartPolicy
from tests.unit.deploy.deployers import ProcessDeployer
from tests.unit.deploy.test_process import PATIENCE_S, Events, until, wait_for_log

POLICY = RestartPolicy(
    backoff_s_min=0.001, own_s_max=0.01, apart_s=0.0, exits_max=0, answer_s=10 * PATIENCE_S
)
CALLS = (
    (builtins, "open"),
    (io, "open"),
    (os, "mkdir"),
    (os, "open"),
    (os, "pidfd_open"),
    (os, "pipe"),
    (os, "pipe2"),
    (selectors.EpollSelector, "register"),
    (socket, "send_fds"),
    (socket, "socketpair"),
    (subprocess, "_fork_exec"),
)
Site = tuple[str, ...]  # a name of CALLS, and the lines that have called it


class Shortage:
    """Fails one call of one thread. seen: the calls so far that were made for a start."""

    def __init__(self) -> None:
        self.seen: dict[Site, None] = {}
        self.thread = 0
        self._fails: Site = ()
        self._code = 0

    def next(self, site: Site, code: int) -> None:
        """Fail the next call of this kind; of none: let each succeed."""
        self._fails, self._code = site, code

    @property
    def is_over(self) -> bool:
        """Return whether the call that was to fail has failed."""
        return not self._fails

    def around(self, name: str, real: Callable[..., object]) -> Callable[..., object]:
        """Return a function that calls the real one, or fails."""

        def call(*given: object, **named: object) -> object:
            if threading.get_ident() == self.thread:
                self._may_fail(name)
            return real(*given, **named)

        return call

    def _may_fail(self, name: str) -> None:
        frames = traceback.extract_stack()[:-2]
        names = [frame.name for frame in frames]
        # spare descriptors are taken later, and a group is ended later
        if "_fill" in names or "_end_group" in names or "_prepare" in names:
            return
        inner = next((i for i, at in enumerate(names) if at in ("_request", "_guarded")), -1)
        if inner < 0:
            return
        site = (name, *(f"{frame.name}:{frame.lineno}" for frame in frames[inner:]))
        self.seen.setdefault(site)
        if site == self._fails:
            self._fails = ()
            raise OSError(self._code, os.strerror(self._code))


@pytest.fixture
def shortage(monkeypatch: pytest.MonkeyPatch) -> Shortage:
    made = Shortage()
    for place, name in CALLS:
        monkeypatch.setattr(place, name, made.around(name, getattr(place, name)))
    return made


@pytest.fixture
def spec(tmp_path: Path) -> ContainerSpec:
    """Return a model that waits for a server."""
    (tmp_path / "model.py").write_text("def predict(x):\n    return x\n")
    connect, code = f"unix:{tmp_path}/none", (str(tmp_path),)
    return ContainerSpec(name="svm", target="model:predict", connect=connect, code=code)


def descendants(pid: int) -> set[int]:
    """Return the processes that a process has started, with those which these have started."""
    found: set[int] = set()
    for task in Path(f"/proc/{pid}/task").glob("*"):
        try:
            children = {int(word) for word in (task / "children").read_text().split()}
        except OSError:  # it has ended
            continue
        found |= children.union(*map(descendants, children))
    return found


def opened() -> list[str]:
    """Return of what kind each descriptor of this process is."""
    kinds = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # that of the list itself
            kinds.append(os.readlink(f"/proc/self/fd/{fd}").partition(":")[0])
    return sorted(kinds)


def what_there_is(deployer: ProcessDeployer) -> tuple[object, ...]:
    """Return the processes, descriptors and control groups."""
    folder = deployer.supervisor._groups._folder
    found: SimpleQueue[tuple[object, ...]] = SimpleQueue()

    def look() -> None:
        groups = sorted(filter(str.isdecimal, os.listdir(folder))) if folder else []
        found.put((descendants(os.getpid()), opened(), groups))

    deployer.supervisor.post(look)  # there no start is half made
    return found.get(timeout=PATIENCE_S)


def is_of(kind: str, site: Site) -> bool:
    """Return whether a call is tried of this kind of start; the others are those of another."""
    starts_server = any(frame.startswith("_start:") for frame in site)
    return starts_server == (kind == "with a new fork server")


def is_same(deployer: ProcessDeployer, before: tuple[object, ...]) -> bool:
    return what_there_is(deployer) == before


def all_ended(deployer: ProcessDeployer) -> bool:
    """End the fork servers that are idle; return whether there is none."""
    servers = deployer.processes.fork_servers
    deployer.supervisor.post(lambda: servers._end_idle(0.0))
    return not servers.pids


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("plain", errno.EMFILE),
        ("plain", errno.EAGAIN),
        ("forked", errno.ENFILE),
        ("forked", errno.ENOMEM),
        ("forked", errno.EAGAIN),
        ("with a new fork server", errno.EMFILE),
    ],
)
def test_a_start_that_fails_anywhere_is_undone_and_made_again(
    kind: str, code: int, spec: ContainerSpec, shortage: Shortage
) -> None:
    events = Events()
    with ProcessDeployer(events, POLICY, fork=kind != "plain") as deployer:
        if kind == "forked":
            deployer.start(spec, 1)
            events.next(NoticeKind.STARTED)
            until(lambda: any("reconnecting" in line for line in deployer.logs("svm", 1, 1)))
        shortage.thread = deployer.supervisor._thread
        before: tuple[object, ...] = ()
        sites: list[Site] = [()]
        for site in sites:
            shortage.next(site, code)
            deployer.start(spec)
            started = events.next(NoticeKind.STARTED)
            wait_for_log(deployer, "reconnecting")
            assert shortage.is_over, site
            status = next(each for each in deployer.list() if not each.replica)
            assert (status.pid, status.restart_count) == (started.pid, 0), site
            assert {event.kind for event in events.drain()} <= {
                NoticeKind.WAITING,
                NoticeKind.STARTED,
                NoticeKind.RESTARTING,
                NoticeKind.STOPPED,
            }, site
            # a fork server that has enough requests already does not take one: EAGAIN
            assert kind == "plain" or code == errno.EAGAIN or started.detail == "forked", site
            assert len(deployer.processes.fork_servers.pids) == (kind != "plain"), site
            deployer.stop("svm", replica=0)
            if kind == "with a new fork server":
                until(lambda: all_ended(deployer))
            if site:
                until(partial(is_same, deployer, before))
            else:
                before = what_there_is(deployer)  # the folder in which it starts stays open
                sites += [each for each in shortage.seen if is_of(kind, each)]
        assert len(sites) > 7
