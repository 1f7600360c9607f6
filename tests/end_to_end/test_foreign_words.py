"""The output of a model is shown on a terminal without control characters."""

import subprocess
import sys
from collections.abc import Iterator

import pytest

import clipper
from tests.frontend.conftest import PATIENCE_S, QUICK
from tests.processes import Program

EVIL = "\x1b]0;owned\x07\x1b[2Jbefore\rafter\x9b31m"


def writes(rows: list[float]) -> list[float]:
    print(EVIL, flush=True)
    return rows


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http={"admin": "127.0.0.1:0", "token": "secret"}, **QUICK) as started:
        started.deploy("writes", writes, input="f64", cache=False)
        started.app("a", models=["writes"], slo_ms=30_000)
        assert started.app("a").predict(1.0).result(PATIENCE_S).output == 1
        yield started


def shell(server: clipper.ClipperServer) -> list[str]:
    url = f"http://{server.admin_address}"
    return [sys.executable, "-m", "clipper", "logs", "writes", "--url", url, "--token", "secret"]


def on_a_terminal(words: list[str]) -> str:
    """Run a command on a terminal of its own and return what it printed there."""
    with Program(*words, terminal=True) as process:
        assert process.wait() == 0, process.output
    return process.output


@pytest.mark.slow
def test_a_terminal_does_not_obey_a_models_output(server: clipper.ClipperServer) -> None:
    shown = on_a_terminal(shell(server))
    assert r"\x1b]0;owned\x07\x1b[2Jbefore\rafter\x9b31m" in shown
    assert not set("\x1b\a\x9b\ufffd") & set(shown)
    assert shown.replace("\r\n", "").count("\r") == 0


@pytest.mark.slow
def test_a_pipe_gets_control_characters_as_they_are(server: clipper.ClipperServer) -> None:
    shown = subprocess.run(shell(server), stdout=subprocess.PIPE, check=True).stdout
    assert "before\rafter\x9b31m".encode() in shown  # click drops colours
