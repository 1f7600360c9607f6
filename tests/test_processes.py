"""Programs of tests: what is awaited of them, and that nothing of them is left."""

import os
import select
import signal
import socket
import sys
from pathlib import Path

import pytest

from tests import processes
from tests.processes import PATIENCE_S, Program, free_ports

SAYS = "import sys, time; print('ready', flush=True); print(sys.stdin.readline().upper()); "


def test_a_program_is_waited_for_asked_and_ended() -> None:
    with Program(sys.executable, "-c", f"{SAYS}sys.exit(3)", until="ready\n") as program:
        assert program.lives
        assert program.lines == ["ready"]
        program.say("yes")
        assert program.line() == "ready"
        assert program.line() == "YES"
        assert program.wait() == 3
        assert not program.lives
        assert "YES" in program.output
        assert program.kill() == 3, "its end stays what it was"


WRITES = """
import os
other = os.fork()
for number in range(20_000):
    os.write(2 if other else 1, b"%s %d\\n" % (b"err" if other else b"out", number))
if other:
    os.waitpid(other, 0)
"""


def test_no_line_goes_over_one_that_is_written_at_the_same_time() -> None:
    with Program(sys.executable, "-c", WRITES) as program:
        assert program.wait() == 0
        expected = {f"{name} {number}" for name in ("out", "err") for number in range(20_000)}
        lost = sorted(expected - {*program.lines})
        assert not lost, f"{len(lost)} lines were lost: {lost[:3]}"


@pytest.mark.parametrize(
    ("code", "limit_s", "why"), [("print('bye')", 60.0, "exit 0\nbye"), (SAYS, 0.05, "not within")]
)
def test_what_does_not_come_is_told_with_the_output(code: str, limit_s: float, why: str) -> None:
    with pytest.raises(AssertionError, match=f"'never': {why}"):
        Program(sys.executable, "-c", code, until="never", limit_s=limit_s)


def test_what_a_program_has_started_ends_with_it(tmp_path: Path) -> None:
    ids = tmp_path / "ids"
    text = f"sleep 600 & echo $! > {ids}; sleep 601"
    with Program("bash", "-c", text, until=lambda: ids.exists() and ids.read_text()) as program:
        left = os.pidfd_open(int(ids.read_text()))
    assert program.wait() == -signal.SIGKILL
    ended, _, _ = select.select([left], [], [], PATIENCE_S)
    os.close(left)
    assert ended


def test_a_program_that_is_late_is_killed() -> None:
    program = Program("sleep", "600")
    with pytest.raises(AssertionError, match="no end within"):
        program.wait(0.01)
    assert program.wait() == -signal.SIGKILL


def test_a_stopped_program_does_not_run_and_ends_all_the_same() -> None:
    with Program(sys.executable, "-c", SAYS, until="ready", terminal=True) as program:
        program.send(signal.SIGSTOP)
        with open(f"/proc/{program.pid}/stat") as file:
            assert file.read().rpartition(")")[2].split()[0] == "T"
        assert program.stop() == -signal.SIGTERM


def test_a_program_on_a_terminal_sees_keys() -> None:
    code = (
        "import shutil; print(shutil.get_terminal_size().columns, flush=True); print(input()[::-1])"
    )
    with Program(sys.executable, "-c", code, terminal=True) as program:
        assert program.see(r"\d+").group() == "120"
        program.press("abc\n")
        assert program.see("cba")
        assert program.wait() == 0


class Draws:
    """Draws numbers that are given."""

    def __init__(self, *given: int) -> None:
        self._given = iter(given)

    def randrange(self, least: int, end: int) -> int:
        drawn = next(self._given)
        assert least <= drawn < end
        return drawn


def test_free_ports_are_successive_and_none_of_them_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ports = free_ports(4)
    assert ports == [*range(ports[0], ports[0] + 4)]
    with socket.create_server(("127.0.0.1", ports[1])):
        monkeypatch.setattr(processes, "_draw", Draws(ports[0], ports[2]))
        assert free_ports(2) == ports[2:]
