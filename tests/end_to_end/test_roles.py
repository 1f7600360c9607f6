"""Roles with real containers: observers that are stuck, full or wrong neither delay nor change an
answer."""

import threading
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput, UnknownModel
from tests.memory_container import MemoryContainer, wait_until

SLO_MS = 10_000


def right(xs):
    return xs[:, 0].astype(int)


def wrong(xs):
    return (xs[:, 0].astype(int) + 1) % 10


def level(xs):
    return xs[:, 0] + 0.5


def raises(xs):
    raise ValueError("no")


def row(i):
    return np.array([i % 10, float(i)])


def of(server, handle):
    return server.stats()["applications"][handle.name]


@pytest.mark.parametrize("role", ["shadow", "canary"])
def test_a_stuck_observer_delays_no_query(role):
    """Its container receives batches and never answers. More queries than it may have in flight are
    answered meanwhile."""
    with clipper.start(heartbeat_ms=60_000, drain_s=0.1) as server:
        server.deploy("main", right, input="f64[2]", cache=False)
        with MemoryContainer(server.address, server.token, "stuck", input="f64[2]") as container:
            container.send_hello()
            wait_until(lambda: "stuck:1" in server.stats()["models"])
            handle = server.app("a", ["main", "stuck"], roles={"stuck": role}, slo_ms=60_000)
            for i in range(400):
                answer = handle.predict(row(i)).result(60)
                assert (answer.output, answer.missing, answer.is_default) == (i % 10, (), False)
                assert [model.name for model in answer.models] == ["main"]
            stats = of(server, handle)
            observer = stats["models"]["stuck:1"]["observer"]
            assert (observer["sent"], observer["open"], observer["answered"], observer["shed"]) == (
                256,
                256,
                0,
                144,
            )
            assert stats["answers"]["ok"] == 400
            assert stats["models"]["stuck:1"]["used"] == 0


def test_an_observer_whose_queue_is_full_delays_no_query(deploy, names):
    with clipper.start(limits={"queue_rows_max": 16}, heartbeat_ms=60_000, drain_s=0.1) as server:
        server.deploy("main", right, input="f64[2]", cache=False)
        with MemoryContainer(server.address, server.token, "full", input="f64[2]") as container:
            container.send_hello()
            wait_until(lambda: "full:1" in server.stats()["models"])
            flood = [server.model("full").predict(row(i), slo_ms=SLO_MS) for i in range(100, 600)]
            handle = server.app("a", ["main", "full"], roles={"full": "canary"}, slo_ms=SLO_MS)
            answers = [handle.predict(row(i)).result(60) for i in range(50)]
            assert [answer.output for answer in answers] == [i % 10 for i in range(50)]
            observer = server.stats()["applications"]["a"]["models"]["full:1"]["observer"]
            assert observer["refused"] == observer["sent"] == 50, "counted, not raised"
            assert any(future.done() for future in flood)


def test_observers_that_fail_or_disagree_decide_nothing(server, deploy, app):
    main, bad, broken = (deploy(model, input="f64[2]") for model in (right, wrong, raises))
    handle = app(
        main,
        bad,
        broken,
        roles={bad.name: "canary", broken.name: "shadow"},
        slo_ms=SLO_MS,
        policy="stacking",
    )
    for i in range(30):
        answer = handle.predict(row(i)).result(60)
        assert (answer.output, answer.confidence > 0, answer.missing) == (i % 10, True, ())
        assert [str(model) for model in answer.models] == [main.name]

    def has_arrived():
        models = of(server, handle)["models"]
        return all(models[model.name]["observer"]["open"] == 0 for model in (bad, broken))

    wait_until(has_arrived)
    stats = of(server, handle)
    assert (
        stats["models"][broken.name]["observer"]["failed"],
        stats["models"][bad.name]["observer"]["answered"],
    ) == (30, 30)
    assert stats["canaries"][bad.name]["others"][main.name] == {"n": 30, "agreement": 0.0}
    assert stats["observers"][bad.name]["agreement"] == 0.0
    assert stats["extra_load_share"] > 0


def test_observers_learn_from_feedback(server, deploy, app):
    main, shadow = deploy(wrong, input="f64[2]"), deploy(right, input="f64[2]")
    handle = app(main, shadow, roles={shadow.name: "shadow"}, slo_ms=SLO_MS)
    for i in range(40):
        answer = handle.predict(row(i)).result(60)
        wait_until(lambda: of(server, handle)["models"][shadow.name]["observer"]["open"] == 0)
        assert handle.feedback(answer, label=i % 10), (
            "an application with roles takes feedback, whatever its policy"
        )
    models = of(server, handle)["models"]
    assert models[main.name]["feedback"] == {"n": 40.0, "mean": 0.0}
    assert models[shadow.name]["feedback"] == {"n": 40.0, "mean": 1.0}
    promoted = server.app(handle.name, roles={main.name: "shadow"})
    assert promoted.predict(row(3)).result(60).output == 3, "roles change while it serves"


def test_a_challenger_answers_its_share(server, deploy, app):
    main, new = deploy(right, input="f64[2]"), deploy(wrong, input="f64[2]")
    handle = app(main, new, roles={new.name: "challenger(share=0.3)"}, slo_ms=SLO_MS)
    answers = [handle.predict(row(i)).result(60) for i in range(600)]
    assert handle.feedback_many(answers, [i % 10 for i in range(600)]).counted == 600
    alone = [i for i, answer in enumerate(answers) if str(answer.models[0]) == new.name]
    assert all(len(answer.models) == 1 for answer in answers)
    assert 90 <= len(alone) <= 270, "180 within 8 standard deviations"
    assert all(answers[i].output == (i + 1) % 10 for i in alone)
    models = of(server, handle)["models"]
    assert models[new.name]["feedback"] == {"n": float(len(alone)), "mean": 0.0}
    assert models[main.name]["feedback"] == {"n": 600.0 - len(alone), "mean": 1.0}


def test_a_decoy_records_what_models_saw(tmp_path: Path):
    with clipper.start(state=str(tmp_path)) as server:
        server.deploy("main", right, input="f64[2]")
        handle = server.app("a", ["main"], roles={"saw": "decoy"}, slo_ms=SLO_MS)
        answers = [handle.predict(row(i), user="u").result(60) for i in range(20)]
        pending = handle.predict(row(20))
        pending.wait(60)
        found = list(server.recorded("a"))
        assert [record.id for record in found[:20]] == [answer.id for answer in answers]
        assert [record.answer for record in found[:20]] == [answer.output for answer in answers]
        assert all(np.array_equal(record.input, row(i)) for i, record in enumerate(found))
        assert [record.answered for record in found] == [True] * 20 + [False], (
            "nobody has asked for the last answer yet"
        )
        assert server.stats()["applications"]["a"]["decoys"]["saw"]["dropped"] == 0
    with clipper.start(state=str(tmp_path)) as server:
        assert len(list(server.recorded("a"))) == 21
        server.app("a").predict(row(1)).result(60)
        assert len(list(server.recorded("a"))) == 22


def test_a_straggler_is_replaced_by_its_mean():
    in_time = threading.Event()
    in_time.set()

    def slow(rows):
        in_time.wait(30)
        return np.full(len(rows), 100.0)

    with clipper.start(heartbeat_ms=60_000, drain_s=0.1) as server:
        server.deploy("fast", level, input="f64[2]", cache=False)
        with MemoryContainer(server.address, server.token, "slow", input="f64[2]").serve(slow):
            wait_until(lambda: "slow:1" in server.stats()["models"])
            handles = [
                server.app(missing, ["fast", "slow"], slo_ms=SLO_MS, missing=missing)
                for missing in ("mean", "skip")
            ]
            both = [handle.predict(row(0)).result(20).output for handle in handles]
            assert both == pytest.approx([50.25, 50.25])
            in_time.clear()
            late = [
                future.result(20)
                for future in [handle.predict(row(2), slo_ms=2000) for handle in handles]
            ]
            in_time.set()
            assert [answer.output for answer in late] == pytest.approx([51.25, 2.5])
            for answer in late:
                assert (list(map(str, answer.models)), list(map(str, answer.missing))) == (
                    ["fast:1"],
                    ["slow:1"],
                )
                assert answer.confidence == 0.5


def test_what_roles_are_refused(server, deploy, app):
    main, other = deploy(right, input="f64[2]"), deploy(wrong, input="f64[2]")
    handle = app(main, other, slo_ms=SLO_MS)
    for roles, message in (
        ({"nobody": "shadow"}, "a role for 'nobody', which application .* does not link"),
        ({main.name: "shadwo"}, "no role 'shadwo'.*did you mean 'shadow'"),
        ({main.name: "challenger(share=2)"}, "share=2 of challenger"),
        ({main.name: "shadow", other.name: "canary"}, "no model is left to answer"),
    ):
        with pytest.raises(InvalidInput, match=message):
            server.app(handle.name, roles=roles)
    with pytest.raises(InvalidInput, match="missing='maen'"):
        server.app(handle.name, missing="maen")
    server.app(handle.name, roles={other.name: "shadow"})
    with pytest.raises(InvalidInput, match="a role for"):
        server.app(handle.name, models=[main.name])
    server.app(handle.name, models=[main.name], roles={})
    assert handle.predict(row(4)).result(60).output == 4


def test_a_model_that_goes_leaves_no_observer_to_answer(server, deploy, app):
    """The primary is retired by force: its shadow does not take its place."""
    main, shadow = deploy(right, input="f64[2]"), deploy(wrong, input="f64[2]")
    handle = app(main, shadow, roles={shadow.name: "shadow"}, slo_ms=SLO_MS)
    server.retire(main.name, force=True)
    with pytest.raises(UnknownModel, match="has no primary left"):
        handle.predict(row(1))


def test_candidates_of_a_request_have_no_roles(server, deploy, app):
    main, shadow = deploy(right, input="f64[2]"), deploy(wrong, input="f64[2]")
    handle = app(main, shadow, roles={shadow.name: "shadow"}, slo_ms=SLO_MS)
    request = clipper.PredictionRequest(row(3), handle.name, candidate_models=(shadow.name,))
    assert server.schedule_prediction(request).result(60).output == 4
    assert of(server, handle)["queries"] == 0, "it is no query of the application's own models"


def test_a_role_of_an_unlinked_model_has_no_effect(server, deploy, app):
    main, removed, shadow = (deploy(model, input="f64[2]") for model in (right, wrong, wrong))
    handle = app(
        main, removed, shadow, roles={removed.name: "canary", shadow.name: "shadow"}, slo_ms=SLO_MS
    )
    server.manage.unlink(handle.name, removed.name)
    assert [str(model) for model in handle.predict(row(1)).result(60).models] == [main.name]
    assert {name: row["role"] for name, row in of(server, handle)["models"].items()} == {
        main.name: "primary", shadow.name: "shadow"
    }  # fmt: skip


def test_roles_in_a_file(tmp_path: Path):
    file = tmp_path / "clipper.toml"
    file.write_text(
        '[apps.a]\nmodels = ["m"]\nroles = ["saw = decoy(share=0.5)"]\nmissing = "skip"\n'
    )
    app = clipper.load_config(file).apps["a"]
    assert (app.roles, app.missing) == (("saw = decoy(share=0.5)",), "skip")
    file.write_text('[apps.a]\nmodels = ["m"]\nroles = ["saw"]\n')
    with pytest.raises(clipper.errors.ConfigError, match="'saw': write 'MODEL = ROLE'"):
        clipper.load_config(file)
