"""Getting a model into a process of its own: pack it, start it, keep it alive, stop it."""

from clipper.deploy.artifact import Artifact
from clipper.deploy.deployer import (
    ContainerSpec,
    Deployer,
    EventKind,
    ReplicaEvent,
    ReplicaState,
    ReplicaStatus,
)
from clipper.deploy.package import Package, pack
from clipper.deploy.process import ProcessDeployer
from clipper.deploy.restarts import RestartPolicy
from clipper.errors import PackagingError

__all__ = [
    "Artifact",
    "ContainerSpec",
    "Deployer",
    "EventKind",
    "Package",
    "PackagingError",
    "ProcessDeployer",
    "ReplicaEvent",
    "ReplicaState",
    "ReplicaStatus",
    "RestartPolicy",
    "pack",
]
