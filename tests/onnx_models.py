"""Small ONNX models with several named tensors, made for tests."""

from typing import Any

import numpy as np
import pytest

Named = dict[str, Any]


def graph(
    nodes: list[Any], inputs: Named, outputs: Named, constants: Named, ml: bool = False
) -> bytes:
    """Return the bytes of an ONNX model. inputs, outputs: (type, shape) by name. ml: it has
    operators of ai.onnx.ml."""
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    helper, numpy_helper = onnx.helper, onnx.numpy_helper
    infos = [
        [helper.make_tensor_value_info(name, *about) for name, about in side.items()]
        for side in (inputs, outputs)
    ]
    made = helper.make_graph(
        nodes,
        "g",
        *infos,
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17)] + [helper.make_opsetid("ai.onnx.ml", 2)] * ml
    model = helper.make_model(made, opset_imports=opsets, ir_version=8)
    return bytes(model.SerializeToString())


def two_by_two() -> bytes:
    """Return a model of two inputs (n, 3) and (n,) with two outputs: their product, and the sum of
    a row."""
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    node, floats = onnx.helper.make_node, onnx.TensorProto.FLOAT
    return graph(
        [
            node("Unsqueeze", ["factor", "one"], ["column"]),
            node("Mul", ["x", "column"], ["scaled"]),
            node("ReduceSum", ["scaled", "one"], ["total"], keepdims=0),
        ],
        {"x": (floats, ["n", 3]), "factor": (floats, ["n"])},
        {"scaled": (floats, ["n", 3]), "total": (floats, ["n"])},
        {"one": np.array([1])},
    )


def encoder() -> bytes:
    """Return an encoder of token ids and a mask: the mean of the unmasked embeddings."""
    onnx = pytest.importorskip("onnx", reason="pip install onnx")
    node, proto = onnx.helper.make_node, onnx.TensorProto
    table = np.random.default_rng(7).normal(size=(50, 8)).astype(np.float32)
    return graph(
        [
            node("Gather", ["table", "input_ids"], ["tokens"]),
            node("Cast", ["attention_mask"], ["weights"], to=proto.FLOAT),
            node("Unsqueeze", ["weights", "last"], ["columns"]),
            node("Mul", ["tokens", "columns"], ["masked"]),
            node("ReduceSum", ["masked", "one"], ["sum"], keepdims=0),
            node("ReduceSum", ["weights", "one"], ["count"], keepdims=1),
            node("Div", ["sum", "count"], ["embedding"]),
        ],
        {
            "input_ids": (proto.INT64, ["n", "length"]),
            "attention_mask": (proto.INT64, ["n", "length"]),
        },
        {"embedding": (proto.FLOAT, ["n", 8])},
        {"table": table, "last": np.array([-1]), "one": np.array([1])},
    )
