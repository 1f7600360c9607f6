"""Is a file a model that could be served? Found out in a process of its own, which a bad file may
end."""

from __future__ import annotations

import contextlib
from typing import Any

from clipper_container.adapters import function, onnx
from clipper_container.model import as_model


def examine(target: str) -> dict[str, Any]:
    """Verify and load. -> `ok`, and the `input` and `output` type of a row or the `reason`."""
    try:
        kind, content = function.open_data(target)
        if kind == "onnx":
            with contextlib.suppress(
                ModuleNotFoundError
            ):  # without it, onnxruntime's own checks must do
                onnx.check(content)
        model = as_model(function.load_target(target))
        model.load()
    except Exception as error:
        return {"ok": False, "reason": function.explain(error)}
    return {"ok": True, "kind": kind, "input": model.input, "output": model.output}
