"""Metrics: their names, what they are made of, and the texts in which others read them."""

from clipper.metrics.collect import Counts, Metrics
from clipper.metrics.families import FAMILIES, Family
from clipper.metrics.grpc_counts import GrpcCounts
from clipper.metrics.http_counts import HttpCounts, TlsCounts
from clipper.metrics.mesh_counts import MeshCounts, MeshMetrics
from clipper.metrics.params_counts import ParamsMetrics
from clipper.metrics.samples import OTHER, Samples
from clipper.metrics.text import CONTENT_TYPES, influx, openmetrics, prometheus

__all__ = [
    "CONTENT_TYPES",
    "FAMILIES",
    "OTHER",
    "Counts",
    "Family",
    "GrpcCounts",
    "HttpCounts",
    "MeshCounts",
    "MeshMetrics",
    "Metrics",
    "ParamsMetrics",
    "Samples",
    "TlsCounts",
    "influx",
    "openmetrics",
    "prometheus",
]
