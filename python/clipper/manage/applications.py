"""The applications of a server: made, changed and removed, after all checks."""

from collections.abc import Mapping

from clipper.catalog.catalog import Catalog
from clipper.errors import AlreadyExists, UnknownApplication
from clipper.manage.application_record import changes_of
from clipper.manage.tables.parameters import ParameterSet
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.resolver import ApplicationResolver
from clipper.spec.application import Links


class Applications:
    """Makes and changes the applications of the catalog. Threads: any."""

    def __init__(
        self,
        catalog: Catalog,
        resolver: ApplicationResolver,
        parameters: ParameterSet,
        slo_ms_max: float,
    ) -> None:
        self._catalog, self._resolver = catalog, resolver
        self._parameters, self._slo_ms_max = parameters, slo_ms_max

    def handle(
        self,
        name: str,
        models: Links | None,
        settings: Mapping[str, object],
        *,
        measured: bool = True,
    ) -> ApplicationHandle:
        """Return the handle of an application; make or change it when models or settings are given.

        measured: refuse a decider whose guaranteed time the models do not keep now; otherwise log
        it. Raises UnknownApplication, UnknownModel, TypeConflict, InvalidInput, and the errors of
        ParameterSet.check_context_table().
        """
        known = self._catalog.view.applications.get(name)
        changes = changes_of(name, models, settings, known, self._slo_ms_max)
        policy = changes.get("policy", known.policy if known else "")
        self._parameters.check_context_table(name, changes.get("context_table"), policy)
        if known is None and not changes:
            raise UnknownApplication.named(name, self._catalog.view.applications)
        self._resolver.check(name, changes, measured=measured)
        if known is None:
            links = changes.pop("models", ())
            try:
                self._catalog.register_application(name, links, **changes)
            except AlreadyExists:  # by another server, since
                self._catalog.update_application(name, models=links, **changes)
        elif changes:
            self._catalog.update_application(name, **changes)
        return ApplicationHandle(
            name, self._resolver.application, self._resolver.table, self._slo_ms_max
        )

    def remove(self, name: str) -> None:
        """Remove an application and its statistics. Raises UnknownApplication, StoreError."""
        self._catalog.unregister_application(name)
