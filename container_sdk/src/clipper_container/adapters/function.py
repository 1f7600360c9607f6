"""A target, as it stands on a command line, -> the object to serve.

A target is `module:attribute`, or the path of a `.pkl` file that `clipper deploy` packed: one line of JSON that says
what the file holds, then a pickle. Pickles run code, so they are opened only here, in the model's own process, and only
when their SHA-256 is the one that was asked for.
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

MAGIC = b"CLIPPER-MODEL "


class LoadError(Exception):
    """A target that cannot be loaded, for a reason that is not an exception of the user's own code."""


def load_target(target: str, sha256: str = "", code: Iterable[str] = ()) -> Any:
    """The object that `target` names.

    sha256: of the whole `.pkl` file, in hex; empty for any.
    code: directories, or files whose directories, go to the front of sys.path.
    Raises: LoadError, and whatever importing the user's code raises.
    """
    for entry in reversed([*code]):
        _prepend(entry if os.path.isdir(entry) else os.path.dirname(os.path.abspath(entry)))
    if target.endswith(".pkl"):
        return _load_file(target, sha256)
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        raise LoadError(f"target {target!r} is neither module:attribute nor the path of a .pkl file")
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


def _load_file(path: str, sha256: str) -> Any:
    with open(path, "rb") as file:
        content = file.read()
    if sha256 and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), sha256.lower()):
        raise LoadError(f"{path} is not the file that was deployed (its SHA-256 differs)")
    head, _, body = content.partition(b"\n")
    if not head.startswith(MAGIC):
        raise LoadError(f"{path} was not packed by clipper; deploy the model again")
    try:
        about = json.loads(head[len(MAGIC) :])
        packed_by, kind = str(about["python"]), str(about["kind"])
    except (ValueError, KeyError, TypeError) as error:
        raise LoadError(f"{path} is damaged in its first line") from error
    here = ".".join(platform.python_version_tuple()[:2])
    if kind != "estimator" and packed_by != here:
        raise LoadError(
            f"{path} holds code packed by Python {packed_by}, this is Python {here}. "
            f"Deploy from Python {here}, or as 'module:function'."
        )
    return pickle.loads(body)  # a cloudpickle is a pickle that imports cloudpickle


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
    package = {"sklearn": "scikit-learn", "cv2": "opencv-python", "PIL": "pillow", "yaml": "pyyaml"}.get(top, top)
    return f"{text} '{top}' is not installed in venv {venv} (Python {python}). Run: pip install {package}"
