"""The start of a node whose store is away: nothing of the mesh is there before its store, and what
asks for it is told why.

Whoever hears first of the store (store/cached_store.py) calls `enter`, and again while that raises
StoreError; when `mesh.enter_s` is over before, the node gives up, and is no node until it is
started anew.
"""

import logging
import time
from abc import abstractmethod

from clipper.errors import ShuttingDown, StoreError
from clipper.mesh.node.parts import Parts

_log = logging.getLogger(__name__)


class Entering(Parts):
    given_up = ""  # why
    _late_s: float | None = None  # when it began to wait
    _hears = False  # the store is there: it enters

    def start_late(self) -> None:
        """Begin without the store, which is away. Returns at once."""
        self._late_s = time.monotonic()
        self._start_threads()
        self._tell(self._loop.call_later, self.settings.enter_s, self._give_up)
        away = "the mesh: %s waits for the store %s, for up to %g s"
        _log.warning(away, self.instance, self.store.name, self.settings.enter_s)

    def enter(self) -> None:
        """The store is there. Returns when models can be loaded here, or when it has given up;
        StoreError when the store is gone again, ShuttingDown when the node is closed meanwhile.
        Once it is in the mesh, this does nothing.
        """
        if self._late_s is None or self._begun.is_set():
            return
        if self._stopping:  # its loop may have ended
            raise ShuttingDown("this node has left the mesh.", hint="Ask another.")
        if self._do(self._enter_late()):
            _log.warning(
                "the mesh: %s is in it, after %.1f s",
                self.instance,
                time.monotonic() - self._late_s,
            )
            self.ground.link_again()

    async def _enter_late(self) -> bool:
        if self.given_up:
            return False
        self._hears = True
        try:
            await self._begin()
        except StoreError as error:
            _log.info("the mesh: %s waits on: %s", self.instance, error)
            raise
        except ShuttingDown:
            raise
        except Exception as error:
            self.given_up = f"it cannot be in the mesh: {error}"
            _log.exception("the mesh: %s gives up", self.instance)
            return False
        finally:
            self._hears = False
        return True

    def _give_up(self) -> None:
        if self._begun.is_set() or self._stopping:
            return
        if self._hears:  # it may succeed; if not, that is known soon
            self._loop.call_later(1.0, self._give_up)
            return
        self.given_up = (
            f"the store {self.store.name} did not come within {self.settings.enter_s:g} s"
            " (mesh.enter_s)"
        )
        _log.error("the mesh: %s gives up: %s", self.instance, self.given_up)

    @property
    def awaits(self) -> str:
        """What keeps this node from the mesh; empty once it is, or was, in it."""
        if self._late_s is None or self._begun.is_set():
            return ""
        if self.given_up:
            return f"another start of this node: {self.given_up}"
        return "the processes that hold models" if self._hears else f"the store {self.store.name}"

    def _check_open(self) -> None:
        if awaits := self.awaits:
            hint = (
                "Look at its log."
                if self.given_up
                else "It enters by itself; ask again, or another node."
            )
            raise StoreError(
                f"the node {self.instance} is not in its mesh: it awaits {awaits}.", hint=hint
            )
        if self._stopping or not self._begun.is_set():
            raise ShuttingDown(
                "this node is not in the mesh.", hint="Start another with clipper.start(mesh=True)."
            )

    @abstractmethod
    def _start_threads(self) -> None: ...

    @abstractmethod
    async def _begin(self) -> None: ...
