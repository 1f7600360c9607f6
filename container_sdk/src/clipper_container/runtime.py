"""The interface of runtimes: classes that load models in a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from clipper_container.model import Model


class ArtifactError(Exception):
    """The model cannot be loaded on any host. The text says why."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model to load.

    type: one of the runtime's `types`. path, key: its location, and what else is needed to open it.
    input, output: types of a row as registered; `any` if none were.
    """

    model: str
    type: str
    path: str = ""
    key: str = ""
    input: str = "any"
    output: str = "any"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A loaded model.

    size_bytes: memory that it occupies; 0: the host measures. concurrency: batches that it may
    evaluate at once. inside: the model occupies memory of this process (False: another server's, so
    the host does not measure).
    """

    model: Model
    size_bytes: int = 0
    concurrency: int = 1
    inside: bool = True


class Runtime(ABC):
    """Loads models of its `types`. A host makes one object of each runtime.

    Threads: several; up to `loading_max` calls of `load` run at once, beside `unload` and
    `predict_size`.
    """

    types: tuple[str, ...] = ()

    def start(self) -> None:  # noqa: B027  # a hook
        """Prepare the runtime; called once, before any other method. The host reports STARTING
        until it returns.

        Remove what an earlier process has left here.
        """

    def prepare(self, type: str) -> None:  # noqa: B027  # a hook
        """Import what models of this type need. Called before the first load of the type, so
        that its memory is not counted as the model's.
        """

    @abstractmethod
    def load(self, artifact: Artifact) -> Loaded:
        """Load a model.

        Raises: ArtifactError when the model is at fault; any other exception counts as a fault of
        the host. Undo partial work before raising.
        """

    def unload(self, artifact: Artifact, loaded: Loaded) -> None:  # noqa: B027  # a hook: memory is freed with the last reference
        """Free a model. No batch of it is running or will come."""

    def predict_size(self, artifact: Artifact) -> int:
        """Estimate the bytes of a model quickly, before it is loaded; 0: the host estimates from
        the size of the file at `path`.
        """
        return 0

    def capacity_bytes(self) -> int:
        """Return the memory for all models of this runtime; 0: the host's capacity."""
        return 0
