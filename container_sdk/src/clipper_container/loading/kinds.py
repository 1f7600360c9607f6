"""The kinds of model files, each declared once: how it is recognized, loaded, and what it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class FileKind:
    """A kind of model files, or of folders.

    adapter: the module of `clipper_container.adapters` whose `load_file(kind, content, about)`
    loads it. extra: of clipper-serving, which installs its packages; empty if there is none.
    packages: distributions that the adapter imports; of each tuple one is enough. endings: of its
    files. mark: what a folder of this kind contains, as a path in it. imports: modules that a
    process which loads many such models imports first. is_code: whether loading may run code that
    the file contains.
    """

    adapter: str
    extra: str
    packages: tuple[tuple[str, ...], ...]
    endings: tuple[str, ...] = ()
    mark: str = ""
    imports: tuple[str, ...] = ()
    is_code: bool = False


_ONNX = ("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml")
_TORCH = (("torch",),)

KINDS: Mapping[str, FileKind] = {
    "onnx": FileKind("onnx", "onnx", (_ONNX,), (".onnx",)),
    "skops": FileKind(
        "skops",
        "skops",
        (("skops",), ("scikit-learn",)),
        (".skops",),
        imports=("skops.io",),
    ),
    "xgboost": FileKind(
        "xgboost",
        "xgboost",
        (("xgboost", "xgboost-cpu"),),
        (".ubj", ".json"),
        imports=("xgboost",),
    ),
    "lightgbm": FileKind(
        "lightgbm",
        "lightgbm",
        (("lightgbm",),),
        (".txt",),
        imports=("lightgbm",),
    ),
    "catboost": FileKind(
        "catboost",
        "catboost",
        (("catboost",),),
        (".cbm",),
        imports=("catboost",),
    ),
    "torchscript": FileKind("torch", "torch", _TORCH, (".pt", ".pth"), imports=("torch",)),
    "torch-export": FileKind(
        "torch",
        "torch",
        _TORCH,
        (".pt2",),
        imports=("torch", "torch.export"),
        is_code=True,
    ),
    "pickle": FileKind(
        "pickles",
        "",
        (("joblib",),),
        (".pkl", ".pickle", ".joblib"),
        imports=("joblib",),
        is_code=True,
    ),
    "keras": FileKind(
        "keras",
        "keras",
        (("keras",),),
        (".keras",),
        imports=("keras",),
        is_code=True,
    ),
    "mlflow": FileKind(
        "mlflow",
        "mlflow",
        (("mlflow-skinny", "mlflow"), ("pandas",)),
        mark="MLmodel",
        imports=("mlflow",),
        is_code=True,
    ),
    "sentence-transformers": FileKind(
        "sentences",
        "sentence-transformers",
        (("sentence-transformers",),),
        mark="modules.json",
        imports=("sentence_transformers",),
        is_code=True,
    ),
    "transformers": FileKind(
        "transformers",
        "transformers",
        (("transformers",), ("torch",)),
        mark="tokenizer_config.json",
        imports=("transformers", "torch"),
    ),
}
ENDINGS: Mapping[str, str] = {
    ending: name for name, kind in KINDS.items() for ending in kind.endings
}
