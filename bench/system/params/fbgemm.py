"""FBGEMM's table-batched embeddings on a CPU, for `python -m bench params`: known rows, bags of
one."""

import warnings
from typing import Any

import numpy as np

from bench.harness import Sample

ABSENT = "not measured: pip install --no-deps fbgemm-gpu-cpu==1.8.0"
Ids = np.ndarray[Any, np.dtype[np.int64]]


class Table:
    """weights: f32[n, dim]. Exact Adagrad, gradients of duplicates summed."""

    def __init__(self, torch: Any, weights: Any, gradients: Any) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )

        self._torch, self._gradients = torch, torch.from_numpy(gradients)
        self._offsets = torch.arange(len(gradients) + 1)
        self._table = SplitTableBatchedEmbeddingBagsCodegen(
            [(*weights.shape, EmbeddingLocation.HOST, ComputeDevice.CPU)],
            optimizer=EmbOptimType.EXACT_ADAGRAD, learning_rate=0.01, pooling_mode=PoolingMode.SUM,
        )  # fmt: skip
        self._table.split_embedding_weights()[0].copy_(torch.from_numpy(weights))

    def forward(self, places: Ids, _: Ids) -> Any:
        return self._table(self._torch.from_numpy(places), self._offsets)

    def forward_and_backward(self, places: Ids, ids: Ids) -> None:
        self.forward(places, ids).backward(self._gradients)


def table(torch: Any, weights: Any, gradients: Any) -> Table | None:
    """Return a table; None if FBGEMM is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Table(torch, weights, gradients)
    except ImportError:
        return None


def backward(both: Sample, forward: Sample) -> Sample:
    """Return the rates of the backward pass, which cannot run without the forward pass: its time is
    subtracted, turn by turn."""
    pairs = zip(both.values, forward.values, strict=True)
    return Sample(tuple(1 / max(1 / all_ - 1 / there, 1e-9) for all_, there in pairs))
