"""The number of connections that a server accepts, chosen so that idle ones leave descriptors for
all else: the processes it starts, its journal, its store.
"""

import logging
from typing import Final, TypeVar

import msgspec

from clipper.settings.grpc import GrpcSettings, own_address
from clipper.settings.http import HttpSettings
from clipper.settings.server import LimitSettings

KEPT_MIN: Final = 96  # a server needs 84 to start, and a model a few more
KEPT_MAX: Final = 1024
KEPT_SHARE: Final = 0.25  # of a process's limit
CONNECTIONS_MIN: Final = 4  # of a kind
_Settings = TypeVar("_Settings", HttpSettings, GrpcSettings, LimitSettings)
_log = logging.getLogger(__name__)


def within_files(
    http: HttpSettings, grpc: GrpcSettings, limits: LimitSettings, files_max: int
) -> tuple[HttpSettings, GrpcSettings, LimitSettings]:
    """Return settings whose limits of connections (HTTP, gRPC, containers) together leave
    descriptors free. files_max: the process's limit. Where it is high enough, nothing changes.
    """
    served = []
    if http.address:
        served.append(http.connections_max)
    if own_address(grpc, http):
        served.append(grpc.connections_max)
    if http.admin:
        served.append(http.connections_max)
    total = limits.connections_max + sum(served)
    kept = min(KEPT_MAX, max(KEPT_MIN, int(KEPT_SHARE * files_max)))
    share = max(0, files_max - kept) / total
    if share >= 1:
        return http, grpc, limits
    _log.warning(
        "this process may open %d files: of %d connections (http, grpc and limits.connections_max)"
        " it accepts %d. Raise the limit: ulimit -n 65536",
        files_max,
        total,
        int(share * total),
    )
    return _reduced(http, share), _reduced(grpc, share), _reduced(limits, share)


def _reduced(settings: _Settings, share: float) -> _Settings:
    most = max(CONNECTIONS_MIN, int(share * settings.connections_max))
    return msgspec.structs.replace(settings, connections_max=most)
