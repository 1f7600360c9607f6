"""Allocations of the core that fail by seed cost single requests, not the server."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
COMPILER = shutil.which("g++")
REFUSED = {"503", "504", "429", "closed"}


@pytest.fixture(scope="module")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The library that LD_PRELOAD names; the core itself is the one of production."""
    library = tmp_path_factory.mktemp("allocator") / "failing.so"
    words = [str(COMPILER), "-O1", "-shared", "-fPIC", "-std=c++17", str(HERE / "failing.cpp"), "-o", str(library)]
    subprocess.run(words, check=True, timeout=120)
    return library


@pytest.mark.slow
@pytest.mark.skipif(COMPILER is None, reason="needs g++")
@pytest.mark.skipif(os.environ.get("CLIPPER_BUILD", "release") in ("asan", "tsan"), reason="has an allocator of its own")
@pytest.mark.parametrize(("seed", "one_in"), [(1, 40), (2, 10)])
def test_a_server_whose_allocations_fail_lives_and_answers_503(allocator: Path, seed: int, one_in: int) -> None:
    environment = {**os.environ, "LD_PRELOAD": str(allocator), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, str(HERE / "serving.py"), str(seed), str(one_in)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["failed"] > 5
    assert set(told["ended"]) <= {"200", *REFUSED}
    assert told["at_last"] == "200"
    assert told["left"] <= 0, "descriptors that nobody closed"
