"""Commands of the shell, each in a process of its own."""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

PATIENCE_S = 60.0


class Process:
    """A command that runs as a process; `seen` has what it has printed until now."""

    def __init__(self, *words: str) -> None:
        command = [sys.executable, "-u", "-m", "clipper", *words]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        self.seen = ""

    def until(self, *texts: str) -> str:
        assert self.process.stdout is not None
        give_up = time.monotonic() + PATIENCE_S
        while not all(text in self.seen for text in texts):
            assert select.select(
                [self.process.stdout], [], [], max(0.0, give_up - time.monotonic())
            )[0], self.seen
            data = os.read(self.process.stdout.fileno(), 4096).decode()
            assert data, f"it ended before it printed {texts}: {self.seen}"
            self.seen += data
        return self.seen

    def rest(self) -> str:
        assert self.process.stdout is not None
        self.seen += self.process.stdout.read().decode()
        self.process.wait(PATIENCE_S)
        self.process.stdout.close()
        return self.seen

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        self.rest()
        return int(self.process.returncode)


@contextlib.contextmanager
def running(*words: str) -> Iterator[Process]:
    started = Process(*words)
    try:
        yield started
    finally:
        if started.process.poll() is None:
            started.process.kill()
        assert started.process.stdout is not None
        started.process.stdout.close()
        started.process.wait(PATIENCE_S)
