"""Replicas that are added and removed while other threads read their statistics."""

import contextlib
import threading
import time
from pathlib import Path

import numpy as np

from clipper_core.runtime.status import StatusError
from tests.stress.node import Node, SocketContainer, together


def wait_for_event(node: Node, notice: str) -> int:
    """Return the connection of the loop's next event of this kind."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        for kind, conn, *_ in node.engine.events():
            if kind.name == notice:
                return conn
        threading.Event().wait(0.0005)
    raise AssertionError(f"no {notice}")


def test_replicas_are_read_while_they_come_and_go(tmp_path: Path, stress: int) -> None:
    node = Node(tmp_path)
    model = node.models[b"plain"]
    conns: list[tuple[int, int]] = []
    over = threading.Event()
    looks = 0

    def comes_and_goes() -> None:
        try:
            for number in range(40 * stress):
                container = SocketContainer(node.path, b"plain")
                conn = wait_for_event(node, "HELLO_RECEIVED")
                node.engine.attach(conn, model.index, b"", number=number, size_max=16)
                conns.append((conn, number))
                with contextlib.suppress(StatusError):
                    model.predict(np.array([1.0, 2.0])).result(60)
                container.drop()
                assert wait_for_event(node, "DISCONNECTED") == conn
        finally:
            over.set()

    def looks_at_them() -> None:
        nonlocal looks
        while not over.is_set():
            for conn, number in conns[-2:]:
                seen = node.engine.replica(conn)
                if seen is not None:
                    looks += 1
                    assert seen["number"] == number
                    assert seen["in_flight"] <= seen["batches"] + 1 <= 3

    together(comes_and_goes, looks_at_them)
    assert looks
    assert all(node.engine.replica(conn) is None for conn, _ in conns)
    node.close()
