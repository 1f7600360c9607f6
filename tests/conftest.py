"""Fixtures of all tests, and a check that no test leaves a thread or a child process."""

import os
import random
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from clipper_core.runtime.status import Status, StatusError, bind_errors, error_for

if TYPE_CHECKING:
    from tests.store.etcd_server import EtcdServer

# A test asserts no time, and has the same examples each time; `--hypothesis-profile=default` draws
# others.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the generators that all share, before the fixtures: a test draws the same numbers,
    whichever ran before it."""
    random.seed(0)
    # scikit-learn draws from it
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


# Programs that tools/fetch.py has put into the environment, also when its Python was called without
# activating it.
if f"{sys.prefix}/bin" not in os.environ["PATH"].split(os.pathsep):
    os.environ["PATH"] = os.pathsep.join((f"{sys.prefix}/bin", os.environ["PATH"]))

# how long a thread or a process may take to end once the test has closed what it opened
PATIENCE_S = 30.0
BYSTANDERS = (
    "multiprocessing.resource_tracker",
    "multiprocessing.forkserver",
    "multiprocessing.spawn",
    "clipper_container fork-server",  # of a server that the tests share; it ends with the server
    "loky",
    "redis-server",
    "etcd --",
)


def our_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("clipper-")}


def child_processes() -> dict[int, str]:
    """Return the children of this process by id, with their command line. Zombies are included:
    their parent has not waited for them."""
    found = {}
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as file:
                ids = file.read().split()
        except OSError:  # the thread has just ended
            continue
        for child in map(int, ids):
            command = command_line(child)
            if not any(name in command for name in BYSTANDERS):
                found[child] = command
    return found


def command_line(process: int) -> str:
    try:
        text = (
            Path(f"/proc/{process}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode(errors="replace")
            .strip()
        )
    except OSError:
        return "(gone)"
    return text or "(a zombie: nobody waited for it)"


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Iterator[None]:
    """Fails a test that leaves a clipper- thread or a child process more than there were before.

    A container that a test killed and that came back is a new process in an old one's place.
    """
    me, threads_before, children_before = os.getpid(), our_threads(), child_processes()
    yield
    if os.getpid() != me:  # a forked child that runs a test's tail
        return
    give_up = time.monotonic() + PATIENCE_S
    for thread in our_threads() - threads_before:
        thread.join(max(give_up - time.monotonic(), 0))
    while len(children := child_processes()) > len(children_before) and time.monotonic() < give_up:
        threading.Event().wait(0.01)
    names = sorted(thread.name for thread in our_threads() - threads_before)
    assert not names, f"threads left running: {', '.join(names)}"
    if len(children) > len(children_before):
        new = "; ".join(
            f"{i} {command}" for i, command in children.items() if i not in children_before
        )
        pytest.fail(f"child processes left: {new}")


@pytest.fixture
def bare_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty folder, which is the current one, without the settings of the environment."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("CLIPPER_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture(autouse=True, scope="module")
def errors_of_the_core(request: pytest.FixtureRequest) -> Iterator[None]:
    """Restore the core's own StatusError for its tests, in case an earlier test has imported the
    package above."""
    if Path(__file__).parent / "core" not in request.path.parents:
        yield
        return
    bound = {status: type(error_for(status, "")) for status in Status}
    bind_errors(dict.fromkeys(Status, None))  # type: ignore[arg-type]  # None: nobody claims it
    yield
    bind_errors({status: error for status, error in bound.items() if error is not StatusError})


@pytest.fixture(scope="session")
def stress() -> int:
    """Return the factor of a stress test's rounds: 1 in `make test`, more in `make stress`."""
    return int(os.environ.get("CLIPPER_STRESS", "1"))


@pytest.fixture(scope="session")
def etcd_server() -> Iterator["EtcdServer"]:
    """Run one etcd for all tests. Each test uses a prefix of its own:
    `open_store(f"{etcd_server.url}/{tmp_path.name}")`."""
    from tests.store.etcd_server import started

    for servers in started():
        yield servers[0]
