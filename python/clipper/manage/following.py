"""Follows the catalog: a server runs the models that any server with the same store has
deployed."""

import logging
from collections.abc import Callable
from typing import Final

from clipper.catalog.catalog import Catalog
from clipper.catalog.view import View
from clipper.component import Backoff, Health, Stop, WakeFlag, Worker
from clipper.errors import ClipperError

_log = logging.getLogger(__name__)
AGAIN_S: Final = 0.5  # after a round that failed
AGAIN_S_MAX: Final = 5.0


class CatalogFollower:
    """Calls `follow` after each change of the catalog, on a thread of its own. Threads: any.

    follow: applies the catalog to this server. It may take long, since it starts and stops
    containers; all changes that come meanwhile cause one more call.
    """

    def __init__(self, catalog: Catalog, follow: Callable[[], None]) -> None:
        self._catalog, self._follow = catalog, follow
        self._worker = Worker(
            "clipper-catalog-follower", self._run, again=Backoff(AGAIN_S, AGAIN_S_MAX)
        )
        self._changed = WakeFlag(self._worker.stop)
        self._end: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Start the thread; it follows at once what has changed since the catalog was read.

        Raises NotStarted.
        """
        self._end = self._catalog.on_change(self._on_change)
        self._worker.start()

    def stop(self) -> None:
        """Stop the thread, after what it is doing. Idempotent."""
        self._end()
        self._worker.end()

    def health(self) -> list[Health]:
        """Return the state of the thread."""
        return [self._worker.health()]

    def _on_change(self, view: View) -> None:
        self._changed.set()

    def _run(self, stop: Stop) -> None:
        again = Backoff(AGAIN_S, AGAIN_S_MAX)
        self._changed.set()
        while not stop.requested:
            if not self._changed.take():
                continue
            try:
                self._follow()
                again.reset()
            except ClipperError as error:  # of the store, or of one model
                _log.warning("what another server changed is not done here yet: %s", error)
                stop.wait(again.next_s())
                self._changed.set()
