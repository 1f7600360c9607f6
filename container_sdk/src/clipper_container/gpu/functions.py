"""Functions of CuPy as modules of torch, without a copy."""

from __future__ import annotations

from collections.abc import Callable

import torch


def cupy_module(function: Callable[..., object]) -> torch.nn.Module:
    """Wrap a function of CuPy arrays, so that GpuModel can run it.

    function: takes a cupy.ndarray (n, ...) and returns one whose first dimension is n. It runs on
    torch's current stream; arrays are exchanged by DLPack. Where CuPy or a GPU is missing, the
    function gets numpy arrays, which have the same methods.
    """
    return _CupyModule(function)


class _CupyModule(torch.nn.Module):  # type: ignore[misc]  # torch may be missing for mypy
    def __init__(self, function: Callable[..., object]) -> None:
        super().__init__()
        self._function = function

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Call the function."""
        if rows.device.type != "cuda":
            return torch.as_tensor(self._function(rows.numpy()))
        import cupy  # type: ignore[import-not-found]

        stream = torch.cuda.current_stream(rows.device)
        with cupy.cuda.Device(rows.device.index), cupy.cuda.ExternalStream(stream.cuda_stream):
            return torch.from_dlpack(self._function(cupy.from_dlpack(rows)))
