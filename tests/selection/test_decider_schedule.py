"""The forms in which deciders may be written, and the errors of those that may not."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper.errors import InvalidInput
from clipper.selection.deciders.schedule import RULES, DeciderStep, Schedule, parse_decider

NAMES = st.sampled_from(["svm", "forest:2", "a.b-c"])


def refused(text: object) -> str:
    with pytest.raises(InvalidInput) as caught:
        parse_decider(text)  # type: ignore[arg-type]
    return str(caught.value)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("all", [DeciderStep("all")]),
        ("first(0.5)", [DeciderStep("first", confidence=0.5)]),
        ("majority", [DeciderStep("majority")]),
        ("quorum(3)", [DeciderStep("quorum", need=3)]),
        ("weighted", [DeciderStep("weighted")]),
        ("best_quality(confidence=0.8)", [DeciderStep("best_quality", confidence=0.8)]),
        ("surest", [DeciderStep("surest")]),
        ("cascade(confidence=0.9)", [DeciderStep("cascade", confidence=0.9)]),
        ("hedged(after_ms=5, budget=0.1)", [DeciderStep("hedged", after_ms=5.0, budget=0.1)]),
        ("hedged", [DeciderStep("hedged", budget=0.05)]),
        ('hedged(after_ms="p95")', [DeciderStep("hedged", budget=0.05)]),
        ("tied", [DeciderStep("tied")]),
        ("mean(tolerance=0.1, need=2)", [DeciderStep("mean", tolerance=0.1, need=2)]),
        ("median(low=-1, high=1)", [DeciderStep("median", low=-1.0, high=1.0)]),
        (
            'guaranteed_time(floor="fast")',
            [DeciderStep("guaranteed_time", models=("fast",), margin_ms=1.0)],
        ),
        ("guaranteed_time", [DeciderStep("guaranteed_time", margin_ms=1.0)]),
        ("floor(fast:2)", [DeciderStep("floor", models=("fast:2",))]),
        ("first within 0.5 s", [DeciderStep("first", until_ms=500.0)]),
        (
            "majority within 12 ms, else best_quality within 18ms else floor(fast)",
            [
                DeciderStep("majority", until_ms=12.0),
                DeciderStep("best_quality", until_ms=18.0),
                DeciderStep("floor", models=("fast",)),
            ],
        ),
        (
            "table(0: svm ≥ .9; 10: svm, forest; 18: any)",
            [
                DeciderStep("row", until_ms=10.0, models=("svm",), confidence=0.9),
                DeciderStep("row", until_ms=18.0, models=("svm", "forest")),
                DeciderStep("row"),
            ],
        ),
    ],
)
def test_text_is_parsed_into_a_schedule(text: str, steps: list[DeciderStep]) -> None:
    schedule = parse_decider(text)
    assert schedule == Schedule(tuple(steps))
    assert parse_decider(str(schedule)) == schedule


def test_only_the_decider_all_waits_for_all() -> None:
    assert parse_decider(" all ").waits_for_all
    others = ("first", "all within 3 ms", "a.b:C", "all within 1 ms, else first")
    assert not any(parse_decider(text).waits_for_all for text in others)


def test_steps_have_names() -> None:
    names = [
        step.name
        for step in parse_decider(
            "quorum(2) within 1 ms, else majority within 2 ms, else floor(a)"
        ).steps
    ]
    assert names == ["quorum(2)", "majority", "floor(a)"]


def test_a_decider_lists_the_models_that_it_names() -> None:
    assert parse_decider("table(0: b; 1: b, a)").models == ("b", "a")
    assert parse_decider("majority within 1 ms, else guaranteed_time(floor=c)").models == ("c",)
    assert parse_decider("guaranteed_time(floor=c)").guaranteed == DeciderStep(
        "guaranteed_time", models=("c",), margin_ms=1.0
    )


def test_a_user_defined_decider_is_parsed() -> None:
    assert parse_decider("my.rules:Two(need=2)").own == "my.rules:Two(need=2)"
    assert str(parse_decider(" my:Two ")) == "my:Two"


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        (7, ["a decider is a text"]),
        (" ", ["a decider is a text"]),
        ("majorty", ["no rule 'majorty'", "did you mean 'majority'?", "Rules: all, first"]),
        ("quorum", ["'quorum'", "needs its need", "Write quorum(3)."]),
        ("cascade", ["needs its confidence", "cascade(confidence=0.9)"]),
        ("floor", ["Write floor(fast)."]),
        ("quorum(0)", ["need=0 of quorum", "a whole number between 1 and 64"]),
        ("quorum(2.5)", ["a whole number"]),
        (
            "first(confidnce=1)",
            ["no setting 'confidnce'", "did you mean 'confidence'?", "Its settings: confidence."],
        ),
        ("tied(3)", ["tied takes no bare '3'", "tied has no settings"]),
        ("first(0.5, 0.6)", ["takes no bare '0.6'"]),
        ("first(0.5, confidence=0.6)", ["given confidence twice"]),
        ("first(confidence=nan)", ["between 0 and 1"]),
        ("mean(tolerance=inf)", ["from 0"]),
        ("mean(low=inf)", ["a number that is finite"]),
        ("hedged(after_ms=x)", ["'p95': as measured"]),
        ("floor(FAST)", ["floor: bad model name 'FAST'"]),
        ("first(", ["cannot read 'first('"]),
        (
            "majority, else first",
            ["step 1, majority", "has no time limit", "Write majority within 12 ms, else ..."],
        ),
        ("majority within 12, else first", ["majority within '12'", "us, ms or s"]),
        ("majority within 0 ms, else first", ["not a time"]),
        ("majority within 1.2.3 ms", ["not a time"]),
        (
            "majority within 12 ms, else first within 3 ms",
            ["step 2, first", "ends at 3 ms", "the step before it at 12 ms"],
        ),
        ("floor(fast) within 3 ms", ["decides to the deadline: leave out `within`"]),
        ("guaranteed_time, else first", ["guaranteed_time ends the decider"]),
        (
            "first within 3 ms, else cascade(0.9)",
            ["cascade cannot be step 2", "Put it first: cascade(confidence=0.9) within"],
        ),
        ("; ".join(["x"]) + " y", ["cannot read 'x y'"]),
        (", else ".join(f"first within {i} ms" for i in range(1, 18)), ["17 steps", "at most 16"]),
        (
            "table(0: svm; 10: forest)",
            ["row 2 of the table no longer accepts svm", "must accept all models"],
        ),
        ("table(0: any; 5: svm)", ["row 2 of the table no longer accepts any"]),
        (
            "table(0: svm >= .3; 5: svm >= .4)",
            ["row 2 of the table needs confidence 0.4, more than the 0.3"],
        ),
        ("table(5: svm)", ["row 1 of the table begins at 5 ms", "Begin with 0"]),
        ("table(0: svm; 0: any)", ["row 2 of the table begins at 0 ms", "Times must increase"]),
        ("table(0 svm)", ["cannot read row 1"]),
        ("table(0: svm; x: any)", ["cannot read row 2"]),
        ("table(0: svm; 1.1.1: any)", ["row 2 of the table begins at '1.1.1'"]),
        ("table(0: svm >= 2)", ["confidence=2 of row 1 of the table"]),
        ("table(0: SVM)", ["row 1 of the table: bad model name"]),
        ("table()", ["0 rows"]),
        ("table(0: svm", ["parenthesis", "not closed"]),
    ],
)
def test_invalid_decider_is_refused_with_the_reason(text: object, parts: list[str]) -> None:
    said = refused(text)
    for part in parts:
        assert part in said, said


@st.composite
def steps(draw: st.DrawFn, last: bool, first: bool) -> DeciderStep:
    names = [
        name
        for name, rule in RULES.items()
        if (last or not rule.last) and (first or not rule.schedules)
    ]
    name = draw(st.sampled_from(names))
    fields = {setting: about.default for setting, about in RULES[name].settings.items()}
    for setting, about in RULES[name].settings.items():
        if (about.default is None and setting != "after_ms") or draw(st.booleans()):
            low, high = max(about.low, -1e6), min(about.high, 1e6)
            fields[setting] = draw(
                st.integers(int(low), int(high)) if about.whole else st.floats(low, high)
            )
    if name == "floor" or (name == "guaranteed_time" and draw(st.booleans())):
        fields["models"] = (draw(NAMES),)
    return DeciderStep(name, **fields)


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    n = draw(st.integers(1, 5))
    times = sorted(draw(st.lists(st.floats(0.001, 1e6), min_size=n, max_size=n, unique=True)))
    made = []
    for i, time in enumerate(times):
        step = draw(steps(i == n - 1, i == 0))
        ends = i < n - 1 or (not RULES[step.rule].last and draw(st.booleans()))
        made.append(
            DeciderStep(
                **{
                    **{f: getattr(step, f) for f in step.__struct_fields__},
                    "until_ms": time if ends else 0.0,
                }
            )
        )
    return Schedule(tuple(made))


@settings(deadline=None)
@given(schedules())
def test_schedule_text_parses_back_to_the_schedule(schedule: Schedule) -> None:
    assert parse_decider(str(schedule)) == schedule


ROW = st.tuples(
    st.integers(0, 9),
    st.sets(st.sampled_from("abc"), max_size=3),
    st.sampled_from([0.0, 0.25, 0.5]),
)


@settings(deadline=None)
@given(st.lists(ROW, min_size=1, max_size=4))
def test_a_table_is_accepted_only_if_its_rules_widen(
    rows: list[tuple[int, set[str], float]],
) -> None:
    """A table is accepted only if each model that may answer at one time may also answer later. No
    model means any."""
    text = "; ".join(
        f"{time}: {', '.join(sorted(models)) or 'any'} >= {sure}" for time, models, sure in rows
    )
    every = frozenset("abcd")
    accepts = [
        {(model, q) for model in models or every for q in (0.0, 0.25, 0.5) if q >= sure}
        for _, models, sure in rows
    ]
    times = [time for time, _, _ in rows]
    sound = times[0] == 0 and all(a < b for a, b in itertools.pairwise(times))
    sound = sound and all(a <= b for a, b in itertools.pairwise(accepts))
    try:
        schedule = parse_decider(f"table({text})")
    except InvalidInput:
        assert not sound, text
    else:
        assert sound, text
        assert [step.until_ms for step in schedule.steps] == [*times[1:], 0.0]
