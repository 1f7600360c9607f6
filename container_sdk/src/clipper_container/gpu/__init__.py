"""Models on a GPU: pinned buffers, copies beside the computation, a CUDA graph for each batch size.

    from clipper_container.gpu import GpuModel

    model = GpuModel(module, input="f32[3,224,224]", device="cuda:0", dtype="bf16", batch_max=64)

    >>> server.deploy("resnet", "resnet:model")

The same file runs on a CPU, where streams and graphs are replaced by plain calls. docs/gpu.md
describes it. Importing this package imports torch.
"""

from clipper_container.gpu.device import CannotCapture, Device, open_device
from clipper_container.gpu.functions import cupy_module
from clipper_container.gpu.model import GpuModel

__all__ = ["CannotCapture", "Device", "GpuModel", "cupy_module", "open_device"]
