"""Processes that are started from a program."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Protocol

from clipper.processes.handle import NO_LIMITS, End, ProcessLimits, Told, describe_exit
from clipper.processes.output import Output
from clipper_container.start_folder import ROOT, StartFolder

_END_OF_KILLED_S: Final = 5.0  # for the kernel, if the supervisor itself ends
_SIGNAL_GROUP: Final = 1 << 2  # PIDFD_SIGNAL_PROCESS_GROUP
_OF_ANOTHER: Final = End(None, "ended; another part of this process has taken its exit code")


@dataclass(frozen=True, slots=True)
class StartCommand:
    """A program and what it gets. fds: descriptors that it inherits under their numbers. stdin: a
    descriptor; -1: nothing to read. stderr: a descriptor; -1: that of its output. session: whether
    it gets a session of its own, besides its process group. joins: whether it joins a control group
    of its own, as `clipper_container.parent_death` does: it runs code that is not ours. limits: of
    one that joins.
    """

    words: Sequence[str]
    environment: Mapping[str, str]
    fds: tuple[int, ...] = ()
    stdin: int = -1
    stderr: int = -1
    session: bool = False
    joins: bool = False
    limits: ProcessLimits = NO_LIMITS

    def command(self, number: int) -> "StartCommand":
        """See Commands: the same command for each start."""
        return self

    def for_start(self, told: Told) -> "StartCommand":
        """Return the command of one start."""
        if not self.joins:
            return self
        return replace(self, environment={**self.environment, **told.group(self.limits)})


class Commands(Protocol):
    """Gives the command of each start, as it may differ. Threads: the supervisor's."""

    def command(self, number: int) -> StartCommand:
        """Return the command of start `number`, from 1. Raises: OSError."""


class Process:
    """A process in a group of its own, or in a session. What it leaves behind in that group ends
    with it. Threads: the one that made it.

    fd: its pidfd, which belongs to this; -1 once the process has ended. popen: it, if it is a child
    of this process.
    """

    def __init__(self, pid: int, fd: int, popen: subprocess.Popen[bytes] | None = None) -> None:
        self.pid, self.fd = pid, fd
        self._popen = popen

    def follow(self, told: Told, over: Callable[[End], None]) -> None:
        """Call `over` with the end of a child of this process, once it has ended."""
        told.watch(self.fd, partial(self._look, told, over))

    def _look(self, told: Told, over: Callable[[End], None]) -> None:
        told.unwatch(self.fd)
        end = self.reap()
        if end is None:
            self.follow(told, over)
        else:
            over(end)

    def signal(self, number: signal.Signals) -> None:
        """Signal the process; SIGKILL also what it has started."""
        if self.fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.fd, number)
        if number == signal.SIGKILL:
            self._kill_group()

    def reap(self) -> End | None:
        """Return the end of a child that has ended; None if it has not. What it has left is
        killed."""
        end = _OF_ANOTHER
        with contextlib.suppress(ChildProcessError):
            # its number is not given to another process as long as it is not reaped
            found = os.waitid(os.P_PIDFD, self.fd, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if found is None:
                return None
            code = found.si_status if found.si_code == os.CLD_EXITED else -found.si_status
            end = End(code, describe_exit(code))
        self.end()
        return end

    def end(self) -> None:
        """Kill the process, and reap a child. Idempotent."""
        self.signal(signal.SIGKILL)
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)
        if self._popen is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._popen.wait(_END_OF_KILLED_S)

    def _kill_group(self) -> None:
        """Kill what is in the group, also after another has reaped the process."""
        try:
            signal.pidfd_send_signal(self.fd, signal.SIGKILL, None, _SIGNAL_GROUP)
        except (ProcessLookupError, PermissionError):
            pass
        except OSError:  # Linux before 6.9
            _kill_group(self.pid)


def _kill_group(pid: int) -> None:
    """Kill what is in the group of a process, if any."""
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


def spawn(command: StartCommand, output: int, folder: StartFolder | None) -> Process:
    """Start a child of this process.

    output: descriptor of its stdout and stderr. folder: where it starts; None: at the root.

    Raises: OSError; ValueError for a NUL in an argument. Then nothing runs.
    """
    with contextlib.ExitStack() as undo:
        popen = subprocess.Popen(
            command.words,
            env=command.environment,
            cwd=ROOT if folder is None else folder.for_child,
            stdin=subprocess.DEVNULL if command.stdin < 0 else command.stdin,
            stdout=output,
            stderr=output if command.stderr < 0 else command.stderr,
            pass_fds=command.fds,
            process_group=None if command.session else 0,
            start_new_session=command.session,
        )
        undo.callback(popen.wait)
        # what it has started by now, too; its group is there, since the program runs
        undo.callback(_kill_group, popen.pid)
        process = Process(popen.pid, os.pidfd_open(popen.pid), popen)
        undo.pop_all()
    return process


class Spawned:
    """A handle of a program that is started for each start. commands: gives its command. folder:
    where it starts; None: at the root. See `Handle`.
    """

    def __init__(self, commands: Commands, folder: StartFolder | None = None) -> None:
        self._commands, self._folder = commands, folder
        self._process: Process | None = None
        # for the start that is under way
        self._opened = contextlib.ExitStack()

    def start(self, number: int, told: Told) -> None:
        """See Handle."""
        command = self._commands.command(number).for_start(told)
        output = Output(told)
        self._opened.callback(output.finish)
        process = self._process = spawn(command, output.for_child, self._folder)
        self._opened.callback(process.end)
        output.handed_over()
        process.follow(told, partial(_over, told, output))
        told.started(process.pid)

    def hurry(self) -> None:
        """See Handle. There is no other way."""

    def signal(self, number: signal.Signals) -> None:
        """See Handle."""
        if self._process is not None:
            self._process.signal(number)

    def clear(self) -> None:
        """See Handle."""
        self._opened.close()


def _over(told: Told, output: Output, end: End) -> None:
    """Tell the end of a process, and before it its last lines."""
    output.finish()
    told.ended(end)
