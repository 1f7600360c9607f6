"""What opens models in a host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from clipper_container.model import Model


class ArtifactError(Exception):
    """The model itself is at fault: it cannot be loaded, here or anywhere. The text says why."""


@dataclass(frozen=True, slots=True)
class Artifact:
    """What is to be loaded. type: one of the runtime's.  path, key: where it is, and what else is
    needed to open it. input, output: types of a row as they were registered, `any` if they were
    not."""

    model: str
    type: str
    path: str = ""
    key: str = ""
    input: str = "any"
    output: str = "any"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model that can be asked. size_bytes: what it occupies; 0: the host measures.  concurrency:
    batches it takes at once. inside: it occupies this process's memory (False: another server's, so
    that there is nothing to measure).
    """

    model: Model
    size_bytes: int = 0
    concurrency: int = 1
    inside: bool = True


class Runtime(ABC):
    """Opens models of its `types`. One object a host.

    Threads: several; `load` runs up to `loading_max` times at once, with `unload` and
    `predict_size` beside it.
    """

    types: tuple[str, ...] = ()

    def start(self) -> None:  # noqa: B027  # a hook
        """Called once before anything else, so that nothing of an earlier life is left. The host is
        STARTING until it returns."""

    def prepare(self, type: str) -> None:  # noqa: B027  # a hook
        """Import what models of this type need. Called before the first of them loads, which then
        is measured without it."""

    @abstractmethod
    def load(self, artifact: Artifact) -> Loaded:
        """Raises: ArtifactError; anything else counts as trouble of this host. What it had begun
        must be undone by then."""

    def unload(self, artifact: Artifact, loaded: Loaded) -> None:  # noqa: B027  # a hook: memory is freed with the last reference
        """No batch is in hand, and none will come."""

    def predict_size(self, artifact: Artifact) -> int:
        """Bytes that it will occupy, quickly and before it is loaded; 0: the host guesses by the
        size of the file at `path`."""
        return 0

    def capacity_bytes(self) -> int:
        """For all its models; 0: what the host has."""
        return 0
