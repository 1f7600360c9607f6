"""One model, and what a policy is looked up by."""

import itertools
from typing import Any

import numpy as np
import pytest

from clipper.errors import InvalidInput
from clipper.selection import POLICIES, Prediction, Query, SingleModel, create_policy
from clipper.types import InputType, VersionedModel

A, B, C = (VersionedModel(name, 1) for name in "abc")
POLICY = SingleModel()


def test_the_first_linked_candidate_is_queried() -> None:
    """Candidates come in the order of the links; a state's models may stand in any."""
    assert POLICY.rank_models_desc(POLICY.init([B, A]), None) == (B, A)
    for linked, candidates in itertools.product(
        itertools.permutations([A, B]), itertools.permutations([A, B, C])
    ):
        assert POLICY.select(POLICY.init(linked), Query("u"), candidates).models == candidates[:1]
    state = POLICY.init([B, A])
    assert POLICY.select(state, Query(), [C]).models == (C,), "candidates of the request's own"
    assert POLICY.select(state, Query(), []).models == ()


@pytest.mark.parametrize(
    ("own", "reported"),
    [(None, 1.0), (0.25, 0.25), (1.5, 1.0), (-1.0, 0.0), (float("nan"), 0.0), (float("inf"), 1.0)],
)
def test_the_models_own_confidence_is_reported(own: float | None, reported: float) -> None:
    combined = POLICY.combine(POLICY.init([A]), {A: Prediction("cat", own)}, ())
    assert (combined.output, combined.confidence, combined.used) == ("cat", reported, (A,))


@pytest.mark.parametrize(
    "bad", [float("nan"), float("inf"), np.array([0.0, np.nan]), np.float32("-inf"), None]
)
def test_what_is_not_finite_is_no_answer(bad: object) -> None:
    state = POLICY.init([A, B])
    assert POLICY.combine(state, {A: Prediction(bad)}, ()).used == ()
    fallback = POLICY.combine(state, {A: Prediction(bad), B: Prediction(2.0)}, ())
    assert (fallback.output, fallback.used) == (2.0, (B,))


def test_nothing_arrived() -> None:
    combined = POLICY.combine(POLICY.init([A]), {}, (A,))
    assert (combined.confidence, combined.used) == (0.0, ())


def test_any_input_will_do() -> None:
    assert all(
        create_policy(name).accepts_input_type(InputType.parse(t))
        for name in POLICIES
        for t in ("str", "f64[3]")
    )


def test_policies_are_found_by_name() -> None:
    assert {name: create_policy(name).name for name in POLICIES} == {
        name: name for name in POLICIES
    }
    with pytest.raises(InvalidInput) as caught:
        create_policy("ensembel")
    text = str(caught.value)
    assert text.startswith(
        "no policy 'ensembel' - did you mean 'ensemble'? Policies: ab, bandit, ensemble,"
        " epsilon_greedy, exp3,"
    )


def test_policies_take_settings() -> None:
    policy: Any = create_policy("exp3(eta=0.05, shadow=0.1)")
    assert policy.answering.shadow == 0.1
    assert create_policy("exp3(eta=0.05)") is create_policy("exp3(eta=0.05)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "exp3(etta=1)",
            (
                "policy 'exp3' has no setting 'etta' - did you mean 'eta'? Its settings: eta,"
                " floor, shadow."
            ),
        ),
        ("single(x=1)", "policy 'single' has no setting 'x'. single has no settings."),
        ("exp3(eta=-1)", "eta=-1: it must lie between 1e-06 and 10."),
        ("exp3(eta='a')", "eta='a': it must lie between 1e-06 and 10."),
        (
            "exp3(0.1)",
            "cannot read the policy 'exp3(0.1)'. Write exp3 or exp3(setting=value, ...).",
        ),
        ("exp3(eta=__import__('os'))", "cannot read the policy"),
        ("exp3(", "cannot read the policy"),
        ("exp3)", "no policy 'exp3)'"),
    ],
)
def test_what_cannot_be_read_is_named(text: str, message: str) -> None:
    with pytest.raises(InvalidInput) as caught:
        create_policy(text)
    assert str(caught.value).startswith(message)
