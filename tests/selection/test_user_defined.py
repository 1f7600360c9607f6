"""User-defined policies and deciders: how they are found or refused, and that their faults affect
no other application."""

import logging
from pathlib import Path

import pytest

from clipper.errors import InvalidInput, PolicyFailed
from clipper.selection import (
    Observation,
    Plan,
    Prediction,
    Query,
    Truth,
    View,
    create_policy,
    user_defined_decider,
)
from clipper.selection.deciders.decider import check_decision
from clipper.selection.policies.stateless_policy import learns
from clipper.selection.user_defined import LOGGED_EVERY, UserDefinedPolicy
from clipper.types import InputType, VersionedModel

A, B = VersionedModel("a", 1), VersionedModel("b", 1)


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


def own(text: str) -> UserDefinedPolicy:
    policy = create_policy(f"user_classes:{text}")
    assert isinstance(policy, UserDefinedPolicy)
    return policy


def test_a_policy_of_two_methods() -> None:
    policy = own("LastWord(confidence=0.25)")
    state = policy.init([A, B])
    plan = policy.select(state, Query(), (A, B))
    assert plan.models == (A, B)
    combined = policy.combine(state, {A: Prediction(1), B: Prediction(2)}, ())
    assert (combined.output, combined.confidence, combined.used) == (2, 0.25, (B,))
    assert not learns(policy)
    assert policy.name == "user_classes:LastWord(confidence=0.25)"
    assert policy.decode(policy.encode(state)) == state
    assert not policy.accepts_input_type(InputType.parse("str"))
    assert policy.rank_models_desc(state, None) == (A, B)
    assert own("LastWord(confidence=0.25)") is policy


def test_a_policy_that_learns() -> None:
    policy = own("Learns")
    state = policy.init([A])
    seen = Observation(Plan((A,)), {A: Prediction(1)}, Truth(1))
    assert learns(policy)
    assert policy.observe(policy.observe(state, seen), seen) == 2
    assert policy.merge(1, 3, 4) == 6


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (
            "nowhere.at_all:X",
            ["no module 'nowhere'", "importable where the server runs", "PYTHONPATH"],
        ),
        (
            "user_classes:LastWrod",
            ["module 'user_classes' has no class 'LastWrod'", "did you mean 'LastWord'?"],
        ),
        (
            "user_classes:Two",
            ["class 'Two' has no method 'select'", "see clipper.selection.Policy"],
        ),
        ("user_classes:HalfLearns", ["has observe, and no 'init'", "leave out observe"]),
        ("user_classes:LastWord(x=1)", ["its constructor raised TypeError"]),
        ("user_classes:Refuses", ["has no method 'select'"]),
        ("user_classes:LastWord(confidence=f())", ["cannot read the policy"]),
        ("broken:X", ["importing it raised NameError", "python -c 'import broken'"]),
    ],
)
def test_invalid_class_is_refused_with_the_reason(
    text: str, parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken.py").write_text("undefined_name\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(InvalidInput) as caught:
        create_policy(text)
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def test_user_defined_deciders_are_loaded_and_checked() -> None:
    assert user_defined_decider("user_classes:Two(need=1)").need == 1  # type: ignore[attr-defined]
    with pytest.raises(
        InvalidInput, match=r"class 'LastWord' has no method 'decide'.*clipper.selection.Decider"
    ):
        user_defined_decider("user_classes:LastWord")
    with pytest.raises(InvalidInput, match="its constructor raised OSError: no licence"):
        user_defined_decider("user_classes:RefusesToDecide")


SEEN = Observation(Plan((A,)), {A: Prediction(1)}, Truth(1))


def test_errors_of_init_select_and_combine_are_raised() -> None:
    with pytest.raises(
        PolicyFailed, match=r"policy .user_classes:Learns.*: init raised ZeroDivisionError: init"
    ):
        own("Learns(fails='init')").init([A])
    with pytest.raises(PolicyFailed, match="select raised ZeroDivisionError"):
        own("Learns(fails='select')").select(0, Query(), (A,))
    with pytest.raises(PolicyFailed, match="combine raised ZeroDivisionError"):
        own("Learns(fails='combine')").combine(0, {A: Prediction(1)}, ())


def test_failing_state_methods_keep_the_state() -> None:
    policy = own("Learns(fails='observe merge encode decode rank_models_desc')")
    assert policy.observe(7, SEEN) == 7
    assert policy.merge(1, 2, 3) == 2
    with pytest.raises(PolicyFailed, match="encode raised ZeroDivisionError"):
        policy.encode(7)
    assert policy.rank_models_desc(7, None) == ()
    with pytest.raises(ValueError, match="decode raised ZeroDivisionError"):
        policy.decode(b"7")


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("plan", "select returned a str, not a Plan"),
        ("stranger", "select returned stranger:1, which is not a candidate"),
        ("nobody", "select returned no model"),
        ("odds", "select gave 3 probabilities for 2 models"),
        ("combined", "combine returned a int, not a Combined"),
        ("nan", "combine returned a confidence of nan"),
        ("absent", "combine used stranger:1, which has not arrived"),
    ],
)
def test_invalid_results_of_a_policy_are_detected(kind: str, said: str) -> None:
    policy = own(f"Nonsense(kind={kind!r})")
    state = policy.init([A, B])
    if said.startswith("select"):
        with pytest.raises(PolicyFailed, match=said):
            policy.select(state, Query(), (A, B))
    else:
        with pytest.raises(PolicyFailed, match=said):
            policy.combine(state, {A: Prediction(1)}, (B,))


def test_the_log_has_the_first_traceback_and_later_every_nth(
    caplog: pytest.LogCaptureFixture,
) -> None:
    policy = own("Learns(fails='observe')")
    policy.failures._count = iter(range(1, 10**6))
    with caplog.at_level(logging.ERROR):
        for _ in range(LOGGED_EVERY + 1):
            policy.observe(0, SEEN)
    assert len(caplog.records) == 2
    assert "observe failed (1 times so far)" in caplog.text
    assert "ZeroDivisionError" in caplog.text
    assert f"({LOGGED_EVERY + 1} times so far)" in caplog.text


@pytest.mark.parametrize("kind", ["text", "nobody", "absent", "nan", "truth"])
def test_invalid_decision_is_refused(kind: str) -> None:
    view = View((A,), {}, (), (A,), 0.0, 20.0)
    with pytest.raises((TypeError, ValueError), match="decide"):
        check_decision(
            user_defined_decider(f"user_classes:SaysNonsense(kind={kind!r})").decide(view), view
        )
