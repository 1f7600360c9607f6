"""Benchmark of the parameter server against torch, numpy, a dict, gRPC, Redis and protobuf.

`--rows pull,push,small ...` selects groups. Rows in memory are measured in CPU time of one thread,
in batches of 4096 ids that are drawn anew each time; all contenders take turns, and each gets its
ids or indices before the clock starts. Rows over a socket are measured in wall time, closed loop,
512 rows of 64 floats.
"""

import sys
from collections.abc import Callable, Sequence

from bench.harness import FAILED, Row, UnknownRows, absent
from bench.system.params import (
    deepfm,
    dtypes,
    durability,
    feedback,
    grpc,
    memory,
    replication,
    snapshot,
    tables,
    tls,
    training,
    wire,
)


def main(quick: bool = False, rows: Sequence[str] | None = None) -> list[Row]:
    groups: dict[str, Callable[[bool], list[Row]]] = {
        "pull": memory.pulls,
        "push": memory.pushes,
        "small": memory.small,
        "threads": memory.threads,
        "memory": memory.row_size,
        "dtypes": dtypes.rows,
        "wire": wire.rows,
        "tls": tls.rows,
        "tables": tables.rows,
        "replication": replication.rows,
        "durability": durability.rows,
        "feedback": feedback.rows,
        "grpc": grpc.rows,
        "snapshot": snapshot.rows,
        "training": training.rows,
        "deepfm": deepfm.rows,
    }
    if rows and (unknown := [name for name in rows if name not in groups]):
        raise UnknownRows(f"no rows {unknown[0]!r}: {', '.join(groups)}")
    found: list[Row] = []
    for name in rows or groups:
        print(f"params: {name}", file=sys.stderr, flush=True)
        try:
            found += groups[name](quick)
        except Exception as error:
            found.append(absent(name, "", f"{FAILED}: {type(error).__name__}: {error}"))
    return found
