"""Metrics: their names, their collection, and the text formats that monitoring systems read."""

from clipper.metrics.collect import Metrics, MetricsSource
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
    "Family",
    "GrpcCounts",
    "HttpCounts",
    "MeshCounts",
    "MeshMetrics",
    "Metrics",
    "MetricsSource",
    "ParamsMetrics",
    "Samples",
    "TlsCounts",
    "influx",
    "openmetrics",
    "prometheus",
]
