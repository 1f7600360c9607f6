"""Selection policies, by the name an application gives."""

from clipper.errors import InvalidInput, did_you_mean
from clipper.selection.ensemble import Ensemble
from clipper.selection.fixed import Fixed
from clipper.selection.policy import Combined, Observation, Plan, Policy, Prediction, Predictions, Query, Truth

POLICIES: dict[str, Policy] = {policy.name: policy for policy in (Fixed(), Ensemble())}


def policy_named(name: str) -> Policy:
    """The policy, or InvalidInput with the names there are."""
    if name not in POLICIES:
        guess = did_you_mean(name, POLICIES) or "."
        raise InvalidInput(f"no policy {name!r}{guess}", hint=f"Policies: {', '.join(sorted(POLICIES))}.")
    return POLICIES[name]


__all__ = [
    "POLICIES",
    "Combined",
    "Ensemble",
    "Fixed",
    "Observation",
    "Plan",
    "Policy",
    "Prediction",
    "Predictions",
    "Query",
    "Truth",
    "policy_named",
]
