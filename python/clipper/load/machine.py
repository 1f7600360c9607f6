"""Description of the machine and the software of a measurement."""

import os
import platform
import subprocess
from pathlib import Path

from clipper.types import VERSION


def machine() -> dict[str, str]:
    """Return cpu, usable cores, load, python, clipper, and the commit of a working copy."""
    models = [
        line.split(":", 1)[1].strip()
        for line in _read("/proc/cpuinfo").splitlines()
        if line.startswith("model name")
    ]
    found = {
        "cpu": models[0] if models else platform.machine(),
        "cores": str(len(os.sched_getaffinity(0))),
        "load": " ".join(_read("/proc/loadavg").split()[:3]),
        "python": platform.python_version(),
        "clipper": VERSION,
        "commit": _commit(),
    }
    return {key: value for key, value in found.items() if value}


def _commit() -> str:
    root = Path(__file__).resolve().parents[3]
    if not (root / "python" / "clipper").is_dir() or not (root / ".git").exists():
        return ""
    command = ["git", "-C", str(root), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=5).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError:
        return ""
