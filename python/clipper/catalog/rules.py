"""Invariants between the records of the catalog, and the consequences of a change. Pure functions
over a view.
"""

import math
from typing import Final

import msgspec

from clipper.catalog.view import Promoted, Rollout, View, app_key, encode, promoted_key
from clipper.errors import InvalidInput, TypeConflict, UnknownModel
from clipper.store import Put
from clipper.types import Application, Model, VersionedModel, check_policy

REPLICAS_MAX: Final = 1024


def put_promoted(view: View, id_: VersionedModel, upto: int = 0) -> Put:
    """Return the write that promotes a version. upto: the highest version known elsewhere."""
    version = id_.version or 0
    highest = max(model.version for model in view.versions[id_.name])
    return Put(promoted_key(id_.name), encode(Promoted(version, max(highest, upto))))


def link_replaced(app: Application, wanted: VersionedModel) -> VersionedModel:
    """Return the one link of the application that has this name, and answers."""
    mine = [link for link in app.models if link.name == wanted.name]
    mine = [link for link in mine if app.roles.get(str(link), "primary") == "primary"]
    if len(mine) != 1:
        linked = ", ".join(map(str, app.models)) or "none"
        why = (
            f"links no {wanted.name!r} that answers"
            if not mine
            else f"links {len(mine)} versions of {wanted.name!r}"
        )
        raise UnknownModel(
            f"application {app.name!r} {why}: '{wanted}' has nothing to take over.",
            hint=f"Linked: {linked}.",
        )
    return mine[0]


def ops_of_promotion(view: View, rollout: Rollout) -> list[Put]:
    """Return the operations of a promotion: the version becomes what its link means, where that is
    this application's alone; else the application links it itself."""
    app, new = view.application(rollout.application), view.model(rollout.model)
    others = [
        other.name
        for other in view.applications.values()
        if other.name != app.name and rollout.link in other.models
    ]
    alone = [link for link in app.models if link.name == new.name] == [rollout.link]
    if rollout.link.version is None and alone and not others:
        return [] if view.model(rollout.link).id == new.id else [put_promoted(view, new.id)]
    return [Put(app_key(app.name), encode(linking_only(app, new.id)))]


def linking_only(app: Application, wanted: VersionedModel) -> Application:
    """Return the application with this version where it had others of the name, without their
    roles."""
    mine = [link for link in app.models if link.name == wanted.name]
    if not mine:
        linked = ", ".join(map(str, app.models)) or "none"
        raise UnknownModel(
            f"application {app.name!r} does not link {wanted.name!r}.", hint=f"Linked: {linked}."
        )
    links = dict.fromkeys(wanted if link in mine else link for link in app.models)
    roles = {
        name: role for name, role in app.roles.items() if name.partition(":")[0] != wanted.name
    }
    return msgspec.structs.replace(app, models=tuple(links), roles=roles)


def check_replicas(name: str, replicas: int) -> None:
    """Raise InvalidInput if the number of replicas is not in the range."""
    if (
        isinstance(replicas, bool)
        or not isinstance(replicas, int)
        or not 0 <= replicas <= REPLICAS_MAX
    ):
        raise InvalidInput(
            f"replicas={replicas!r} of model {name!r}: 0 to {REPLICAS_MAX} are possible."
        )


def version_after(view: View, model: Model) -> VersionedModel | None:
    """Return the version that is the latest of its name once this one is retired."""
    left = [
        other.version
        for other in view.versions[model.name]
        if not other.retired_us and other != model
    ]
    return VersionedModel(model.name, view.latest_of(model.name, left)) if left else None


def broken_by_retiring(view: View, name: str, model: Model) -> set[VersionedModel]:
    """Return the application's links that would have no model any more, or one that takes other
    inputs."""
    app, latest = view.applications[name], VersionedModel(model.name)
    next_one = version_after(view, model)
    falls_back = next_one is not None and app.input.agrees_with(view.model(next_one).input)
    return {link for link in app.models if link == model.id or (link == latest and not falls_back)}


def check_settings(app: Application) -> None:
    """Raise InvalidInput if a setting of an application is not in its range."""
    if not (_is_number(app.slo_ms) and 0 < app.slo_ms < math.inf):
        raise InvalidInput(
            f"slo_ms={app.slo_ms!r} of application {app.name!r}: a time above 0 ms is needed."
        )
    if not (_is_number(app.confidence_min) and 0 <= app.confidence_min <= 1):
        raise InvalidInput(
            f"confidence_min={app.confidence_min!r} of application {app.name!r}: 0 to 1 is"
            " possible."
        )
    if not (_is_number(app.priority) and app.priority in (1, 2, 3)):
        raise InvalidInput(
            f"priority={app.priority!r} of application {app.name!r}: it is 1, the highest, to 3."
        )
    check_policy(app.policy)
    if not isinstance(app.decider, str):
        raise InvalidInput(
            f"decider={app.decider!r} of application {app.name!r}: a text is needed, as 'majority'."
        )
    if len(set(app.models)) != len(app.models):
        twice = next(link for link in app.models if app.models.count(link) > 1)
        raise InvalidInput(f"application {app.name!r} links '{twice}' twice.")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_types(app: Application, model: Model) -> None:
    """Raise TypeConflict if a model's input or output type does not fit an application."""
    if not app.input.agrees_with(model.input):
        raise TypeConflict(
            f"model '{model.id}' has the input {model.input}, application {app.name!r} has"
            f" {app.input}.",
            hint="Link a model with that input, or give the model another name.",
        )
