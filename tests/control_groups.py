"""The control group of this process, for tests of what is made below it."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper.processes.control_groups import own_group


@contextlib.contextmanager
def own_group_mounted(folder: Path) -> Iterator[Path]:
    """Give the folder of this process's group, where others can be made; cgroup v2 is mounted in
    `folder` if it is not there yet. Skips the test where that cannot be.
    """
    with contextlib.ExitStack() as mounted:
        try:
            found = own_group()
        except OSError:
            done = subprocess.run(["mount", "-t", "cgroup2", "none", folder], capture_output=True)
            if done.returncode:
                pytest.skip("no cgroup v2 can be written here, and none be mounted")
            mounted.callback(subprocess.run, ["umount", "--lazy", folder], check=True)
            found = own_group()
        yield found
