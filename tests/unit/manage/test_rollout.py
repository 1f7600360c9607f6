"""Steps of a rollout: records and figures in, a step out, with a clock that the test sets."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from clipper.catalog.view import Rollout
from clipper.errors import InvalidInput
from clipper.manage.rollouts.decisions import (
    STAGES,
    checked_guard,
    checked_rate,
    decide,
    moved,
    seconds_of,
    stages_of,
)
from clipper.serving.rollout.guards import Counts, Figures
from clipper.types import VersionedModel

S = 1_000_000
ONE, TWO = VersionedModel("svm", 1), VersionedModel("svm", 2)
NOTHING = Figures(Counts(), Counts())
GOOD = Figures(
    Counts(5000, 0, {20_000: 0}, feedbacks=5000, reward=4900),
    Counts(5000, feedbacks=5000, reward=4900),
    5000,
    5000,
)
BAD = Figures(Counts(50, 40, {20_000: 50}), Counts(5000))


def rollout(**changes: object) -> Rollout:
    begun = Rollout(
        "digits",
        TWO,
        VersionedModel("svm"),
        ONE,
        STAGES,
        60.0,
        "p99<20ms, error<1%, reward>=-5%",
        0.05,
    )
    return msgspec.structs.replace(begun, **changes)  # type: ignore[arg-type]


def test_it_grows_when_its_time_is_over_and_its_guards_hold() -> None:
    now = rollout()
    assert decide(now, GOOD, 59).reason == "it is held for 1 s more"
    step = decide(now, GOOD, 60)
    assert step.kind == "advance"
    assert [verdict.outcome for verdict in step.verdicts] == ["holds"] * 3
    assert moved(now, step).share == 0.25
    stamped = rollout(stage_us=1, began_us=1)  # by a clock of another host, which may jump
    assert decide(stamped, GOOD, 59).kind == "stay"


def test_too_few_observations_never_promote() -> None:
    step = decide(rollout(), Figures(Counts(20, 0, {20_000: 0}), Counts(400)), 10**6)
    assert step.kind == "stay"
    assert step.reason.startswith(
        "p99<20ms is undecided: 0 of 20 answers took longer than 20 ms; error<1% is undecided"
    )
    assert (
        decide(rollout(guard=""), NOTHING, 10**6).reason
        == "the new version has answered nothing yet"
    )


def test_a_broken_guard_reverts_at_once_and_gives_the_reason() -> None:
    step = decide(rollout(), BAD, 1)
    assert step.kind == "revert"
    assert "error<1% is broken: 40 of 50 answers were the default" in step.reason
    over = moved(rollout(), step)
    assert (over.state, over.share, over.reason) == ("reverted", 0.0, step.reason)
    assert decide(over, BAD, 2).kind == "stay"


def test_a_paused_rollout_keeps_its_share_and_can_be_reverted() -> None:
    paused = rollout(state="paused")
    assert decide(paused, GOOD, 10**6).reason == "it is paused"
    assert decide(paused, BAD, 1).kind == "revert"


def test_the_last_stage_promotes_and_compares_with_no_other_version() -> None:
    last = rollout(stage=3)
    alone = Figures(Counts(5000, 0, {20_000: 0}), Counts())
    step = decide(last, alone, 60)
    assert (step.kind, len(step.verdicts)) == ("promote", 2)
    assert (moved(last, step).state, moved(last, step).share) == ("promoted", 1.0)


def test_a_rollout_without_its_model_ends() -> None:
    step = decide(rollout(), GOOD, 60, "'svm' is svm:3 now")
    assert moved(rollout(), step).state == "aborted"
    assert step.reason == "'svm' is svm:3 now"


@st.composite
def checks(draw: st.DrawFn) -> list[tuple[int, Figures]]:
    """Draw times and figures as they may come, good and bad."""
    found, now = [], 0
    for _ in range(draw(st.integers(1, 30))):
        now += draw(st.integers(0, 90)) * S
        n = draw(st.integers(0, 3000))
        defaults = draw(st.integers(0, n))
        feedback_count = draw(st.integers(0, n))
        new = Counts(
            n,
            defaults,
            {20_000: draw(st.integers(0, n))},
            float(feedback_count),
            float(draw(st.integers(0, feedback_count))),
        )
        found.append(
            (
                now,
                Figures(
                    new,
                    Counts(n, feedbacks=float(feedback_count), reward=feedback_count / 2),
                    n,
                    draw(st.integers(0, n)),
                ),
            )
        )
    return found


@given(
    checks(), st.sampled_from(["", "error<1%", "p99<20ms, error<5%, reward>=-5%, agreement>90%"])
)
def test_a_rollout_advances_stage_by_stage_for_any_figures(
    each: list[tuple[int, Figures]], guard: str
) -> None:
    """The share only grows, one stage at a time, each held for its time; once over, it is over."""
    now = rollout(guard=guard)
    for time_us, figures in each:
        held_s = (time_us - now.stage_us) / S
        step = decide(now, figures, held_s)
        after = moved(now, step)
        assert decide(now, figures, held_s) == step, "pure"
        if not now.is_open:
            assert after == now
        elif step.kind in ("advance", "promote"):
            assert held_s >= 60
            assert all(verdict.outcome == "holds" for verdict in step.verdicts)
            assert after.stage == now.stage + (step.kind == "advance")
            assert (after.state == "promoted") == (now.stage == len(STAGES) - 1)
        elif step.kind == "revert":
            assert any(verdict.outcome == "broken" for verdict in step.verdicts)
            assert after.share == 0.0
        else:
            assert after == now
        now = msgspec.structs.replace(after, stage_us=time_us) if after != now else now


def test_what_a_person_writes() -> None:
    assert stages_of(None, None) == STAGES
    assert stages_of("5%", "5,25,50,100") == STAGES
    assert stages_of("10%", None) == (0.1, 0.25, 0.5, 1.0)
    assert stages_of(0.01, [0.5, 1]) == (0.01, 0.5, 1.0)
    assert stages_of(None, "100") == (1.0,)
    assert [seconds_of(text) for text in ("60s", "5m", "1h", "0.5s", "200ms", 7, "2d", "30")] == [
        60, 300, 3600, 0.5, 0.2, 7, 172_800, 30,
    ]  # fmt: skip
    assert checked_guard("error<1%,p99<20ms") == "error<1%, p99<20ms"
    for wrong in (
        ("5%", "3,50"),
        (None, "50,25"),
        (None, ""),
        (None, "0,100"),
        (None, "50,101"),
        ("x", None),
        (None, []),
    ):
        with pytest.raises(InvalidInput):
            stages_of(*wrong)  # type: ignore[arg-type]
    for time in ("soon", "-1s", "31d", float("nan"), None):
        with pytest.raises(InvalidInput):
            seconds_of(time)  # type: ignore[arg-type]
    for rate in (0, 0.6, True, "x"):
        with pytest.raises(InvalidInput):
            checked_rate(rate)  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="twice"):
        checked_guard("error<1%, error<2%")
