"""Reads how much memory this process has."""

import os


def resident_bytes() -> int:
    """Return the resident memory of a process in bytes; Linux only."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
