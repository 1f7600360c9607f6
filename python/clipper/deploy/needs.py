"""Requirements of a model: file or module, Python version, packages."""

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

from clipper.deploy.packages.sources import SourceFiles, own_folders, shipped
from clipper.errors import InvalidInput
from clipper.types import Model
from clipper_container.artifacts import ArtifactUrl, is_url
from clipper_container.loading.kinds import ENDINGS, KINDS
from clipper_container.loading.targets import DISTRIBUTIONS, MAGIC, PACKED

# For each kind: distributions that provide what its adapter imports. The first is added when none
# of them is required by the user.
_ADAPTERS: Final[Mapping[str, tuple[tuple[str, ...], ...]]] = {
    "function": (("cloudpickle",),),
    "estimator": (("cloudpickle",),),
    "model": (("cloudpickle",),),
    "torch": (("cloudpickle",), ("torch",)),
    **{name: kind.packages for name, kind in KINDS.items()},
}
_BUCKETS: Final = ("obstore",)
_OURS: Final = frozenset({"clipper", "clipper-core", "clipper-serving", "clipper-container"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_HEAD_BYTES_MAX: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Needs:
    """A model's file or module, and the environment it needs.

    target: path, or `module:attribute`. sha256: of the file in hex, "" for a module. kind: as
    `Package.kind`; "module" for an import. python: "3.11", or empty for any. requirements: the
    user's lines for pip; empty: the server's own environment. packages: required distributions,
    with the version at packing time or "". code: folders for sys.path.
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
        """Return True if the target is a file."""
        return bool(self.sha256)

    @property
    def is_pulled(self) -> bool:
        """Return True if the target is a URL that the container pulls."""
        return is_url(self.target)

    @property
    def module(self) -> str:
        """Return the top-level module of a `module:attribute`; "" for a file."""
        return (
            ""
            if self.is_file or self.is_pulled
            else self.target.partition(":")[0].partition(".")[0]
        )

    def sources(self) -> SourceFiles:
        """Return the files of its folders of code that it needs."""
        is_module = not (self.is_file or self.is_pulled)
        return shipped(self.target if is_module else "", own_folders(self.code))

    def pip(self) -> tuple[str, ...]:
        """Return pip's lines for an environment: the user's, then missing imports of the
        adapter; without requirements all packages at the versions of packing time.
        """
        required = {
            _canonical(found[0]) for line in self.requirements if (found := _NAME.match(line))
        }
        lines = [*self.requirements]
        in_bucket = self.target.startswith(("s3://", "gs://"))
        for choices in (*_ADAPTERS.get(self.kind, ()), *((_BUCKETS,) if in_bucket else ())):
            if required.isdisjoint(choices):
                name = next((name for name in choices if name in self.packages), choices[0])
                lines.append(self._pinned(name))
                required.add(name)
        if not self.requirements:
            lines += [self._pinned(name) for name in self.packages if name not in required]
        return tuple(lines)

    def _pinned(self, name: str) -> str:
        version = "" if self.requirements else self.packages.get(name, "").partition("+")[0]
        return f"{name}=={version}" if version else name


def needs_of(model: Model) -> Needs:
    """Return the requirements of a model of the catalog. Raises: InvalidInput if its containers
    are started externally, or its file is missing.
    """
    if not model.target:
        raise InvalidInput(
            f"containers of model '{model.id}' are started elsewhere.",
            hint="There is nothing to run here.",
        )
    if model.command:
        raise InvalidInput(
            f"model '{model.id}' is a command, which a server runs on its own host only.",
            hint="Write its image, and run that: clipper export dockerfile NAME FOLDER"
            " (docs/sdk-cpp-java.md).",
        )
    kind_here = kind_of_url(model.target) if is_url(model.target) else "module"
    head = _head_of(model.target) if model.sha256 else {"kind": kind_here}
    kind = str(head["kind"])
    packages = head.get("packages")
    if not isinstance(packages, dict):
        packages = {name: version for name in installed_for(kind) if (version := version_of(name))}
    by_value = kind in ("function", "model", "torch")
    python = model.python or (str(head.get("python", "")) if by_value else "")
    return Needs(model.target, kind, model.sha256, python, model.requirements, packages, model.code)


def kind_of_url(url: str) -> str:
    """Return the kind of a model by the ending of its URL; a folder is one of MLflow."""
    return ENDINGS.get(Path(ArtifactUrl.parse(url).key).suffix.lower(), "mlflow")


def installed_for(kind: str) -> list[str]:
    """Return the distributions of a kind's adapter that are installed here."""
    return [
        name
        for choices in _ADAPTERS.get(kind, ())
        if (name := next(filter(version_of, choices), ""))
    ]


def version_of(distribution: str) -> str:
    """Return the version installed here; "" if none is."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def packages_of(modules: Sequence[str]) -> dict[str, str]:
    """Return the distributions that provide top-level modules, with their versions, without
    clipper's and Python's own.
    """
    names: set[str] = set()
    for module in {*modules} - sys.stdlib_module_names - {"__main__", ""}:
        known = DISTRIBUTIONS.get(module, module)
        names.update((known,) if version_of(known) else _owners().get(module, ()))
    found = {_canonical(name) for name in names} - _OURS
    return {name: version for name in sorted(found) if (version := version_of(name))}


@functools.cache
def _owners() -> Mapping[str, Sequence[str]]:
    """Return all distributions by module. Reads each of them: about 0.2 s."""
    return importlib.metadata.packages_distributions()


def python_here() -> str:
    """Return the running Python's minor version, such as "3.11"."""
    return ".".join(platform.python_version_tuple()[:2])


def _canonical(name: str) -> str:
    return re.sub("[-_.]+", "-", name).lower()


def _head_of(target: str) -> dict[str, object]:
    """Return the first line of a packed file."""
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
        raise InvalidInput(f"{target} is not a packed model.", hint="Deploy the model again.")
    return head
