"""A torch module served on a GPU, two batches at a time."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from clipper_container.adapters.torch import only_output
from clipper_container.gpu.device import CannotCapture, Device, DeviceEvent, open_device
from clipper_container.gpu.ladder import BatchLadder
from clipper_container.loading.errors import first_line
from clipper_container.model import Model, OneRowFailed, UserValue
from clipper_container.schema import FREE, TensorSpec

Array = np.ndarray
CASTS = {"": None, "f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
IN_FLIGHT = 2  # batches: one is copied while the other is computed
EXIT_DEVICE_LOST = 75


class DeviceLost(SystemExit):
    """Ends the process: CUDA cannot be used in it any more. The server starts another one, and the
    batches of this one are evaluated elsewhere or again.
    """

    def __init__(self, reason: str) -> None:
        print(f"the GPU is lost to this process: {reason}", file=sys.stderr, flush=True)
        super().__init__(EXIT_DEVICE_LOST)


@dataclass
class _Slot:
    """The memory of one batch under way. replays: the CUDA graph of a batch size. busy: from the
    start of a batch until its outputs are taken.
    """

    host_in: torch.Tensor
    device_in: torch.Tensor
    device_out: torch.Tensor
    host_out: torch.Tensor
    replays: dict[int, Callable[[], None]] = field(default_factory=dict)
    busy: bool = False


@dataclass
class PendingBatch:
    """A batch that was submitted. inputs: its rows, until it is collected. done: when its outputs
    are in `slot`. outputs: instead, if they are there already.
    """

    inputs: UserValue
    rows: int
    slot: _Slot | None = None
    done: DeviceEvent | None = None
    outputs: Array | None = None


class GpuModel(Model):
    """Runs forward() of a torch module with one input whose first dimension is the batch.

    Rows are copied into pinned memory, and by a stream of its own to the GPU, while the batch
    before is computed. A batch is filled up to one of a ladder of static sizes (`BatchLadder`);
    each size is a CUDA graph if its capture succeeds, and runs eagerly if not. Outputs come back by
    a third stream. Out of memory splits the batch and lowers the largest size; no row is lost.

    module: moved to the device by load(). input: type of a row, "f32[3,224,224]"; or "f32[*]" for
    rows of different lengths: these are concatenated, copied at once and padded on the device, and
    forward() gets (padded f32[n, longest], lengths i64[n]), always eagerly. device: see
    `open_device`. dtype: "f16", "bf16" or "f32": floats are cast on the device, the module's
    weights too; outputs of 16 bits become f32. batch_max: most rows of a batch. graphs: False for
    none.

    size_bytes: after load(), the device memory that the model reserved at its peak: the size by
    which a mesh counts it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        input: str,
        device: str = "auto",
        dtype: str = "",
        batch_max: int = 64,
        graphs: bool = True,
    ) -> None:
        if dtype not in CASTS:
            raise ValueError(f"dtype {dtype!r}: give one of {', '.join(filter(None, CASTS))}.")
        spec = TensorSpec.parse("input", input)
        if spec.is_text or (spec.is_ragged and spec.shape != (FREE,)):
            raise ValueError(f"input {input!r}: a GPU model takes 'f32[3,224,224]' or 'f32[*]'.")
        self.input, self.batch_max = input, batch_max
        self.size_bytes = 0
        self._module, self._spec, self._device_name = module, spec, device
        self._torch_dtype, self._graphs = CASTS[dtype], graphs
        self._ladder = BatchLadder(batch_max)
        self._how: dict[int, str] = {}
        self._slots: list[_Slot] = []
        self._device: Device

    # -- loading

    def load(self) -> None:
        """Move the module to the device, allocate buffers, capture the graphs, and report both."""
        torch.set_grad_enabled(False)
        device = self._device = open_device(self._device_name)
        before = device.reserved_bytes()
        self._module.eval()
        self._module.to(device.torch_device, self._torch_dtype)
        self._to_device, self._compute, self._to_host = (device.stream() for _ in range(3))
        if not self._spec.is_ragged:
            self._slots = [self._slot() for _ in range(IN_FLIGHT)]
            for size in list(self._ladder.sizes):
                if not self._prepare(size):
                    break
        self.size_bytes = max(0, device.reserved_bytes() - before)
        for line in self.report():
            print(line, file=sys.stderr, flush=True)

    def report(self) -> list[str]:
        """Return, in words: the device, how each batch size runs, the share of padded rows, and the
        memory.
        """
        lines = [", ".join(f"{key} {value}" for key, value in self._device.describe().items())]
        groups: dict[str, list[int]] = {}
        for size, how in self._how.items():
            groups.setdefault(how, []).append(size)
        if self._spec.is_ragged:
            lines.append("batches run eagerly, because rows have different lengths")
        lines += [
            f"batches of {', '.join(map(str, sizes))}: {how}" for how, sizes in groups.items()
        ]
        lines.append(f"padded rows: {self._ladder.padding:.1%}")
        return [*lines, f"device memory reserved: {self.size_bytes >> 20} MiB"]

    def _slot(self) -> _Slot:
        numpy_type = torch.from_numpy(np.zeros(0, self._spec.numpy)).dtype
        shape, device = (self.batch_max, *self._spec.shape), self._device
        device_in = torch.zeros(shape, dtype=numpy_type, device=device.torch_device)
        with torch.inference_mode():
            probe = self._call(device_in[:1])
        out = torch.zeros(
            (self.batch_max, *probe.shape[1:]), dtype=probe.dtype, device=device.torch_device
        )
        return _Slot(
            device.host_buffer(shape, numpy_type),
            device_in,
            out,
            device.host_buffer(tuple(out.shape), out.dtype),
        )

    def _prepare(self, size: int) -> bool:
        """Capture one batch size for each slot; False if the device has too little memory."""
        try:
            for slot in self._slots:
                if self._graphs:
                    slot.replays[size] = self._device.capture(
                        lambda slot=slot: self._forward(slot, size),  # type: ignore[misc]
                        self._compute,
                    )
                else:
                    self._forward(slot, size)
            self._how[size] = "captured" if self._graphs else "eager, because graphs=False"
        except CannotCapture as error:
            for slot in self._slots:
                slot.replays.pop(size, None)
            self._how[size] = f"eager, because {error}"
        except Exception as error:
            if not self._device.is_out_of_memory(error):
                raise
            for slot in self._slots:
                slot.replays.pop(size, None)
            self._lower(size, error)
            return False
        return True

    # -- predicting

    def predict_batch(self, inputs: object) -> Array:
        """Compute one batch and wait for it."""
        return self.collect(self.submit(inputs))

    def submit(self, inputs: UserValue) -> PendingBatch:
        """Begin a batch; at most IN_FLIGHT may be under way. The rows may change after collect().

        Raises: the errors of forward(); none for too little memory.
        """
        rows = len(inputs)
        batch = PendingBatch(inputs, rows)
        if self._spec.is_ragged or rows > self._ladder.batch_max:
            batch.outputs = self._in_parts(inputs, self._ladder.batch_max)
            return batch
        try:
            batch.slot, batch.done = self._start(inputs)
        except Exception as error:
            batch.outputs = self._after(error, inputs)
        return batch

    def is_done(self, batch: PendingBatch) -> bool:
        """Return whether collect() would not wait."""
        return batch.done is None or batch.done.is_done()

    def collect(self, batch: PendingBatch) -> Array:
        """Wait for a batch and return its outputs, in memory of their own. Batches are collected
        in the order in which they were submitted.
        """
        if batch.outputs is not None:
            return batch.outputs
        assert batch.slot is not None
        assert batch.done is not None
        batch.slot.busy = False
        try:
            batch.done.synchronize()
        except Exception as error:
            return self._after(error, batch.inputs)
        return _one_number_a_row(batch.slot.host_out[: batch.rows].numpy().copy())

    def _start(self, inputs: Array) -> tuple[_Slot, DeviceEvent]:
        """Copy rows in, compute, and copy outputs out; only the first is waited for."""
        rows, slot = len(inputs), next((slot for slot in self._slots if not slot.busy), None)
        if slot is None:
            raise RuntimeError(f"{IN_FLIGHT} batches are under way; collect one first.")
        size = self._ladder.choose(rows)
        slot.host_in[:rows].numpy()[...] = inputs
        with self._to_device.use():
            slot.device_in[:rows].copy_(slot.host_in[:rows], non_blocking=True)
        self._compute.wait(self._to_device.record())
        with self._compute.use():
            replay = slot.replays.get(size)
            if replay is not None:
                replay()
            else:
                self._forward(slot, size)
        self._to_host.wait(self._compute.record())
        with self._to_host.use():
            slot.host_out[:rows].copy_(slot.device_out[:rows], non_blocking=True)
        slot.busy = True
        return slot, self._to_host.record()

    def _forward(self, slot: _Slot, size: int) -> None:
        with torch.inference_mode():
            slot.device_out[:size].copy_(self._call(slot.device_in[:size]))

    def _call(self, rows: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        """Call the module; return its output, whose first dimension must be that of the rows."""
        if self._torch_dtype is not None and rows.is_floating_point():
            rows = rows.to(self._torch_dtype)
        called = f"{type(self._module).__name__}.forward()"
        found = only_output(called, self._module(rows, *more))
        if not isinstance(found, torch.Tensor) or found.ndim == 0 or len(found) != len(rows):
            shape = list(found.shape) if isinstance(found, torch.Tensor) else type(found).__name__
            raise TypeError(
                f"{called} returned {shape} for {len(rows)} rows;"
                " the first dimension must be the batch"
            )
        return found.float() if found.dtype in (torch.float16, torch.bfloat16) else found

    # -- too little memory

    def _after(self, error: Exception, inputs: UserValue) -> Array:
        """Compute a batch in halves after the device had too little memory for it. Raises:
        OneRowFailed when one row alone needs too much; DeviceLost; any other error as it is.
        """
        if not self._device.is_out_of_memory(error):
            if not self._device.is_alive():
                raise DeviceLost(first_line(error)) from error
            raise error
        if len(inputs) == 1:
            raise OneRowFailed(f"one row alone needs too much memory: {first_line(error)}")
        with contextlib.suppress(RuntimeError):
            self._device.free_unused()
        outputs = self._in_parts(inputs, len(inputs) // 2)  # raises if one row is at fault
        if len(inputs) <= self._ladder.batch_max:
            self._lower(len(inputs), error)
        return outputs

    def _lower(self, below: int, error: Exception) -> None:
        """Remove the batch sizes from `below` on, and say so."""
        left = self._ladder.lower(below)
        for size in [size for size in self._how if size > left]:
            del self._how[size]
            for slot in self._slots:
                slot.replays.pop(size, None)
        with contextlib.suppress(RuntimeError):
            self._device.free_unused()
        print(
            f"out of memory with {below} rows; batches have at most {left} rows from now on:"
            f" {first_line(error)}",
            file=sys.stderr,
            flush=True,
        )

    def _in_parts(self, inputs: UserValue, size: int) -> Array:
        """Compute rows in batches of at most `size`, one after another."""
        parts: list[Array] = []
        at = 0
        while at < len(inputs):
            part = inputs[at : at + min(size, self._ladder.batch_max)]
            parts.append(self._ragged(part) if self._spec.is_ragged else self.predict_batch(part))
            at += len(part)
        return np.concatenate(parts)

    # -- rows of different lengths

    def _ragged(self, inputs: Sequence[Array]) -> Array:
        lengths = [len(row) for row in inputs]
        flat = torch.from_numpy(np.concatenate(inputs))
        try:
            with torch.inference_mode():
                rows = torch.split(flat.to(self._device.torch_device), lengths)
                padded = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
                counts = torch.tensor(lengths, device=self._device.torch_device)
                found = self._call(padded, counts)
        except Exception as error:
            return self._after(error, inputs)
        self._ladder.rows += sum(lengths)
        self._ladder.padded += padded.numel() - sum(lengths)
        return _one_number_a_row(found.cpu().numpy())


def _one_number_a_row(outputs: Array) -> Array:
    """Return outputs of shape (n, 1) as n numbers."""
    one = outputs.ndim > 1 and outputs.size == len(outputs)
    return outputs.reshape(len(outputs)) if one else outputs
