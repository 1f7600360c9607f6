"""Packs a function, an estimator or a Model into a file that a container can load.

Code travels by value: cloudpickle takes the function, its closure and the user's own modules, so a
container needs only installed packages. The file is one line of JSON with a description, then the
pickle; `clipper_container.loading.targets` reads it.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import importlib.util
import inspect
import io
import json
import logging
import os
import pickle
import re
import site
import sys
import sysconfig
import tempfile
import types
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import cloudpickle

from clipper.deploy.needs import packages_of, python_here
from clipper.deploy.packages.artifact import ENDINGS, SUFFIX, artifact_of, is_data
from clipper.deploy.packages.sources import SUFFIX as COPIED
from clipper.deploy.packages.sources import copied, defined_in, holds
from clipper.deploy.processes.command import Command
from clipper.errors import PackagingError, did_you_mean
from clipper.types import UserValue
from clipper_container import Model
from clipper_container.adapters.columns import array_type, columns_of, names_of, record_type
from clipper_container.forking.hints import top_level
from clipper_container.loading.missing_modules import explain_missing
from clipper_container.loading.targets import MAGIC, PACKED
from clipper_container.model import is_torch_module

_log = logging.getLogger(__name__)
STORED = (*PACKED, COPIED)  # endings of what `pack` writes
NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_TARGET = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_OURS = frozenset({"clipper", "clipper_core", "clipper_container"})
_SEARCH_DEPTH_MAX = 6
IMPORTS_MAX = 500
_PACKAGES = frozenset({"site-packages", "dist-packages"})
_SAFER = {  # by kind
    "estimator": (
        "Save it as .skops (skops.io.dump) or .onnx (skl2onnx.to_onnx), and deploy that file."
    ),
    "torch": (
        "Save it as .onnx (torch.onnx.export) or TorchScript (torch.jit.save), and deploy that"
        " file."
    ),
    "torch-export": "Save it as .onnx (torch.onnx.export), and deploy that file.",
    "pickle": (
        "Save it as .skops (skops.io.dump), .onnx, or by the framework's own save_model, and deploy"
        " that file."
    ),
    "mlflow": "Deploy the .onnx, .ubj or .txt file that the model was logged from.",
    "": "Deploy 'module:attribute' of code that is installed where it runs.",
}
_Place = tuple[str, str, str]  # variable, where it is, type of what is in it


@dataclass(frozen=True, slots=True)
class Package:
    """A model that a container can load.

    target: path of the packed file, or `module:attribute`. sha256: of the file in hex, "" for a
    module. kind: "function", "estimator", "model", "module", "torch", or a file's kind
    (`Artifact.kind`). input: type of one row, if known. code: directories for the container's
    sys.path: copies first (sources.py). tables: parameter tables that a Model declares. command,
    folder: of a `Command`. columns: names of the columns of an array, if the model was fitted on a
    DataFrame.
    """

    target: str
    kind: str
    sha256: str = ""
    input: str | None = None
    code: tuple[str, ...] = ()
    tables: dict[str, dict[str, UserValue]] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    folder: str = ""
    columns: tuple[str, ...] = ()


def pack(
    thing: object,
    name: str,
    version: int,
    directory: str | os.PathLike[str],
    code: Sequence[str] = (),
    no_pickle: bool = False,
) -> Package:
    """Pack a function, bound method, estimator, Model (or its class), torch.nn.Module, booster of
    XGBoost or LightGBM, "module:attribute", model file or folder (`Artifact.kind`), Artifact, or
    Command.

    directory: for the file `NAME-VERSION-SHA12.pkl` (or `.packed`), and the copy of the sources of
    a "module:attribute" and of `code`; created if missing. code: files or directories needed beyond
    what travels by value. no_pickle: refuse to create a pickle.

    Raises: PackagingError; OSError if the file cannot be written.
    """
    check_model_name(name)
    if isinstance(thing, Command):
        return Package(thing.text, "command", command=thing.words, folder=thing.folder)
    places = _directories(code)
    if is_data(thing):
        artifact = artifact_of(thing)
        if artifact.is_code:
            if no_pickle:
                safer = _SAFER.get(artifact.kind, _SAFER[""])
                what = f"a file of kind {artifact.kind} may hold pickles, which are code"
                raise PackagingError(f"{what}, and server.no_pickle refuses that. {safer}")
            _log.warning(
                "model %s: a file of kind %s can contain code, which runs when it is loaded: deploy"
                " only files that you trust",
                name,
                artifact.kind,
            )
        path, sha256 = _stored(artifact.packed(name), name, version, directory, SUFFIX)
        return Package(path, artifact.kind, sha256, code=places, columns=names_of(thing))
    if isinstance(thing, str) and not thing:  # containers are started externally
        return Package("", "module")
    if isinstance(thing, str):
        folders = tuple(dict.fromkeys((*places, *_home_of(thing))))
        return Package(thing, "module", code=copied(thing, folders, name, version, directory))
    kind = _kind(thing)
    if no_pickle:
        raise PackagingError(
            f"{name!r} is a {kind}: it would travel as a pickle, which is code, and "
            "server.no_pickle refuses "
            f"that. {_SAFER.get(kind, _SAFER[''])}"
        )
    path, sha256 = _stored(_content(thing, kind, name), name, version, directory, ".pkl")
    places = copied("", places, name, version, directory)
    return Package(
        path,
        kind,
        sha256,
        input_of(thing),
        places,
        tables_of(thing) if kind == "model" else {},
        columns=names_of(thing) if kind == "estimator" else (),
    )


def check_model_name(name: str) -> None:
    """Raise PackagingError if a model cannot have this name: the names of its files contain it."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise PackagingError(
            f"{name!r} is not a model name; use a-z, 0-9, '.', '_' and '-', at most 128, the first"
            " a letter or digit"
        )


def _stored(
    content: bytes, name: str, version: int, directory: str | os.PathLike[str], suffix: str
) -> tuple[str, str]:
    """Write the file; return its path and SHA-256."""
    sha256 = hashlib.sha256(content).hexdigest()
    path = Path(directory) / f"{name}-{version}-{sha256[:12]}{suffix}"
    _write(path, content)
    return str(path.absolute()), sha256


def input_of(thing: object) -> str | None:
    """Return the type of one row ("f64[64]", or named columns) that an estimator, the object of a
    bound method, or a Model declares.
    """
    declared = getattr(thing, "input", None)
    if isinstance(declared, str) and declared != "any":
        return declared
    for owner in (thing, getattr(thing, "__self__", None)):
        if owner is None or isinstance(owner, type):
            continue
        if columns := columns_of(owner):
            return record_type(columns)
        if type_ := array_type(owner):
            return type_
    return None


def tables_of(thing: object) -> dict[str, dict[str, UserValue]]:
    """Return the tables that a Model declares."""
    declared = getattr(thing, "tables", None)
    return (
        {str(name): spec for name, spec in declared.items()}
        if isinstance(declared, Mapping)
        else {}
    )


def _kind(thing: object) -> str:
    if is_torch_module(thing) and not hasattr(thing, "predict_batch"):
        return "torch"
    if isinstance(thing, Model) or hasattr(thing, "predict_batch"):
        return "model"
    if isinstance(thing, (type, types.ModuleType)):
        raise PackagingError(
            f"cannot ship {getattr(thing, '__name__', thing)!r}: a {type(thing).__name__} is no"
            " model. Give a function, a fitted estimator, or a subclass of"
            " clipper_container.Model."
        )
    if hasattr(thing, "predict") and not inspect.isroutine(thing):
        return "estimator"
    if callable(thing):
        return "function"
    raise PackagingError(
        f"cannot ship a {type(thing).__name__}: give a function, an estimator with predict(), a"
        " Model, or 'module:function'."
    )


# -- targets that a container can import


def _home_of(target: str) -> tuple[str, ...]:
    """Return the directory of a "module:attribute" that is the user's own file. Imports nothing."""
    if not _TARGET.fullmatch(target):
        raise PackagingError(
            f"{target!r} names no model; write 'module:function', such as 'features:predict', or a"
            f" file that ends in {', '.join(ENDINGS)}"
        )
    top = target.partition(":")[0].partition(".")[0]
    if top == "__main__":
        raise PackagingError(
            f"{target!r} names this very script; give the function itself instead of its name"
        )
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return ()
    if spec is None or spec.origin is None or not _is_local(spec.origin):
        return ()
    origin = Path(spec.origin).absolute()
    return (str(origin.parent.parent if spec.submodule_search_locations else origin.parent),)


def check_found(target: str, code: Sequence[str], folder: str = "") -> None:
    """Raise PackagingError if the module of a "module:attribute" is nowhere, or if its file has no
    such attribute. Nothing is imported.

    folder: another one in which the user may have meant the module to be.
    """
    module, _, attribute = target.partition(":")
    try:
        is_found = importlib.util.find_spec(module.partition(".")[0]) is not None
    except (ImportError, ValueError):
        is_found = False
    if not is_found and not holds(code, module):
        raise PackagingError(explain_missing(module, [*code, folder] if folder else code) + ".")
    names = defined_in(code, module)
    first = attribute.partition(".")[0]
    if names is not None and first not in names:
        raise PackagingError(
            f"module {module!r} has no {first!r}{did_you_mean(first, names) or '.'}",
            hint=f"It has: {', '.join(sorted(names)) or 'nothing'}.",
        )


def _directories(code: Sequence[str]) -> tuple[str, ...]:
    places = []
    for entry in code:
        path = Path(entry).absolute()
        if not path.exists():
            raise PackagingError(f"code={entry!r}: there is no such file or directory")
        places.append(str(path if path.is_dir() else path.parent))
    return tuple(dict.fromkeys(places))


# -- packing by value


def _content(thing: object, kind: str, name: str) -> bytes:
    thing = _on_the_cpu(thing) if kind == "torch" else thing
    stream, modules = io.BytesIO(), set[str]()
    with _local_modules_by_value():
        try:
            _Noting(stream, modules).dump(thing)
        except Exception as error:
            raise _explain(thing, error) from error
    tops = {module.partition(".")[0] for module in modules}
    if local := sorted(
        module for module in tops if module in sys.modules and _travels(sys.modules[module])
    ):
        _log.info(
            "model %s: %s travel%s by value", name, ", ".join(local), "s" if len(local) == 1 else ""
        )
    about = {
        "format": 1,
        "kind": kind,
        "name": name,
        "python": python_here(),
        "packages": packages_of([*tops]),
        "imports": _imports(modules),
    }
    return MAGIC + json.dumps(about).encode() + b"\n" + stream.getvalue()


def _imports(modules: set[str]) -> list[str]:
    """Return those that a container will import from installed packages."""
    useful = top_level(modules)
    return sorted(
        module
        for module in modules
        if module.partition(".")[0] in useful
        and module in sys.modules
        and not _travels(sys.modules[module])
    )[:IMPORTS_MAX]


def _on_the_cpu(module: UserValue) -> object:
    """Move a module to the CPU; containers may lack the device."""
    parts = (*module.parameters(), *module.buffers())
    return (
        module if all(part.device.type == "cpu" for part in parts) else copy.deepcopy(module).cpu()
    )


class _Noting(cloudpickle.Pickler):  # type: ignore[misc]
    """A pickler that records the modules it meets. A function with a cache (functools.lru_cache)
    travels by value with an empty cache; pickle itself would only name it."""

    def __init__(self, stream: io.BytesIO, modules: set[str]) -> None:
        super().__init__(stream)
        self._modules = modules

    def persistent_id(self, thing: object) -> None:
        if isinstance(thing, types.ModuleType):
            self._modules.add(thing.__name__)
        else:
            owner = (
                thing
                if isinstance(thing, type | types.FunctionType | types.BuiltinFunctionType)
                else type(thing)
            )
            self._modules.add(str(getattr(owner, "__module__", None) or ""))

    def reducer_override(self, thing: UserValue) -> UserValue:
        """Return how an object is rebuilt. Raises: PicklingError for one of the user's own modules
        that a container would have to import by its name: it has no such module."""
        if isinstance(thing, functools._lru_cache_wrapper) and _is_by_value(thing):
            given = thing.cache_parameters()
            made = (thing.__wrapped__, given["maxsize"], given["typed"], functools._CacheInfo)
            return functools._lru_cache_wrapper, made, {**vars(thing)}
        found = super().reducer_override(thing)
        if (
            found is NotImplemented
            and not isinstance(thing, type | types.FunctionType)
            and hasattr(thing, "__qualname__")
            and _is_by_value(thing)
            and isinstance(thing.__reduce_ex__(pickle.HIGHEST_PROTOCOL), str)
        ):
            raise pickle.PicklingError(
                f"it uses {thing.__qualname__!r}, a {type(thing).__name__}, which a pickle only"
                f" names, and its container has no module {thing.__module__!r}. Use a plain"
                " function, or deploy 'module:function' of a file"
            )
        return found


def _is_by_value(thing: UserValue) -> bool:
    """Return True if the module of an object is pickled by value."""
    module = getattr(thing, "__module__", None)
    return module == "__main__" or module in cloudpickle.list_registry_pickle_by_value()


def _dumps(thing: object) -> bytes:
    stream = io.BytesIO()
    _Noting(stream, set()).dump(thing)
    return stream.getvalue()


@contextmanager
def _local_modules_by_value() -> Iterator[None]:
    """Pickle the user's own modules by value within the `with` block, as __main__ always is."""
    already = cloudpickle.list_registry_pickle_by_value()
    added = []
    for name, module in sys.modules.copy().items():  # a copy: other threads may import
        if (
            isinstance(module, types.ModuleType)
            and name == module.__name__
            and name not in already
            and _travels(module)
        ):
            cloudpickle.register_pickle_by_value(module)
            added.append(module)
    try:
        yield
    finally:
        for module in added:
            cloudpickle.unregister_pickle_by_value(module)


def _travels(module: types.ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    if not file or module.__name__ == "__main__" or module.__name__.partition(".")[0] in _OURS:
        return False
    return file.endswith(".py") and _is_local(file)


def _is_local(file: str) -> bool:
    """Return True for the user's own file, False for Python's and installed packages.

    Some installers link packages to files elsewhere (uv, Nix), and some add folders that this
    Python does not list (PYTHONPATH of Nix, Bazel); all of these count as installed.
    """
    paths = (os.path.abspath(file), os.path.realpath(file))
    if any(not _PACKAGES.isdisjoint(path.split(os.sep)) for path in paths):
        return False
    return not any(
        path.startswith(place + os.sep) for path in paths for place in _installed_places()
    )


@functools.cache
def _installed_places() -> tuple[str, ...]:
    paths = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    paths += [*site.getsitepackages(), site.getusersitepackages()]
    return tuple(
        {
            place
            for path in paths
            if path
            for place in (os.path.abspath(path), os.path.realpath(path))
        }
    )


def _write(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


# -- finding what cannot be pickled


def _explain(thing: object, error: Exception) -> PackagingError:
    name = getattr(thing, "__name__", None) or type(thing).__name__
    found = _culprit(thing, frozenset(), "")
    if found is None:
        return PackagingError(f"cannot ship {name!r}: {error}")
    variable, place, kind = found
    where = f", {place}" if place else ""
    return PackagingError(
        f"cannot ship {name!r}: it closes over a '{kind}' (variable '{variable}'{where}). Create it"
        " inside load()."
    )


def _culprit(thing: object, seen: frozenset[int], variable: str) -> _Place | None:
    """Return the innermost part of `thing` that cannot be pickled, and the name that holds it."""
    if id(thing) in seen or len(seen) > _SEARCH_DEPTH_MAX:
        return None
    for name, part in _parts(thing):
        if _is_portable(part):
            continue
        path = f"{variable}.{name}" if variable and not inspect.isfunction(thing) else name
        inner = _culprit(part, seen | {id(thing)}, path)
        if inner is None:
            return (
                path,
                _place(thing),
                f"{type(part).__module__}.{type(part).__qualname__}".removeprefix("builtins."),
            )
        return inner if inner[1] else (inner[0], _place(thing), inner[2])
    return None


def _is_portable(part: object) -> bool:
    try:
        _dumps(part)
    except Exception:
        return False
    return True


def _parts(thing: object) -> Iterator[tuple[str, object]]:
    """Yield what `thing` refers to: variables of a function, object of a method, attributes,
    items.
    """
    if inspect.ismethod(thing):
        yield from _parts_of_instance(thing.__self__)
        yield from _parts(thing.__func__)
    elif inspect.isfunction(thing):
        yield from _parts_of_function(thing)
    elif isinstance(thing, functools.partial):
        yield from (("args", argument) for argument in thing.args)
        yield from thing.keywords.items()
        yield from _parts(thing.func)
    elif isinstance(thing, dict):
        yield from ((str(key), value) for key, value in thing.items())
    elif isinstance(thing, (list, tuple, set, frozenset)):
        yield from (("items", item) for item in thing)
    elif isinstance(thing, type):
        yield from vars(thing).items()
    else:
        yield from _parts_of_instance(thing)


def _parts_of_instance(thing: UserValue) -> Iterator[tuple[str, object]]:
    yield from getattr(thing, "__dict__", {}).items()
    if not isinstance(thing, type) and inspect.isfunction(
        getattr(type(thing), "predict_batch", None)
    ):
        yield from _parts_of_function(type(thing).predict_batch)


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # an empty closure cell
            continue
    for name in _global_names(function.__code__):
        if name in function.__globals__:
            yield name, function.__globals__[name]
    yield from (("default", value) for value in function.__defaults__ or ())
    yield from (function.__kwdefaults__ or {}).items()


def _global_names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _global_names(constant)


def _place(thing: object) -> str:
    """Return "app.py:12", where a function or class is defined; "" if unknown."""
    function = thing.__func__ if inspect.ismethod(thing) else thing
    if inspect.isfunction(function):
        return (
            f"{os.path.basename(function.__code__.co_filename)}:{function.__code__.co_firstlineno}"
        )
    owner = thing if isinstance(thing, type) else type(thing)
    try:
        file = inspect.getsourcefile(owner)
        return (
            f"{os.path.basename(file)}:{inspect.getsourcelines(owner)[1]}"
            if file and _is_local(file)
            else ""
        )
    except (TypeError, OSError):
        return ""
