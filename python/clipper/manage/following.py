"""Follows the catalog: a server runs the models that any server with the same store has
deployed."""

import logging
import threading
from collections.abc import Callable

from clipper.catalog.catalog import Catalog
from clipper.catalog.view import View
from clipper.errors import ClipperError

_log = logging.getLogger(__name__)
_AGAIN_S = 1.0  # after a round that failed


class CatalogFollower:
    """Calls `follow` after each change of the catalog, on a thread of its own. Threads: any.

    follow: applies the catalog to this server. It may take long, since it starts and stops
    containers; all changes that come meanwhile cause one more call.
    """

    def __init__(self, catalog: Catalog, follow: Callable[[], None]) -> None:
        self._catalog, self._follow = catalog, follow
        self._changed = threading.Event()
        self._closing = threading.Event()
        self._end: Callable[[], None] = lambda: None
        self._thread = threading.Thread(
            target=self._run, name="clipper-catalog-follower", daemon=True
        )

    def start(self) -> None:
        """Start the thread; it follows at once what has changed since the catalog was read."""
        self._end = self._catalog.on_change(self._on_change)
        self._changed.set()
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, after what it is doing. Idempotent."""
        self._end()
        self._closing.set()
        self._changed.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _on_change(self, view: View) -> None:
        self._changed.set()

    def _run(self) -> None:
        while True:
            self._changed.wait()
            if self._closing.is_set():
                return
            self._changed.clear()
            try:
                self._follow()
            except ClipperError as error:
                self._again(str(error))
            except Exception as error:
                _log.exception("the catalog could not be followed")
                self._again(str(error))

    def _again(self, why: str) -> None:
        _log.warning("what another server changed is not done here yet: %s", why)
        self._closing.wait(_AGAIN_S)
        self._changed.set()
