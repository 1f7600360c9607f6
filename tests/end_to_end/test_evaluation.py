"""Offline evaluation: what another policy would have achieved, from the journal of a real
server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main
from clipper.cli.measurement.evaluating import since_of
from clipper.errors import InvalidInput, NotAllowed


def right(xs):
    return xs[:, 0].astype(int)


def often(xs):
    """Answer correctly for seven inputs of ten."""
    return np.where(xs[:, 0] < 7, xs[:, 0], -1).astype(int)


def use(app, count):
    for i in range(count):
        answer = app.predict(np.array([i % 10, i])).result(60)
        assert app.feedback(answer, label=i % 10)


def test_a_time_since_is_an_age_or_a_date() -> None:
    assert since_of("", 1e9) == 0.0
    assert since_of("90m", 1e9) == 1e9 - 5400
    assert since_of("7d", 1e9) == 1e9 - 7 * 86_400
    assert since_of("2026-01-31T08:00+00:00", 1e9) == 1769846400.0
    for wrong in ("yesterday", "d", "12"):
        with pytest.raises(InvalidInput, match="neither an age nor a date"):
            since_of(wrong, 1e9)


@pytest.mark.slow
def test_policies_are_compared_on_the_journal_while_the_server_runs(tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    with clipper.start(state=state, admin="127.0.0.1:0") as server:
        models = [server.deploy(m.__name__, m, input="f64[2]").name for m in (right, often)]
        app = server.app("digits", models=models, policy="epsilon_greedy(epsilon=0.9)", slo_ms=5000)
        use(app, 300)
        best = app.evaluate("ab(shares={'right': 1})")
        worst = app.evaluate("ab(shares={'often': 1})")
        assert best.queries == worst.queries == 300
        assert best.snips.value == pytest.approx(1.0)
        assert abs(worst.snips.value - 0.7) < 5 * worst.snips.standard_error
        assert best.logged is not None
        assert worst.snips.value < best.logged.value < 1.0
        assert app.evaluate("squarecb", queries_max=100).queries == 100

        begin = time.time()
        use(app, 20)
        assert app.evaluate("squarecb", since=begin).queries == 20
        limits = ["--since", "1h", "--last", "300"]
        shown = CliRunner().invoke(
            main, ["evaluate", "digits", "--policy", "squarecb", *limits, "--folder", state]
        )
        assert shown.exit_code == 0, shown.output
        assert "(as it ran)" in shown.output
        two = ["--policy", "thompson", "--policy", "exp3"]
        many = CliRunner().invoke(main, ["evaluate", "digits", *two, "--json", "--folder", state])
        first, second = json.loads(many.output)
        assert (first["policy"], second["policy"]) == ("thompson", "exp3")
        assert first["queries"] == 320
        assert 0.5 < first["dr"]["value"] < 1.2
        url = ["--url", f"http://{server.admin_address}", "-o", "json"]
        asked = CliRunner().invoke(main, ["evaluate", "digits", *two, *url])
        assert json.loads(asked.output) == json.loads(many.output)

        with pytest.raises(NotAllowed, match="not answered by all models"):
            app.evaluate("stacking")
        with pytest.raises(InvalidInput, match="no policy 'nonesuch'"):
            app.evaluate("nonesuch")
        other = server.app("other", models=models, policy="exp3", slo_ms=5000)
        with pytest.raises(NotAllowed, match="no feedback for application 'other'"):
            other.evaluate("exp3")


@pytest.mark.slow
def test_a_single_model_without_choice_allows_no_evaluation_of_others(tmp_path: Path) -> None:
    with clipper.start(state=str(tmp_path / "state")) as server:
        models = [server.deploy(m.__name__, m, input="f64[2]").name for m in (right, often)]
        app = server.app("digits", models=models, policy="ab(shares={'right': 1})", slo_ms=5000)
        use(app, 30)
        with pytest.raises(NotAllowed, match="30 logged choices were made without randomness"):
            app.evaluate("exp3")


def test_evaluating_without_a_journal_names_the_folder_and_the_next_command(tmp_path: Path) -> None:
    result = CliRunner().invoke(
        main, ["evaluate", "digits", "--policy", "exp3", "--folder", str(tmp_path)]
    )
    assert isinstance(result.exception, NotAllowed | SystemExit)
    assert "has no journal" in f"{result.output}{result.exception}"


def test_evaluate_finds_the_state_of_the_file_beside_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["evaluate", "digits", "--policy", "exp3"]
    # without a folder a running server is asked
    (tmp_path / "clipper.toml").write_text('[http]\nadmin = "127.0.0.1:1"\n')
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 1
    assert "no server of this user runs on this host at 127.0.0.1:1" in result.output
    (tmp_path / "clipper.toml").write_text('[server]\nstate = ".here"\n')
    (tmp_path / ".here").mkdir()
    result = CliRunner().invoke(main, words)
    text = f"{result.output}{result.exception}"
    assert ".here" in text
    assert "has no journal" in text
