"""Devices: what a GPU and a CPU do differently, behind one interface.

On a CPU a stream runs its work at once, pinned memory is plain memory, and no graph can be
captured. All else of this package is the same code for both.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from clipper_container.loading.errors import first_line

_UUID = re.compile(r"(GPU|MIG|MIG-GPU)-[0-9a-fA-F/-]+")
_INDEX = re.compile(r"(?:cuda:?)?([0-9]+)?")
_WARM_UPS = 3  # calls before a capture, as torch's documentation of CUDA graphs advises


class CannotCapture(Exception):
    """A call cannot become a CUDA graph. The text says why."""


class DeviceEvent(Protocol):
    """A point in the work of a stream."""

    def is_done(self) -> bool:
        """Return whether the work before this point has ended."""

    def synchronize(self) -> None:
        """Block until the work before this point has ended."""


class DeviceStream(Protocol):
    """Work that a device does in order, beside that of other streams."""

    def use(self) -> AbstractContextManager[None]:
        """Return a context in which calls of torch are added to this stream."""

    def record(self) -> DeviceEvent:
        """Return the end of the work added so far."""

    def wait(self, event: DeviceEvent) -> None:
        """Delay later work of this stream until the event; the caller does not wait."""


class Device(Protocol):
    """A place where a model runs. Threads: one."""

    torch_device: torch.device

    def describe(self) -> dict[str, str]:
        """Return name and kind of the device, for people."""

    def stream(self) -> DeviceStream:
        """Make a stream."""

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate zeroed host memory that the device can copy from and to by itself."""

    def capture(self, call: Callable[[], None], stream: DeviceStream) -> Callable[[], None]:
        """Record what `call` does on a stream; return a function that replays it on the current
        stream. Raises: CannotCapture; the errors of `call`.
        """

    def reserved_bytes(self) -> int:
        """Return the most device memory that this process has reserved; 0 where that is unknown."""

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether an error says that the device has too little memory."""

    def free_unused(self) -> None:
        """Return memory that is cached and not used to the device."""

    def is_alive(self) -> bool:
        """Return whether the device still computes. After some errors of CUDA a process cannot use
        it any more.
        """


def open_device(name: str = "auto") -> Device:
    """Return the device of a name. Call it before anything else uses CUDA in this process.

    name: "cpu"; "cuda:1" or "1", an index; "GPU-..." or "MIG-...", a UUID as `nvidia-smi -L` prints
    it; "auto": the first GPU, or the CPU where there is none.

    Raises: ValueError for a name that is no device here.
    """
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return CpuDevice()
    if _UUID.fullmatch(name):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        if torch.cuda.is_initialized() and visible != name:
            raise ValueError(
                f"device {name!r}: CUDA is in use in this process already, so a UUID cannot be"
                f" chosen any more. Set CUDA_VISIBLE_DEVICES={name} for the container."
            )
        os.environ["CUDA_VISIBLE_DEVICES"] = name
    found = _INDEX.fullmatch("" if name == "auto" or _UUID.fullmatch(name) else name)
    if found is None:
        raise ValueError(
            f"{name!r} is not a device. Write 'cpu', 'cuda:0', the UUID of a GPU or of a MIG"
            " instance (nvidia-smi -L), or 'auto'."
        )
    index, count = int(found[1] or 0), torch.cuda.device_count() if torch.cuda.is_available() else 0
    if index >= count:
        raise ValueError(
            f"device {name!r}: this process sees {count} GPUs. See nvidia-smi -L, and"
            " CUDA_VISIBLE_DEVICES of the container; 'cpu' runs without a GPU."
        )
    return CudaDevice(index)


# -- the CPU


class CpuEvent:
    """A point that has passed already."""

    def is_done(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


class CpuStream:
    """Runs its work at once, on the calling thread."""

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Change nothing."""
        yield

    def record(self) -> DeviceEvent:
        """Return a point that has passed."""
        return CpuEvent()

    def wait(self, event: DeviceEvent) -> None:
        """Return at once."""
        event.synchronize()


class CpuDevice:
    """The CPU, with the interface of a GPU."""

    torch_device = torch.device("cpu")

    def describe(self) -> dict[str, str]:
        """Return its kind and its number of threads."""
        return {"device": "cpu", "name": f"{torch.get_num_threads()} threads"}

    def stream(self) -> DeviceStream:
        """Make a stream that runs its work at once."""
        return CpuStream()

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate plain memory."""
        return torch.zeros(shape, dtype=dtype)

    def capture(self, call: Callable[[], None], stream: DeviceStream) -> Callable[[], None]:
        """Raise CannotCapture."""
        raise CannotCapture("a CPU has no CUDA graphs")

    def reserved_bytes(self) -> int:
        """Return 0: the process's memory is measured by its host."""
        return 0

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether torch's or Python's allocator has failed."""
        return isinstance(error, MemoryError) or (
            isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
        )

    def free_unused(self) -> None:
        """Do nothing."""

    def is_alive(self) -> bool:
        """Return True."""
        return True


# -- CUDA


@dataclass(frozen=True, slots=True)
class CudaEvent:
    """A CUDA event."""

    event: torch.cuda.Event

    def is_done(self) -> bool:
        """Ask the GPU."""
        return bool(self.event.query())

    def synchronize(self) -> None:
        """Block until the GPU has reached it; other threads of Python run meanwhile."""
        self.event.synchronize()


class CudaStream:
    """A CUDA stream of one GPU."""

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Make it torch's current stream."""
        with torch.cuda.stream(self.stream):
            yield

    def record(self) -> DeviceEvent:
        """Record an event."""
        event = torch.cuda.Event()
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: DeviceEvent) -> None:
        """Let the GPU wait for an event."""
        assert isinstance(event, CudaEvent)
        self.stream.wait_event(event.event)


class CudaDevice:
    """A GPU, or a MIG instance of one, by its index among those that this process sees."""

    def __init__(self, index: int) -> None:
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        self._pool: torch.cuda.MemPool | None = None

    def describe(self) -> dict[str, str]:
        """Return name, index, UUID and memory, whether it is a MIG instance, and whether MPS shares
        it between processes.
        """
        seen = torch.cuda.get_device_properties(self.torch_device)
        uuid = str(getattr(seen, "uuid", "unknown"))
        is_mig = "MIG" in seen.name or os.environ.get("CUDA_VISIBLE_DEVICES", "").startswith("MIG-")
        return {
            "device": str(self.torch_device),
            "name": seen.name,
            "uuid": uuid,
            "memory": f"{seen.total_memory >> 20} MiB",
            "mig": "yes" if is_mig else "no",
            "mps": "yes" if is_shared_by_mps() else "no",
        }

    def stream(self) -> DeviceStream:
        """Make a CUDA stream."""
        return CudaStream(self.torch_device)

    def host_buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate pinned memory."""
        return torch.zeros(shape, dtype=dtype, pin_memory=True)

    def capture(self, call: Callable[[], None], stream: DeviceStream) -> Callable[[], None]:
        """Record a CUDA graph. All graphs of a device share one memory pool, since they are
        replayed one after another on one stream.
        """
        assert isinstance(stream, CudaStream)
        torch.cuda.synchronize(self.torch_device)
        with stream.use():
            for _ in range(_WARM_UPS):
                call()
        stream.record().synchronize()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(
                graph,
                pool=self._pool,
                stream=stream.stream,
                capture_error_mode="thread_local",  # other models of the process go on meanwhile
            ):
                call()
        except RuntimeError as error:
            torch.cuda.synchronize(self.torch_device)
            if self.is_out_of_memory(error):
                raise
            raise CannotCapture(first_line(error)) from None
        replay: Callable[[], None] = graph.replay
        return replay

    def reserved_bytes(self) -> int:
        """Return the peak of the memory that torch's allocator has reserved."""
        return int(torch.cuda.max_memory_reserved(self.torch_device))

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Return whether torch's allocator for CUDA, or CUDA, has failed for want of memory."""
        return isinstance(error, torch.cuda.OutOfMemoryError) or (
            isinstance(error, RuntimeError) and "out of memory" in str(error)
        )

    def free_unused(self) -> None:
        """Empty the allocator's cache."""
        torch.cuda.empty_cache()

    def is_alive(self) -> bool:
        """Try a small computation."""
        try:
            torch.ones(1, device=self.torch_device).add_(1)
            torch.cuda.synchronize(self.torch_device)
        except RuntimeError:
            return False
        return True


def is_shared_by_mps() -> bool:
    """Return whether a control daemon of NVIDIA's Multi-Process Service answers on this host."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")  # NVIDIA's default
    return (Path(folder) / "control").exists()
