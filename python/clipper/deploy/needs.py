"""What a model needs to run, wherever that is: a process here, an environment of its own, an
image."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from clipper.errors import InvalidInput
from clipper.types import Model
from clipper_container.adapters.function import DISTRIBUTIONS, MAGIC, PACKED

# Of each kind: what its adapter imports, and what else brings the same. The first goes in when none
# of them is asked for.
_ADAPTERS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "function": (("cloudpickle",),),
    "estimator": (("cloudpickle",),),
    "model": (("cloudpickle",),),
    "torch": (("cloudpickle",), ("torch",)),
    "onnx": (("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino", "onnxruntime-directml"),),
    "skops": (("skops",), ("scikit-learn",)),
    "xgboost": (("xgboost", "xgboost-cpu"),),
    "lightgbm": (("lightgbm",),),
    "torchscript": (("torch",),),
    "torch-export": (("torch",),),
    "pickle": (("joblib",),),
    "mlflow": (("mlflow-skinny", "mlflow"), ("pandas",)),
}
_OURS: Final = frozenset({"clipper", "clipper-core", "clipper-serving", "clipper-container"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEAD_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's file or module, and the environment it runs in.

    target: path of its file, or `module:attribute`.  sha256: of that file in hex, "" for a module.
    kind: as `Package.kind`; "module" for what is imported.
    python: "3.11", or empty for any: the version that its code was packed by, or that was asked
    for. requirements: lines for pip, as they were given; empty: it runs in the server's own
    environment. packages: distributions that are needed in any case, with the version that was
    there when it was packed, or "". code: folders for sys.path.
    """

    target: str
    kind: str
    sha256: str = ""
    python: str = ""
    requirements: tuple[str, ...] = ()
    packages: Mapping[str, str] = field(default_factory=dict)
    code: tuple[str, ...] = ()

    @property
    def is_file(self) -> bool:
        return bool(self.sha256)

    @property
    def module(self) -> str:
        """The top-level module of a `module:attribute`; "" for a file."""
        return "" if self.is_file else self.target.partition(":")[0].partition(".")[0]

    def pip(self) -> tuple[str, ...]:
        """Lines for pip that make an environment for it beside clipper-container: what was asked
        for, then what its adapter imports and nobody asked for; without requirements, everything it
        was packed with, at the versions of then.
        """
        asked = {_canonical(found[0]) for line in self.requirements if (found := _NAME.match(line))}
        lines = [*self.requirements]
        for choices in _ADAPTERS.get(self.kind, ()):
            if asked.isdisjoint(choices):
                name = next((name for name in choices if name in self.packages), choices[0])
                lines.append(self._pinned(name))
                asked.add(name)
        if not self.requirements:
            lines += [self._pinned(name) for name in self.packages if name not in asked]
        return tuple(lines)

    def _pinned(self, name: str) -> str:
        version = "" if self.requirements else self.packages.get(name, "").partition("+")[0]
        return f"{name}=={version}" if version else name


def needs_of(model: Model) -> Needs:
    """What a model of the catalog needs. InvalidInput for one whose containers are started
    elsewhere, or whose file is gone."""
    if not model.target:
        raise InvalidInput(
            f"containers of model '{model.id}' are started elsewhere.",
            hint="There is nothing to run here.",
        )
    head = _head_of(model.target) if model.sha256 else {"kind": "module"}
    kind = str(head["kind"])
    packages = head.get("packages")
    if not isinstance(packages, dict):
        packages = {name: version for name in installed_for(kind) if (version := version_of(name))}
    by_value = kind in ("function", "model", "torch")
    python = model.python or (str(head.get("python", "")) if by_value else "")
    return Needs(model.target, kind, model.sha256, python, model.requirements, packages, model.code)


def installed_for(kind: str) -> list[str]:
    """Distributions that the adapter of a kind imports, as far as they are installed here."""
    return [
        name
        for choices in _ADAPTERS.get(kind, ())
        if (name := next(filter(version_of, choices), ""))
    ]


def version_of(distribution: str) -> str:
    """As installed here; "" if it is not."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages_of(modules: Sequence[str]) -> dict[str, str]:
    """The distributions, with their versions here, that top-level modules come from; ours and
    Python's are left out."""
    names: set[str] = set()
    for module in {*modules} - sys.stdlib_module_names - {"__main__", ""}:
        known = DISTRIBUTIONS.get(module, module)
        names.update((known,) if version_of(known) else _owners().get(module, ()))
    found = {_canonical(name) for name in names} - _OURS
    return {name: version for name in sorted(found) if (version := version_of(name))}


@functools.cache
def _owners() -> Mapping[str, Sequence[str]]:
    """All distributions by module: a look into each of them, some 0.2 s."""
    return importlib.metadata.packages_distributions()


def python_here() -> str:
    """ "3.11"."""
    return ".".join(platform.python_version_tuple()[:2])


def _canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _head_of(target: str) -> dict[str, object]:
    """The first line of a packed file."""
    try:
        with Path(target).open("rb") as file:
            line = file.readline(_HEAD_BYTES_MAX)
        head = json.loads(line.removeprefix(MAGIC))
    except (OSError, ValueError) as error:
        raise InvalidInput(
            f"{target} cannot be read: {error}.", hint="Deploy the model again."
        ) from None
    if not (
        line.startswith(MAGIC)
        and target.endswith(PACKED)
        and isinstance(head, dict)
        and "kind" in head
    ):
        raise InvalidInput(f"{target} is no packed model.", hint="Deploy the model again.")
    return head
