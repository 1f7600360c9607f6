"""Models with several named tensors, in processes of their own: functions, ONNX, PyTorch; what is
cached, joined and combined; and what happens to wrong inputs and outputs, and killed containers."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import DoesNotFit, InvalidInput, ModelFailed, TypeConflict
from clipper.schema import InvalidTensor, Tensors
from tests.end_to_end.conftest import deploying
from tests.threads import join

Deploy = Callable[..., Any]
Batch = dict[str, Any]
TEXT = {"ids": "i64[*]", "mask": "i64[*]"}
SCORES = {"label": "i64", "scores": "f32[2]"}


@pytest.fixture
def deploy(server: clipper.ClipperServer, names: Iterator[str]) -> Iterator[Deploy]:
    with deploying(server, names) as do:
        yield do


def score(batch: Batch) -> Batch:
    """Return, for two tensors, the sum of the ids that count, and two numbers."""
    kept = [ids[mask > 0] for ids, mask in zip(batch["ids"], batch["mask"], strict=True)]
    return {
        "label": np.array([ids.sum() for ids in kept], np.int64),
        "scores": np.array([[len(ids), 0.5] for ids in kept], np.float32),
    }


def row(*ids: int) -> Batch:
    return {"ids": np.array(ids), "mask": np.ones(len(ids), np.int64)}


# -- functions


def test_a_function_takes_and_returns_dicts_of_arrays(
    server: clipper.ClipperServer, deploy: Deploy
) -> None:
    model = deploy(score, inputs=TEXT, outputs=SCORES)
    found = model.predict(row(1, 2, 3)).result(60)
    assert found["label"] == 6
    np.testing.assert_array_equal(found["scores"], np.float32([3, 0.5]))
    answer = server.predict(model.name, row(5)).result(60)
    assert answer.output["label"] == 5
    many = model.predict_many([row(1), row(2, 3), row()]).result(60)
    assert many["label"].tolist() == [1, 5, 0]


def test_strings_scalars_and_two_free_dimensions(deploy: Deploy) -> None:
    def describe(batch: Batch) -> Batch:
        return {
            "text": [f"{name} {tags.tolist()}" for name, tags in zip(
                batch["name"], batch["tags"], strict=True)],
            "image": [image * 2 for image in batch["image"]],
            "raw": [name.encode() for name in batch["name"]],
        }  # fmt: skip

    model = deploy(
        describe,
        schema='{"name": "str", "tags": "str[*]", "image": "f32[*,*,3]", "on": "bool"}'
        ' -> {"text": "str", "image": "f32[*,*,3]", "raw": "bytes"}',
    )
    image = np.arange(12, dtype=np.float32).reshape(2, 2, 3)
    found = model.predict({"name": "Zoë", "tags": ["a", "b"], "image": image, "on": True}).result(
        60
    )
    assert found["text"] == "Zoë ['a', 'b']"
    np.testing.assert_array_equal(found["image"], image * 2)
    assert found["raw"] == "Zoë".encode()


def test_row_by_row_and_a_confidence(server: clipper.ClipperServer, deploy: Deploy) -> None:
    from clipper_container import Scored

    def one(given: Batch) -> Any:
        return {"total": float(given["a"].sum() + given["b"])}

    def sure(batch: Batch) -> Any:
        return Scored({"total": batch["a"].sum(axis=1) + batch["b"]}, [0.25] * len(batch["b"]))

    types = {"inputs": {"a": "f64[2]", "b": "f64"}, "outputs": {"total": "f64"}}
    given = {"a": [1.0, 2.0], "b": 4.0}
    model = deploy(one, row_by_row=True, **types)
    assert model.predict(given).result(60) == {"total": 7.0}
    answer = server.predict(deploy(sure, **types).name, given).result(60)
    assert (answer.output, answer.confidence) == ({"total": 7.0}, 0.25)


def test_arrays_of_fixed_tensors_go_in_chunks(
    server: clipper.ClipperServer, deploy: Deploy
) -> None:
    def add(batch: Batch) -> Batch:
        assert not any(column.flags.writeable for column in batch.values())
        return {"sum": batch["a"] + batch["b"][:, None], "sign": batch["b"] > 0}

    model = deploy(
        add, inputs={"a": "f32[3]", "b": "i16"}, outputs={"sum": "f32[3]", "sign": "bool"}
    )
    a, b = np.random.default_rng(1).random((500, 3), np.float32), np.arange(-250, 250)
    answers = server.schedule_predictions({"a": a, "b": b}, models=[model.name]).result(20)
    assert not answers.is_default.any()
    np.testing.assert_allclose(answers.outputs["sum"], a + b[:, None].astype("f4"))
    np.testing.assert_array_equal(answers.outputs["sign"], b > 0)
    app = server.app(f"of-{model.name.partition(':')[0]}", models=[model.name.partition(":")[0]])
    some = app.predict_many({"a": a[:40], "b": b[:40]}, outputs=["sign"]).result(20)
    assert some.outputs.keys() == {"sign"}


def test_the_example_runs() -> None:
    path = Path(__file__).parents[2] / "examples" / "tensors" / "serve.py"
    ran = subprocess.run([sys.executable, path], capture_output=True, text=True, timeout=60)
    assert ran.stdout.startswith("embedding (8,) norm 2.1"), ran.stderr
    assert "refused: tensor 'mask' is missing" in ran.stdout


# -- what is wrong


@pytest.mark.parametrize(
    ("given", "tensor", "message"),
    [
        ({"ids": [1]}, "mask", "tensor 'mask' is missing"),
        ({"ids": [1], "mask": [1], "segment": [1]}, "segment", "unknown tensor 'segment'"),
        ({"ids": [0.5], "mask": [1]}, "ids", r"tensor 'ids': expected i64\[\*\], got f64"),
        ({"ids": [1], "mask": [[1]]}, "mask", "tensor 'mask': expected i64"),
        ([1, 2], "ids", "expected a dict"),
    ],
)
def test_bad_input_names_the_tensor(deploy: Deploy, given: Any, tensor: str, message: str) -> None:
    model = deploy(score, inputs=TEXT, outputs=SCORES)
    with pytest.raises(InvalidTensor, match=message) as caught:
        model.predict(given)
    assert caught.value.tensor == tensor
    assert isinstance(caught.value, InvalidInput)


def test_finite_is_checked_in_every_tensor(deploy: Deploy) -> None:
    model = deploy(lambda b: b["a"], inputs={"a": "f32[2]"}, finite=True)
    assert model.predict({"a": [1, 2]}).result(60).tolist() == [1, 2]
    with pytest.raises(InvalidTensor, match="tensor 'a' holds NaN"):
        model.predict({"a": [1, np.nan]})


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ({"label": [1]}, "tensor 'scores' is missing"),
        ({"label": [1], "scores": [[1.0, 2.0]], "more": [1]}, "unknown tensor 'more'"),
        ({"label": [1, 2], "scores": [[1.0, 2.0]] * 2}, "has 2 rows for a batch of 1"),
        ({"label": [1], "scores": [[1.0, 2.0, 3.0]]}, "tensor 'scores': expected"),
        ({"label": [0.5], "scores": [[1.0, 2.0]]}, "tensor 'label': expected i64, got f64"),
        ([1], "returned a list; return a dict"),
    ],
)
def test_wrong_outputs_fail_the_batch_and_name_the_tensor(
    deploy: Deploy, returned: Any, message: str
) -> None:
    model = deploy(lambda _: returned, inputs=TEXT, outputs=SCORES)
    with pytest.raises(ModelFailed, match=message):
        model.predict(row(1)).result(60)


def test_a_dict_without_declared_outputs_names_what_to_declare(deploy: Deploy) -> None:
    model = deploy(lambda xs: {"a": xs, "t": ["x"] * len(xs)}, input="f32[2]")
    with pytest.raises(ModelFailed, match=r"outputs=\{'a': 'f32\[2\]', 't': 'str'\}"):
        model.predict(np.zeros(2, "f4")).result(60)


# -- cache, join, policies


def test_all_inputs_are_the_key_of_cache_and_join(deploy: Deploy, tmp_path: Path) -> None:
    calls = tmp_path / "calls"

    def count(batch: Batch) -> Batch:
        with calls.open("a") as file:
            file.write("x" * len(batch["mask"]))
        time.sleep(0.05)
        return {
            "n": [int(ids.sum() * 10 + m.sum()) for ids, m in zip(*batch.values(), strict=True)]
        }

    model = deploy(count, inputs=TEXT, outputs={"n": "i64"}, batching={"size_max": 1})
    same = [model.predict({"ids": [3], "mask": [1]}) for _ in range(20)]
    assert {future.result(60)["n"] for future in same} == {31}
    assert model.predict({"ids": [3], "mask": [0]}).result(60)["n"] == 30  # another mask
    assert model.predict({"ids": [3], "mask": [1]}).result(60)["n"] == 31
    assert calls.read_text() == "xx"
    model.put({"ids": [9], "mask": [9]}, {"n": 1})
    assert model.predict({"ids": [9], "mask": [9]}).result(60) == {"n": 1}


def voter(label: int, confidence: float) -> Callable[[Batch], Batch]:
    def vote(batch: Batch) -> Batch:
        n = len(batch["x"])
        return {"label": np.full(n, label), "score": np.full(n, confidence)}

    return vote


def test_policies_combine_the_output_that_the_application_names(
    server: clipper.ClipperServer, deploy: Deploy, names: Iterator[str]
) -> None:
    types = {"inputs": {"x": "f64[2]"}, "outputs": {"label": "i64", "score": "f64"}}
    votes = ((1, 0.1), (2, 0.2), (2, 0.3))
    models = [deploy(voter(*each), **types) for each in votes]
    links = [model.name.partition(":")[0] for model in models]
    with pytest.raises(InvalidInput, match="Name the one that its policy combines: output='label'"):
        server.app(next(names), models=links)
    with pytest.raises(InvalidTensor, match="unknown tensor 'lable' - did you mean 'label'"):
        server.app(next(names), models=links, output="lable")
    vote = server.app(next(names), models=links, output="label", slo_ms=5000)
    answer = vote.predict({"x": [1.0, 2.0]}).result(60)
    assert answer.output == 2
    assert vote.feedback(answer, label=2)
    mean = server.app(next(names), models=links, output="score", slo_ms=5000)
    assert mean.predict({"x": [1.0, 2.0]}).result(60).output == pytest.approx(0.2)
    rows = vote.predict_many({"x": np.ones((40, 2))}).result(60)
    assert rows.outputs.tolist() == [2] * 40
    assert vote.feedback_many(rows, np.full(40, 2)).counted == 40
    early = server.app(next(names), models=links, output="label", decider="majority", slo_ms=5000)
    answer = early.predict({"x": [3.0, 4.0]}).result(60)
    assert (answer.output, answer.decided_by) == (2, "majority"), "scores differ, labels do not"


def test_defaults_and_some_outputs(
    server: clipper.ClipperServer, deploy: Deploy, names: Iterator[str]
) -> None:
    def fail(batch: Batch) -> Batch:
        raise ValueError("no")

    model = deploy(fail, inputs=TEXT, outputs=SCORES).name.partition(":")[0]
    with pytest.raises(InvalidTensor, match="tensor 'scores' is missing"):
        server.app(next(names), models=[model], default={"label": -1})
    name = next(names)
    app = server.app(name, models=[model], default={"label": -1, "scores": [0.0, 0.0]})
    answer = app.predict(row(1)).result(60)
    assert answer.is_default
    assert answer.output["label"] == -1
    assert answer.output["scores"].dtype == np.float32
    assert app.predict(row(1), outputs=["label"]).result(60).output == {"label": -1}
    with pytest.raises(InvalidTensor, match="unknown tensor 'lable'"):
        app.predict(row(1), outputs=["lable"])
    with pytest.raises(InvalidInput, match="feedback is about one of them"):
        app.feedback(answer, label=1)
    rows = app.predict_many([row(1), row(2)]).result(60)
    assert rows.is_default.all()
    assert list(rows.outputs["label"]) == [-1, -1]
    plain = deploy(lambda xs: xs, input="f64").name.partition(":")[0]
    with pytest.raises(DoesNotFit, match="one output without a name"):
        server.app(next(names), models=[plain], output="label")
    named = server.app(next(names), models=[plain])
    with pytest.raises(InvalidInput, match=f"application '{named.name}' has one output without"):
        named.predict(1.0, outputs=["label"])


def test_a_linked_model_has_the_same_tensors(
    server: clipper.ClipperServer, deploy: Deploy, names: Iterator[str]
) -> None:
    one = deploy(score, inputs=TEXT, outputs=SCORES).name.partition(":")[0]
    other = deploy(score, inputs={"ids": "i64[*]", "m": "i64[*]"}, outputs=SCORES)
    with pytest.raises(TypeConflict, match="has the input"):
        server.app(next(names), models=[one, other.name.partition(":")[0]], output="label")


# -- a container that is killed


def test_a_killed_container_loses_no_query(server: clipper.ClipperServer, deploy: Deploy) -> None:
    def slow(batch: Batch) -> Batch:
        time.sleep(0.01)
        return {**score(batch), "pid": np.full(len(batch["ids"]), os.getpid())}

    model = deploy(
        slow, inputs=TEXT, outputs={**SCORES, "pid": "i64"}, cache=False, replicas=2,
        batching={"size_max": 4},
    )  # fmt: skip
    pid = int(model.predict(row(1)).result(60)["pid"])
    killer = threading.Timer(0.1, os.kill, (pid, signal.SIGKILL))
    killer.start()
    futures = [model.predict(row(i, 1), slo_ms=20_000) for i in range(200)]
    assert [int(future.result(20)["label"]) for future in futures] == [i + 1 for i in range(200)]
    join(killer)


# -- frameworks


def onnx_model() -> bytes:
    """Return an ONNX model of two inputs, one of a free size, and two outputs."""
    helper = pytest.importorskip("onnx.helper", reason="pip install 'clipper-serving[onnx]'")
    from onnx import TensorProto

    nodes = [
        helper.make_node("Mul", ["dense", "two"], ["doubled"]),
        helper.make_node("ReduceSum", ["ids", "axis"], ["total"], keepdims=0),
    ]
    graph = helper.make_graph(
        nodes,
        "g",
        [
            helper.make_tensor_value_info("dense", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("ids", TensorProto.INT64, ["n", "length"]),
        ],
        [
            helper.make_tensor_value_info("doubled", TensorProto.FLOAT, ["n", 3]),
            helper.make_tensor_value_info("total", TensorProto.INT64, ["n"]),
        ],
        [
            helper.make_tensor("two", TensorProto.FLOAT, [], [2.0]),
            helper.make_tensor("axis", TensorProto.INT64, [1], [1]),
        ],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return bytes(model.SerializeToString())


def test_onnx_takes_its_own_names_and_types(
    server: clipper.ClipperServer, deploy: Deploy, tmp_path: Path
) -> None:
    runtime = pytest.importorskip("onnxruntime", reason="pip install 'clipper-serving[onnx]'")
    path = tmp_path / "two.onnx"
    path.write_bytes(onnx_model())
    model = deploy(str(path))
    assert model.describe_input() == '{"dense": "f32[3]", "ids": "i64[*]"}'
    assert str(model.outputs) == '{"doubled": "f32[3]", "total": "i64"}'
    session = runtime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    generator = np.random.default_rng(3)
    rows: list[dict[str, Any]] = [
        {"dense": generator.random(3, np.float32), "ids": generator.integers(0, 9, 1 + i % 4)}
        for i in range(30)
    ]
    futures = [model.predict(each) for each in rows]
    for each, future in zip(rows, futures, strict=True):
        wanted = session.run(None, {name: value[None] for name, value in each.items()})
        found = future.result(60)
        np.testing.assert_array_equal(found["doubled"], wanted[0][0])
        assert found["total"] == wanted[1][0]
    answers = server.schedule_predictions(rows, models=[model.name]).result(60)
    assert list(answers.outputs["total"]) == [each["ids"].sum() for each in rows]


def encoder() -> Any:
    torch = pytest.importorskip("torch", reason="pip install 'clipper-serving[torch]'")

    class Encoder(torch.nn.Module):  # type: ignore[misc, name-defined]
        """A model that embeds ids and averages over those that the mask keeps."""

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = torch.nn.Embedding(32, 8)
            self.head = torch.nn.Linear(8, 2)

        def forward(self, ids: Any, mask: Any) -> Any:
            weights = mask.unsqueeze(-1).float()
            mean = (self.embed(ids) * weights).sum(1) / weights.sum(1).clamp(min=1.0)
            return {"embedding": mean, "logits": self.head(mean)}

    return Encoder().eval()


def test_an_encoder_with_ids_and_mask(deploy: Deploy) -> None:
    module = encoder()
    outputs = {"embedding": "f32[8]", "logits": "f32[2]"}
    model = deploy(module, inputs=TEXT, outputs=outputs)
    ids = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 3]]
    found = [model.predict({"ids": each, "mask": [1] * len(each)}) for each in ids]
    for each, future in zip(ids, found, strict=True):
        check_encoded(module, each, future.result(20))


def check_encoded(module: Any, ids: list[int], found: Batch) -> None:
    import torch

    with torch.inference_mode():
        wanted = module(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.int64))
    for name, value in wanted.items():
        np.testing.assert_allclose(found[name], value[0].numpy(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["torchscript", "torch-export"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_files_of_an_encoder(kind: str) -> None:
    torch = pytest.importorskip("torch", reason="pip install 'clipper-serving[torch]'")
    from clipper_container.adapters.torch import load
    from clipper_container.loading.errors import LoadError
    from clipper_container.worker.named_tensors import with_tensors

    module, buffer = encoder(), io.BytesIO()
    example = (torch.ones(2, 4, dtype=torch.int64), torch.ones(2, 4, dtype=torch.int64))
    if kind == "torchscript":
        torch.jit.save(torch.jit.trace(module, example, strict=False), buffer)
    else:
        sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("length")}
        program = torch.export.export(module, example, dynamic_shapes={"ids": sizes, "mask": sizes})
        torch.export.save(program, buffer)
    model = load(kind, buffer.getvalue())
    if kind == "torchscript":
        with pytest.raises(LoadError, match=r"needs 2 inputs \(ids, mask\); deploy it with their"):
            model.check_input(named=False)
    else:
        assert model.input == TEXT
    inputs = Tensors.parse(TEXT)
    outputs = Tensors.parse({"embedding": "f32[8]", "logits": "f32[2]"})
    served = with_tensors(model, str(inputs), str(outputs), "m", False)
    ids = [[3, 1, 4], [1, 5, 9, 2], [6, 5, 3]]
    records = inputs.pack_many([row(*each) for each in ids])
    for each, record in zip(ids, served.predict_batch(records), strict=True):
        check_encoded(module, each, outputs.unpack(record))
