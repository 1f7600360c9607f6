"""The start of a node while its store is away: it joins the mesh once the store answers."""

import logging
import time
from collections.abc import Awaitable, Callable
from typing import Final

from clipper.errors import ShuttingDown, StoreError
from clipper.mesh.node_loop import NodeLoop

RECHECK_S: Final = 1.0  # a join in progress when the time is over is given so much more, again
_log = logging.getLogger(__name__)


class DeferredJoin:
    """Joins the mesh later, within `enter_s` seconds of `start`; then the node gives up for good.

    join: joins the mesh; awaited on the event loop.  is_joined: returns whether it has.
    given_up: why the node has given up; empty unless it has.
    """

    def __init__(
        self,
        name: str,
        store_name: str,
        enter_s: float,
        loop: NodeLoop,
        join: Callable[[], Awaitable[None]],
        is_joined: Callable[[], bool],
    ) -> None:
        self._name, self._store_name, self._enter_s = name, store_name, enter_s
        self._loop, self._join, self._is_joined = loop, join, is_joined
        self._started_s: float | None = None  # monotonic
        self._is_joining = False
        self.given_up = ""

    @property
    def awaits(self) -> str:
        """Return what the node waits for before it joins; empty once it has joined."""
        if self._started_s is None or self._is_joined():
            return ""
        if self.given_up:
            return f"another start of this node: {self.given_up}"
        return "the processes that hold models" if self._is_joining else self._store

    @property
    def _store(self) -> str:
        return f"the store {self._store_name}"

    def start(self) -> None:
        """Begin to wait for the store. Returns at once."""
        self._started_s = time.monotonic()
        self._loop.call(self._loop.call_later, self._enter_s, self._give_up)
        waits = "the mesh: %s waits for %s, for up to %g s"
        _log.warning(waits, self._name, self._store, self._enter_s)

    def store_is_back(self) -> bool:
        """Join now; return whether this call made the node join. Threads: any but the loop's.

        StoreError when the store is away again, ShuttingDown when the node is closed meanwhile.
        """
        if self._started_s is None or self._is_joined():
            return False
        if self._loop.stopping:
            raise ShuttingDown("this node has left the mesh.", hint="Use another node.")
        if not self._loop.run(self._try()):
            return False
        waited_s = time.monotonic() - self._started_s
        _log.warning("the mesh: %s has joined it, after %.1f s", self._name, waited_s)
        return True

    async def _try(self) -> bool:
        if self.given_up:
            return False
        self._is_joining = True
        try:
            await self._join()
        except StoreError as error:
            _log.info("the mesh: %s keeps waiting: %s", self._name, error)
            raise
        except ShuttingDown:
            raise
        except Exception as error:
            self.given_up = f"it cannot join the mesh: {error}"
            _log.exception("the mesh: %s gives up", self._name)
            return False
        finally:
            self._is_joining = False
        return True

    def _give_up(self) -> None:
        if self._is_joined() or self._loop.stopping:
            return
        if self._is_joining:
            self._loop.call_later(RECHECK_S, self._give_up)
            return
        self.given_up = f"{self._store} did not come within {self._enter_s:g} s (mesh.enter_s)"
        _log.error("the mesh: %s gives up: %s", self._name, self.given_up)

    def check(self) -> None:
        """Raise StoreError while the node waits to join."""
        awaits = self.awaits
        if not awaits:
            return
        hint = "It joins by itself; try again, or use another node."
        if self.given_up:
            hint = "See its log."
        raise StoreError(
            f"the node {self._name} is not in its mesh: it awaits {awaits}.", hint=hint
        )
