"""The election of one leader among the nodes of a mesh, in the store."""

from collections.abc import Callable
from typing import Final

from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.registry import Registry
from clipper.store import Candidate

ELECTION: Final = "mesh"


class Election:
    """The candidacy of this node, bound to its current lease.

    on_elected: called on the event loop when this node becomes the leader.  candidate: the entry in
    the store that leader-only transactions compare with; None: no entry.
    """

    def __init__(
        self, me: str, registry: Registry, loop: NodeLoop, on_elected: Callable[[], None]
    ) -> None:
        self._me, self._registry, self._loop = me, registry, loop
        self._on_elected = on_elected
        self.candidate: Candidate | None = None

    @property
    def is_leader(self) -> bool:
        """True while this node is the elected leader."""
        return self.candidate is not None and self.candidate.is_leader

    async def stand(self) -> None:
        """Become a candidate with the current lease."""
        lease = self._registry.lease
        if lease is None:
            return
        candidate = await self._loop.run_blocking(
            Candidate, self._registry.store, ELECTION, self._me.encode(), lease
        )
        self.candidate = candidate
        candidate.on_change(lambda leads: self._loop.call(self._on_elected) if leads else None)

    async def resign(self) -> None:
        """Withdraw the candidacy."""
        candidate, self.candidate = self.candidate, None
        if candidate is not None:
            await self._loop.run_blocking(candidate.resign)
