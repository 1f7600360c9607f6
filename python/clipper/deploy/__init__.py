"""Deployment: package a model, start its containers, restart them, stop them."""

from clipper.deploy.deployer import (
    ContainerSpec,
    Deployer,
    EventKind,
    ReplicaEvent,
    ReplicaState,
    ReplicaStatus,
)
from clipper.deploy.packages.artifact import Artifact
from clipper.deploy.packages.package import Package, pack
from clipper.deploy.processes.process import ProcessDeployer
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
