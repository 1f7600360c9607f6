"""The version of a model that queries get on this server, while the catalog names another one.

Servers that share a store start their containers of a new version when the catalog has it. Until
as many of it are up here as of the version before, queries go to the version before: also when that
was retired meanwhile, and for as long as the new one does not come up.
"""

import logging
from collections.abc import Mapping
from typing import Protocol

from clipper.catalog.view import View
from clipper.errors import ClipperError
from clipper.types import Application, Model, VersionedModel

_log = logging.getLogger(__name__)


class Connections(Protocol):
    """The connected containers of a server."""

    def answering(self, model: VersionedModel) -> int:
        """Return how many connected replicas of a version can answer."""


class ServedVersions:
    """The versions that names and links of applications mean here. Threads: any; `follow`: one at a
    time.

    waiting: versions that are to be used and are not up yet, each with the one in its place.
    in_use: the versions that were chosen for the last view: their containers are needed.
    """

    def __init__(self, connections: Connections) -> None:
        self._connections = connections
        # by application, or "" for queries that name the model itself
        self._chosen: Mapping[tuple[str, VersionedModel], VersionedModel] = {}
        self.waiting: Mapping[VersionedModel, VersionedModel] = {}
        self.in_use: frozenset[VersionedModel] = frozenset()

    def model(self, view: View, link: VersionedModel, application: str = "") -> Model:
        """Return the version that an application's link, or a query's name, means here. Raises
        UnknownModel, UnknownVersion."""
        known, name = self._chosen, VersionedModel(link.name)
        chosen = known.get((application, link)) or (known.get(("", name)) if link == name else None)
        return (view.record(chosen) if chosen else None) or view.model(link)

    def follow(self, view: View) -> None:
        """Choose anew: a version that has come up takes the place of the one before."""
        before = self._chosen
        chosen = dict[tuple[str, VersionedModel], VersionedModel]()
        waiting: dict[VersionedModel, VersionedModel] = {}
        for name in view.versions:
            link = VersionedModel(name)
            self._choose(view, ("", link), before.get(("", link)), chosen, waiting)
        for app in view.applications.values():
            for link in app.models:
                place = (app.name, link)
                if link.version is None and ("", link) in chosen:
                    chosen[place] = chosen["", link]
                elif link.name in view.versions:
                    old = before.get(place) or _replaced(before, app, link)
                    self._choose(view, place, old, chosen, waiting)
        for id_, instead in waiting.items() - self.waiting.items():
            _log.info("queries get %s until %s is up here", instead, id_, extra={"model": str(id_)})
        self._chosen = chosen
        self.waiting = waiting
        self.in_use = frozenset(chosen.values())

    def has_news(self, view: View) -> bool:
        """Return whether a version that is waited for has come up since `follow`."""
        for id_, instead in self.waiting.items():
            new, old = view.record(id_), view.record(instead)
            if new is None or old is None or self._is_up(new, old):
                return True
        return False

    def _choose(
        self,
        view: View,
        place: tuple[str, VersionedModel],
        old: VersionedModel | None,
        chosen: dict[tuple[str, VersionedModel], VersionedModel],
        waiting: dict[VersionedModel, VersionedModel],
    ) -> None:
        """Enter what a link means; nothing if it means no version."""
        try:
            new = view.model(place[1])
        except ClipperError:
            return
        before = view.record(old) if old is not None and old != new.id else None
        if before is None or self._is_up(new, before):
            chosen[place] = new.id
        else:
            chosen[place] = waiting[new.id] = before.id

    def _is_up(self, new: Model, old: Model) -> bool:
        """Return whether a version can take the queries of another one, or nothing is gained by
        waiting for it."""
        if new.target and not new.replicas:
            return True
        serving = self._connections.answering(old.id)
        if not serving and (old.retired_us or not old.replicas):
            return True
        wanted = min(serving, new.replicas)
        return self._connections.answering(new.id) >= max(wanted, 1)


def _replaced(
    before: Mapping[tuple[str, VersionedModel], VersionedModel],
    app: Application,
    link: VersionedModel,
) -> VersionedModel | None:
    """Return what a link meant that this one has replaced, if it is the only one of its name."""
    found = [
        chosen
        for (name, old), chosen in before.items()
        if name == app.name and old.name == link.name and old not in app.models
    ]
    return found[0] if len(found) == 1 else None
