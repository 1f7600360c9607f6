"""A container that loads leaves the cores to others, and takes its share back once it is warm."""

import os
import subprocess
import sys
import textwrap

import pytest

pytestmark = pytest.mark.skipif(
    not hasattr(os, "SCHED_BATCH"), reason="this system has no SCHED_BATCH"
)


def run(source: str) -> str:
    code = (
        "import os, subprocess, threading\nfrom clipper_container.worker.priority import lower\n"
        + textwrap.dedent(source)
    )
    return subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60
    ).stdout


def test_threads_and_children_get_their_priority_back() -> None:
    """Threads and processes that a model starts while it loads would otherwise stay slow."""
    printed = run("""
        def seen(task):
            with open(f"/proc/{task or 'self'}/sched") as file:  # the slice: since Linux 6.12
                slice = [line.split(":")[1].strip() for line in file if "se.slice" in line]
            return os.sched_getscheduler(task), os.getpriority(os.PRIO_PROCESS, task), slice

        before = seen(0)
        restore = lower()
        assert os.sched_getscheduler(0) == os.SCHED_BATCH
        assert os.getpriority(os.PRIO_PROCESS, 0) >= before[1]
        assert seen(0)[2] == ["100000000"] * len(before[2])
        over = threading.Event()
        thread = threading.Thread(target=over.wait)
        thread.start()
        child = subprocess.Popen(["sleep", "60"])
        restore()
        assert seen(0) == seen(thread.native_id) == seen(child.pid) == before
        over.set()
        child.kill()
        print("restored")
        """)
    assert printed == "restored\n"


def test_a_scheduling_policy_that_was_set_explicitly_is_kept() -> None:
    printed = run("""
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        lower()()
        print(os.sched_getscheduler(0) == os.SCHED_IDLE)
        """)
    assert printed == "True\n"
