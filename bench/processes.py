"""Processes of a benchmark. Each makes an object, and calls its methods when it is told to.

A process is a new interpreter, not a fork: threads of the caller's libraries do not exist in a
fork, and the locks that they hold stay locked in it. Each answer is waited for for a limited time,
and a process that ends early is an error.
"""

import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Self

ENDS_WITHIN_S = 10.0


class ObjectProcess:
    """A process with one object. Threads: one at a time.

    make: called there with `arguments`; returns the object. It is pickled, as are the arguments and
    results of methods. limit_s: of each answer.
    """

    def __init__(self, make: Callable[..., object], *arguments: object, limit_s: float) -> None:
        self._limit_s = limit_s
        self._line, theirs = Pipe()
        with theirs:
            command = [sys.executable, "-m", "bench.processes", str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
        self._line.send((make, arguments))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._line.close()
        self._process.kill()
        self._process.wait(ENDS_WITHIN_S)

    def start(self, method: str, *arguments: object) -> None:
        """Start a method. `result` returns what it returns, in the order of the starts. Raises as
        `result` if the process has ended."""
        try:
            self._line.send((method, arguments))
        except (BrokenPipeError, ConnectionResetError):
            self.result()
            raise

    def call(self, method: str, *arguments: object) -> Any:
        """Call a method, and wait for what it returns. Raises as `result`."""
        self.start(method, *arguments)
        return self.result()

    def result(self) -> Any:
        """Wait for the next answer. Raises TimeoutError, and RuntimeError if the method raised or
        the process has ended."""
        try:
            if not self._line.poll(self._limit_s):
                raise TimeoutError(f"a process gave no answer within {self._limit_s:g} s")
            error, value = self._line.recv()
        except (EOFError, ConnectionResetError):
            status = self._process.wait(ENDS_WITHIN_S)
            raise RuntimeError(f"a process ended early, with exit status {status}") from None
        if error:
            raise RuntimeError(error)
        return value


def call_all(processes: Sequence[ObjectProcess], method: str, *arguments: object) -> list[Any]:
    """Call a method in several processes at the same time; return their results in order."""
    for one in processes:
        one.start(method, *arguments)
    return [one.result() for one in processes]


def main(line: Connection) -> None:
    """Make the object and serve its methods until the caller closes the pipe, or one raises."""
    try:
        make, arguments = line.recv()
        served = make(*arguments)
        while True:
            method, arguments = line.recv()
            line.send(("", getattr(served, method)(*arguments)))
    except EOFError:
        return
    except Exception as error:
        traceback.print_exc()
        line.send((f"{type(error).__name__}: {error}", None))


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
