"""Selection policies and deciders, created from the text that an application gives.

A policy is a name, `stacking`, a name with settings, `exp3(eta=0.05, shadow=0.1)`, or a
user-defined class, `package.module:Class(setting=value)`. User-defined deciders are named alike.
"""

import functools
import inspect
from collections.abc import Mapping, Sequence

from clipper.errors import DoesNotFit, InvalidInput, did_you_mean
from clipper.selection import user_defined
from clipper.selection.deciders.decider import AnswerFrom, Decider, DecidingPolicy, View, Wait
from clipper.selection.deciders.schedule import DeciderStep, Schedule, parse_decider
from clipper.selection.learning.learning_policy import LearningPolicy, state_in_context
from clipper.selection.learning.prediction_sets import with_coverage
from clipper.selection.policies.bandits import (
    Bandit,
    EpsilonGreedy,
    Exp3,
    KlUcb,
    SquareCB,
    Thompson,
    TsallisInf,
)
from clipper.selection.policies.contextual import LinTs, LinUcb, features_of
from clipper.selection.policies.ensemble import Ensemble
from clipper.selection.policies.experts import Exp4, LogOdds, Stacking
from clipper.selection.policies.mixture import Mixture
from clipper.selection.policies.ridge import Ridge
from clipper.selection.policies.single_model import SingleModel
from clipper.selection.policies.weighted import AbSplit, StaticWeights
from clipper.selection.policy import (
    Combined,
    Observation,
    Plan,
    Policy,
    Prediction,
    Predictions,
    Query,
    Truth,
)
from clipper.selection.setting_syntax import parse_settings
from clipper.types import UserValue, VersionedModel

_CLASSES = (
    SingleModel, Ensemble, AbSplit, StaticWeights,
    Mixture, Bandit, Exp3, Exp4, Stacking, SquareCB, Thompson, KlUcb, TsallisInf, LogOdds,
    EpsilonGreedy, LinUcb, LinTs, Ridge,
)  # fmt: skip
POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in _CLASSES}


@functools.lru_cache(maxsize=1024)
def create_policy(text: str) -> Policy:
    """Create the policy that `text` describes; equal texts share one object.

    Raises InvalidInput that lists the known names and settings, and DoesNotFit for a coverage of a
    policy that does not learn.
    """
    if user_defined.is_user_defined(text):
        made = user_defined.load_user_object(
            text,
            "policy",
            lambda inner: _settings(text, text.partition("(")[0], inner),
            user_defined.NEEDED,
        )
        return user_defined.UserDefinedPolicy(made, text.strip())
    name, open, rest = text.strip().partition("(")
    if name not in POLICIES:
        guess = did_you_mean(name, POLICIES) or "."
        raise InvalidInput(
            f"no policy {name!r}{guess}", hint=f"Policies: {', '.join(sorted(POLICIES))}."
        )
    settings = _settings(text, name, rest) if open else {}
    known = inspect.signature(POLICIES[name]).parameters
    coverage = settings.pop("coverage", None)
    for setting in settings:
        if setting not in known:
            guess = did_you_mean(setting, known) or "."
            hint = f"Its settings: {', '.join(known)}." if known else f"{name} has no settings."
            raise InvalidInput(f"policy {name!r} has no setting {setting!r}{guess}", hint=hint)
    policy: Policy = POLICIES[name](**settings)
    if coverage is not None:
        if not isinstance(policy, LearningPolicy):
            hint = "Choose one that does: policy='stacking'."
            raise DoesNotFit(
                f"coverage={coverage!r}: policy {name!r} does not learn how wide a set must be.",
                hint=hint,
            )
        return policy.with_coverage(coverage)
    return policy


def default_policy(
    models: Sequence[VersionedModel | str], roles: Mapping[str, str] | None = None
) -> str:
    """Return the policy of a new application that names none.

    It is `mixture` for several primary models: an equal vote until there is feedback. For one model
    it is `ensemble`, which returns that model's output.
    """
    others = [model for model, role in (roles or {}).items() if not role.startswith("primary")]
    primaries = [model for model in models if str(model) not in others]
    return Mixture.name if len(primaries) > 1 else Ensemble.name


def takes_context(policy: Policy) -> bool:
    """Return True if the policy may use the features of a query."""
    return isinstance(policy, Mixture | LinUcb | LinTs | user_defined.UserDefinedPolicy)


@functools.lru_cache(maxsize=1024)
def user_defined_decider(text: str) -> Decider:
    """Create the decider that `package.module:Class(setting=value)` names.

    Equal texts share one object. Raises InvalidInput that names what is missing.
    """
    decider: Decider = user_defined.load_user_object(
        text, "decider", lambda inner: _settings(text, text.partition("(")[0], inner), ("decide",)
    )
    return decider


def _settings(text: str, name: str, rest: str) -> dict[str, UserValue]:
    return parse_settings(rest, "policy", text, f"{name} or {name}(setting=value, ...)")


__all__ = [
    "POLICIES",
    "AbSplit",
    "AnswerFrom",
    "Bandit",
    "Combined",
    "Decider",
    "DeciderStep",
    "DecidingPolicy",
    "Ensemble",
    "EpsilonGreedy",
    "Exp3",
    "Exp4",
    "KlUcb",
    "LinTs",
    "LinUcb",
    "LogOdds",
    "Mixture",
    "Observation",
    "Plan",
    "Policy",
    "Prediction",
    "Predictions",
    "Query",
    "Ridge",
    "Schedule",
    "SingleModel",
    "SquareCB",
    "Stacking",
    "StaticWeights",
    "Thompson",
    "Truth",
    "TsallisInf",
    "View",
    "Wait",
    "create_policy",
    "default_policy",
    "features_of",
    "parse_decider",
    "state_in_context",
    "takes_context",
    "user_defined_decider",
    "with_coverage",
]
