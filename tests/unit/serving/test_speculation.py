"""Speculative queries: the models that a query with a decider is sent to, when, and the answer."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from clipper.errors import ForkedProcess, InvalidInput
from clipper.selection import Plan, create_policy
from clipper.serving.feedback.states import States
from clipper.serving.query.decider_threads import OWN_STEP, DeciderThreads
from clipper.serving.query.processor import QueryContext, ResolvedApplication, finish
from clipper.serving.query.speculation import (
    MEASURED_MIN,
    NEVER,
    Speculation,
    check_decider,
    check_guarantee,
    check_times,
    speculation_of,
)
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel
from clipper_core.results.decider import Rule
from clipper_core.runtime.histogram import LatencyHistogram, Snapshot
from clipper_core.runtime.status import Status

A, B, C = (VersionedModel(name, 1) for name in "abc")
LINKS = (C, A, B)
OK, PENDING, UNNEEDED, DEADLINE, FAILED = (
    Status.OK,
    Status.PENDING,
    Status.UNNEEDED,
    Status.DEADLINE,
    Status.MODEL_ERROR,
)


class Core:
    """A fake of the members of a model that speculation reads: its latencies so far, in us."""

    def __init__(self, *latencies_us: int) -> None:
        self.index, self.engine, self.latency_reads = 0, self, 0
        self.histogram = LatencyHistogram()
        for latency in latencies_us:
            self.histogram.record(latency)

    def model_latency(self, index: int) -> Snapshot:
        assert index == self.index
        self.latency_reads += 1
        return self.histogram.snapshot()


def resolved(
    decider: str = "all", policy: str = "ensemble", cores: tuple[Any, ...] = (), **fields: Any
) -> ResolvedApplication:
    chosen = create_policy(policy)
    learner = States(MemoryStore(), Journal(None), "node", 100, 1.0).learner(
        "app", policy, chosen, LINKS
    )
    made = dict(zip(LINKS, cores or (Core(), Core(), Core()), strict=True))
    fields = {"default": "none", "node": "n0", **fields}
    application = ResolvedApplication("app", LINKS, made, chosen, learner, 20_000, **fields)
    return msgspec.structs.replace(
        application, speculation=speculation_of(decider, application, DeciderThreads())
    )


def speculation(decider: str, policy: str = "ensemble", cores: tuple[Any, ...] = ()) -> Speculation:
    found = resolved(decider, policy, cores).speculation
    assert found is not None
    return found


def call(
    decider: str,
    policy: str = "ensemble",
    plan: Plan | None = None,
    slo_us: int = 20_000,
    cores: tuple[Any, ...] = (),
):
    found = speculation(decider, policy, cores)
    return found.call(found.policy.init(LINKS), plan or Plan((A, B, C)), None, slo_us)


# -- asking


def test_an_application_that_waits_for_all_models_has_no_decider() -> None:
    assert resolved("all").speculation is None
    assert resolved("first").speculation is not None


def test_all_are_queried_best_first() -> None:
    assert call("majority").models == (C, A, B), "as they are linked"
    assert call("majority", "static(weights={'a': 2})").models == (A, C, B)
    assert call("cascade(0.9)", "static(weights={'a': 2})").models == (C, A, B)


def test_a_policy_that_selects_one_ranks_it_first() -> None:
    chosen = Plan((B,), (0.5,))
    assert call("hedged", "exp3", chosen).models == (B, C, A)
    assert call("majority", "exp3", chosen).models == (B, C, A)
    assert call("guaranteed_time(floor=a)", "exp3", chosen).models == (B, A), (
        "the chosen one and the floor"
    )
    assert call("all within 9 ms, else floor(a)", "exp3", chosen).models == (B, A)
    assert call("guaranteed_time", "exp3", chosen).models == (B, C, A)


def test_the_selection_of_a_policy_is_followed() -> None:
    assert call("majority", plan=Plan((A, B))).models == (A, B)
    assert call("majority within 1 ms, else floor(c)", plan=Plan((A, B))).models == (C, A, B)


def test_the_last_steps_end_is_the_querys() -> None:
    assert call("first").slo_us == 20_000
    assert call("first within 5 ms").slo_us == 5_000
    assert call("first within 50 ms").slo_us == 20_000
    assert call("guaranteed_time(floor=a)").slo_us == 19_000
    assert call("guaranteed_time(floor=a, margin_ms=2.5)").slo_us == 17_500
    assert call("guaranteed_time(floor=a, margin_ms=2.5)", slo_us=2000).slo_us == 1


def test_steps_as_the_core_has_them() -> None:
    steps = call(
        "majority within 5 ms, else best_quality(0.5) within 8 ms, else floor(b)"
    ).order.decider.steps
    assert [(step.rule, step.until_us) for step in steps] == [
        (Rule.QUORUM, 5000),
        (Rule.BEST, 8000),
        (Rule.FLOOR, 0),
    ]
    assert (steps[1].confidence_min, steps[2].which) == (0.5, 2)
    rows = call("table(0: b >= 0.9; 3: b, a; 6: any)").order.decider.steps
    assert [row.accept for row in rows] == [0b100, 0b110, None]
    assert [row.until_us for row in rows] == [3000, 6000, 0]
    assert call("hedged(budget=0.25)").order.decider.steps[0].extra == 0.25
    assert call("mean(tolerance=1)").order.decider.steps[0].need == 2
    assert call("mean").order.decider.steps[0].need == 0


def test_weights_are_given_where_a_rule_has_use_for_them() -> None:
    assert call("weighted", "static(weights={'a': 3})").order.weights == (3.0, 1.0, 1.0)
    assert call("majority", "static(weights={'a': 3})").order.weights is None


def test_models_that_are_queried_later() -> None:
    assert call("first").starts_us is None
    assert call("cascade(0.9)").starts_us == (0, NEVER, NEVER)
    assert call("cascade(0.9) within 5 ms, else floor(b)").starts_us == (0, NEVER, 0)
    assert call("hedged(after_ms=5)").starts_us == (0, 5000, 10_000)


def test_a_hedge_waits_for_what_was_measured() -> None:
    fresh = (Core(*[100] * (MEASURED_MIN - 1)), Core(), Core())
    assert call("hedged", cores=fresh).starts_us == (0, 10_000, 20_000), (
        "half the SLO, until something is measured"
    )
    known = (Core(*[3000] * MEASURED_MIN), Core(), Core())
    assert call("hedged", cores=known).starts_us[1] == pytest.approx(3000, rel=0.05)
    quick = (Core(*[30] * MEASURED_MIN), Core(), Core())
    assert call("hedged", cores=quick).starts_us[1] == 1000, "never at once"


def test_measurements_are_read_periodically() -> None:
    cores = (Core(*[3000] * MEASURED_MIN), Core(), Core())
    found = speculation("hedged", cores=cores)
    for _ in range(10):
        found.call(None, Plan((A, B, C)), None, 20_000)
    assert cores[0].latency_reads == 1


def test_values_of_a_state_are_computed_once() -> None:
    found = speculation("first")
    one, other = (
        found.call("s", Plan((A, B, C)), None, 20_000),
        found.call("s", Plan((A, B, C)), None, 10_000),
    )
    assert one.order is other.order
    assert found.call("t", Plan((A, B, C)), None, 20_000).order is not one.order


def test_one_bucket_of_hedges_for_every_order() -> None:
    found = speculation("hedged", "exp3")
    state = found.policy.init(LINKS)
    deciders = {
        id(found.call(state, Plan((model,)), None, 20_000).order.decider) for model in LINKS
    }
    assert len(deciders) == 1


# -- what is refused


def test_a_decider_must_fit_the_models() -> None:
    with pytest.raises(
        InvalidInput, match=r"names 'd', which application 'app' does not link.*Linked: c, a, b\."
    ):
        check_decider("app", "floor(d)", LINKS)
    with pytest.raises(
        InvalidInput, match=r"quorum\(4\) of application 'app' needs 4 models; it links 3"
    ):
        check_decider("app", "quorum(4)", LINKS)
    with pytest.raises(InvalidInput, match="links 65 models; a decider takes at most 64"):
        check_decider("app", "first", [VersionedModel("m", i) for i in range(1, 66)])
    assert check_decider("app", "floor(a:1)", LINKS).models == ("a:1",)


def test_a_decider_must_fit_the_time() -> None:
    with pytest.raises(
        InvalidInput, match="majority within 20 ms ends after the 20 ms of application 'app'"
    ):
        check_times("app", check_decider("app", "majority within 20 ms, else first", LINKS), 20)
    with pytest.raises(
        InvalidInput, match="margin_ms=1 of guaranteed_time leaves nothing of the 1 ms"
    ):
        check_times("app", check_decider("app", "guaranteed_time", LINKS), 1)
    check_times("app", check_decider("app", "majority within 19 ms, else first", LINKS), 20)


def test_a_guarantee_must_be_measured() -> None:
    fixed, any_ = (
        check_decider("app", "guaranteed_time(floor=a)", LINKS),
        check_decider("app", "guaranteed_time", LINKS),
    )
    slow, fast, fresh = Core(*[30_000] * 100), Core(*[3000] * 100), Core(*[3000] * 99)
    check_guarantee("app", fixed, 20, {A: fast, B: slow}, {})  # type: ignore[dict-item]
    check_guarantee("app", any_, 20, {A: slow, B: fast}, {})  # type: ignore[dict-item]
    check_guarantee("app", check_decider("app", "first", LINKS), 20, {A: slow}, {})  # type: ignore[dict-item]
    with pytest.raises(InvalidInput) as caught:
        check_guarantee("app", fixed, 20, {A: slow, B: fast}, {})  # type: ignore[dict-item]
    assert "no model is known to answer within 19 ms: a:1 takes 3" in str(caught.value)
    assert "99th percentile of 100" in str(caught.value)
    assert (
        "run server.model('a:1').predict(x).result() 100 times; or raise slo_ms, or name a faster"
        in str(caught.value)
    )
    with pytest.raises(
        InvalidInput, match="a:1 has made 99 predictions of the 100 that a measurement takes"
    ):
        check_guarantee("app", fixed, 20, {A: fresh}, {})  # type: ignore[dict-item]


def test_what_came_after_a_refusal_is_measured_by_itself() -> None:
    fixed, core, since = (
        check_decider("app", "guaranteed_time(floor=a)", LINKS),
        Core(*[90_000] * 500),
        {},
    )
    for latency_us, count, accepted in (
        (90_000, 0, False),
        (3000, 99, False),
        (3000, 99, False),
        (3000, 100, True),
    ):
        for _ in range(count):
            core.histogram.record(latency_us)
        if accepted:
            check_guarantee("app", fixed, 20, {A: core}, since)  # type: ignore[dict-item]
        else:
            with pytest.raises(InvalidInput, match="a:1 takes"):
                check_guarantee("app", fixed, 20, {A: core}, since)  # type: ignore[dict-item]


# -- answering


@dataclass
class Ruled:
    """A fake of the members of a decided future that are read, by task: (status, output,
    confidence, detail, latency)."""

    extra: QueryContext
    verdict: tuple[int, int, int] | None
    tasks: list[Any] = field(default_factory=list)
    latency_us: int = 5000
    id: int = 255

    def status(self, i: int = 0) -> Status:
        return self.tasks[i][0]

    def output(self, i: int = 0) -> Any:
        return self.tasks[i][1] if self.tasks[i][0] is OK else None

    def confidence(self, i: int = 0) -> None:
        return None

    def prediction(self, i: int = 0) -> tuple[Any, None]:
        return self.output(i), None

    def detail(self, i: int = 0) -> str:
        return "ValueError: boom"

    def latencies_us(self) -> list[int]:
        return [task[2] for task in self.tasks]


def ruled(
    decider: str,
    verdict: Any,
    *tasks: Any,
    policy: str = "ensemble",
    latency_us: int = 5000,
    **fields: Any,
):
    """Return a decided future; its tasks are of C, A and B, in that order."""
    application = resolved(decider, policy, **fields)
    assert application.speculation is not None
    state, plan = application.learner.state(None), Plan((A, B, C))
    call = application.speculation.call(state, plan, None, 20_000)
    full = [
        (status, output[0] if output else None, output[1] if output[1:] else 1000)
        for status, *output in tasks
    ]
    return finish(
        Ruled(QueryContext(application, plan, state, "", (), call), verdict, full, latency_us)
    )  # type: ignore[arg-type]


def test_the_verdict_is_answered() -> None:
    answer = ruled("majority", (0, 0b110, 0b110), (PENDING,), (OK, 7), (OK, 7))
    assert (answer.output, answer.decided_by, answer.models, answer.missing) == (
        7,
        "majority",
        (A, B),
        (),
    )
    assert (answer.confidence, answer.latency_us, answer.id, answer.is_default) == (
        2 / 3,
        5000,
        "n0-ff",
        False,
    )


def test_a_late_prediction_is_not_part_of_the_answer() -> None:
    answer = ruled("first", (0, 0b010, 0b010), (OK, 8, 6000), (OK, 7), (OK, 8, 6000))
    assert (answer.output, answer.models, answer.missing, answer.agreement) == (7, (A,), (), 1 / 3)


@pytest.mark.parametrize(
    "now", [(PENDING,), (OK, 8, 6000), (DEADLINE, None, 20_000), (UNNEEDED, None, 5000)]
)
def test_missing_models_do_not_depend_on_the_time_of_reading(now: Any) -> None:
    assert ruled("majority", (0, 0b110, 0b110), now, (OK, 7), (OK, 7)).missing == ()
    late = ruled("majority within 5 ms, else first", (1, 0b010, 0b110), now, (OK, 7), (OK, 8))
    assert (late.missing, late.decided_by) == ((C,), "first")
    assert ruled(
        "majority", (0, 0b010, 0b110), now, (OK, 7), (OK, 8), latency_us=20_000
    ).missing == (C,)


def test_failed_models_are_missing_and_models_that_were_not_queried_are_not() -> None:
    assert ruled("first", (0, 0b010, 0b010), (FAILED, None, 3000), (OK, 7), (PENDING,)).missing == (
        C,
    )
    assert (
        ruled("first", (0, 0b010, 0b010), (FAILED, None, 6000), (OK, 7), (PENDING,)).missing == ()
    )
    assert (
        ruled(
            "cascade(0.9)", (0, 0b001, 0b001), (OK, 7), (UNNEEDED,), (UNNEEDED,), latency_us=20_000
        ).missing
        == ()
    )


def test_default_when_no_model_answered() -> None:
    answer = ruled("floor(b)", (0, 0, 0b001), (OK, 7), (DEADLINE,), (FAILED,), latency_us=20_000)
    assert (answer.output, answer.is_default, answer.decided_by, answer.models) == (
        "none",
        True,
        "",
        (),
    )
    assert answer.reason == "a:1 did not answer by the deadline; b:1 failed: ValueError: boom"
    answer = ruled(
        "cascade(0.9)", (0, 0, 0), (DEADLINE,), (UNNEEDED,), (UNNEEDED,), latency_us=20_000
    )
    assert (answer.reason, answer.missing) == ("c:1 did not answer by the deadline", (C,))


def test_not_sure_enough() -> None:
    answer = ruled("first", (0, 0b010, 0b010), (PENDING,), (OK, 7), (PENDING,), confidence_min=0.5)
    assert (answer.output, answer.is_default, answer.decided_by) == ("none", True, "first")
    assert answer.reason == "confidence 0.33 is below the application's 0.50"


def test_names_of_those_that_decide() -> None:
    assert (
        ruled("table(0: c; 3: any)", (1, 0b010, 0b010), (PENDING,), (OK, 7), (PENDING,)).decided_by
        == "table(3)"
    )
    assert (
        ruled(
            "first within 3 ms, else floor(b)", (1, 0b100, 0b100), (PENDING,), (PENDING,), (OK, 7)
        ).decided_by
        == "floor(b)"
    )


def test_a_query_that_was_given_up() -> None:
    answer = ruled("first", None, (Status.CANCELLED,), (Status.CANCELLED,), (Status.CANCELLED,))
    assert (answer.output, answer.reason) == ("none", "the query was cancelled")
    with pytest.raises(ForkedProcess):
        ruled("first", None, (Status.FORKED,), (Status.FORKED,), (Status.FORKED,))


def test_a_decider_of_your_own_has_decided(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "selection"))
    answer = ruled("user_classes:Two", (OWN_STEP, 0b110, 0b110), (PENDING,), (OK, 7), (OK, 7))
    assert (answer.output, answer.decided_by, answer.models) == (7, "user_classes:Two", (A, B))
    answer = ruled("user_classes:Two", (0, 0b110, 0b110), (PENDING,), (OK, 7), (OK, 7))
    assert (answer.output, answer.decided_by) == (7, "all"), "it failed, or was too late"


def test_predictions_are_those_of_the_snapshot() -> None:
    """Every verdict over three tasks, whatever has come since: the answer is made of `used` and
    `seen` alone."""
    for seen in range(8):
        for used in range(8):
            if used & ~seen:
                continue
            tasks = [(OK, i, 1000) for i in range(3)]
            answer = ruled("surest", (0, used, seen), *tasks)
            lowest = next((i for i in range(3) if used >> i & 1), None)
            assert answer.output == ("none" if lowest is None else lowest)
            assert set(answer.models) <= {LINKS[i] for i in range(3) if seen >> i & 1}
