"""BentoML: its own batching, which learns."""

import os
import subprocess
import sys
from pathlib import Path

import bentoml
from models import BATCH_MAX, MODELS


@bentoml.service(
    workers=1,
    traffic={"timeout": 20},
    metrics={"enabled": False},
    logging={"access": {"enabled": False}},
)
class Served:
    @bentoml.api(route="/noop1", batchable=True, max_batch_size=BATCH_MAX, max_latency_ms=20_000)
    def noop1(self, input: list[list[float]]) -> list[float]:
        return MODELS["noop1"](input)

    @bentoml.api(route="/noop784", batchable=True, max_batch_size=BATCH_MAX, max_latency_ms=20_000)
    def noop784(self, input: list[list[float]]) -> list[float]:
        return MODELS["noop784"](input)

    @bentoml.api(route="/linear", batchable=True, max_batch_size=BATCH_MAX, max_latency_ms=20_000)
    def linear(self, input: list[list[float]]) -> list[float]:
        return MODELS["linear"](input)


if __name__ == "__main__":
    here = Path(__file__).resolve().parent
    words = [
        "serve",
        "bentoml_server:Served",
        "--working-dir",
        str(here),
        "--host",
        "127.0.0.1",
        "--port",
        sys.argv[1],
    ]
    env = {**os.environ, "BENTOML_DO_NOT_TRACK": "1", "PYTHONPATH": str(here)}
    sys.exit(subprocess.call([sys.executable, "-m", "bentoml", *words], env=env))
