"""Parsing of roles, and the models that a query is sent to because of them."""

import math
from collections import Counter

import pytest

from clipper.errors import InvalidInput
from clipper.selection import Plan, Query, create_policy
from clipper.serving.rollout.roles import Role, RoleAssignment, check_roles, role_named
from clipper.types import VersionedModel

A, B, C, D = (VersionedModel(name, 1) for name in "abcd")
LINKS = ("svm:1", "svm:2", "forest")


def test_roles_as_they_are_written():
    assert role_named("shadow", "m") == Role("shadow")
    assert role_named("canary(share=0.5, rate_max=100)", "m") == Role("canary", 0.5, 100)
    assert role_named("challenger", "m") == Role("challenger", 0.1)
    assert role_named(" decoy(bytes_max=100_000)", "m").bytes_max == 100_000
    assert role_named("primary", "m") == Role("primary")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("shadwo", r"no role 'shadwo' \(of 'svm'\).*id you mean 'shadow'"),
        ("", "no role ''"),
        ("shadow(shares=0.5)", "no setting 'shares'.*id you mean 'share'"),
        ("primary(share=0.5)", "no setting 'share'.*settings: none"),
        ("shadow(0.5)", "cannot read the role"),
        ("shadow(share=0.5", "cannot read the role"),
        ("shadow(share=__import__('os'))", "cannot read the role"),
        ("shadow(share=0)", "share=0 of shadow 'svm'.*above 0 and at most at 1"),
        ("canary(share=1.5)", "share=1.5 of canary 'svm'"),
        ("canary(share=True)", "share=True"),
        ("canary(share='x')", "share='x'"),
        ("challenger(share=1)", "share=1 of challenger 'svm'.*below 1"),
        ("shadow(rate_max=0)", "rate_max=0 of shadow"),
        ("decoy(bytes_max=10)", "bytes_max=10 of decoy.*from 65536"),
        (3, "is a str such as 'shadow', not a int"),
    ],
)
def test_what_is_no_role(text, message):
    with pytest.raises(InvalidInput, match=message):
        role_named(text, "svm")


def test_roles_find_their_links():
    found = check_roles("a", LINKS, {"svm:2": "shadow", "forest": "canary", "saw": "decoy"})
    assert {str(place): role.kind for place, role in found.items()} == {
        "svm:2": "shadow",
        "forest": "canary",
        "saw": "decoy",
    }
    only = check_roles("a", ("svm:2", "forest"), {"svm": "shadow"})
    assert list(only) == [VersionedModel("svm", 2)], "the only one of that name"
    assert check_roles("a", (), None) == {}


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            {"svm": "shadow"},
            "a role for 'svm' is ambiguous: application 'a' links 'svm:1' and 'svm:2'."
            " Name the version, as in 'svm:1'",
        ),
        ({"svn:2": "shadow"}, "a role for 'svn:2'.*did you mean 'svm:2'"),
        ({"forest:1": "shadow"}, "a role for 'forest:1'"),
        ({"FOREST": "shadow"}, "roles of application 'a': bad model name"),
        ({"forest": "decoy"}, "a decoy is not a model, 'forest' is one"),
        ({"De Coy": "decoy"}, "bad decoy name"),
        (
            {"svm:1": "shadow", "svm:2": "canary", "forest": "challenger"},
            "no model is left to answer",
        ),
        (
            {"svm:1": "challenger(share=0.6)", "svm:2": "challenger(share=0.4)"},
            "take 1 of the queries; below 1",
        ),
        (["shadow"], "roles by model"),
    ],
)
def test_what_roles_are_refused(roles, message):
    with pytest.raises(InvalidInput, match=message):
        check_roles("a", LINKS, roles)


def test_two_roles_of_one_model():
    with pytest.raises(InvalidInput, match="'svm:2' has two"):
        check_roles("a", ("svm:2", "forest"), {"svm:2": "shadow", "svm": "canary"})


def planned(assignment, n=10_000, policy="ensemble", models=(A, B, C, D)):
    chosen = create_policy(policy)
    state = chosen.init(models)
    return [assignment.plan(chosen, state, Query(None, (i + 0.5) / n)) for i in range(n)]


def test_observers_never_answer():
    assignment = RoleAssignment({B: Role("shadow"), C: Role("canary")}, (A, B, C, D))
    assert assignment.primaries == (A, D)
    assert all(p.models == (A, D) and p.observers == (B, C) for p in planned(assignment, 100))


@pytest.mark.parametrize(
    "policy", ["ensemble", "single", "exp3", "squarecb(shadow=0.3)", "ab", "stacking"]
)
def test_a_challenger_has_its_share_and_answers_alone(policy):
    assignment = RoleAssignment(
        {B: Role("challenger", 0.2), D: Role("challenger", 0.1)}, (A, B, C, D)
    )
    plans = planned(assignment, policy=policy)
    alone = Counter(plan.models for plan in plans if plan.models[0] in (B, D))
    assert alone == {(B,): 2000, (D,): 1000}
    assert all(not {B, D} & set(plan.models) for plan in plans if plan.models[0] not in (B, D))
    assert {plan.probability(B) for plan in plans if B in plan.models} == {0.2}


def test_a_plan_holds_the_probability_of_the_whole_choice():
    """Each set of models is queried as often as its plan states."""
    assignment = RoleAssignment({B: Role("challenger", 0.25)}, (A, B, C))
    plans = planned(assignment, policy="ab(shares={'a': 0.9, 'c': 0.1})", models=(A, B, C))
    count_of = Counter(plan.models for plan in plans)
    for plan in set(plans):
        assert count_of[plan.models] / len(plans) == pytest.approx(plan.probabilities[0], abs=2e-3)
    everybody = RoleAssignment({B: Role("challenger", 0.25)}, (A, B, C)).plan(
        create_policy("ensemble"), (A, B, C), Query(None, 0.9)
    )
    assert everybody.probability(A) == 0.75


def test_the_policy_chooses_as_without_a_challenger():
    """The rest of the number is uniform again: the policy gets all of [0, 1)."""

    class Seen:
        def __init__(self):
            self.uniforms = []

        def select(self, state, query, candidates):
            self.uniforms.append(query.uniform)
            return Plan(tuple(candidates))

    seen, assignment = Seen(), RoleAssignment({B: Role("challenger", 0.3)}, (A, B))
    for i in range(1000):
        assignment.plan(seen, None, Query(None, (i + 0.5) / 1000))
    assert len(seen.uniforms) == 700
    assert seen.uniforms == pytest.approx([(i + 0.5) / 700 for i in range(700)])
    assignment.plan(seen, None, Query(None, math.nextafter(1.0, 0.0)))
    assert 0 <= max(seen.uniforms) < 1


def test_a_replay_chooses_alike():
    assignment = RoleAssignment({B: Role("challenger", 0.3), C: Role("shadow", 0.5)}, (A, B, C, D))
    first, again = (planned(assignment, 500, "exp3") for _ in range(2))
    assert [(p.models, p.probabilities, p.observers) for p in first] == [
        (p.models, p.probabilities, p.observers) for p in again
    ]


def test_an_observer_has_its_share_whatever_the_policy_does():
    assignment = RoleAssignment({B: Role("shadow", 0.25), C: Role("canary", 0.5)}, (A, B, C, D))
    chosen = create_policy("single")
    golden = [(i * 0.7548776662466927) % 1.0 for i in range(20_000)]
    plans = [assignment.plan(chosen, (A, B, C, D), Query(None, uniform)) for uniform in golden]
    assert sum(B in plan.observers for plan in plans) / len(plans) == pytest.approx(0.25, abs=0.02)
    assert sum(C in plan.observers for plan in plans) / len(plans) == pytest.approx(0.5, abs=0.02)
    low = [
        B in plan.observers for plan, uniform in zip(plans, golden, strict=True) if uniform < 0.1
    ]
    assert sum(low) / len(low) == pytest.approx(0.25, abs=0.04), (
        "whatever the query's number chose before"
    )


def test_a_policys_own_observers_stay():
    assignment = RoleAssignment({C: Role("shadow")}, (A, B, C))
    policy = create_policy("exp3(shadow=1.0)")
    plan = assignment.plan(policy, policy.init((A, B, C)), Query(None, 0.4))
    assert set(plan.observers) == {A, B, C} - set(plan.models)
