"""The start of a replica: cold, plain, forked from a fork server, and after a kill.

Two servers run the same models, one with `server.fork_server` off, which is the anchor. A kill is
SIGKILL to the only replica while a client asks in a loop; the figure is the time to its next
answer, the pause before a restart (0.1 s) included.
"""

import os
import signal
import time
from typing import Any

import numpy as np

import clipper
from bench.harness import Goal, Row, Sample, absent, interleave, row
from clipper.metrics.stats import ReplicaStats
from clipper_container.machine import proportional_bytes, resident_bytes

KILLED = Goal("value_at_most", 0.5)
SECOND = Goal("value_at_most", 0.3)
SETTLE_S = 3.0  # a fork server imports what the first replica was seen to import
ANSWER_MS = 2000.0


def main(quick: bool) -> list[Row]:
    """Build the rows. quick: one repetition."""
    rows: list[Row] = []
    for name, make in (("scikit-learn", _sklearn), ("torch", _torch)):
        try:
            model, inputs = make()
        except ImportError as error:
            rows.append(absent(f"{name}: start", "s", f"pip install: {error}"))
            continue
        rows += _rows(name, model, inputs, 1 if quick else 5)
    return rows


def _rows(name: str, model: Any, inputs: Any, repetitions: int) -> list[Row]:
    starts = [_Server(model, inputs, fork) for fork in (True, False)]
    forked, plain = starts
    try:
        time.sleep(SETTLE_S)
        cases = {
            "forked": forked.second_replica,
            "plain": plain.second_replica,
            "killed": forked.kill,
            "killed plain": plain.kill,
        }
        found: dict[str, Sample] = interleave(cases, repetitions, warmups=0)
        rss, pss = forked.memory()
        rss_plain, pss_plain = plain.memory()
    finally:
        for one in starts:
            one.close()
    seconds = "s"
    return [
        row(f"{name}: first deployment", forked.cold_s, seconds, "plain", plain.cold_s),
        row(f"{name}: a second replica", found["forked"], seconds, "plain", found["plain"], SECOND),
        row(
            f"{name}: killed, to the next answer",
            found["killed"],
            seconds,
            "plain",
            found["killed plain"],
            KILLED,
        ),
        row(
            f"{name}: memory of a replica of two (PSS)",
            pss / 1e6,
            "MB",
            "plain",
            pss_plain / 1e6,
            note=f"RSS {rss / 1e6:.0f} MB, plain {rss_plain / 1e6:.0f} MB",
        ),
    ]


class _Server:
    """A server with one model."""

    def __init__(self, model: Any, inputs: Any, fork: bool) -> None:
        self._server = clipper.start(
            fork_server=fork, restarts_max=1000, restart_ms_min=100, restart_ms_max=100
        )
        began = time.perf_counter()
        dtype = f"{'f32' if inputs.dtype == np.float32 else 'f64'}[{len(inputs)}]"
        self._model = self._server.deploy("model", model, input=dtype, cache=False)
        self.cold_s = time.perf_counter() - began
        self._inputs = inputs
        self._answer()

    def _replicas(self) -> list[ReplicaStats]:
        found = self._server.stats()["models"]["model:1"]["replicas"]
        return [one for one in found if one["state"] == "ready"]

    def _answer(self) -> None:
        while True:
            try:
                self._model.predict(self._inputs, slo_ms=ANSWER_MS).result(30)
                return
            except clipper.ClipperError:
                time.sleep(0.002)

    def second_replica(self) -> float:
        """Return the seconds from the request for a second replica until it is connected."""
        began = time.perf_counter()
        self._server.scale("model", 2)
        while len(self._replicas()) < 2:
            time.sleep(0.002)
        took_s = time.perf_counter() - began
        self._server.scale("model", 1)
        return took_s

    def kill(self) -> float:
        """Return the seconds from the kill of the only replica to the next answer."""
        (replica,) = self._replicas()
        pidfd = os.pidfd_open(replica["pid"])
        began = time.perf_counter()
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
        while any(one["pid"] == replica["pid"] for one in self._replicas()):
            time.sleep(0.001)
        self._answer()
        return time.perf_counter() - began

    def memory(self) -> tuple[float, float]:
        """Return the mean RSS and PSS of two replicas in bytes."""
        self._server.scale("model", 2)
        while len(self._replicas()) < 2:
            time.sleep(0.01)
        pids = [one["pid"] for one in self._replicas()]
        rss, pss = map(resident_bytes, pids), map(proportional_bytes, pids)
        return sum(rss) / 2, sum(pss) / 2

    def close(self) -> None:
        """Close the server."""
        self._server.close()


def _sklearn() -> tuple[Any, Any]:
    from sklearn.linear_model import LogisticRegression

    random = np.random.default_rng(0)
    inputs = random.random((200, 4))
    return LogisticRegression().fit(inputs, inputs.sum(axis=1) > 2), inputs[0]


def _torch() -> tuple[Any, Any]:
    import torch

    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(4, 3)), np.ones(4, np.float32)
