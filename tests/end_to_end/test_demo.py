"""The demo as a person has it: real models in real processes, its summary, its keys; and the
examples beside it."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.cli import main
from clipper_demo import digits
from clipper_demo.report import quantile
from tests.processes import Program

pytest.importorskip("sklearn")

PATIENCE_S = 120.0
ENOUGH = 100  # answers to learn from
EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "digits"
# of the first of the five models
REPLICAS = 2
DEMO = [sys.executable, "-m", "clipper", "demo"]


def containers_of(server: int) -> list[str]:
    """Return the command lines of containers that process `server` started, dead or alive."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if "clipper_container" in words and str(server) in words:
            found.append(" ".join(words))
    return found


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a folder in which the first demo stores its models for the next ones."""
    return str(tmp_path_factory.mktemp("state"))


def ran(seconds: int, state: str) -> tuple[dict[str, Any], Program]:
    """Return what a demo of so many seconds prints in the end, and its process, which has ended."""
    command = [*DEMO, "--seconds", seconds, "--json", "--state", state]
    with Program(*command) as process:
        assert process.wait(PATIENCE_S) == 0, process.output
    assert "Traceback" not in process.output
    return json.loads(process.lines[-1]), process


def test_a_few_seconds_without_a_terminal(state: str) -> None:
    # a busy machine needs more of them for as many answers to learn from
    for seconds in (3, 6, 12, 24):
        summary, process = ran(seconds, state)
        replicas = [model["replicas"] for model in summary["models"].values()]
        enough = all(learned["answers"] > ENOUGH for learned in summary["learning"].values())
        if enough and len(replicas[0]) == REPLICAS:
            break
    application = summary["application"]
    assert application["answered"] == application["sent"] > 0
    assert application["accuracy"] > 0.7, "one of the three gives wrong labels for some of the time"
    assert 0 <= application["slo_met"] <= 1
    assert (
        application["slo_met"] * application["answered"]
        <= application["answered"] - application["defaults"]
    )
    assert application["errors"] == {}
    assert application["wall_p99_ms"] >= application["p50_ms"] > 0
    assert set(summary["models"]) == {"forest:1", "logreg:1", "svm:1", "bayes:1", "tree:1"}
    assert [len(states) for states in replicas] == [REPLICAS, 1, 1, 1, 1]
    # on a busy machine a batch may be overdue at the end
    assert {state for states in replicas for state in states} <= {"ready", "suspect"}
    assert all(0 < summary["models"][f"{name}:1"]["cached"] < 0.9 for name in digits.GOOD)
    assert all(model["limit"] > 0 for model in summary["models"].values())
    assert summary["faults"] == []
    check_learning(summary)
    assert containers_of(process.pid) == []


def check_learning(summary: dict[str, Any]) -> None:
    """Check that both applications learned from a few hundred feedbacks while their best model was
    broken twice."""
    assert set(summary["learning"]) == {"exp3", "stacking"}
    for learned in summary["learning"].values():
        assert learned["answers"] > ENOUGH
        assert learned["errors"] < learned["answers"] / 2
        assert set(learned["shares"]) == set(digits.REPLICAS)
        assert sum(learned["shares"].values()) == pytest.approx(1)
    assert summary["learning"]["stacking"]["shares"]["bayes"] < 0.2, "it began with a fifth"
    spoiled, mended, again = summary["events"]
    assert spoiled["text"] == f"{spoiled['model']} gives wrong labels"
    assert mended["text"] == f"{spoiled['model']} is right again"
    assert again["text"] == f"{again['model']} gives wrong labels"
    assert 0 < spoiled["at_s"] < mended["at_s"] < again["at_s"]


@pytest.fixture
def terminal(state: str) -> Iterator[Program]:
    with Program(*DEMO, "--state", state, terminal=True) as program:
        yield program


def test_keys_on_a_terminal(terminal: Program) -> None:
    """d degrades the best model and restores it, k kills a container, which is restarted, + raises
    the rate, v changes the view, and q ends the demo and its processes."""
    terminal.see(r"300 queries a second")
    terminal.see(r"exp3 picks a model.*stacking weighs all")
    terminal.press("d")
    spoiled = terminal.see(r"(\w+) gives wrong labels; exp3 queried it most")[1]
    terminal.press("d")
    terminal.see(rf"{spoiled} gives right labels again")
    terminal.press("v")
    terminal.see(r"SLO 50 ms")
    terminal.press("k")
    killed = terminal.see(r"(\w+:1/0) killed \(kill -9")[1]
    terminal.see(rf"{killed} is missed after \d+ ms")
    back = terminal.see(rf"{killed} is back after (\d+\.\d+) s")
    assert 0 < float(back[1]) < PATIENCE_S
    terminal.press("+")
    terminal.see(r"375 queries a second")
    terminal.press("q")
    terminal.see(r"queries answered in")
    terminal.see(rf"{killed} was killed, back after")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.output
    assert containers_of(terminal.pid) == []


def test_a_signal_ends_it_in_good_order(state: str) -> None:
    with Program(*DEMO, "--seconds", "600", "--state", state, until="sending") as process:
        assert process.stop() in (0, 1)  # 1 when the signal came before the first answer
    assert "queries answered in" in process.output
    assert containers_of(process.pid) == []


def test_without_scikit_learn_it_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(clipper.ClipperError, match="scikit-learn is not installed") as caught:
        digits.load()
    assert caught.value.hint == 'Run: pip install "clipper-serving[demo]"'
    from click.testing import CliRunner

    result = CliRunner().invoke(main, ["demo", "--seconds", "1"])
    assert result.exit_code == 1
    assert 'pip install "clipper-serving[demo]"' in result.stderr


def test_without_matplotlib_it_names_what_to_install_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from click.testing import CliRunner

    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = CliRunner().invoke(main, ["demo", "--plot", "x.png"])
    assert result.exit_code == 1
    assert "matplotlib is not installed" in result.stderr
    assert 'pip install "clipper-serving[plot]"' in result.stderr


def test_a_quantile_is_a_value_that_occurred() -> None:
    assert quantile([], 0.5) == 0
    for n in range(1, 50):
        values = list(range(1, n + 1))
        for q in (0.01, 0.5, 0.9, 0.99, 1.0):
            expected = next(value for value in values if value >= q * n)
            assert quantile(values, q) == expected


# -- the examples


@pytest.mark.parametrize(
    ("script", "words", "said"),
    [
        ("serve.py", ["20000"], r"the scan shows 4; answered 4.*\nsvm: 9\d\.\d%"),
        (
            "online.py",
            [],
            (
                r"after    0 feedbacks 10% right\n(.*\n)*after 1400 feedbacks [789]\d% right\nit"
                r" says of itself: [789]\d%"
            ),
        ),
        ("strings.py", ["20000"], r"snow.*: weather.*\n.*: sport.*\n.*: food"),
    ],
)
def test_an_example_runs(script: str, words: list[str], said: str) -> None:
    # words: an SLO that a busy machine can keep
    command = [sys.executable, EXAMPLES / script, *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert re.search(said, done.stdout), done.stdout
    assert done.stderr == ""


def test_what_deciders_save() -> None:
    # which a busy machine can keep
    command = [sys.executable, EXAMPLES.parent / "speculation" / "serve.py", "200", "25"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    rows = re.findall(r"^(\w+).* +\d+\.\d% +\d+\.\d +\d+\.\d  \w", done.stdout, re.M)
    assert rows == ["all", "majority", "guaranteed_time", "majority"], done.stdout
    assert done.stderr == ""


def test_a_container_of_ones_own() -> None:
    with clipper.start(models={"brightness": {"input": "f64[64]"}}, token="secret") as server:
        command = [sys.executable, "-m", "clipper_container", "serve", "own_container:Brightness"]
        command += ["--connect", server.address, "--name", "brightness"]
        environment = {"CLIPPER_TOKEN": "secret"}
        with Program(*command, environment=environment, folder=EXAMPLES) as process:
            future = server.model("brightness").predict(np.full(64, 8.0), slo_ms=30_000)
            assert future.result(timeout=PATIENCE_S) == 0.5
            assert process.stop() == 0
