"""Objects as a notebook shows them, and cells that run again."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.notebook.shown import (
    answer_html,
    answers_html,
    application_html,
    model_html,
    server_html,
)
from clipper.types import Answer, Answers, VersionedModel

EVIL = "<script>alert('x')</script>"
MODEL = VersionedModel("svm", 1)
DOCS = Path(__file__).resolve().parents[2] / "docs"


def cells_of(html: str) -> dict[str, str]:
    """Return the cells of a table by their titles, as they are written."""
    return dict(re.findall(r"<tr><th[^>]*>([^<]*)</th><td[^>]*>([^<]*)</td></tr>", html))


def test_an_answer() -> None:
    shown = cells_of(answer_html(Answer(7, confidence=0.25, models=(MODEL,), latency_us=1500)))
    assert shown == {"output": "7", "confidence": "0.25", "from": "svm:1", "latency": "1.5 ms"}
    late = Answer(None, is_default=True, reason="it is late", missing=(MODEL,))
    shown = cells_of(answer_html(late))
    assert (shown["default"], shown["missing"]) == ("it is late", "svm:1")


def test_what_models_return_is_escaped_and_cut() -> None:
    html = answer_html(Answer({"name": EVIL}, is_default=True, reason=EVIL))
    assert "<script" not in html
    assert html.count("&lt;script&gt;") == 2
    assert len(answer_html(Answer("x" * 100_000))) < 2000
    answers = Answers([EVIL], np.ones(1), np.ones(1, bool), reasons={EVIL: 1})
    assert "<script" not in answers_html(answers)


def test_a_server_its_models_and_applications() -> None:
    with clipper.start(http="127.0.0.1:0") as server:
        assert repr(server) == f"<ClipperServer at {server.http_address}: no models>"
        model = server.deploy("sums", lambda rows: rows.sum(axis=1), input="f64[3]")
        application = server.app("total", ["sums"], slo_ms=2000)
        shown = cells_of(server_html(server))
        assert shown == {
            "queries": server.http_address,
            "state": "memory",
            "models": "sums:1 f64[3]",
            "applications": "total",
        }
        assert repr(server) == f"<ClipperServer at {server.http_address}: sums:1>"
        assert cells_of(model_html(model)) == {"input": "f64[3]"}
        assert "&lt;Application total: sums:1 by" in application_html(application)
    assert repr(server) == "<ClipperServer, closed>"
    assert cells_of(server_html(server))["state"] == "closed"


@pytest.fixture
def shell() -> Iterator[Any]:
    shells = pytest.importorskip(
        "IPython.core.interactiveshell", reason="no IPython: pip install --group notebooks"
    )
    shell = shells.InteractiveShell.instance()
    yield shell
    for server in filter(None, (shell.user_ns.get("server"), shell.user_ns.get("first"))):
        server.close()
    shells.InteractiveShell.clear_instance()


def run(shell: Any, text: str) -> Any:
    result = shell.run_cell(text, store_history=True)
    result.raise_error()
    return result.result


def test_a_cell_that_runs_again_leaves_no_process(
    shell: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run(shell, "import clipper")
    starts = "server = clipper.start()"
    deploys = "model = server.deploy('sums', lambda rows: rows.sum(axis=1), input='f64[3]')"
    run(shell, starts)
    for _ in range(3):
        run(shell, deploys)
    assert run(shell, "[str(one.id) for one in server.catalog.view.models()]") == ["sums:3"]
    assert "sums:1 is retired: this cell has deployed sums:2" in capsys.readouterr().out
    run(shell, f"other = 1\n{deploys}")
    assert run(shell, "[str(one.id) for one in server.catalog.view.models()]") == [
        "sums:3",
        "sums:4",
    ]
    run(shell, "first = server")
    run(shell, starts)
    assert run(shell, "first.is_closed, server.is_closed") == (True, False)
    data, _ = shell.display_formatter.format(shell.user_ns["server"])
    assert data["text/html"].startswith("<table><caption>ClipperServer")


def test_the_notebook_of_the_tutorial_runs() -> None:
    nbformat = pytest.importorskip("nbformat", reason="no nbclient: pip install --group notebooks")
    nbclient = pytest.importorskip("nbclient", reason="no nbclient: pip install --group notebooks")
    pytest.importorskip("ipykernel", reason="no ipykernel: pip install --group notebooks")
    pytest.importorskip("sklearn", reason='no scikit-learn: pip install "clipper-serving[demo]"')
    notebook = nbformat.read(DOCS / "tutorial.ipynb", as_version=4)
    twice = [notebook.cells[i] for i in (5, 5)]
    notebook.cells[5:6] = [nbformat.from_dict(dict(cell)) for cell in twice]
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3").execute()
    shown = [
        output["data"]["text/html"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if "text/html" in output.get("data", {})
    ]
    titles = [re.findall("<caption>([^<]*)", html)[0] for html in shown]
    assert titles == [
        "ClipperServer",
        "Model svm:1",
        "Model svm:2",
        "Application digits",
        "Answer",
        "ClipperServer",
    ]
    assert cells_of(shown[-1])["models"] == "svm:2 f64[64]"
