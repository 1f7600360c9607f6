"""Runs pytest for one room of tests and records every result as a line of JSON.

`tests/run.py` starts this file as a process: `python tests/room.py RESULTS STACKS [pytest
arguments]`. It works like `python -m pytest` in the current folder. SIGUSR2 writes the stacks of
all threads to the file STACKS.
"""

import ctypes
import faulthandler
import gc
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any, TextIO

import pytest

# Garbage collections: the usual (700, 10, 10) cost 15 % more CPU. There are none until the tests
# are collected, since imports make no garbage, and what is there by then is never looked at again.
RARELY = (20_000, 20, 20)
PR_SET_THP_DISABLE = 41


def cpu_seconds() -> float:
    """Return the CPU time of this process and of its children that have ended."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


class Recorder:
    """A pytest plugin that writes one line when a test starts and one when it ends."""

    def __init__(self, results: TextIO) -> None:
        self._results = results
        self._test: dict[str, Any] = {}
        self._begun = (0.0, 0.0)

    def _write(self, kind: str, **values: Any) -> None:
        if os.getpid() == self._owner:  # not in a child that a test forked
            self._results.write(json.dumps({"kind": kind, **values}) + "\n")
            self._results.flush()

    _owner = os.getpid()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        gc.freeze()
        gc.enable()
        self._write("collected", count=len(session.items))

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.outcome != "passed":
            self._write("test", test=report.nodeid, **_outcome(report), seconds=0.0, cpu=0.0)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._test = {"test": nodeid, "outcome": "passed", "text": ""}
        self._begun = (time.perf_counter(), cpu_seconds())
        self._write("start", test=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        this = _outcome(report)
        # the test, and then its teardown
        if this["outcome"] == "failed" and self._test["outcome"] == "failed":
            self._test["text"] += "\n" + this["text"]
        elif this["outcome"] != "passed":
            self._test.update(this)

    def pytest_runtest_logfinish(self) -> None:
        seconds, cpu = time.perf_counter() - self._begun[0], cpu_seconds() - self._begun[1]
        self._write("test", **self._test, seconds=round(seconds, 3), cpu=round(cpu, 3))

    def pytest_sessionfinish(self) -> None:
        self._write("finished", cpu=round(cpu_seconds(), 1))


def _outcome(report: pytest.CollectReport | pytest.TestReport) -> dict[str, str]:
    """Return the outcome and the text of a report: the reason of a skip, or the traceback and
    captured output of a failure."""
    if report.outcome == "skipped":
        expected = getattr(report, "wasxfail", None)
        reason = f"xfail: {expected}" if expected is not None else report.longrepr
        return {
            "outcome": "skipped",
            "text": str(reason[2] if isinstance(reason, tuple) else reason),
        }
    if report.outcome == "passed":
        return {"outcome": "passed", "text": ""}
    captured = [f"-- {name} --\n{text.rstrip()}" for name, text in report.sections if text.strip()]
    return {"outcome": "failed", "text": "\n".join([report.longreprtext, *captured])}


def no_huge_pages() -> None:
    """Keep huge pages from this process and all that it starts.

    A server writes to its cache when its first model comes, 32 MiB, so that queries find memory:
    50 ms in huge pages, 5 ms in small ones. That is much for a server that lives for a second.
    """
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)


def main(results: str, stacks: str, *arguments: str) -> int:
    gc.set_threshold(*RARELY)
    gc.disable()
    no_huge_pages()
    with Path(results).open("w") as lines, Path(stacks).open("w") as threads:
        # the parent may have been started with it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)
        faulthandler.register(signal.SIGUSR2, file=threads, all_threads=True)
        return int(pytest.main([*arguments], plugins=[Recorder(lines)]))


if __name__ == "__main__":
    sys.path[0] = os.getcwd()  # as `python -m pytest` does
    status = main(*sys.argv[1:])
    sys.exit(status)
