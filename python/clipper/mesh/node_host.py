"""The interface that a node needs of the server it runs in."""

from collections.abc import Sequence
from typing import Protocol

from clipper.serving.models.containers import Replica
from clipper.serving.models.model_source import ModelQueue, ResolvedModel
from clipper.serving.query.processor import ResolvedApplication
from clipper.types import Batching, Model, VersionedModel


class NodeHost(Protocol):
    """The server of a mesh node. Threads: any."""

    @property
    def address(self) -> str:
        """Return the address that replicas connect to."""

    def token_of(self, model: str, instance: str) -> str:
        """Return the token that an instance's copy of a model presents when it connects."""

    @property
    def batching(self) -> Batching:
        """Return the default batching of replicas."""

    def new_core(self, record: Model) -> ModelQueue:
        """Return a new queue for a model, which is in no list of models."""

    def applications(self, model: ResolvedModel) -> tuple[ResolvedApplication, ResolvedApplication]:
        """Return a model's resolved applications: while it is loaded, and while it is not.

        The second allows more time. Both ask the model before a query is queued.
        """

    def replicas(self, id: VersionedModel) -> Sequence[Replica]:
        """Return the connected replicas of a model."""

    def disconnect(self, id: VersionedModel, number: int) -> None:
        """Disconnect the replicas with this number; their rows return to the model's queue."""

    def close(self, resolved: ResolvedApplication, seconds: float) -> None:
        """Announce that no replica will connect for so long; earlier queries fail at once."""

    def forget(self, resolved: ResolvedApplication) -> None:
        """Fail all queries of a model that is no longer registered."""

    def linking(self, id: str) -> Sequence[str]:
        """Return the names of the applications that use a model."""

    def link_again(self) -> None:
        """Make applications resolve their models again."""

    def is_taken(self, name: str) -> bool:
        """Return whether the catalog has a model or an application of this name."""
