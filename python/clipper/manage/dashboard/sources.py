"""Data of the server that the dashboard shows."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from clipper.clock import wall_time_us
from clipper.errors import ClipperError, without_secrets
from clipper.frontend.server_interface import ServerInterface
from clipper.manage.change_words import lines_of
from clipper.manage.deployment import Incident
from clipper.manage.operations import Operations, application_row, record_of
from clipper.manage.overview import InspectedServer, troubles
from clipper.metrics.samples import Stats
from clipper.serving.query.application import shares_of
from clipper.types import Model

EVENTS_MAX: Final = 100
_LINES_MAX: Final = 8  # of one change
_READ_EACH_S: Final = 10.0


@dataclass(slots=True)
class ServerSources:
    """Data sources of the feed. Threads: one. addresses: returns the server's addresses by kind."""

    server: InspectedServer
    node: ServerInterface
    operations: Operations
    incidents: Callable[[], Iterable[Incident]]
    slow: Callable[[], dict[str, list[dict[str, object]]]]
    addresses: Callable[[], Mapping[str, str]]
    started_us: int = 0
    _entries: tuple[dict[str, object], ...] = ()
    _revision: int = -1
    _due_s: float = 0.0

    def stats(self) -> Stats:
        """Return the stats of the server, with those of its shards."""
        params, stats = self.node.params, self.node.stats()
        return stats if params is None else {**stats, "shards": params.observer.latest()}

    def shares(self) -> dict[str, dict[str, float]]:
        """Return the weights that each application's policy has learned, by model."""
        found = {}
        for name in self.node.catalog.view.applications:
            with contextlib.suppress(ClipperError):
                # gone meanwhile, or a policy of somebody's own that fails
                found[name] = shares_of(self.node.resolve(name))
        return found

    def slowest(self) -> dict[str, list[dict[str, object]]]:
        """Return the slowest queries, by application."""
        return self.slow()

    def rollouts(self) -> list[dict[str, object]]:
        """Return the rollouts, each as a row."""
        return self.operations.rollouts()

    def troubles(self, stats: Stats) -> dict[str, tuple[str, str, str]]:
        """Return the troubles of models, as `clipper ps` words them."""
        return troubles(self.server, stats["models"])

    def about(self) -> dict[str, object]:
        """Return version, process, addresses, models and applications."""
        view = self.node.catalog.view
        self.started_us = self.started_us or wall_time_us()
        return {
            "version": self.node.version,
            "pid": os.getpid(),
            "started_us": self.started_us,
            "state": without_secrets(self.node.config.server.state) or "memory",
            "addresses": dict(self.addresses()),
            "mesh": "" if self.node.mesh is None else self.node.mesh.instance,
            "params": "" if self.node.params is None else str(self.node.params.folder),
            "applications": [application_row(app) for app in view.applications.values()],
            "models": [self._model(model) for model in view.models()],
            "events": self._events(view.revision),
        }

    def _model(self, model: Model) -> dict[str, object]:
        view = self.node.catalog.view
        row = record_of(model)
        keep = (
            "name",
            "version",
            "output",
            "replicas",
            "replicas_max",
            "batching",
            "cache",
            "target",
            "created_us",
        )
        return {
            **{key: row[key] for key in keep if key in row},
            "id": str(model.id),
            "input": str(model.input),
            "latest": view.model(model.name).id == model.id,
            "applications": [app.name for app in view.linking(model)],
        }

    def _events(self, revision: int) -> list[dict[str, object]]:
        """Return the last changes of the catalog and what happened to containers, the newest first.
        The store is read when there was a change, and now and then: others may share it."""
        now_s = time.monotonic()
        if revision != self._revision or now_s > self._due_s:
            self._entries = tuple(entry_row(entry) for entry in self.operations.history(EVENTS_MAX))
            self._revision, self._due_s = revision, now_s + _READ_EACH_S
        incidents = [msgspec.to_builtins(incident) for incident in self.incidents()]
        return sorted([*self._entries, *incidents], key=lambda row: -int(row["time_us"]))[
            :EVENTS_MAX
        ]


def entry_row(entry: Mapping[str, Any]) -> dict[str, object]:
    """Return an entry of the history, in lines for a person."""
    return {
        **{key: entry[key] for key in ("time_us", "actor", "verb", "number")},
        "lines": lines_of(entry["changed"])[:_LINES_MAX],
    }
