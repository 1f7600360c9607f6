"""Model files from object stores and web servers, pulled into a cache on disk."""

from clipper_container.artifacts.cache import ArtifactCache, CachedArtifact
from clipper_container.artifacts.errors import PullError
from clipper_container.artifacts.limits import PullLimits
from clipper_container.artifacts.pull import examine, pull
from clipper_container.artifacts.url import ArtifactUrl, is_url

__all__ = [
    "ArtifactCache",
    "ArtifactUrl",
    "CachedArtifact",
    "PullError",
    "PullLimits",
    "examine",
    "is_url",
    "pull",
]
