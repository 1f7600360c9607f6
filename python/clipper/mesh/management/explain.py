"""Explanations of where a model is loaded, where it could be, and why. Threads: any."""

from collections.abc import Callable

from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions import failures, placement
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.management.models import ModelManagement
from clipper.mesh.records import Instance, MeshModel
from clipper.mesh.registry import Registry, now_ms
from clipper.mesh.reports import Explanation, ModelStatus, Verdict
from clipper.settings.mesh import MeshSettings


class Explainer:
    """Answers `MeshNode.explain`. instances: returns the nodes that are alive."""

    def __init__(
        self,
        settings: MeshSettings,
        registry: Registry,
        loader: ModelLoader,
        models: ModelManagement,
        instances: Callable[[], list[Instance]],
        constraints: Callable[[], placement.Constraints],
        log: DecisionLog,
    ) -> None:
        self._settings, self._registry, self._loader = settings, registry, loader
        self._models, self._instances = models, instances
        self._constraints, self._log = constraints, log

    def explain(self, id: str) -> Explanation:
        """Return what placement says of each node, the decisions so far, and what comes next."""
        record, history = self._registry.read(id), self._log.of(id)
        if record is None:
            nothing = "Nothing: no such model is registered."
            return Explanation(id, "NOT_FOUND", (), history, nothing)
        ranked = placement.explain(
            record,
            self._instances(),
            now_ms(),
            constraints=self._constraints(),
            seen=self._loader.times,
            exclude=failures.blocked(record, now_ms(), self._settings),
        )
        verdicts = tuple(Verdict(one.instance, one.ok, one.why, one.rank - 1) for one in ranked)
        status = self._models.status_of(id, record)
        return Explanation(id, status.status, verdicts, history, self._next(record, status))

    def _next(self, record: MeshModel, status: ModelStatus) -> str:
        if status.status == "LOADED":
            copies = ", ".join(copy.instance for copy in status.copies if copy.state == "LOADED")
            return (
                f"It is served by {copies}, until it is the one of least worth where room is"
                " needed."
            )
        if status.status == "LOADING":
            return "It is being loaded; queries that came meanwhile are served then."
        failed = self._models.failure_of(record)
        if failed is not None:
            seconds = max(0, failed.retry_ms - now_ms()) // 1000
            return f"It is tried again in {seconds} s: {failed.why}"
        return "It is loaded at its first query."
