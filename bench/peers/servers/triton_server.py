"""Triton through pytriton: its HTTP and batching; the models run in the script's process."""

import socket
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from models import BATCH_MAX, MODELS, WAIT_MS
from pytriton.decorators import batch
from pytriton.model_config import DynamicBatcher, ModelConfig, Tensor
from pytriton.triton import Triton, TritonConfig


def served(name: str) -> Callable[..., Any]:
    @batch
    def infer(x: Any) -> list[Any]:
        return [np.array(MODELS[name](x), np.float64).reshape(-1, 1)]

    return infer  # type: ignore[no-any-return,unused-ignore]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


if __name__ == "__main__":
    config = TritonConfig(
        http_address="127.0.0.1",
        http_port=int(sys.argv[1]),
        grpc_port=free_port(),
        metrics_port=free_port(),
    )
    with Triton(config=config) as triton:
        for each in MODELS:
            triton.bind(
                model_name=each,
                infer_func=served(each),
                inputs=[Tensor(name="x", dtype=np.float64, shape=(-1,))],
                outputs=[Tensor(name="output", dtype=np.float64, shape=(1,))],
                config=ModelConfig(
                    max_batch_size=BATCH_MAX,
                    batcher=DynamicBatcher(max_queue_delay_microseconds=WAIT_MS * 1000),
                ),
            )
        triton.run()
        while True:
            time.sleep(1)
