"""`clipper serve`: a model's file, module or folder is served at once, by real processes."""

import json
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click.testing
import pytest

from clipper.cli import main
from tests.dashboard.browser import Chromium, found
from tests.end_to_end.commands import running
from tests.processes import PATIENCE_S, Program

MODULE = """
from factor import FACTOR


def total(rows):
    return rows.sum(axis=1) * FACTOR


class Longest:
    input = "str"

    def predict_batch(self, texts):
        return [max(text.split(), key=len) for text in texts]
"""
FREE = ("--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0", "--admin", "127.0.0.1:0")


@pytest.fixture
def here(bare_folder: Path) -> Path:
    (bare_folder / "mine.py").write_text(MODULE)
    (bare_folder / "factor.py").write_text("FACTOR = 2\n")
    return bare_folder


@contextmanager
def served(*words: str) -> Iterator[Program]:
    with running("serve", *words, "--slo-ms", "60000") as server:
        server.until("state: memory", limit_s=240)
        yield server
        assert server.stop() == 0
        assert server.output.endswith("closed\n")


def refused(*words: str) -> str:
    """Return what a command prints that is refused before a server starts."""
    result = click.testing.CliRunner().invoke(main, ["serve", *words], prog_name="clipper")
    assert result.exit_code != 0, result.output
    return result.stderr


def run(line: str) -> Any:
    """Return the JSON that a command of the shell prints."""
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def curls(server: Program) -> list[str]:
    return re.findall(r"^  (curl .*)$", server.output, re.M)


def name_in(curl: str) -> str:
    return curl.partition("/api/")[2].partition("/")[0]


def address(server: Program, what: str) -> str:
    found = re.search(rf"^{what}\b.*? at (?:http://)?(127\.0\.0\.1:\d+)", server.output, re.M)
    assert found is not None, server.output
    return found[1]


def post(url: str, body: object, **headers: str) -> Any:
    sent = urllib.request.Request(url, json.dumps(body).encode(), headers, method="POST")
    with urllib.request.urlopen(sent, timeout=PATIENCE_S) as response:
        return json.load(response)


def test_the_lines_that_are_printed_work(here: Path) -> None:
    with served("mine:total", "mine:Longest", "--input", "", *FREE) as server:
        lines = curls(server)
        assert len(lines) == 2
        # the type of the function's input is not known; that of the class is
        assert "INPUT: one row as JSON" in server.output
        known = next(line for line in lines if "/longest/" in line)
        assert run(known)["output"] == "hello"
        other = next(line for line in lines if "/total/" in line)
        assert run(other.replace("INPUT", "[1, 2]"))["output"] == 6
        assert "queries come in over gRPC at 127.0.0.1:" in server.output


def test_the_link_to_the_dashboard_opens_once(here: Path) -> None:
    with served("mine:total", "--input", "f64[2]", *FREE[:4]) as server:
        link = re.search(r"dashboard at (http://\S+/dashboard/open\.html)#(\S+) ", server.output)
        assert link is not None, server.output
        page, code = link.groups()
        root = page.removesuffix("/dashboard/open.html")
        with urllib.request.urlopen(page, timeout=PATIENCE_S) as response:
            assert b"/dashboard/open.js" in response.read()
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(f"{root}/admin/ps", timeout=PATIENCE_S)
        token = post(f"{root}/dashboard/session", {"code": code})["token"]
        asked = urllib.request.Request(f"{root}/admin/ps")
        asked.add_header("Authorization", f"Bearer {token}")
        with urllib.request.urlopen(asked, timeout=PATIENCE_S) as response:
            assert json.load(response)["models"][0]["name"] == "total"
        for wrong in (code, "", "guess"):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                post(f"{root}/dashboard/session", {"code": wrong})
        # a command of this user prints another, which is good once as well
        result = click.testing.CliRunner().invoke(main, ["dashboard"], prog_name="clipper")
        assert result.exit_code == 0, result.output
        another = result.stdout.strip().partition("#")[2]
        assert post(f"{root}/dashboard/session", {"code": another})["token"] == token
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(f"{root}/admin/dashboard/link", {})


@pytest.mark.skipif(not found(), reason="no chromium: python tools/fetch.py chromium")
def test_the_link_opens_the_dashboard_in_a_browser(here: Path) -> None:
    with served("mine:total", "--input", "f64[2]", *FREE[:4]) as server, Chromium() as browser:
        link = re.search(r"dashboard at (http://\S+) ", server.output)
        assert link is not None, server.output
        page = browser.page()
        page.open(link[1])
        page.until_text("total")
        page.until("document.querySelector('.tiles')")
        assert page.run("location.hash") == ""
        assert link[1].partition("#")[2] not in page.run("location.href")
        # a second time, in a profile of its own
        other = browser.page()
        other.open(link[1])
        other.until_text("this link was used before")
        assert "Log in with a token instead" in other.text()
        page.close()
        other.close()


def test_a_taken_port_is_replaced_by_the_next_free_one_and_said(here: Path) -> None:
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            holder.bind(("127.0.0.1", 8000))
            holder.listen(1)
        except OSError:
            pass  # another program has it: so it is taken all the same
        with served("mine:total", "--input", "f64[2]") as server:
            assert "127.0.0.1:8000 is taken" in server.output
            found = address(server, "queries come in")
            assert int(found.rpartition(":")[2]) % 10 == 0
            assert f"queries come in at {found} instead" in server.output
            (line,) = curls(server)
            assert found in line
            assert run(line)["output"] == 2


def test_an_address_that_is_named_is_not_replaced(here: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        taken = f"127.0.0.1:{holder.getsockname()[1]}"
        with running("serve", "mine:total", "--http", taken, *FREE[2:]) as server:
            assert server.wait() == 1
            assert f"cannot listen on http.address = '{taken}': it is taken" in server.output


def test_new_code_is_a_new_version_and_broken_code_is_not(here: Path) -> None:
    with served("mine:total", "--input", "f64[2]", "--reload", *FREE) as server:
        (line,) = curls(server)
        query = line.replace("0.5, 0.5", "1, 2")
        assert run(query)["output"] == 6
        # which the module imports
        (here / "factor.py").write_text("FACTOR = 10\n")
        server.until("model total:2 is deployed instead of total:1")
        assert run(query)["output"] == 30
        (here / "mine.py").write_text("def total(rows:\n")
        server.until("model total has changed, but stays as it is")
        assert "SyntaxError" in server.output
        assert run(query)["output"] == 30
        (here / "mine.py").write_text(MODULE.replace("* FACTOR", "* 0"))
        server.until("is deployed instead of total:2")
        assert run(query)["output"] == 0
        result = click.testing.CliRunner().invoke(main, ["ps", "-o", "json"], prog_name="clipper")
        assert len(json.loads(result.stdout)) == 1


def test_a_model_that_fails_ends_the_command_with_its_reason(here: Path) -> None:
    (here / "bad.py").write_text("import nothing_of_that_name\n\n\ndef f(rows):\n    return rows\n")
    with running("serve", "bad:f", *FREE) as server:
        assert server.wait() == 1
        assert "nothing_of_that_name" in server.output
        assert "bad.py" in server.output


def test_a_first_failure_is_mended_by_an_edit(here: Path) -> None:
    (here / "mine.py").write_text("def total(rows):\n    return rows.summ(axis=1)\n")
    with served("mine:total", "--input", "f64[2]", "--reload", *FREE) as server:
        (here / "mine.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
        server.until("model total:2 is deployed")
        (line,) = curls(server)
        assert run(line)["output"] == 1


def test_files_and_folders_are_applications_of_their_names(here: Path) -> None:
    joblib = pytest.importorskip("joblib", reason='pip install "clipper-serving[demo]"')
    from sklearn.linear_model import LinearRegression

    folder = here / "models"
    folder.mkdir()
    for name, slope in (("Price list.v2", 3.0), ("plain", 1.0)):
        fitted = LinearRegression().fit([[0.0], [1.0]], [0.0, slope])
        joblib.dump(fitted, folder / f"{name}.joblib")
    (folder / "notes.txt").write_text("no model\n")
    (folder / "settings.json").write_text("{}\n")
    with served("models", *FREE, "--default", "-1") as server:
        assert "applications: plain, price-list.v2\n" in server.output
        outputs = {name_in(line): run(line)["output"] for line in curls(server)}
        assert outputs == {"plain": pytest.approx(0.5), "price-list.v2": pytest.approx(1.5)}
        fitted = LinearRegression().fit([[0.0], [1.0]], [0.0, 5.0])
    with served("models/plain.joblib", "--name", "slope", "--reload", *FREE) as server:
        (line,) = curls(server)
        assert run(line)["output"] == pytest.approx(0.5)
        joblib.dump(fitted, folder / "plain.joblib")
        server.until("model slope:2 is deployed instead of slope:1")
        assert run(line)["output"] == pytest.approx(2.5)


def test_a_killed_server_leaves_nothing_that_commands_find(here: Path) -> None:
    with running("serve", "mine:total", "--input", "f64[2]", *FREE) as server:
        server.until("state: memory", limit_s=240)
        server.stop(signal.SIGKILL)
    # other programs of this user may run servers elsewhere
    (here / "clipper.toml").write_text('[server]\nstate = "none"\n')
    result = click.testing.CliRunner().invoke(main, ["ps"], prog_name="clipper")
    assert result.exit_code == 1
    assert "no server of this user runs on this host" in result.stderr
    with served("mine:total", "--input", "f64[2]", *FREE) as server:
        assert run(curls(server)[0])["output"] == 2


def test_down_ends_it_from_its_folder(here: Path) -> None:
    with running("serve", "mine:total", "--input", "f64[2]", *FREE) as server:
        server.until("state: memory", limit_s=240)
        (here / "clipper.toml").write_text('[server]\nstate = "elsewhere"\n')
        result = click.testing.CliRunner().invoke(main, ["down"], prog_name="clipper")
        assert result.exit_code == 0, result.output
        assert server.wait() == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["modle.onnx"], "(there is model.onnx)"),
        (["modle.onnx"], "error: model 'modle': "),
        (["mine.py"], "clipper serve mine:total"),
        (["mien:total"], "mine.py"),
        (["empty"], "no model is in the folder 'empty'"),
        (["note.txt"], "is not a model of LightGBM"),
        (["mine:total", "other:total"], "would both be 'total'"),
        (["mine:total", "--name", "a", "--name", "b"], "2 names are given for 1 models"),
        (["mine:total", "--default", "[1"], "is not JSON"),
        (["mine:total", "--replicas", "many"], "is not a number or MIN-MAX"),
        (["mine:total", "--replicas", "4-1"], "error: replicas '4-1': the second number"),
        (["mine:total", "--input", "f65[2]"], "error: bad input type 'f65[2]'"),
        (["mine:total", "--http", "8000"], "expected 'HOST:PORT'"),
        (["mine:total", "--http", "0.0.0.0:0"], "any host that reaches this address"),
        ([], "Missing argument 'FILE...'"),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_starts(
    here: Path, words: list[str], said: str
) -> None:
    (here / "empty").mkdir()
    (here / "model.onnx").write_bytes(b"")
    (here / "note.txt").write_text("no model\n")
    assert said in refused(*words)
