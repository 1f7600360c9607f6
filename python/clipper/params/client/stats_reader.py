"""Reader of the shards' statistics."""

import os
import threading
import time
from collections.abc import Sequence
from typing import cast

from clipper.errors import ClipperError
from clipper.metrics.stats import ShardReading, ShardStats
from clipper_container.params.connection import ShardConnection, ShardRequest, addresses_in, call
from clipper_container.params.frames import unpacked
from clipper_core.runtime.histogram import Snapshot, snapshot_of

ALL_S = 3.0  # for all shards that do not answer, together


class StatsReader:
    """Reads the `stats` of all shards of a set. Threads: any; readings wait for each other.

    shards: folder of a set, whose addresses may change, or all addresses in order. only: number of
    a single shard. answer_s: time that each shard is given.
    """

    def __init__(
        self,
        shards: str | os.PathLike[str] | Sequence[str],
        *,
        token: str = "",
        only: int | None = None,
        answer_s: float = 1.0,
    ) -> None:
        self._folder = os.fspath(shards) if isinstance(shards, str | os.PathLike) else ""
        self._addresses, self._token = ([] if self._folder else list(shards)), token  # type: ignore[arg-type]
        self._only, self._answer_s = only, answer_s
        self._connections: list[ShardConnection] = []
        self._known: tuple[list[str], str] = ([], "")
        self._lock = threading.Lock()

    def close(self) -> None:
        """Close all connections."""
        with self._lock:
            for connection in self._connections:
                connection.close()
            self._connections = []

    def read(self) -> list[ShardReading]:
        """Return the statistics of each shard in order, or {"shard": number, "away": reason}.

        Raises InvalidInput if there is no set.
        """
        with self._lock:
            connections = self._found()
            until = time.monotonic() + ALL_S
            requests = [
                _sent(connection)
                if time.monotonic() < until
                else "others took all the time there was"
                for connection in connections
            ]
            return [
                _received(connection, request)
                for connection, request in zip(connections, requests, strict=True)
            ]

    def _found(self) -> list[ShardConnection]:
        known = addresses_in(self._folder) if self._folder else (self._addresses, self._token)
        if known != self._known:
            for connection in self._connections:
                connection.close()
            addresses, token = self._known = known
            each = range(len(addresses)) if self._only is None else (self._only,)
            self._connections = [
                ShardConnection(i, addresses.__getitem__, token, None, self._answer_s) for i in each
            ]
        return self._connections


def rows_of(one: ShardReading | None, key: str) -> int:
    """Return a count of rows, summed over the tables of a shard; 0 if it is away."""
    return 0 if one is None or "away" in one else sum(row[key] for row in one["tables"].values())


def increase(was: ShardStats | None, one: ShardStats, *keys: str) -> int:
    """Return by how much counts of rows have grown between two readings of a shard.

    was: None for all since the shard started.
    """
    return max(0, sum(rows_of(one, key) - rows_of(was, key) for key in keys))


def lags_between(before: ShardStats | None, after: ShardStats) -> Snapshot:
    """Return the distribution of gradient ages, in versions, between two readings of a shard.

    before: None for all since the shard started.
    """
    now = snapshot_of(after["lags"]["buckets"], after["lags"]["sum"])
    return now - snapshot_of(before["lags"]["buckets"], before["lags"]["sum"]) if before else now


def _sent(connection: ShardConnection) -> ShardRequest | str:
    """Send the request. Returns it, or why it could not be sent."""
    request = call("stats")
    for last in (False, True):  # the first connection may be to a former life
        try:
            connection.send(request)
            return request
        except (OSError, ClipperError) as error:
            connection.close()
            if last:
                return str(error) or type(error).__name__
    return ""


def _received(connection: ShardConnection, request: ShardRequest | str) -> ShardReading:
    if isinstance(request, str):
        return {"shard": connection.number, "away": request}
    try:
        connection.wait_for_answer(request)
        return cast(ShardReading, unpacked(request.body))
    except (OSError, ClipperError) as error:
        connection.close()
        return {"shard": connection.number, "away": str(error) or type(error).__name__}
