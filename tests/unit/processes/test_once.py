"""Commands that run once: their output and exit, limits, and what they leave behind."""

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper.errors import NotStarted, ShuttingDown
from clipper.processes import Outcome, StartCommand, Supervisor, run_once, spawned
from tests.threads import join

ALIVE = "import time; print('begun', flush=True); time.sleep(600)"
LIMIT_S = 30.0


@pytest.fixture
def processes() -> Iterator[Supervisor]:
    with Supervisor() as found:
        yield found


def python(text: str) -> StartCommand:
    return StartCommand([sys.executable, "-I", "-S", "-c", text], {})


def test_lines_come_in_order_before_the_end(processes: Supervisor) -> None:
    seen: list[str] = []
    text = "import sys; print(*range(500), sep='\\n', flush=True); sys.exit('the last')"
    found = run_once(processes, "it", python(text), LIMIT_S, on_line=seen.append)
    assert seen == [*map(str, range(500)), "the last"]
    assert found == Outcome(1, "exit 1", seen[-200:], late=False, started=True)
    assert processes.list() == []


def test_a_command_that_cannot_be_started_is_not_tried_again(processes: Supervisor) -> None:
    found = run_once(processes, "it", StartCommand(["/no/such/program"], {}), LIMIT_S)
    assert (found.code, found.late) == (None, False)
    assert found.detail.startswith("not started: [Errno 2]")


def test_the_limit_ends_a_command_and_what_it_has_started(
    processes: Supervisor, tmp_path: Path
) -> None:
    """Its child holds the pipe, and is deaf to SIGTERM."""
    text = (
        "import os, signal, time; signal.signal(15, signal.SIG_IGN); child = os.fork();"
        f"child and open({str(tmp_path / 'child')!r}, 'w').write(str(child)); time.sleep(600)"
    )
    found = run_once(processes, "it", python(text), 2.0)
    assert (found.code, found.late, found.started) == (None, True, True)
    assert found.detail == "killed (SIGKILL)"
    child = int((tmp_path / "child").read_text())
    assert ends(child)


def ends(pid: int) -> bool:
    """Return whether a process that was killed ends; whoever adopted it reaps it."""
    stat, until_s = Path(f"/proc/{pid}/stat"), time.monotonic() + LIMIT_S
    try:
        while ") Z " not in stat.read_text():
            if time.monotonic() > until_s:
                return False
            os.sched_yield()
    except (FileNotFoundError, ProcessLookupError):
        pass
    return True


def test_a_predicate_ends_a_command(processes: Supervisor) -> None:
    over = threading.Event()
    found = run_once(processes, "it", python(ALIVE), LIMIT_S, over.is_set, lambda line: over.set())
    assert (found.code, found.late, list(found.lines)) == (None, False, ["begun"])


def test_an_error_in_what_follows_the_lines_ends_a_command(processes: Supervisor) -> None:
    with pytest.raises(ZeroDivisionError):
        run_once(processes, "it", python(ALIVE), LIMIT_S, on_line=lambda line: 1 / 0)
    assert processes.list() == []


def test_the_end_of_the_supervisor_ends_a_command(processes: Supervisor) -> None:
    closes = threading.Thread(target=processes.end)
    found = run_once(processes, "it", python(ALIVE), on_line=lambda line: closes.start())
    join(closes)
    assert (found.code, found.late) == (None, False)
    with pytest.raises((ShuttingDown, NotStarted)):
        run_once(processes, "it", python(ALIVE))


class Short:
    """Fails the first starts for want of a descriptor."""

    def __init__(self, times: int) -> None:
        self.times, self.start = times, spawned.spawn

    def __call__(self, *given: object) -> spawned.Process:
        self.times -= 1
        if self.times >= 0:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return self.start(*given)  # type: ignore[arg-type]


@pytest.mark.parametrize(("times", "limit_s"), [(2, LIMIT_S), (1 << 30, 0.5)])
def test_a_shortage_of_the_server_is_waited_for(
    processes: Supervisor, monkeypatch: pytest.MonkeyPatch, times: int, limit_s: float
) -> None:
    monkeypatch.setattr(spawned, "spawn", Short(times))
    found = run_once(processes, "it", python("print(1)"), limit_s)
    assert found.started == (times == 2)
    if found.started:
        assert (found.code, list(found.lines)) == (0, ["1"])
    else:
        assert (found.code, found.late) == (None, True)
        assert "the server is short of something: [Errno 24]" in found.detail


def test_a_signal_is_told(processes: Supervisor) -> None:
    found = run_once(processes, "it", python("import os; os.kill(os.getpid(), 11)"), LIMIT_S)
    assert (found.code, found.detail) == (-signal.SIGSEGV, "killed (SIGSEGV)")
