"""PyTorch: modules, TorchScript and exported programs answer as the module itself after eval()."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_container.model import SeveralOutputs
from tests.frameworks.served import ROWS, Case, check, loaded, seeds
from tests.sizes import sized

torch = pytest.importorskip("torch")
pytest.importorskip("torch.fx.experimental.symbolic_shapes")  # torch.jit.trace() takes 2 s for it

# frameworks warn of parameters that do not matter
pytestmark = pytest.mark.filterwarnings("ignore")
WIDTH = 5
DTYPES = ("float32", "float64", "float16", "bfloat16")


def net_of(rng: np.random.Generator) -> tuple[Any, Any]:
    """Return a small module of one input, and the type of its weights."""
    dtype = getattr(torch, str(rng.choice(DTYPES)))
    last = int(rng.choice([1, 3]))
    kind = str(rng.choice(["plain", "norm", "mixed", "transposed", "whole"]))

    class Net(torch.nn.Module):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(WIDTH, 4).to(dtype)
            self.norm = torch.nn.BatchNorm1d(4).to(dtype) if kind == "norm" else None
            self.drop = torch.nn.Dropout(0.5)
            self.last = torch.nn.Linear(4, last).to(dtype)
            self.scale = torch.nn.Parameter(torch.ones(1, dtype=torch.float64))
            if kind != "mixed":
                self.scale = torch.nn.Parameter(torch.ones(1, dtype=dtype))

        def forward(self, pixels: Any) -> Any:
            hidden = self.first(pixels.to(dtype))
            hidden = hidden if self.norm is None else self.norm(hidden)
            found = self.last(self.drop(torch.relu(hidden))) * self.scale
            if kind == "transposed":
                return found.T.contiguous().T  # strides that are not those of rows
            return found.argmax(1) if kind == "whole" else found

    torch.manual_seed(int(rng.integers(1 << 30)))
    net = Net()
    return (net if rng.random() < 0.5 else net.eval()), dtype


def array_of(found: Any) -> Any:
    """Return a tensor as the array that is served: (n, 1) as n numbers."""
    found = found.float() if found.dtype == torch.bfloat16 else found
    array = found.numpy()
    return array.reshape(len(array)) if array.ndim > 1 and array.size == len(array) else array


def own_of(net: Any) -> Any:
    """Return a function that asks the module itself."""

    def own(part: Any) -> Any:
        with torch.inference_mode():
            return array_of(net.eval()(torch.from_numpy(np.array(part, np.float32))))

    return own


@seeds(12, 150)
def test_answers_are_those_of_the_module(seed: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(seed)
    net, dtype = net_of(rng)
    rows = rng.random((ROWS, WIDTH)).astype(np.float32)
    ways = ["module", "traced", "traced file"]
    ways += sized([], ["exported", "exported file"])  # torch.export takes seconds to import
    way = str(rng.choice(ways))
    own, thing = own_of(net), net
    example = torch.from_numpy(rows[:3])
    with torch.inference_mode(False), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if way.startswith("traced"):
            thing = torch.jit.trace(net.eval(), example)
            torch.jit.save(thing, tmp_path / "m.pt")
        elif way.startswith("exported"):
            free = {"pixels": {0: torch.export.Dim("batch")}}
            thing = torch.export.export(net.eval(), (example,), dynamic_shapes=free)
            torch.export.save(thing, tmp_path / "m.pt2")
    if way == "traced file":
        thing = str(tmp_path / "m.pt")
    elif way == "exported file":
        thing = str(tmp_path / "m.pt2")
    else:
        net.input = f"f32[{WIDTH}]"
    case = Case(f"seed {seed}: {way} {dtype}", thing, rows, own)
    assert check(case, tmp_path, rng) == "served"


class Several(torch.nn.Module):  # type: ignore[name-defined]
    """Returns what it is told."""

    input = "f32[2]"

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: Any) -> Any:
        total, twice = x.sum(1), x * 2
        return {
            "tuple": (total, twice),
            "dict": {"logits": twice, "hidden": total},
            "nested": [(total, twice)],
            "one of a tuple": (twice,),
            "one of a dict": {"any": twice},
            "text": "no tensor",
        }[self.kind]


@pytest.mark.parametrize("kind", ["tuple", "dict", "nested"])
def test_a_module_of_several_outputs_loses_none(kind: str, tmp_path: Path) -> None:
    model = loaded(Several(kind), tmp_path)
    with pytest.raises(
        SeveralOutputs, match=r"Several\.forward\(\) returned 2 outputs; deploy it with"
    ):
        model.predict_batch(np.ones((2, 2), np.float32))
    found = model.predict_tensors({"x": np.ones((2, 2), np.float32)}) if kind != "nested" else ()
    assert len(found) in (0, 2)


@pytest.mark.parametrize("kind", ["one of a tuple", "one of a dict"])
def test_a_module_of_one_output_answers_it(kind: str, tmp_path: Path) -> None:
    found = loaded(Several(kind), tmp_path).predict_batch(np.ones((3, 2), np.float32))
    assert found.tolist() == [[2.0, 2.0]] * 3


def test_what_is_no_tensor_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="returned a str; a tensor is needed"):
        loaded(Several("text"), tmp_path).predict_batch(np.ones((3, 2), np.float32))
