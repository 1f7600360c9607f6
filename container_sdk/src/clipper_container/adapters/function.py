"""A target, as it stands on a command line, -> the object to serve.

A target is `module:attribute`; an `.onnx` or `.skops` file; or the path of a file that `clipper deploy` packed: one line of
JSON that says what the file holds, then a pickle (`.pkl`), or ONNX or skops bytes (`.packed`). Pickles run code, so they are
opened only here, in the model's own process, and only when their SHA-256 is the one that was asked for.
"""

from __future__ import annotations

import hashlib
import hmac
import importlib
import json
import os
import pickle
import platform
import sys
from collections.abc import Iterable
from typing import Any

from clipper_container.adapters.errors import LoadError

MAGIC = b"CLIPPER-MODEL "
PACKED = (".pkl", ".packed")
RAW = {".onnx": "onnx", ".skops": "skops"}  # data, by its ending
DISTRIBUTIONS = {  # where a module has another name than what pip installs
    "sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml", "mlflow": "mlflow-skinny",
}  # fmt: skip
__all__ = ["DISTRIBUTIONS", "MAGIC", "PACKED", "RAW", "LoadError", "explain", "load_target", "open_data"]


def load_target(target: str, sha256: str = "", code: Iterable[str] = ()) -> Any:
    """The object that `target` names.

    sha256: of the whole file, in hex; empty for any.
    code: directories, or files whose directories, go to the front of sys.path.
    Raises: LoadError, and whatever importing the user's code raises.
    """
    for entry in reversed([*code]):
        _prepend(entry if os.path.isdir(entry) else os.path.dirname(os.path.abspath(entry)))
    if target.endswith(PACKED):
        return _load_file(target, sha256)
    if kind := RAW.get(os.path.splitext(target)[1]):
        return _load_data(kind, _content(target, sha256), ())
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        raise LoadError(f"target {target!r} is neither module:attribute nor the path of a .pkl, .onnx or .skops file")
    _prepend(os.getcwd(), last=True)
    thing: Any = importlib.import_module(module)
    for name in attribute.split("."):
        try:
            thing = getattr(thing, name)
        except AttributeError:
            raise LoadError(f"module {module!r} has no attribute {attribute!r}") from None
    return thing


def _prepend(directory: str, last: bool = False) -> None:
    if directory not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, directory)


def _content(path: str, sha256: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read()
    if sha256 and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), sha256.lower()):
        raise LoadError(f"{path} is not the file that was deployed (its SHA-256 differs)")
    return content


def _load_data(kind: str, content: bytes, trusted: Iterable[str]) -> Any:
    """A model that is data: nothing of it is unpickled."""
    if kind == "onnx":
        from clipper_container.adapters.onnx import OnnxModel

        return OnnxModel(content)
    from clipper_container.adapters import skops

    return skops.load(content, tuple(trusted))


def _load_file(path: str, sha256: str) -> Any:
    about, body = _unpacked(path, sha256)
    kind = str(about["kind"])
    if kind in RAW.values():
        return _load_data(kind, body, about.get("trusted", ()))
    here = ".".join(platform.python_version_tuple()[:2])
    packed_by = str(about["python"])
    if kind != "estimator" and packed_by != here:
        raise LoadError(
            f"{path} holds code packed by Python {packed_by}, this is Python {here}. "
            f"Deploy from Python {here}, or as 'module:function'."
        )
    return pickle.loads(body)  # a cloudpickle is a pickle that imports cloudpickle


def _unpacked(path: str, sha256: str = "") -> tuple[dict[str, Any], bytes]:
    """The first line and the rest of a packed file."""
    head, _, body = _content(path, sha256).partition(b"\n")
    if not head.startswith(MAGIC):
        raise LoadError(f"{path} was not packed by clipper; deploy the model again")
    try:
        about = json.loads(head[len(MAGIC) :])
        if not isinstance(about, dict) or not {"python", "kind"} <= about.keys():
            raise ValueError("no description")
    except ValueError as error:
        raise LoadError(f"{path} is damaged in its first line") from error
    return about, body


def open_data(path: str) -> tuple[str, bytes]:
    """The kind and the bytes of a model that is data. Raises: LoadError for anything else."""
    if kind := RAW.get(os.path.splitext(path)[1]):
        return kind, _content(path, "")
    about, body = _unpacked(path)
    if about["kind"] not in RAW.values():
        raise LoadError(f"{path} holds code; only ONNX and skops files can be looked at without running them")
    return str(about["kind"]), body


def explain(error: BaseException) -> str:
    """Why loading failed, in one line, with the next step where one is known."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return _explain_missing(error.name)
    if isinstance(error, LoadError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")


def _explain_missing(name: str) -> str:
    top = name.partition(".")[0]
    text = f"No module named '{name}'."
    places = [os.getcwd(), *(os.path.dirname(os.path.abspath(entry)) for entry in sys.path if entry)]
    for place in places:
        if os.path.exists(os.path.join(place, top + ".py")):
            return f'{text} It is a local file; packed by value on the next deploy, or add code=["{top}.py"].'
    python = ".".join(platform.python_version_tuple()[:2])
    venv = os.path.basename(sys.prefix)
    package = DISTRIBUTIONS.get(top, top)
    return f"{text} '{top}' is not installed in venv {venv} (Python {python}). Run: pip install {package}"
