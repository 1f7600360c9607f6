"""Statistics of a shard, for `clipper params ps` and `top`, metrics and the dashboard."""

import os
from collections import deque
from typing import TYPE_CHECKING, Final, cast

from clipper.component import State
from clipper.metrics.stats import LogStats, ShardStats, SnapshotStats
from clipper.params.shard.replication.followers import FollowerState
from clipper_container.machine import resident_bytes
from clipper_container.params.frames import RefusalCode

if TYPE_CHECKING:
    from clipper.params.shard.shard import Shard

_REASONS: Final = {int(one): one.name.lower() for one in RefusalCode}
_SAMPLES = 4096


class ChangeAges:
    """Samples of the log's position over time, to tell how old a change is. Threads: the answering
    one."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=_SAMPLES)

    def note(self, now: float, position: int) -> None:
        """Add a sample, if the position has changed."""
        if not self._seen or self._seen[-1][1] != position:
            self._seen.append((now, position))

    def behind_s(self, acknowledged: int, now: float) -> float:
        """Return the minimum age of the oldest change after a position.

        Samples are limited: a change before the oldest sample counts as old as that one.
        """
        return next((now - at for at, position in self._seen if position > acknowledged), 0.0)


def stats_of(shard: "Shard", now: float) -> ShardStats:
    """Return the statistics of a shard. Threads: the answering one."""
    parameters, core, counts = shard.parameters, shard.core, shard.core.counts
    named = enumerate(zip(parameters.specs, parameters.tables, strict=False))
    refused = counts.refused()
    lags = counts.lags()
    copies = [(of, one.replica) for of, one in shard.copies.items()]
    snapshots = shard.snapshots
    return {
        "shard": shard.config.number,
        "shards": shard.config.shards,
        "pid": os.getpid(),
        "ready": core.ready,
        "state_lost": core.state_lost,
        "ended": shard.ended,
        "degraded": [
            f"{one.name} failed: {one.why}"
            for one in shard.health()
            if one.state in (State.DEGRADED, State.FAILED)
        ],
        "exposed": shard.followers.exposed,
        "seconds": now - shard.began_s,
        "initialized": parameters.dense.initialized,
        "variables": len(parameters.dense),
        "nbytes": parameters.nbytes,
        "resident_bytes": resident_bytes(os.getpid()),
        "tables": {
            s.name: {
                "rows": len(t),
                "dim": s.dim,
                "nbytes": t.nbytes,
                "steps": t.steps,
                **counts.table(place),
            }
            for place, (s, t) in named
            if s.name
        },
        "server": core.stats(),
        "model_pushes": counts.taken,
        "refused": {name: refused.get(why, 0) for why, name in _REASONS.items()},
        "lags": {"buckets": [(low, count) for low, _, count in lags.buckets()], "sum": lags.sum},
        "recovery": {"seconds": shard.recovery[0], "source": shard.recovery[1]},
        "followers": [
            {
                "shard": f.shard,
                "on": f.on,
                "waited": f.waited,
                "whole": f.is_whole,
                "silent_s": now - f.last_seen_s,
                "behind": behind,
                "behind_s": behind_s,
            }
            for f in shard.followers.each
            for behind, behind_s in (_lag(shard, f, now),)
        ],
        "replicas": [
            {
                "shard": of,
                "whole": r is not None,
                "epoch": r.epoch if r else 0,
                "version": r.version if r else 0,
                "rows": r.parameters.rows if r else 0,
            }
            for of, r in copies
        ],
        "replica_reads": {
            "served": shard.replica_reads.served,
            "behind": shard.replica_reads.behind,
        },
        "snapshots": cast(SnapshotStats, snapshots.stats() if snapshots is not None else {}),
        "log": cast(LogStats, snapshots.log.stats() if snapshots and snapshots.log else {}),
    }


def _lag(shard: "Shard", one: FollowerState, now: float) -> tuple[int, float]:
    """Return how far a follower is behind, in pushes and seconds; one without a whole copy lacks
    all pushes there were."""
    if one.is_whole:
        behind_s = shard.ages.behind_s(one.acknowledged, now)
        return shard.core.position - one.acknowledged, behind_s
    return max(shard.core.version, shard.core.position), now - one.incomplete_since_s
