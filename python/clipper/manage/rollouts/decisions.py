"""Decisions about rollouts: the next step, from a record, what was counted, and the time. Nothing
here acts; rolling.py carries a step out.

    begin -> stage 0 --(held, and every guard holds)--> stage 1 -> ... -> the last --> promoted
                  \\______________ a guard is broken: reverted; the ground is gone: aborted _______/

Growing takes time (`hold_s`) and evidence (each guard has enough observations to hold); shrinking
takes evidence alone, which of a clear regression is a handful of answers. The error rate is that of
the whole rollout: it is shared out over stages and guards, so that a version that keeps to its
guards is reverted with at most that probability, however long it takes. A paused rollout does not
grow. It is reverted all the same.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import Final, Literal

import msgspec

from clipper.catalog.view import Rollout
from clipper.clock import seconds_in
from clipper.errors import InvalidInput
from clipper.serving.rollout.guards import Figures, Guard, Verdict, guards_in

STAGES: Final = (0.05, 0.25, 0.5, 1.0)
GUARD: Final = "error<1%"
HOLD_S: Final = 60.0
HOLD_S_MAX: Final = 30 * 86_400.0
ERROR_RATE: Final = 0.05
_STAGES_MAX: Final = 20


class Step(msgspec.Struct, frozen=True):
    """The next step of a rollout. kind: stay, or what becomes of the record.  reason: of it, for a
    person.  verdicts: of the guards, in their order."""

    kind: Literal["stay", "advance", "promote", "revert", "abort"]
    reason: str
    verdicts: tuple[Verdict, ...] = ()


def decide(rollout: Rollout, figures: Figures, held_s: float, gone: str = "") -> Step:
    """Return the next step of a rollout.

    held_s: how long this server has counted the figures of the stage, by the monotonic clock; the
    stamps of the record are for people. gone: why the rollout cannot go on, if so.
    """
    if not rollout.is_open:
        return Step("stay", f"it is {rollout.state}")
    if gone:
        return Step("abort", gone)
    guards = guards_in(rollout.guard)
    verdicts = verdicts_of(rollout, guards, figures)
    broken = [
        f"{verdict.guard} is broken: {verdict.reason}"
        for verdict in verdicts
        if verdict.outcome == "broken"
    ]
    if broken:
        return Step("revert", "; ".join(broken), verdicts)
    if rollout.state == "paused":
        return Step("stay", "it is paused", verdicts)
    left_s = rollout.hold_s - held_s
    if left_s > 0:
        return Step("stay", f"it is held for {left_s:.0f} s more", verdicts)
    waiting = [
        f"{verdict.guard} is undecided: {verdict.reason}"
        for verdict in verdicts
        if verdict.outcome == "undecided"
    ]
    if waiting or not figures.new.answers:
        return Step(
            "stay", "; ".join(waiting) or "the new version has answered nothing yet", verdicts
        )
    reason = "; ".join(verdict.reason for verdict in verdicts) or f"{figures.new.answers} answers"
    last = rollout.stage == len(rollout.stages) - 1
    return Step("promote" if last else "advance", reason, verdicts)


def verdicts_of(rollout: Rollout, guards: Sequence[Guard], figures: Figures) -> tuple[Verdict, ...]:
    """Return the verdict of each guard; comparisons are left out where no query sees the old
    version.
    """
    rate = rollout.error_rate / (len(rollout.stages) * max(1, len(guards)))
    judged = [guard for guard in guards if not (guard.beside and rollout.share >= 1.0)]
    return tuple([guard.judge(figures, rate) for guard in judged])


def moved(rollout: Rollout, step: Step) -> Rollout:
    """Return the record after a step."""
    replace = msgspec.structs.replace
    if step.kind == "advance":
        return replace(rollout, stage=rollout.stage + 1, reason=step.reason)
    state = {"promote": "promoted", "revert": "reverted", "abort": "aborted"}.get(step.kind)
    return rollout if state is None else replace(rollout, state=state, reason=step.reason)


# -- what a person writes


def stages_of(
    canary: str | float | None, stages: str | Sequence[str | float] | None
) -> tuple[float, ...]:
    """Return the shares, ascending. Texts are per cent ("5%", "5,25,50,100"), numbers are shares
    (0.05). Without stages, those of STAGES above the first."""
    first = () if canary is None else (_share(canary),)
    each: tuple[float, ...]
    if stages is None:
        each = tuple(share for share in STAGES if not first or share > first[0])
    else:
        parts = stages.split(",") if isinstance(stages, str) else stages
        each = tuple(_share(part) for part in parts)
    found = first + (each[1:] if first and each and each[0] == first[0] else each)
    if not 1 <= len(found) <= _STAGES_MAX or any(one >= other for one, other in pairwise(found)):
        shares = ", ".join(f"{share:.4g}" for share in found) or "none"
        raise InvalidInput(
            f"stages of a rollout grow, and are at most {_STAGES_MAX}; these: {shares}.",
            hint="Write 5,25,50,100.",
        )
    return found


def _share(value: str | float) -> float:
    try:
        share = (
            float(value.strip().removesuffix("%")) / 100 if isinstance(value, str) else float(value)
        )
    except (TypeError, ValueError):
        share = 0.0
    if not 0 < share <= 1:
        raise InvalidInput(
            f"{value!r} is not a share of the queries.", hint='Write "5%", or 0.05 for a number.'
        )
    return share


def seconds_of(value: str | float) -> float:
    """Return the seconds of 60, "60s", "5m" or "1h"."""
    try:
        seconds = seconds_in(value) if isinstance(value, str) else float(value)
    except (TypeError, ValueError):
        seconds = -1.0
    if not 0 <= seconds <= HOLD_S_MAX:
        raise InvalidInput(
            f"{value!r} is not a time to hold a stage.", hint="Write 60s, 5m or 1h: up to 30 days."
        )
    return seconds


def checked_guard(text: str) -> str:
    """Return a guard as it is recorded. Raises InvalidInput."""
    guards = guards_in(text)
    if len({(guard.metric, guard.beside) for guard in guards}) < len(guards):
        raise InvalidInput(f"guards {text!r}: one of them is given twice.")
    return ", ".join(guard.text for guard in guards)


def checked_rate(rate: float) -> float:
    """Check an error rate. Raises InvalidInput."""
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not 1e-9 <= rate <= 0.5:
        raise InvalidInput(f"error_rate={rate!r}: a probability up to 0.5, as 0.05.")
    return float(rate)
