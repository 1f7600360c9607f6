"""Liveness and safe-to-stop files for an external supervisor.

`FILE` is touched while the shard answers, also while it recovers. `FILE.ready` exists while the
shard serves and its copies in other shards are whole, so that it may be stopped.
"""

import logging
from pathlib import Path

from clipper.params.shard.replication.followers import FollowerState
from clipper.settings.params import ParamsSettings

QUIET_S = 3.0  # several long polls of a follower
log = logging.getLogger("clipper.params")


def is_safe_to_stop(
    ready: bool, followers: list[FollowerState], now: float, settings: ParamsSettings
) -> bool:
    """Return whether each copy of this shard is whole and has sent something recently, or was given
    up."""
    quiet_s, patience_s = (
        QUIET_S + (0.0 if settings.replication == "waited" else settings.period_s),
        settings.without_replica_s,
    )
    silent = [
        (one, 0.0 if one.waiting_call is not None else now - one.last_seen_s) for one in followers
    ]
    return ready and all(
        (one.is_whole and for_s <= quiet_s) or for_s > patience_s > 0 for one, for_s in silent
    )


class HealthFiles:
    """The two files of a shard. Threads: one. path: None for none."""

    def __init__(self, path: Path | None, settings: ParamsSettings) -> None:
        self._path, self._settings = path, settings
        self._ready = path.with_name(f"{path.name}.ready") if path is not None else None
        self._failed = False

    def update(self, ready: bool, followers: list[FollowerState], now: float) -> None:
        """Touch the files, or remove the second one."""
        if self._path is None or self._ready is None:
            return
        try:
            self._path.touch(0o644)
            if is_safe_to_stop(ready, followers, now, self._settings):
                self._ready.touch(0o644)
            else:
                self._ready.unlink(missing_ok=True)
        except OSError as error:
            if not self._failed:
                log.warning("%s is not touched any more: %s", self._path, error)
            self._failed = True

    def end(self) -> None:
        """Remove the files."""
        for path in filter(None, (self._path, self._ready)):
            path.unlink(missing_ok=True)
