"""The task of the elected leader: clean up after dead nodes and keep the policies of models."""

from typing import Final

from clipper.mesh.decisions import maintenance
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.tasks.actions import ActionExecutor
from clipper.mesh.tasks.election import Election
from clipper.mesh.tasks.state_view import StateView
from clipper.metrics.stats import MeshStats
from clipper.settings.mesh import MeshSettings

WAKING_MAX: Final = 1000  # unloaded models that one round considers for proactive loading


class LeaderTasks:
    """Runs the reaper (decisions/maintenance.py) while this node is the leader.

    Threads: the event loop; `counts` any.
    """

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        election: Election,
        view: StateView,
        actions: ActionExecutor,
    ) -> None:
        self._settings, self._registry, self._election = settings, registry, election
        self._view, self._actions = view, actions
        self._counts: MeshStats = {}

    @property
    def counts(self) -> MeshStats:
        """Counts of all models as of the last round; empty when this node is not the leader."""
        return self._counts if self._election.is_leader else {}

    async def reap(self) -> None:
        """Run one round; does nothing unless this node is the leader."""
        if not self._election.is_leader or self._registry.is_fenced:
            return
        models = list(self._registry.models.values())
        active = [
            (m.id, m)
            for m in models
            if m.copies or m.failures or m.policy.copies_min or m.policy.pinned or m.auto_delete
        ]
        unloaded = sorted((m for m in models if not m.copies), key=lambda m: -m.used_ms)
        self._counts = {
            "loaded_somewhere": sum(bool(m.loaded) for _, m in active),
            "failing": sum(bool(m.failures) for _, m in active),
        }
        vmodels, waking = self._registry.vmodels.values(), unloaded[:WAKING_MAX]
        view = self._view.take(active, vmodels=vmodels, waking=waking)
        for action in maintenance.reaper(view, now_ms(), self._settings):
            if not self._election.is_leader:
                return
            await self._actions.execute(action)
