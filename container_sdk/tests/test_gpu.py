"""Models on a GPU, with the CPU in its place: the same buffers, streams and ladder, no graphs."""

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="pip install torch")

from clipper_container.gpu import CannotCapture, GpuModel, cupy_module, open_device  # noqa: E402
from clipper_container.gpu import device as gpu_device  # noqa: E402
from clipper_container.gpu import model as gpu_model  # noqa: E402
from clipper_container.gpu.device import CpuDevice  # noqa: E402
from clipper_container.gpu.ladder import BatchLadder  # noqa: E402
from clipper_container.loading.runtimes import PythonRuntime  # noqa: E402
from clipper_container.model import OneRowFailed  # noqa: E402
from clipper_container.runtime import Artifact  # noqa: E402
from clipper_container.worker.evaluation import Evaluator  # noqa: E402

UUID = "5b1c0a3e-7d52-4e0b-9a1d-2f6c8e4b9d07"


def loaded(module: Any, **settings: Any) -> GpuModel:
    model = GpuModel(module, **{"input": "f32[3]", "device": "cpu", "batch_max": 20, **settings})
    model.load()
    return model


def rows(count: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).random((count, 3), np.float32)


class Sum(torch.nn.Module):  # type: ignore[name-defined]
    """Return the sum of each row; out of memory for more than `most` rows at once."""

    def __init__(self, most: int = 1000) -> None:
        super().__init__()
        self.most, self.sizes = most, list[int]()

    def forward(self, inputs: Any) -> Any:
        self.sizes.append(len(inputs))
        if len(inputs) > self.most:
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 GiB")
        return inputs.sum(dim=1)


@pytest.mark.parametrize("seed", range(5))
def test_outputs_are_those_of_the_module_whatever_the_batches(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh())
    model = loaded(module)
    waiting: list[tuple[Any, Any]] = []
    for turn in range(60):
        inputs = rows(draw.randrange(1, 50), turn)  # also more than the largest batch
        waiting.append((inputs, model.submit(inputs.copy())))
        if len(waiting) == gpu_model.IN_FLIGHT or draw.random() < 0.4:
            inputs, batch = waiting.pop(0)
            expected = module(torch.from_numpy(inputs)).detach().numpy()
            np.testing.assert_allclose(model.collect(batch), expected, rtol=1e-5, atol=1e-6)


def test_a_third_batch_is_refused_and_harms_no_other() -> None:
    model = loaded(Sum())
    first, second = model.submit(rows(2)), model.submit(rows(3, seed=1))
    with pytest.raises(RuntimeError, match="collect one first"):
        model.submit(rows(1))
    np.testing.assert_allclose(model.collect(first), rows(2).sum(axis=1), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(
        model.collect(second), rows(3, seed=1).sum(axis=1), rtol=1e-6, atol=1e-6
    )


def test_outputs_outlive_the_batches_that_follow() -> None:
    model = loaded(Sum())
    kept = model.predict_batch(rows(4))
    for turn in range(4):
        model.predict_batch(rows(4, seed=turn + 1))
    np.testing.assert_allclose(kept, rows(4).sum(axis=1), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("batch_max", [1, 2, 3, 7, 64, 100, 1000])
def test_a_ladder_holds_every_batch_and_pads_little(batch_max: int) -> None:
    ladder = BatchLadder(batch_max)
    assert ladder.sizes == sorted(set(ladder.sizes))
    assert ladder.sizes[-1] == batch_max
    for count in range(1, batch_max + 1):
        assert count <= ladder.choose(count) <= max(1.34 * count, 1)
    assert ladder.padding <= 0.15
    with pytest.raises(ValueError, match=f"more than the largest batch, {batch_max}"):
        ladder.choose(batch_max + 1)


def test_too_little_memory_splits_the_batch_lowers_the_largest_size_and_loses_no_row(
    capsys: pytest.CaptureFixture[str],
) -> None:
    module = Sum()
    model = loaded(module)
    waiting = model.submit(rows(2, seed=5))
    module.most = 6  # from now on, as when another process takes the memory
    np.testing.assert_allclose(
        model.predict_batch(rows(20)), rows(20).sum(axis=1), rtol=1e-6, atol=1e-6
    )
    np.testing.assert_allclose(
        model.collect(waiting), rows(2, seed=5).sum(axis=1), rtol=1e-6, atol=1e-6
    )
    for _ in range(3):  # each time the largest size comes nearer to what fits
        module.sizes.clear()
        outputs = model.predict_batch(rows(20))
        np.testing.assert_allclose(outputs, rows(20).sum(axis=1), rtol=1e-6, atol=1e-6)
    assert max(module.sizes) == 6, "not tried again, and no lower than needed"
    printed = capsys.readouterr().err
    assert "out of memory with 10 rows; batches have at most 8 rows" in printed


def test_too_little_memory_at_the_start_leaves_the_sizes_that_fit() -> None:
    model = loaded(Sum(most=9))
    assert model.predict_batch(rows(20)).shape == (20,)
    assert any("batches of 1, 2, 4, 5, 6, 7, 8:" in line for line in model.report())


def test_a_row_that_is_too_large_alone_fails_alone() -> None:
    class Picky(Sum):
        def forward(self, inputs: Any) -> Any:
            if bool((inputs[:, 0] < 0).any()):
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: 8 GiB")
            return super().forward(inputs)

    model = loaded(Picky())
    inputs = rows(6)
    inputs[2, 0] = -1.0
    with pytest.raises(OneRowFailed, match="one row alone needs too much memory: Default"):
        model.predict_batch(inputs)
    (found,), _ = Evaluator(model, "m").run(inputs, 6)
    assert found.status is not None
    assert [*found.status] == [0, 0, 1, 0, 0, 0]
    good = [0, 1, 3, 4, 5]
    np.testing.assert_allclose(found.data[good], inputs[good].sum(axis=1), rtol=1e-5, atol=1e-6)
    assert model.report()[1].startswith("batches of 1, 2, 4,"), "no size is to blame"
    assert "20" in model.report()[1]


def test_each_size_reports_how_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    loaded(Sum(), batch_max=4)
    assert "batches of 1, 2, 4: eager, because a CPU has no CUDA graphs" in capsys.readouterr().err
    loaded(Sum(), batch_max=4, graphs=False)
    assert "batches of 1, 2, 4: eager, because graphs=False" in capsys.readouterr().err


class Replaying(CpuDevice):
    """A CPU whose graphs are the calls themselves, except for batches that cannot be captured."""

    def __init__(self) -> None:
        self.replayed = 0

    def capture(self, call: Callable[[], None], stream: Any) -> Callable[[], None]:
        call()

        def replay() -> None:
            self.replayed += 1
            call()

        return replay


def test_a_captured_size_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    device = Replaying()
    monkeypatch.setattr(gpu_model, "open_device", lambda name: device)
    model = loaded(Sum())
    np.testing.assert_allclose(
        model.predict_batch(rows(20)), rows(20).sum(axis=1), rtol=1e-6, atol=1e-6
    )
    assert device.replayed == 1
    assert model.report()[1].endswith(": captured")


def test_a_lost_device_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    device = Replaying()
    monkeypatch.setattr(gpu_model, "open_device", lambda name: device)
    module = Sum()
    model = loaded(module)
    monkeypatch.setattr(device, "is_alive", lambda: False)
    monkeypatch.setattr(module, "forward", _assert_on_the_device)
    with pytest.raises(SystemExit) as ended:
        model.predict_batch(rows(3))
    assert ended.value.code == gpu_model.EXIT_DEVICE_LOST
    assert "device-side assert" in capsys.readouterr().err


def _assert_on_the_device(inputs: Any) -> Any:
    raise RuntimeError("CUDA error: device-side assert triggered")


@pytest.mark.parametrize("dtype", ["f16", "bf16"])
def test_floats_are_cast_on_the_device_and_come_back_as_f32(dtype: str) -> None:
    torch.manual_seed(0)
    module = torch.nn.Linear(3, 2)
    exact = module(torch.from_numpy(rows(7))).detach().numpy()
    found = loaded(module, dtype=dtype).predict_batch(rows(7))
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, atol=0.02)
    assert not np.array_equal(found, exact)


class Lengths(torch.nn.Module):  # type: ignore[name-defined]
    """Return sum and length of each row, from padded rows and their lengths."""

    def forward(self, padded: Any, lengths: Any) -> Any:
        assert padded.shape == (len(lengths), int(lengths.max()))
        return torch.stack([padded.sum(dim=1), lengths.float()], dim=1)


def test_rows_of_different_lengths_are_padded_on_the_device() -> None:
    model = loaded(Lengths(), input="f32[*]", batch_max=3)
    inputs = [np.ones(size, np.float32) for size in (1, 5, 2, 9)]
    assert model.predict_batch(inputs).tolist() == [[1, 1], [5, 5], [2, 2], [9, 9]]
    assert "padded rows: " in model.report()[2]


def test_an_output_without_the_batch_is_an_error_that_names_both() -> None:
    class Scalar(torch.nn.Module):  # type: ignore[name-defined]
        def forward(self, inputs: Any) -> Any:
            return inputs.sum()

    with pytest.raises(TypeError, match=r"Scalar.forward\(\) returned \[\] for 1 rows"):
        loaded(Scalar())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "f8"}, "give one of f32, f16, bf16"),
        ({"input": "str"}, "a GPU model takes"),
        ({"input": "f32[*,3]"}, "a GPU model takes"),
        ({"batch_max": 0}, "at least one row"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GpuModel(Sum(), **{"input": "f32[3]", **settings})


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "GPU", "tpu:0", "cuda:99"])
def test_a_device_that_is_none_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=name):
        open_device(name)


@pytest.mark.parametrize("name", [f"GPU-{UUID}", f"MIG-{UUID}", f"MIG-GPU-{UUID}/7/0"])
def test_a_device_by_its_uuid_is_the_only_one_of_the_process(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The driver selects by CUDA_VISIBLE_DEVICES; here it sees one device, then none."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(
        torch.cuda, "device_count", lambda: int(os.environ["CUDA_VISIBLE_DEVICES"] == name)
    )
    monkeypatch.setattr(gpu_device, "CudaDevice", lambda index: (index,))
    assert open_device(name) == (0,)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == name
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert open_device(name) == (0,)
    with pytest.raises(ValueError, match="CUDA is in use in this process already"):
        open_device(f"GPU-{UUID[::-1]}")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match=f"device '{name}': this process sees 0 GPUs"):
        open_device(name)


def test_without_a_gpu_auto_is_the_cpu() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert open_device().describe()["device"] == "cpu"
    with pytest.raises(CannotCapture):
        open_device("cpu").capture(lambda: None, open_device("cpu").stream())


def test_a_function_of_cupy_gets_numpy_arrays_without_a_gpu() -> None:
    model = loaded(cupy_module(lambda inputs: inputs.max(axis=1)))
    np.testing.assert_allclose(model.predict_batch(rows(5)), rows(5).max(axis=1))


def test_a_host_counts_a_model_by_the_device_memory_it_reserved(tmp_path: Path) -> None:
    (tmp_path / "sized.py").write_text(
        "class Sized:\n    def predict_batch(self, inputs):\n        return inputs\n"
        "from clipper_container import Model\n"
        "class Reserving(Model):\n    def load(self):\n        self.size_bytes = 5 << 20\n"
        "    def predict_batch(self, inputs):\n        return inputs\n"
    )
    runtime = PythonRuntime()
    for attribute, size in (("Sized", 0), ("Reserving", 5 << 20)):
        path = f"{tmp_path}/sized.py:{attribute}"
        assert runtime.load(Artifact("m", "python", path)).size_bytes == size
