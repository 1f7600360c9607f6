"""Whether a shard is alive, and whether it may be done without, as files that a supervisor of one's
own looks at.

`FILE` is touched while the shard answers, also while it restores, however long that takes.
`FILE.ready` is there while it serves and its copies elsewhere are whole: whoever ends it then, for
an update or to drain its machine, ends one of at least two.
"""

import logging
from pathlib import Path

from clipper.params.shard.replication import FollowerState
from clipper.settings.params import ParamsSettings

QUIET_S = 3.0  # several of a follower's long polls
log = logging.getLogger("clipper.params")


def is_safe_to_stop(
    ready: bool, followers: list[FollowerState], now: float, settings: ParamsSettings
) -> bool:
    """Each copy is whole and heard of; or was given up, by `without_replica_s`, until it comes
    back: nothing waits for it then, so an update does not either."""
    quiet_s, patience_s = (
        QUIET_S + (0.0 if settings.replication == "waited" else settings.period_s),
        settings.without_replica_s,
    )
    silent = [(one, 0.0 if one.asked is not None else now - one.heard_s) for one in followers]
    return ready and all(
        (one.is_whole and for_s <= quiet_s) or for_s > patience_s > 0 for one, for_s in silent
    )


class HealthFiles:
    """Threads: one. path: None touches nothing."""

    def __init__(self, path: Path | None, settings: ParamsSettings) -> None:
        self._path, self._settings = path, settings
        self._ready = path.with_name(f"{path.name}.ready") if path is not None else None
        self._failed = False

    def update(self, ready: bool, followers: list[FollowerState], now: float) -> None:
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
        for path in filter(None, (self._path, self._ready)):
            path.unlink(missing_ok=True)
