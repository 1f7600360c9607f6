"""Roles: what a linked model does beside, or instead of, answering.

- primary: chosen by the policy, and answers. The default.
- challenger(share): alone, for its share of the queries, which it answers: how it would do on real
  traffic.
- shadow: beside each query, never answers: what it would have answered. The first to be shed.
- canary: beside each query, never answers: a model that is understood. Others are measured against
  it, and its own scores show drift.
- decoy: no model; writes what the models received to disk.

No query waits for an observer (shadow, canary, decoy). It is queried after the query's own
models; its futures are read later, and are never waited for; it is queried only while few of its
tasks are open, so that a stuck one costs nothing. A challenger takes its share by the
query's own uniform number, and hands the policy what is left of it, spread over [0, 1) again: the
policy's choice stays as random as it was, and a replay chooses alike. Source: Dunning and Friedman,
"Machine Learning Logistics", 2017, for canary and decoy.
"""

import math
from collections.abc import Mapping, Sequence

import msgspec

from clipper.errors import DoesNotFit, InvalidInput, did_you_mean
from clipper.selection import Plan, Policy, Query
from clipper.selection.setting_syntax import parse_settings
from clipper.types import UserValue, VersionedModel, check_name

_BUDGET = ("share", "rate_max")
_SETTINGS: dict[str, tuple[str, ...]] = {
    "primary": (),
    "challenger": ("share",),
    "shadow": _BUDGET,
    "canary": _BUDGET,
    "decoy": (*_BUDGET, "bytes_max"),
}
OBSERVERS = ("shadow", "canary")
DECOY_BYTES_MIN = 65_536


class Role(msgspec.Struct, frozen=True):
    """The role of a linked model or of a decoy. share: of the queries.  rate_max: queries a second,
    at most.  bytes_max: of a decoy's records on disk."""

    kind: str
    share: float = 1.0
    rate_max: float = math.inf
    bytes_max: int = 64 << 20

    @property
    def observes(self) -> bool:
        """Return whether models of this role observe queries without answering."""
        return self.kind in OBSERVERS


PRIMARY = Role("primary")


def role_named(text: str, whose: str) -> Role:
    """Return the role of `NAME` or `NAME(setting=value, ...)`. Raises InvalidInput that names whose
    it is and what is wrong."""
    if not isinstance(text, str):
        raise InvalidInput(
            f"the role of {whose!r} is a str such as 'shadow', not a {type(text).__name__}."
        )
    kind, open, rest = text.strip().partition("(")
    if kind not in _SETTINGS:
        guess = did_you_mean(kind, _SETTINGS) or "."
        raise InvalidInput(
            f"no role {kind[:100]!r} (of {whose!r}){guess}", hint=f"Roles: {', '.join(_SETTINGS)}."
        )
    settings = parse_settings(rest, "role", text, "shadow or shadow(share=0.5)") if open else {}
    for setting in settings:
        if setting not in _SETTINGS[kind]:
            guess = did_you_mean(setting, _SETTINGS[kind]) or "."
            known = ", ".join(_SETTINGS[kind]) or "none"
            raise InvalidInput(
                f"role {kind!r} (of {whose!r}) has no setting {setting!r}{guess}",
                hint=f"Its settings: {known}.",
            )
    if kind == "challenger":
        settings.setdefault("share", 0.1)
    for setting, value in settings.items():
        _check_setting(kind, whose, setting, value)
    return Role(kind, **settings)


def _check_setting(kind: str, whose: str, setting: str, value: UserValue) -> None:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if setting == "share" and not (
        number and 0 < value <= 1 and (kind != "challenger" or value < 1)
    ):
        top = "below 1" if kind == "challenger" else "at most at 1"
        raise InvalidInput(f"share={value!r} of {kind} {whose!r}: it must lie above 0 and {top}.")
    if setting == "rate_max" and not (number and 0 < value < math.inf):
        raise InvalidInput(f"rate_max={value!r} of {kind} {whose!r}: queries a second, above 0.")
    if setting == "bytes_max" and not (
        isinstance(value, int) and not isinstance(value, bool) and value >= DECOY_BYTES_MIN
    ):
        raise InvalidInput(
            f"bytes_max={value!r} of {kind} {whose!r}: a whole number from {DECOY_BYTES_MIN}."
        )


def check_roles(
    application: str, links: Sequence[str | VersionedModel], roles: Mapping[str, str] | None
) -> dict[VersionedModel | str, Role]:
    """Return the roles by the link they are of, or by a decoy's name. Raises InvalidInput for what
    cannot be: a model that is not linked, an unknown role, a share out of range, no model left to
    answer."""
    if not isinstance(roles or {}, Mapping):
        raise InvalidInput(
            f"roles of application {application!r}: roles by model, as in {{'svm:2': 'shadow'}}."
        )
    try:
        linked = [VersionedModel.parse(link) for link in links]
    except ValueError as error:
        raise InvalidInput(f"application {application!r}: {error}") from None
    found: dict[VersionedModel | str, Role] = {}
    for name, text in (roles or {}).items():
        place, role = placed(application, linked, name, text)
        if place in found:
            raise InvalidInput(f"roles of application {application!r}: '{place}' has two.")
        found[place] = role
    _check_somebody_answers(application, linked, found)
    return found


def placed(
    application: str, linked: Sequence[VersionedModel], name: str, text: str
) -> tuple[VersionedModel | str, Role]:
    """Return one role, and the link it is of or the decoy's name."""
    role = role_named(text, str(name))
    find = _decoy_named if role.kind == "decoy" else _link_named
    return find(application, name, linked), role


def _link_named(application: str, name: str, linked: Sequence[VersionedModel]) -> VersionedModel:
    """Return the link of that notation, or the only one of that name. Raises DoesNotFit if there
    is none; InvalidInput if there are several."""
    try:
        wanted = VersionedModel.parse(name)
    except ValueError as error:
        raise InvalidInput(f"roles of application {application!r}: {error}") from None
    if wanted in linked:
        return wanted
    fitting = [link for link in linked if wanted.version is None and link.name == wanted.name]
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        several = " and ".join(f"'{link}'" for link in fitting)
        raise InvalidInput(
            f"a role for '{wanted}' is ambiguous: application {application!r} links {several}.",
            hint=f"Name the version, as in '{fitting[0]}'.",
        )
    known = [str(link) for link in linked]
    guess = did_you_mean(str(wanted), known) or "."
    hint = f"Linked: {', '.join(known) or 'none'}."
    raise DoesNotFit(
        f"a role for '{wanted}', which application {application!r} does not link{guess}", hint=hint
    )


def _decoy_named(application: str, name: str, linked: Sequence[VersionedModel]) -> str:
    try:
        check_name(name, "decoy")
    except ValueError as error:
        raise InvalidInput(f"roles of application {application!r}: {error}") from None
    if any(link.name == name for link in linked):
        hint = "Give the decoy a name of its own, or the model the role shadow."
        raise InvalidInput(
            f"decoy {name!r} of application {application!r}: a decoy is not a model, {name!r}"
            " is one.",
            hint=hint,
        )
    return name


def _check_somebody_answers(
    application: str, linked: Sequence[VersionedModel], found: Mapping[VersionedModel | str, Role]
) -> None:
    primaries = [link for link in linked if found.get(link, PRIMARY).kind == "primary"]
    if linked and not primaries:
        hint = "Leave one of them without a role: it is then a primary."
        raise InvalidInput(
            f"application {application!r}: no model is left to answer, all have other roles.",
            hint=hint,
        )
    total = sum(role.share for role in found.values() if role.kind == "challenger")
    if total >= 1:
        raise InvalidInput(
            f"challengers of application {application!r} take {total:g} of the queries; below 1 is"
            " possible."
        )


class RoleAssignment:
    """The roles of an application's running models. Threads: any; it never changes.

    primaries: models.  observers: (model, share).  challengers: (end, model, share): it takes the
    queries whose number is below `end`, and not below the end before.
    """

    __slots__ = ("_left", "challengers", "observers", "primaries", "roles")

    def __init__(
        self, roles: Mapping[VersionedModel, Role], models: Sequence[VersionedModel]
    ) -> None:
        self.roles = {model: roles.get(model, PRIMARY) for model in models}
        self.primaries = tuple(
            model for model, role in self.roles.items() if role.kind == "primary"
        )
        self.observers = tuple(
            (model, role.share) for model, role in self.roles.items() if role.observes
        )
        shares = [
            (model, role.share) for model, role in self.roles.items() if role.kind == "challenger"
        ]
        ends = [math.fsum(share for _, share in shares[: i + 1]) for i in range(len(shares))]
        self.challengers = tuple((end, *one) for end, one in zip(ends, shares, strict=True))
        self._left = 1.0 - (ends[-1] if ends else 0.0)

    def plan(self, policy: Policy, state: object, query: Query) -> Plan:
        """Return the models that a query calls.

        Its probabilities are those of the whole choice, so that what is learned from it is
        unbiased.
        """
        uniform = query.uniform
        plan = self._challenged(query)
        if plan is None:
            taken = 1.0 - self._left
            rest = (
                min((uniform - taken) / self._left, math.nextafter(1.0, 0.0)) if taken else uniform
            )
            plan = policy.select(state, Query(query.user, rest, query.features), self.primaries)
            if taken and plan.models:
                odds = plan.probabilities or (1.0,) * len(plan.models)
                plan = Plan(
                    plan.models,
                    tuple([self._left * p for p in odds]),
                    plan.observers,
                    plan.features,
                )
        watching = self._watching(plan, uniform)
        return (
            Plan(plan.models, plan.probabilities, watching, plan.features)
            if watching != plan.observers
            else plan
        )

    def _challenged(self, query: Query) -> Plan | None:
        for end, model, share in self.challengers:
            if query.uniform < end:
                return Plan((model,), (share,), (), query.features)
        return None

    def _watching(self, plan: Plan, uniform: float) -> tuple[VersionedModel, ...]:
        """Return the policy's observers, and those whose share has this query: by bits of the
        number that nobody else looks at."""
        low = (uniform * 2**27) % 1.0
        mine = [
            m
            for i, (m, share) in enumerate(self.observers)
            if share >= 1.0 or (low + i * 0.6180339887) % 1.0 < share
        ]
        return tuple(dict.fromkeys((*plan.observers, *mine))) if mine else plan.observers
