"""The applications of a server: made, changed and removed, after all checks."""

from collections.abc import Mapping

from clipper.catalog.catalog import Catalog, plain
from clipper.errors import AlreadyExists, InvalidInput, UnknownApplication, did_you_mean
from clipper.manage.tables.parameters import ParameterSet
from clipper.options import Links
from clipper.selection import create_policy, default_policy, with_coverage
from clipper.serving.query.application import ApplicationHandle, slo_in_us
from clipper.serving.query.missing_outputs import check_missing
from clipper.serving.query.resolver import ApplicationResolver
from clipper.serving.rollout.roles import check_roles
from clipper.types import Application, UserValue, VersionedModel

_SETTINGS = tuple(
    field
    for field in Application.__struct_fields__
    if field not in ("name", "models", "created_us")
)


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
        changes = self._changes(name, models, settings)
        known = self._catalog.view.applications.get(name)
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

    def _changes(
        self, name: str, models: Links | None, settings: Mapping[str, object]
    ) -> dict[str, UserValue]:
        """Return the checked changes of an application's record."""
        changes: dict[str, UserValue] = dict(settings)
        if unknown := sorted(set(changes) - set(_SETTINGS)):
            guess = did_you_mean(unknown[0], ("models", *_SETTINGS)) or "."
            raise InvalidInput(
                f"unknown setting {unknown[0]!r} of application {name!r}{guess}",
                hint=f"Settings: models, {', '.join(_SETTINGS)}.",
            )
        if models is not None:
            changes["models"] = (
                (models,) if isinstance(models, str | VersionedModel) else tuple(models)
            )
        known = self._catalog.view.applications.get(name)
        if known is None:
            known = Application(name)
            if changes and "policy" not in changes:
                changes["policy"] = default_policy(changes.get("models", ()), changes.get("roles"))

        def new(setting: str) -> UserValue:
            return changes.get(setting, getattr(known, setting))

        if changes.keys() & {"policy", "coverage"}:
            create_policy(with_coverage(new("policy"), new("coverage")))
        if "slo_ms" in changes:
            slo_in_us(changes["slo_ms"], self._slo_ms_max)
            changes["slo_ms"] = plain(changes["slo_ms"])  # numpy's numbers too
        if "missing" in changes:
            check_missing(changes["missing"])
        if new("roles") and changes.keys() & {"roles", "models"}:
            check_roles(name, new("models"), new("roles"))
        self._parameters.check_context_table(name, changes.get("context_table"), new("policy"))
        return changes
