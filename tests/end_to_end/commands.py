"""Commands of the shell, each in a process of its own."""

import sys

from tests.processes import Program


def running(*words: str, terminal: bool = False) -> Program:
    return Program(sys.executable, "-u", "-m", "clipper", *words, terminal=terminal)
