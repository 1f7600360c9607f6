"""Getting a model into a process of its own: pack it, start it, keep it alive, stop it."""

from clipper.deploy.deployer import ContainerSpec, Deployer, EventKind, ReplicaEvent, ReplicaState, ReplicaStatus
from clipper.deploy.package import Package, pack
from clipper.deploy.process import ProcessDeployer, RestartPolicy
from clipper.errors import PackagingError

__all__ = [
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
