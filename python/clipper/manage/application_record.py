"""The settings of an application's record, made from what a person states of it: checks and
defaults, whichever way they come in."""

from collections.abc import Mapping

import numpy as np

from clipper.catalog.catalog import plain
from clipper.errors import InvalidInput, did_you_mean
from clipper.selection import create_policy, default_policy, with_coverage
from clipper.serving.query.application import slo_in_us
from clipper.serving.query.missing_outputs import check_missing
from clipper.serving.rollout.roles import check_roles
from clipper.spec.application import ApplicationSpec, Links, roles_of
from clipper.spec.field import at, converted
from clipper.types import Application, InputType, UserValue, VersionedModel

_NUMBERS = ("slo_ms", "confidence_min", "coverage", "priority")


def changes_of(
    name: str,
    models: Links | None,
    settings: Mapping[str, object],
    known: Application | None,
    slo_ms_max: float,
) -> dict[str, UserValue]:
    """Return the checked changes of an application's record. known: the record before, if there is
    one; an input and a policy that are empty leave those of the record.

    Raises InvalidInput, and what policies and roles raise.
    """
    changes: dict[str, UserValue] = dict(settings)
    allowed = at(ApplicationSpec, "python")
    if unknown := sorted(set(changes) - set(allowed)):
        raise InvalidInput(
            f"unknown setting {unknown[0]!r} of application {name!r}"
            f"{did_you_mean(unknown[0], allowed) or '.'}",
            hint=f"Settings: {', '.join(allowed)}.",
        )
    if models is not None:
        given = (models,) if isinstance(models, str | VersionedModel) else models
        changes["models"] = [str(VersionedModel.parse(one)) for one in given]
    _plain_values(changes)
    if known is None:
        known = Application(name)
        if changes and "policy" not in changes:
            changes["policy"] = default_policy(changes.get("models", ()), changes.get("roles"))

    def new(setting: str) -> UserValue:
        return changes.get(setting, getattr(known, setting))

    if changes.keys() & {"policy", "coverage"}:
        create_policy(with_coverage(new("policy"), new("coverage")))
    if "slo_ms" in changes:
        slo_in_us(changes["slo_ms"], slo_ms_max)
    if "missing" in changes:
        check_missing(changes["missing"])
    if new("roles") and changes.keys() & {"roles", "models"}:
        check_roles(name, new("models"), new("roles"))
    return converted(ApplicationSpec, changes, "python")


def _plain_values(changes: dict[str, UserValue]) -> None:
    """Replace values as Python has them by those of the specification."""
    for setting in ("input", "policy"):
        if not changes.get(setting, True):
            del changes[setting]
    if "input" in changes:
        changes["input"] = str(InputType.parse(changes["input"]))
    if "roles" in changes:
        try:
            changes["roles"] = roles_of(changes["roles"] or {})
        except InvalidInput as error:
            raise InvalidInput(f"`roles`: {error.message}") from None
    if "default" in changes:
        changes["default"] = plain(changes["default"])
    for setting in _NUMBERS:
        if isinstance(value := changes.get(setting), np.generic):
            changes[setting] = value.item()
