"""An allocation of the core that fails may fail one request, but not the server, and no test of the
core crashes by it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.sizes import sized

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("g++")
REFUSED = {"503", "504", "429", "closed"}
NO_MEMORY = "refused 15"
SUITES = sorted(path.name for path in (ROOT / "tests" / "core").glob("test_*.py"))
GROWN_BY_PEERS = [
    "test_engine.py",
    "test_ensemble_call.py",
    "test_container_connection.py",
    "test_shard_loop.py",
]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++"),
    pytest.mark.skipif(
        os.environ.get("CLIPPER_BUILD", "release") in ("asan", "tsan"),
        reason="has an allocator of its own",
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return the environment with the allocator that fails preloaded; the core is the one of
    production."""
    library = tmp_path_factory.mktemp("allocator") / "failing.so"
    words = [
        str(COMPILER),
        "-O1",
        "-shared",
        "-fPIC",
        "-std=c++17",
        str(HERE / "failing.cpp"),
        "-o",
        str(library),
    ]
    subprocess.run(words, check=True, timeout=120)
    return {**os.environ, "LD_PRELOAD": str(library), "PYTHONPATH": str(ROOT)}


def run(environment: dict[str, str], program: str, seed: int, one_in: int) -> dict[str, Any]:
    """Run a program of this folder; return the report that it prints."""
    words = [sys.executable, str(HERE / program), str(seed), str(one_in)]
    done = subprocess.run(
        words, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert report["failed"] > 5
    assert report["left"] <= 0, "descriptors that nobody closed"
    return report


@pytest.mark.parametrize(("seed", "one_in"), [(1, 40), (2, 10)])
def test_a_server_whose_allocations_fail_lives_and_answers_503(
    environment: dict[str, str], seed: int, one_in: int
) -> None:
    report = run(environment, "serving.py", seed, one_in)
    assert set(report["ended"]) <= {"200", *REFUSED}
    assert report["at_last"] == "200"


@pytest.mark.parametrize("seed", range(sized(2, 20)))
def test_a_shard_whose_allocations_fail_applies_each_push_once(
    environment: dict[str, str], seed: int
) -> None:
    report = run(environment, "sharding.py", seed, 20)
    assert set(report["ended"]) <= {NO_MEMORY, "closed"}
    assert report["applied"] == [report["pushes"]] * len(report["applied"])


@pytest.mark.parametrize("seed", range(sized(1, 3)))
def test_an_engine_whose_allocations_fail_loses_no_container(
    environment: dict[str, str], seed: int
) -> None:
    report = run(environment, "containing.py", seed, 10)
    assert report["attached"] == report["gone"], (
        "every container that was attached is known to have gone"
    )
    assert report["pending"] == 0, "queries that nothing ended"
    assert report["wrong"] == 0
    assert report["at_last"] == "OK"


@pytest.mark.parametrize("seed", range(sized(1, 4)))
@pytest.mark.parametrize("suite", sized(GROWN_BY_PEERS, SUITES))
def test_no_test_of_the_core_dies_of_a_failed_allocation(
    environment: dict[str, str], suite: str, seed: int
) -> None:
    limits = {"FAILING_SEED": str(seed), "FAILING_ONE_IN": "20", "FAILING_TEST_S": "5"}
    words = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.allocation.plugin",
        "-m",
        "not slow",
    ]
    done = subprocess.run(
        [*words, f"tests/core/{suite}"],
        env={**environment, **limits},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode >= 0, f"died by signal {-done.returncode}\n{done.stderr[-4000:]}"
    assert "allocations failed: " in done.stdout, done.stdout[-4000:]
