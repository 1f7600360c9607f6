"""The built-in runtimes of a host: model files, and Python code in a folder."""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import json
import os
import sys
import threading
from collections.abc import Sequence
from types import ModuleType

from clipper_container.loading.errors import LoadError
from clipper_container.loading.kinds import KINDS
from clipper_container.loading.targets import explain, load_as
from clipper_container.loading.unused_imports import without_array_libraries
from clipper_container.model import UserValue, as_model
from clipper_container.runtime import Artifact, ArtifactError, Loaded, Runtime
from clipper_container.worker.async_model import is_async
from clipper_container.worker.declared_tables import declared

_IMPORTS = {
    "onnx": ("onnxruntime",),
    "skops": ("skops.io", "sklearn.ensemble", "sklearn.pipeline"),
}
_KEYS = {"sha256": str, "trusted": list, "labels": list, "estimator": dict, "confidence": bool}


class FileRuntime(Runtime):
    """Loads model files of the kinds whose framework is installed, and packed files."""

    def __init__(self) -> None:
        found = [
            name
            for name, kind in KINDS.items()
            if kind.endings and not kind.is_code and _is_installed(_imports_of(name)[0])
        ]
        self.types = (*found, "packed")

    def prepare(self, type: str) -> None:
        """Import the framework of this kind."""
        with without_array_libraries():
            for module in _imports_of(type):
                importlib.import_module(module)

    def load(self, artifact: Artifact) -> Loaded:
        """Load a file. Raises: ArtifactError."""
        about = _about(artifact.key)
        try:
            thing = load_as(artifact.type, artifact.path, about.get("sha256", ""), about)
        except LoadError as error:
            raise ArtifactError(str(error)) from None
        return _loaded(thing, about.get("confidence", True))


def _imports_of(kind: str) -> Sequence[str]:
    return _IMPORTS.get(kind) or (KINDS[kind].imports if kind in KINDS else ())


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module.partition(".")[0]) is not None


def _about(key: str) -> dict[str, UserValue]:
    if not key:
        return {}
    try:
        about = json.loads(key)
    except ValueError as error:
        raise ArtifactError(
            f'the key is not a JSON object such as {{"sha256": "..."}}: {error}'
        ) from None
    if not isinstance(about, dict):
        raise ArtifactError('the key is not a JSON object such as {"sha256": "..."}')
    for name, value in about.items():
        if name not in _KEYS or not isinstance(value, _KEYS[name]):
            raise ArtifactError(f"the key has {name!r}: {value!r:.60}; known: {', '.join(_KEYS)}")
    return about


def _loaded(thing: object, confidence: bool = True) -> Loaded:
    try:
        model = as_model(thing, confidence)
    except TypeError as error:
        raise ArtifactError(str(error)) from None
    if names := declared(model):
        raise ArtifactError(
            f"the model declares parameter tables ({', '.join(names)}), which models of a host"
            " cannot use"
        )
    if is_async(model):
        raise ArtifactError("the model is async, which models of a host cannot be")
    model.load()
    size = getattr(model, "size_bytes", 0)  # of device memory, which the host cannot measure
    return Loaded(model, size if isinstance(size, int) and size > 0 else 0)


class PythonRuntime(Runtime):
    """Loads `module:attribute` or `file.py:attribute` from a folder. Imported modules stay
    imported after an unload.
    """

    types = ("python",)

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[str, threading.Lock] = {}

    def load(self, artifact: Artifact) -> Loaded:
        """Import the attribute. Raises: ArtifactError."""
        where, colon, attribute = artifact.path.rpartition(":")
        if not colon or not where or not attribute:
            raise ArtifactError(
                f"path {artifact.path!r} is neither module:attribute nor file.py:attribute"
            )
        if artifact.key and not os.path.isdir(artifact.key):
            raise NotADirectoryError(f"the folder {artifact.key!r} is not there")
        folder = os.path.abspath(artifact.key or os.getcwd())
        try:
            thing: object = self._module(where, folder)
            for name in attribute.split("."):
                thing = getattr(thing, name)
        except (SyntaxError, AttributeError) as error:
            raise ArtifactError(explain(error)) from error
        except ModuleNotFoundError as error:
            raise ImportError(explain(error)) from error
        return _loaded(thing)

    def _module(self, where: str, folder: str) -> ModuleType:
        file = os.path.join(
            folder, where if where.endswith(".py") else where.replace(".", os.sep) + ".py"
        )
        with self._lock:  # of sys.path
            if folder not in sys.path:
                sys.path.append(folder)
            importlib.invalidate_caches()
        if where.endswith(".py") or ("." not in where and os.path.isfile(file)):
            with self._lock:
                importing = self._files.setdefault(file, threading.Lock())
            with importing:
                return _module_of(file)
        module = importlib.import_module(where)
        found = os.path.abspath(getattr(module, "__file__", None) or "")
        if os.path.exists(os.path.join(folder, where.partition(".")[0])) and not found.startswith(
            folder + os.sep
        ):
            raise ArtifactError(
                f"package {where.partition('.')[0]!r} of {folder} is not imported: this host has"
                f" one of that name from {found}. Name it otherwise, or name a file:"
                " path/to/file.py:attribute"
            )
        return module


def _module_of(file: str) -> ModuleType:
    """Import a file under a unique name, so that two folders may each have a model.py; a changed
    file is imported anew.
    """
    about = os.stat(file)
    key = f"{file} {about.st_mtime_ns} {about.st_size} {about.st_ino}"
    name = f"clipper_model_{hashlib.sha256(key.encode()).hexdigest()[:16]}"
    if (module := sys.modules.get(name)) is not None:
        return module
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ArtifactError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
