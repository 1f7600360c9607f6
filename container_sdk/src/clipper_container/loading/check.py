"""Verifies a model file in a process of its own, which a malformed file may crash."""

from __future__ import annotations

import contextlib

from clipper_container.adapters import onnx
from clipper_container.errors import fails_call_only
from clipper_container.loading import targets as function
from clipper_container.model import as_model
from clipper_container.schema import type_text


def examine(target: str) -> dict[str, object]:
    """Verify and load a file. Returns a map: `ok`, then `kind`, `input` and `output`, or
    `reason`.
    """
    try:
        kind, content = function.open_data(target)
        if kind == "onnx":
            # without onnx, onnxruntime's checks must suffice
            with contextlib.suppress(ModuleNotFoundError):
                onnx.check(content)
        model = as_model(function.load_target(target))
        model.load()
    except BaseException as error:
        if not fails_call_only(error):
            raise
        return {"ok": False, "reason": function.explain(error)}
    types = {"input": type_text(model.input), "output": type_text(model.output)}
    return {"ok": True, "kind": kind, **types}
