"""Deployment: package a model, start its containers, restart them, stop them."""

from clipper.deploy.deployer import (
    ContainerSpec,
    ReplicaStatus,
)
from clipper.deploy.packages.artifact import Artifact
from clipper.deploy.packages.package import Package, pack
from clipper.errors import PackagingError
from clipper.processes.restarts import RestartPolicy

__all__ = [
    "Artifact",
    "ContainerSpec",
    "Package",
    "PackagingError",
    "ReplicaStatus",
    "RestartPolicy",
    "pack",
]
