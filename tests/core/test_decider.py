"""The rules of deciders, compared with a slow reference model; an enumeration shows that an early
answer is always the one of waiting for all tasks."""

import itertools
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from clipper_core.results.decider import Decider, Rule, Ruling, Step, Vote, VoteState
from clipper_core.runtime.status import Status, StatusError
from tests.sizes import sized

NEVER = math.inf
SLO_US = 1_000
VOTING = (Rule.QUORUM, Rule.WEIGHTED)
PICKING_FIRST = (Rule.FIRST, Rule.TIED, Rule.HEDGED, Rule.CASCADE)
UNSUBMITTED, OUTSTANDING, ARRIVED, FAILED = (
    VoteState.UNSUBMITTED,
    VoteState.OUTSTANDING,
    VoteState.ARRIVED,
    VoteState.FAILED,
)


# -- the twin: everything by sets and sorting, nothing clever


class Twin:
    def __init__(self, steps: Sequence[Step]) -> None:
        self.steps = steps

    def decide(self, votes: Sequence[Vote], elapsed: int, slo: float) -> tuple[Any, ...]:
        """Return (kind, step, mask, until, winner), as in Ruling."""
        ends = [min(step.until_us or slo, slo) for step in self.steps]
        slo = ends[-1]
        over = elapsed >= slo
        come = {i for i, vote in enumerate(votes) if comes(vote, slo)}
        due = {
            i
            for i, vote in enumerate(votes)
            if vote.state == UNSUBMITTED and start_of(vote) <= elapsed
        }
        planned = [
            start_of(vote)
            for vote in votes
            if vote.state == UNSUBMITTED and elapsed < start_of(vote) < NEVER
        ]
        now = next((s for s, end in enumerate(ends[:-1]) if elapsed < end), len(ends) - 1)
        for s in range(now, len(self.steps)):
            last = s == len(self.steps) - 1
            found = self.step(self.steps[s], votes, slo, last, not over)
            if found is not None:
                return (found[0], s, bits(found[1]), None, found[2])
            if come and not over:
                if due:
                    return ("submit", s, bits(due), None, None)
                until = min([ends[s], *planned])
                return ("wait", s, 0, None if until == NEVER else until, None)
        used, winner = self.leftover(self.steps[-1], votes, slo)
        return ("answer", len(self.steps) - 1, bits(used), None, winner)

    def step(
        self, step: Step, votes: Sequence[Vote], slo: float, last: bool, may_submit: bool
    ) -> Any:
        considered = [i for i in range(len(votes)) if step.accept is None or step.accept >> i & 1]
        arrived = [i for i in considered if votes[i].state == ARRIVED]
        coming = [i for i in considered if comes(votes[i], slo)]
        sure = [
            i
            for i in arrived
            if step.confidence_min <= 0 or (votes[i].confidence or 0) >= step.confidence_min
        ]
        if step.rule == Rule.ALL:
            return ("answer", arrived, None) if arrived and not coming else None
        if step.rule in VOTING:
            return self.vote(step, votes, considered, arrived, coming, last)
        if step.rule == Rule.BEST:
            return (
                ("answer", sure[:1], sure[0])
                if sure and not any(i < sure[0] for i in coming)
                else None
            )
        if step.rule == Rule.SUREST:
            best = max(arrived, key=lambda i: confidence(votes[i]), default=None)
            if best is None or best not in sure:
                return None
            certain = confidence(votes[best]) == 1 and not any(i < best for i in coming)
            return ("answer", [best], best) if certain or not coming else None
        if step.rule in (Rule.MEAN, Rule.MEDIAN):
            return self.numbers(step, votes, arrived, coming)
        if step.rule == Rule.FLOOR:
            if step.which in arrived:
                return ("answer", [step.which], step.which)
            ask = may_submit and step.which < len(votes) and votes[step.which].state == UNSUBMITTED
            return ("submit", [step.which], None) if ask else None
        if sure:
            first = sure[0] if step.rule == Rule.ROW else min(sure, key=lambda i: votes[i].order)
            return ("answer", [first], first)
        waiting = any(votes[i].state == OUTSTANDING for i in considered)
        left = [i for i in considered if votes[i].state == UNSUBMITTED]
        if step.rule in (Rule.CASCADE, Rule.HEDGED) and may_submit and not waiting and left:
            return ("submit", left[:1], None)
        return None

    def vote(
        self,
        step: Step,
        votes: Sequence[Vote],
        considered: list[int],
        arrived: list[int],
        coming: list[int],
        last: bool,
    ) -> Any:
        weight = (lambda i: votes[i].weight) if step.rule == Rule.WEIGHTED else (lambda i: 1.0)
        total = sum(weight(i) for i in considered if votes[i].state != UNSUBMITTED or i in coming)
        if not arrived:
            return None
        winner, heavy = plurality(votes, arrived, weight)
        rest = max([w for key, w in heavy.items() if key != key_of(votes[winner])], default=0.0)
        top = heavy[key_of(votes[winner])]
        if top < step.confidence_min * total or (
            coming and top - rest <= sum(map(weight, coming)) + 1e-9 * total
        ):
            return None
        alike = sum(key_of(votes[i]) == key_of(votes[winner]) for i in arrived)
        if not last and (alike < step.need if step.need else 2 * top <= total * (1 + 1e-9)):
            return None
        return ("answer", arrived, winner)

    def numbers(
        self, step: Step, votes: Sequence[Vote], arrived: list[int], coming: list[int]
    ) -> Any:
        numbered = [i for i in arrived if isinstance(votes[i].value, int | float)]
        if len(numbered) < step.need or not arrived:
            return None
        if not coming:
            return ("answer", numbered or arrived, None)
        if not numbered:
            return None
        values = [float(votes[i].value) for i in numbered]
        close = step.need > 1 and step.tolerance > 0 and max(values) - min(values) <= step.tolerance
        here = combined(step, votes, numbered, {})
        ends = [min(step.low, *values), max(step.high, *values)]
        if step.rule == Rule.MEAN and sum(votes[i].weight for i in coming) <= 0:
            return ("answer", numbered, None) if close else None
        fixed = all(
            abs(combined(step, votes, numbered, dict.fromkeys(coming, end)) - here)
            <= step.tolerance
            for end in ends
        )
        return ("answer", numbered, None) if close or fixed else None

    def leftover(
        self, step: Step, votes: Sequence[Vote], slo: float
    ) -> tuple[list[int], int | None]:
        considered = [i for i in range(len(votes)) if step.accept is None or step.accept >> i & 1]
        arrived = [i for i in considered if votes[i].state == ARRIVED]
        sure = [
            i
            for i in arrived
            if step.confidence_min <= 0 or (votes[i].confidence or 0) >= step.confidence_min
        ] or arrived
        if not arrived or (step.rule == Rule.FLOOR and step.which not in arrived):
            return [], None
        if step.rule == Rule.ALL:
            return arrived, None
        if step.rule in VOTING:
            weight = (lambda i: votes[i].weight) if step.rule == Rule.WEIGHTED else (lambda i: 1.0)
            return arrived, plurality(votes, arrived, weight)[0]
        if step.rule in (Rule.MEAN, Rule.MEDIAN):
            return [i for i in arrived if isinstance(votes[i].value, int | float)] or arrived, None
        if step.rule == Rule.FLOOR:
            one = step.which
        elif step.rule in (Rule.BEST, Rule.ROW):
            one = sure[0]
        elif step.rule == Rule.SUREST:
            one = max(arrived, key=lambda i: (confidence(votes[i]), -i))
        elif step.rule == Rule.CASCADE:
            one = max(arrived, key=lambda i: (confidence(votes[i]), i))
        else:
            one = min(sure, key=lambda i: votes[i].order)
        return [one], one


def start_of(vote: Vote) -> float:
    return NEVER if vote.start_us is None else vote.start_us


def comes(vote: Vote, slo: float) -> bool:
    return vote.state == OUTSTANDING or (vote.state == UNSUBMITTED and start_of(vote) < slo)


def confidence(vote: Vote) -> float:
    return 0.5 if vote.confidence is None else vote.confidence


def key_of(vote: Vote) -> tuple[type, Any]:
    return type(vote.value), vote.value


def plurality(
    votes: Sequence[Vote], arrived: list[int], weight: Callable[[int], float]
) -> tuple[int, dict[Any, float]]:
    """Return the first task with the winning value, and the weights of all values, by the rule of
    clipper.selection.votes."""
    heavy: dict[Any, float] = {}
    sure: dict[Any, float] = {}
    for i in arrived:
        key = key_of(votes[i])
        heavy[key] = heavy.get(key, 0.0) + weight(i)
        sure[key] = sure.get(key, 0.0) + confidence(votes[i])
    tied = [key for key in heavy if heavy[key] >= max(heavy.values()) * (1 - 1e-12)]
    winner = max(tied, key=lambda key: sure[key])
    return next(i for i in arrived if key_of(votes[i]) == winner), heavy


def combined(
    step: Step, votes: Sequence[Vote], arrived: list[int], more: dict[int, float]
) -> float:
    values = [(float(votes[i].value), votes[i].weight) for i in arrived] + [
        (x, votes[i].weight) for i, x in more.items()
    ]
    if step.rule == Rule.MEDIAN:
        ordered = sorted(x for x, _ in values)
        low, high = ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2]
        return low if low == high else low / 2 + high / 2
    if sum(weight for _, weight in values) <= 0:
        return statistics.fmean(x for x, _ in values)
    return sum(x * weight for x, weight in values if weight) / sum(weight for _, weight in values)


def bits(tasks: Any) -> int:
    return sum(1 << i for i in set(tasks))


# -- the twin agrees


def random_step(rng: random.Random, n: int, until: int) -> Step:
    which = rng.randrange(n)
    rule = rng.choice(list(Rule))
    low, high = rng.choice([(-math.inf, math.inf), (0.0, 3.0), (1.0, 1.0)])
    accept = rng.choice([None, None, rng.randrange(1, 1 << n)])
    if rule == Rule.FLOOR and accept is not None:
        accept |= 1 << which
    return Step(
        rule,
        until,
        accept,
        rng.choice([0.0, 0.0, 0.5, 0.9]),
        rng.choice([0, 0, 1, 2, 3]),
        rng.choice([0.0, 0.25, 1.0]),
        which,
        low,
        high,
    )


def random_votes(rng: random.Random, n: int) -> list[Vote]:
    values = rng.choice([[0, 1], [0, 1, 2], ["a", "b"], [0.5, 1.0, 2.5], [True, 1, 1.0, "1", b"1"]])
    orders = rng.sample(range(n), n)
    return [
        Vote(
            rng.choice(list(VoteState)),
            rng.choice(values),
            rng.choice([None, 0.0, 0.5, 0.75, 1.0]),
            rng.choice([0.0, 0.25, 1.0, 1.0, 3.0]),
            rng.choice([None, 0, 100, 600, 5_000]),
            orders[i],
        )
        for i in range(n)
    ]


@pytest.mark.parametrize("seed", range(40))
def test_it_rules_as_a_slow_twin_does(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        n = rng.randrange(1, 8)
        ends = sorted(rng.sample(range(50, 900), rng.randrange(4)))
        steps = [random_step(rng, n, end) for end in [*ends, rng.choice([0, 950])]]
        votes = random_votes(rng, n)
        elapsed, slo = (
            rng.choice([0, 40, 300, 899, 949, 999, 1_000, 2_000]),
            rng.choice([SLO_US, 500, None]),
        )
        got = Decider(steps).decide(votes, elapsed, slo)
        want = Twin(steps).decide(votes, elapsed, NEVER if slo is None else slo)
        assert tuple(got) == want, (steps, votes, elapsed, slo)


# -- early never changes the outcome


def outcome(ruling: Ruling, votes: Sequence[Vote], step: Step) -> Any:
    """Return the value that an answer stands for: a key, a combined value, or the models used."""
    assert ruling.kind == "answer"
    used = [i for i in range(len(votes)) if ruling.mask >> i & 1]
    if step.rule in VOTING:
        return None if ruling.winner is None else key_of(votes[ruling.winner])
    if step.rule in (Rule.MEAN, Rule.MEDIAN):
        return combined(step, votes, used, {}) if used else None
    return tuple(used)


def ends_of(n: int, alphabet: Sequence[Any]) -> Iterator[list[Any]]:
    """Return every combination of ends of n tasks."""
    return (list(each) for each in itertools.product(alphabet, repeat=n))


def votes_after(
    what: Sequence[Any], order: Sequence[int], upto: int, weights: Sequence[float]
) -> list[Vote]:
    """Return the votes when the first `upto` models of `order` have ended and the others have not.

    what: None for a failure, or (value, confidence), by model.
    """
    votes = []
    for i, end in enumerate(what):
        at = order.index(i)
        if at >= upto:
            votes.append(Vote(OUTSTANDING, weight=weights[i]))
        elif end is None:
            votes.append(Vote(FAILED, weight=weights[i]))
        else:
            votes.append(Vote(ARRIVED, end[0], end[1], weights[i], 0, at))
    return votes


LABELS = [None, ("a", 0.9), ("a", None), ("b", 0.2), ("c", 1.0)]
NUMBERS = [None, (0.0, None), (1.0, 0.5), (4.0, 1.0)]
SHAPES: list[tuple[Step, Sequence[Any], int]] = [
    (Step(Rule.ALL), LABELS, 3),
    (Step(Rule.FIRST), LABELS, 4),
    (Step(Rule.FIRST, confidence_min=0.5), LABELS, 4),
    (Step(Rule.QUORUM), LABELS[:4], 4),
    (Step(Rule.QUORUM), [None, ("a", 0.3), ("b", None)], 5),
    (Step(Rule.QUORUM, need=2), LABELS[:4], 4),
    (Step(Rule.QUORUM, confidence_min=0.5), LABELS[:4], 4),
    (Step(Rule.WEIGHTED), LABELS[:4], 4),
    (Step(Rule.WEIGHTED), [None, ("a", 0.3), ("b", None)], 5),
    (Step(Rule.WEIGHTED, confidence_min=0.75), [None, ("a", 0.3), ("b", None)], 5),
    (Step(Rule.BEST), LABELS[:3], 5),
    (Step(Rule.BEST, confidence_min=0.5), LABELS, 4),
    (Step(Rule.SUREST), LABELS, 4),
    (Step(Rule.MEDIAN), NUMBERS, 4),
    (Step(Rule.MEDIAN), [None, (0.0, None), (1.0, None)], 5),
    (Step(Rule.MEDIAN, tolerance=1.0), NUMBERS, 4),
    (Step(Rule.MEAN, tolerance=0.5, low=0.0, high=4.0), NUMBERS, 4),
    (Step(Rule.MEAN, tolerance=1.5, low=0.0, high=4.0, need=1), NUMBERS, 4),
]


@pytest.mark.parametrize(
    ("step", "alphabet", "n"),
    SHAPES,
    ids=lambda each: repr(each)[:60] if isinstance(each, Step) else "",
)
@pytest.mark.parametrize("skewed", [False, True])
def test_an_early_answer_is_that_of_waiting_for_all(
    step: Step, alphabet: Sequence[Any], n: int, skewed: bool
) -> None:
    """An early answer equals the answer after all tasks have ended, for orders of arrival of all
    outcomes of n tasks.

    Five random orders of each are tried; in the full tier all.
    """
    decider, rng = Decider([step]), random.Random(n)
    weights = [1.0, 0.3, 0.3, 0.5, 0.1][:n] if skewed else [1.0] * n
    orders = list(itertools.permutations(range(n)))
    early = 0
    for what in ends_of(n, alphabet):
        for order in rng.sample(orders, sized(5, len(orders))):
            votes = votes_after(what, order, n, weights)
            want = outcome(decider.decide(votes, 1, SLO_US), votes, step)
            for upto in range(n):
                ruling = decider.decide(votes_after(what, order, upto, weights), 1, SLO_US)
                if ruling.kind == "answer":
                    early += 1
                    got = outcome(ruling, votes, step)
                    if step.rule in (Rule.MEAN, Rule.MEDIAN) and want is not None:
                        assert abs(got - want) <= step.tolerance + 1e-9, (what, order, upto)
                    else:
                        assert got == want, (what, order, upto)
                    break
    assert early > 0 or step.rule == Rule.ALL, "it never answers early"


@pytest.mark.parametrize("rule", [Rule.QUORUM, Rule.WEIGHTED])
@pytest.mark.parametrize("need", [0, 2, 3])
@pytest.mark.parametrize("share", [0.0, 0.6])
def test_a_step_that_others_follow_rules_early_only_on_what_it_would_have_ruled_late(
    rule: Rule, need: int, share: float
) -> None:
    """The first of two steps decides early only what it would decide after all have ended."""
    n, weights = 5, [1.0, 0.7, 0.7, 0.5, 0.2]
    decider = Decider([Step(rule, 500, None, share, need), Step(Rule.BEST)])
    rng = random.Random(need)
    orders = list(itertools.permutations(range(n)))
    kinds = set()
    for what in ends_of(n, [None, ("a", 0.3), ("b", None)]):
        for order in rng.sample(orders, sized(6, 16)):
            votes = votes_after(what, order, n, weights)
            late = decider.decide(votes, 1, SLO_US)
            for upto in range(n):
                early = decider.decide(votes_after(what, order, upto, weights), 1, SLO_US)
                if early.kind == "answer":
                    assert early.step == late.step == 0, (what, order, upto)
                    assert key_of(votes[early.winner or 0]) == key_of(votes[late.winner or 0]), (
                        what,
                        order,
                        upto,
                    )
                    kinds.add("early")
            kinds.add(late.step)
    assert kinds == {0, 1, "early"}


# -- single rules, as one would say them


def arrived(
    value: Any, order: int = 0, confidence: float | None = None, weight: float = 1.0
) -> Vote:
    return Vote(ARRIVED, value, confidence, weight, 0, order)


WAITING = Vote(OUTSTANDING)


def test_a_row_of_a_table_takes_the_best_ranked_that_is_there() -> None:
    table = Decider([Step(Rule.ROW, 10, accept=0b001), Step(Rule.ROW)])
    late_first = [WAITING, arrived(1, order=1), arrived(2, order=0)]
    assert table.decide(late_first, 5, SLO_US).kind == "wait"
    assert table.decide(late_first, 10, SLO_US).winner == 1, "not the one that came first"
    assert Decider([Step(Rule.FIRST)]).decide(late_first, 10, SLO_US).winner == 2


def test_a_majority_is_decided_when_no_other_value_can_win() -> None:
    majority = Decider([Step(Rule.QUORUM)])
    assert majority.decide([arrived("a"), arrived("b"), WAITING], 5).kind == "wait"
    assert majority.decide([arrived("a"), arrived("a"), WAITING], 5).mask == 0b11
    assert majority.decide([arrived("a"), arrived("a"), WAITING, WAITING], 5).kind == "wait", (
        "a tie is still possible"
    )


def test_a_schedule_goes_from_step_to_step() -> None:
    decider = Decider(
        [Step(Rule.QUORUM, 12_000), Step(Rule.BEST, 18_000), Step(Rule.FLOOR, which=2)]
    )
    votes = [WAITING, arrived("a"), WAITING]
    assert decider.decide(votes, 11_999, 20_000)[:4] == ("wait", 0, 0, 12_000)
    assert decider.decide(votes, 12_000, 20_000)[:4] == ("wait", 1, 0, 18_000)
    assert decider.decide([Vote(FAILED), *votes[1:]], 12_000, 20_000)[:3] == ("answer", 1, 0b010)
    assert decider.decide(votes, 18_000, 20_000)[:4] == ("wait", 2, 0, 20_000)
    assert decider.decide([WAITING, WAITING, arrived("c")], 18_000, 20_000)[:3] == (
        "answer",
        2,
        0b100,
    )
    assert decider.decide(votes, 20_000, 20_000)[:3] == ("answer", 2, 0), (
        "the floor has not come: nothing"
    )


def test_when_nothing_is_on_its_way_the_remaining_steps_do_not_wait() -> None:
    decider = Decider([Step(Rule.QUORUM, 12_000), Step(Rule.FIRST)])
    assert decider.decide([arrived("a", 1), arrived("b", 0), Vote(FAILED)], 10, 20_000)[:3] == (
        "answer",
        1,
        0b010,
    )
    assert decider.decide([Vote(FAILED)] * 3, 10, 20_000)[:3] == ("answer", 1, 0)


def test_a_cascade_requests_the_next_model_only_while_time_remains() -> None:
    decider = Decider([Step(Rule.CASCADE, confidence_min=0.8)])
    later = Vote(UNSUBMITTED, start_us=None)
    assert decider.decide([later, later], 0, 100)[:3] == ("submit", 0, 0b01)
    assert decider.decide([arrived("a", confidence=0.5), later], 10, 100)[:3] == ("submit", 0, 0b10)
    assert decider.decide([arrived("a", confidence=0.8), later], 10, 100)[:3] == ("answer", 0, 0b01)
    assert decider.decide([arrived("a", confidence=0.5), later], 100, 100)[:3] == (
        "answer",
        0,
        0b01,
    )
    assert (
        decider.decide([arrived("a", confidence=0.5), arrived("b", 1, 0.5)], 10, 100).mask == 0b10
    ), "of equals the later"


def test_a_hedge_is_queried_in_time_or_when_all_have_failed() -> None:
    decider = Decider([Step(Rule.HEDGED)])
    hedge = Vote(UNSUBMITTED, start_us=30)
    assert decider.decide([WAITING, hedge], 0, 100)[:4] == ("wait", 0, 0, 30)
    assert decider.decide([WAITING, hedge], 30, 100)[:3] == ("submit", 0, 0b10)
    assert decider.decide([Vote(FAILED), hedge], 5, 100)[:3] == ("submit", 0, 0b10)
    assert decider.decide([arrived(1), hedge], 5, 100)[:3] == ("answer", 0, 0b01)


def test_a_floor_that_was_not_queried_is_queried() -> None:
    decider = Decider([Step(Rule.FIRST, 50, accept=0b01), Step(Rule.FLOOR, which=1)])
    assert decider.decide([WAITING, Vote(UNSUBMITTED, start_us=None)], 50, 100)[:3] == (
        "submit",
        1,
        0b10,
    )


def test_close_numbers_stand_for_all_only_where_that_was_configured() -> None:
    votes = [arrived(1.0), arrived(1.1, 1), WAITING]
    assert Decider([Step(Rule.MEAN, need=2, tolerance=0.2)]).decide(votes, 1).mask == 0b011
    assert Decider([Step(Rule.MEAN, need=2)]).decide(votes, 1).kind == "wait"
    assert Decider([Step(Rule.MEAN, need=1, tolerance=0.2)]).decide(votes, 1).kind == "wait"
    assert Decider([Step(Rule.MEAN, need=2, tolerance=0.05)]).decide(votes, 1).kind == "wait"


# -- what is refused


@pytest.mark.parametrize(
    ("steps", "why"),
    [
        ([], "1 to 16 steps, not 0"),
        ([Step(Rule.ALL, i + 1) for i in range(17)], "1 to 16 steps, not 17"),
        ([(99,)], "no rule has the number 99"),
        (
            [Step(Rule.ALL, 5), Step(Rule.ALL, 5)],
            "step 1 of the decider: steps end one after another",
        ),
        ([Step(Rule.ALL), Step(Rule.ALL, 5)], "at the deadline"),
        ([Step(Rule.ALL, accept=0)], "accept is a set of tasks"),
        ([Step(Rule.ALL, accept=1 << 64)], "accept is a set of tasks"),
        ([Step(Rule.QUORUM, need=65)], "QUORUM: need and which count tasks"),
        ([Step(Rule.FLOOR, which=64)], "FLOOR: need and which count tasks"),
        ([Step(Rule.FLOOR, which=2, accept=1)], "which accept leaves out"),
        ([Step(Rule.FIRST, confidence_min=1.5)], "FIRST: confidence_min lies between 0 and 1"),
        ([Step(Rule.FIRST, confidence_min=math.nan)], "confidence_min lies between 0 and 1"),
        ([Step(Rule.MEAN, tolerance=-1.0)], "tolerance is from 0 on"),
        ([Step(Rule.MEAN, low=2.0, high=1.0)], "low below high"),
        ([Step(Rule.HEDGED, extra=2.0)], "extra is a share of the queries"),
        ([Step(Rule.ALL, -1)], "until_us is a time after receipt"),
    ],
)
def test_what_is_no_schedule_is_refused_with_the_reason(steps: Any, why: str) -> None:
    with pytest.raises(StatusError, match=why) as caught:
        Decider(steps)
    assert caught.value.status == Status.BAD_INPUT


def test_steps_may_be_given_in_any_form() -> None:
    steps = (Step(Rule.FIRST, 5), Step(Rule.ALL))
    assert Decider([(Rule.FIRST, 5), {"rule": Rule.ALL}]).steps == steps
    assert repr(Decider(steps)) == "<Decider FIRST, ALL>"


@pytest.mark.parametrize("n", [0, 65])
def test_a_decider_receives_up_to_64_tasks(n: int) -> None:
    with pytest.raises(StatusError, match=f"not {n}"):
        Decider([Step(Rule.ALL)]).decide([WAITING] * n, 0)
    assert Decider([Step(Rule.QUORUM)]).decide([arrived("a")] * 64, 0).mask == (1 << 64) - 1
