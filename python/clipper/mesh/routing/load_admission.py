"""Refusal of queries whose model cannot be loaded in time.

A node loads a limited number of models in a second. When more are asked for, each further load only
makes all others later, until none is in time. So a query of a model that is not loaded is refused
at once when its load could not be ready by its deadline; without a deadline, when the load would
wait longer than `mesh.load_wait_ms`. While loads wait for more than half of that, a model must also
have been used more than those that would be evicted for it. Sources: the refusal, Gujarati et al.,
"Clockwork", OSDI 2020; the comparison with what is evicted, TinyLFU (Einziger et al., 2017); the
default of two seconds, Nah (2004), "How long are users willing to wait?".
"""

from collections.abc import Callable
from typing import Final

from clipper.errors import Overloaded
from clipper.mesh.decisions.claims import alive_copies
from clipper.mesh.decisions.placement import Constraints, constraint_of, unfit
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.registry import Registry
from clipper.settings.mesh import MeshSettings

BUSY_SHARE: Final = 0.5  # of the time there is, above which a load must be worth an eviction


class LoadAdmission:
    """Refuses queries whose model cannot be loaded in time. constraints: see CopyLocator.
    Threads: any.
    """

    def __init__(
        self,
        loader: ModelLoader,
        registry: Registry,
        settings: MeshSettings,
        constraints: Callable[[], Constraints] = dict,
    ) -> None:
        self._loader, self._registry, self._settings = loader, registry, settings
        self._constraints = constraints

    def check(self, id: str, deadline_ms: float | None) -> None:
        """Raise Overloaded for a query of a model that has to be loaded, but cannot be in time.

        deadline_ms: the time that the query has; None: it states none.
        """
        wait_ms, ready_ms = self._loader.forecast_ms(id)
        if not wait_ms:
            return
        limit_ms = self._settings.load_wait_ms if deadline_ms is None else deadline_ms
        needed_ms = wait_ms if deadline_ms is None else ready_ms
        is_late = needed_ms > limit_ms
        if not is_late and (
            wait_ms <= BUSY_SHARE * limit_ms
            or self._loader.is_loading(id)
            or self._loader.is_worth_loading(id)
        ):
            return
        if self._others_can(id, limit_ms):
            return
        self._loader.counts.failed("refused")
        loader, settings = self._loader, self._settings
        rate = loader.pace.per_second(loader.loading_max)
        given = (
            f"mesh.load_wait_ms is {settings.load_wait_ms:g}"
            if deadline_ms is None
            else f"the query has {deadline_ms:g} ms"
        )
        why = "" if is_late else ", and what it would evict is used more"
        raise Overloaded(
            f"model {id!r} is not loaded: {loader.queue.waiting} loads wait in {loader.me}, which"
            f" makes {rate:.3g} in a second; it would be loaded in {ready_ms:.0f} ms, and"
            f" {given}{why}.",
            hint="Try again later, give the query more time, or add a node.",
            retry_after_s=ready_ms / 1000,
        )

    def _others_can(self, id: str, limit_ms: float) -> bool:
        """Return whether another node has the model or loads it, or can load it in time."""
        record, me = self._registry.models.get(id), self._loader.me
        if record is None:
            return False
        if alive_copies(record, self._registry.alive()).keys() - {me}:
            return True
        pace, constraint = self._loader.pace, constraint_of(record.type, self._constraints())
        return any(
            pace.wait_ms(other.loading + other.queued, max(1, other.loading_max)) <= limit_ms
            for other in self._registry.instances.values()
            if other.id != me and not unfit(record, other, constraint, record.size_bytes)
        )
