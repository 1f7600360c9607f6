"""Memory, cores and variables of models that run in processes."""

import json
import os
import resource
from typing import Any

import pytest

import clipper
from clipper.errors import ModelFailed
from clipper.processes import ChildState
from tests.frontend.conftest import QUICK
from tests.memory_container import wait_until

HUGE_BYTES = 1 << 30


def seen(rows: Any) -> list[str]:
    data_bytes, _ = resource.getrlimit(resource.RLIMIT_DATA)
    found = {
        "data_mib": data_bytes >> 20,
        "cores": len(os.sched_getaffinity(0)),
        "mode": os.environ.get("MODE"),
        "own": sorted(name for name in os.environ if name.startswith("CLIPPER_")),
    }
    return [json.dumps(found)] * len(rows)


def greedy(rows: Any) -> list[float]:
    if rows[0][0] == 2.0:
        os.abort()  # as C++ does where there is no memory
    held = bytearray(HUGE_BYTES if rows[0][0] else 1)
    return [float(len(held))] * len(rows)


def replica_of(server: clipper.ClipperServer, name: str) -> Any:
    stats: Any = server.stats()
    (replica,) = stats["models"][name]["replicas"]
    return replica


@pytest.mark.parametrize("fork", [True, False], ids=["forked", "plain"])
def test_a_process_has_the_limits_and_variables_of_its_model(fork: bool) -> None:
    limits = {"memory_mib": 900, "cpus": 1.0, "env": {"MODE": "fast"}}
    with clipper.start(fork_server=fork, **QUICK) as server:
        model = server.deploy("seen", seen, input="f64[1]", output="str", cache=False, **limits)
        assert json.loads(model.predict([1.0], slo_ms=60_000).result(60)) == {
            "data_mib": 900,
            "cores": 1,
            "mode": "fast",
            "own": [],
        }
        told = replica_of(server, "seen:1")["start"]
        assert told.startswith("forked" if fork else "plain")
        assert "memory_mib=900 of " in told
        assert "cpus=1 of " in told


def test_a_model_over_its_limit_fails_alone() -> None:
    with clipper.start(**QUICK) as server:
        one = server.deploy("greedy", greedy, input="f64[1]", cache=False, memory_mib=700)
        other = server.deploy("other", greedy, input="f64[1]", cache=False)
        with pytest.raises(ModelFailed, match="MemoryError"):
            one.predict([1.0], slo_ms=60_000).result(60)
        assert one.predict([0.0], slo_ms=60_000).result(60) == 1.0, "it goes on"
        assert other.predict([1.0], slo_ms=60_000).result(60) == HUGE_BYTES
        pid = replica_of(server, "other:1")["pid"]
        with pytest.raises(clipper.errors.ClipperError):
            one.predict([2.0], slo_ms=60_000).result(60)
        wait_until(
            lambda: (
                replica_of(server, "greedy:1")["state"] == ChildState.READY
                and "memory_mib, is 700" in replica_of(server, "greedy:1")["detail"]
            )
        )
        assert replica_of(server, "other:1")["pid"] == pid
