"""The periodic tasks of every node: scaling of used models, and the janitor."""

import asyncio

from clipper.mesh.decisions import claims, maintenance, scaling
from clipper.mesh.decisions.usage import UsageCounter
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.records import MeshModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.tasks.actions import ActionExecutor
from clipper.mesh.tasks.state_view import StateView
from clipper.settings.mesh import MeshSettings


class NodeTasks:
    """Rounds that every node runs for the models it holds. Threads: the event loop."""

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        loader: ModelLoader,
        usage: UsageCounter,
        view: StateView,
        actions: ActionExecutor,
    ) -> None:
        self._settings, self._registry, self._loader = settings, registry, loader
        self._usage, self._view, self._actions = usage, view, actions

    async def scale(self) -> None:
        """Load more copies of models with high rates.

        Of several nodes that hold a model, the one that has held it longest acts.
        """
        usage = self._usage.read(now_ms(), asyncio.get_running_loop().time())
        for id in usage:
            record = self._registry.models.get(id)
            if record is not None and scaling.is_heavy(record, usage[id], self._settings):
                self._usage.heavy(id, now_ms())
        mine = [(id, record) for id in usage if (record := self._led_here(id)) is not None]
        view = self._view.take(mine, usage)
        for action in maintenance.rates(view, now_ms(), self._settings):
            await self._actions.execute(action)

    def _led_here(self, id: str) -> MeshModel | None:
        record: MeshModel | None = self._registry.models.get(id)
        if record is None:
            return None
        loaded = claims.loaded_copies(record, self._registry.alive())
        return record if loaded and loaded[0] == self._loader.me else None

    async def clean(self) -> None:
        """Run the janitor: make the registry and the memory of this node agree."""
        if self._registry.is_fenced:
            return
        models, me, held = self._registry.models, self._loader.me, self._loader.held
        mine = {m.id: m for m in models.values() if me in m.copies or me in m.failures}
        for id in held:
            if id not in mine and (record := models.get(id)) is not None:
                mine[id] = record
        usage = {id: self._usage.last(id, now_ms()) for id in held}
        view = self._view.take(list(mine.items()), usage)
        for action in maintenance.janitor(view, now_ms(), self._settings):
            await self._actions.execute(action)
