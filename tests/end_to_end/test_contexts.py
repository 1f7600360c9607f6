"""Contexts and coverage through the public API, real models and a restart."""

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput


def even(xs):
    """Answer correctly for even inputs only."""
    return np.where(xs[:, 0] % 2 == 0, xs[:, 0], -1).astype(int)


def odd(xs):
    return np.where(xs[:, 0] % 2 == 1, xs[:, 0], -1).astype(int)


@pytest.fixture(scope="module")
def models(deploy_for_all):
    return [deploy_for_all(model, input="f64[1]") for model in (even, odd)]


def context(i):
    return [1.0 if i % 2 else -1.0]


@pytest.mark.parametrize("policy", ["linucb", "lints"])
def test_a_query_goes_to_the_model_that_its_context_selects(models, app, policy):
    handle = app(*models, slo_ms=30_000, default=-9, policy=policy)
    errors = []
    for i in range(300):
        answer = handle.predict(np.array([float(i % 10)]), context=context(i)).result(60)
        errors.append(answer.output != i % 10)
        assert handle.feedback(answer, label=i % 10)
    assert sum(errors[150:]) <= 10
    assert handle.feedback(input=np.array([3.0]), label=3, context=context(3))
    with pytest.raises(InvalidInput, match="context has 2 features"):
        handle.predict(np.array([1.0]), context=[1.0, 2.0])
    with pytest.raises(InvalidInput, match=r"context\[0\]=nan"):
        handle.predict(np.array([1.0]), context=[np.nan])


@pytest.mark.parametrize("policy", ["mixture", "lints"])
def test_lists_train_the_contexts_of_their_answers(models, app, policy):
    """The core learns lists one observation at a time, also if their labels have to be converted
    first."""
    lists = {
        "alone": lambda handle, answers: [
            handle.feedback(answer, label=i % 10) for i, answer in enumerate(answers)
        ],
        "list": lambda handle, answers: handle.feedback_many(
            answers, [i % 10 for i in range(len(answers))]
        ),
        "converted": lambda handle, answers: handle.feedback_many(
            answers, [float(i % 10) for i in range(len(answers))]
        ),
    }
    seen = {}
    for name, send_feedback in lists.items():
        handle = app(*models, slo_ms=30_000, policy=policy)
        send_feedback(
            handle,
            [
                handle.predict(np.array([float(i % 10)]), context=context(i)).result(60)
                for i in range(20)
            ],
        )
        state = handle._resolve(handle.name).learner.shared.state
        seen[name] = state.rows.shape[1], state.seen
    columns = {"mixture": 16 + 6 * 64 + 2, "lints": 5}[policy]  # with one feature
    assert seen == dict.fromkeys(lists, (columns, 20.0))


def test_other_policies_leave_a_context_aside(models, app):
    for policy in ("ensemble", "exp3"):
        assert (
            app(*models, slo_ms=30_000, policy=policy)
            .predict(np.array([1.0]), context=[1.0])
            .result(60)
            .models
        )


def test_sets_are_given_where_a_coverage_is_requested(models, app):
    handle = app(*models, slo_ms=30_000, policy="stacking", coverage=0.8)
    assert (
        app(*models, slo_ms=30_000, policy="stacking").predict(np.array([1.0])).result(60).set == ()
    )
    for i in range(100):
        answer = handle.predict(np.array([float(i % 10)])).result(60)
        assert answer.set[0] == answer.output
        handle.feedback(answer, label=i % 10)
    with pytest.raises(InvalidInput, match="'ensemble' does not learn how wide"):
        app(*models, policy="ensemble", coverage=0.8)
    with pytest.raises(InvalidInput, match="between"):
        app(*models, policy="stacking", coverage=2)


def test_numbers_get_intervals_and_a_restart_keeps_them(tmp_path):
    def double(xs):
        return xs[:, 0] * 2.0

    def shifted(xs):
        return xs[:, 0] + 1.0

    draw = np.random.default_rng(1)
    with clipper.start(state=str(tmp_path)) as server:
        for model in (double, shifted):
            server.deploy(model.__name__, model, input="f64[1]")
        app = server.app(
            "a", models=["double", "shifted"], policy="ridge", coverage=0.9, slo_ms=30_000
        )
        for _ in range(100):
            x = draw.uniform(-5, 5)
            app.feedback(app.predict(np.array([x])).result(60), label=3 * x + draw.normal())
    with clipper.start(state=str(tmp_path)) as server:
        assert server.catalog.view.applications["a"].coverage == 0.9
        answer = server.app("a").predict(np.array([2.0])).result(30)
        low, high = answer.set
    assert answer.output == pytest.approx(6.0, abs=1.0)
    assert 0.8 < (high - low) / 2 < 4
