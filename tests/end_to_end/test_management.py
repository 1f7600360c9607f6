"""A real `clipper up`, managed from a shell and by `clipper.connect`: what is done takes effect,
and is there after a kill."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import numpy as np
import pytest

import clipper
from clipper import errors
from clipper.cli import main
from clipper.frontend.http.messages import to_json
from clipper.manage.client import Client
from clipper.manage.running import Running, announce, running, the_one
from tests.end_to_end.commands import running as command
from tests.frontend.conftest import warm_workers
from tests.processes import PATIENCE_S

MODELS = """
def double(rows):
    print("a batch of", len(rows), flush=True)
    return rows.sum(axis=1) * 2


def triple(rows):
    return rows.sum(axis=1) * 3


def quadruple(rows):
    return rows.sum(axis=1) * 4
"""
FILE = """
[server]
state = "state"
drain_s = 1.0
[models.sums]
target = "mine:double"
input = "f64[3]"
[apps.total]
models = ["sums"]
slo_ms = 30000
default = -1
"""


@pytest.fixture
def here(bare_folder: Path) -> Path:
    (bare_folder / "mine.py").write_text(MODELS)
    (bare_folder / "clipper.toml").write_text(FILE)
    return bare_folder


def shell(*words: str, code: int = 0) -> str:
    """Yield a function that runs a command as a process."""
    done = subprocess.run(
        [sys.executable, "-m", "clipper", *words],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def run_json(*words: str, code: int = 0) -> Any:
    """Run a command in this process; return its output as JSON, or its error text if it fails."""
    result = click.testing.CliRunner().invoke(
        main, [*words, *(("-o", "json") if code == 0 else ())], prog_name="clipper"
    )
    assert result.exit_code == code, result.output
    return json.loads(result.stdout) if code == 0 else result.stderr


def test_a_model_from_deployment_to_rollback_and_after_a_kill(here: Path) -> None:
    with command("up") as first:
        first.until("sums:1/0 is connected", "state: ")
        assert shell("predict", "total", "[1, 2, 3]").startswith("12.0\tby sums:1 in ")
        assert "dry run: deployed sums:2" in shell(
            "deploy", "sums", "mine:triple", "--input", "f64[3]", "--dry-run"
        )
        assert [row["version"] for row in run_json("models", "sums")] == [1]
        assert "deployed sums:2" in shell(
            "deploy", "sums", "mine:triple", "--input", "f64[3]", "--behind"
        )
        assert run_json("predict", "total", "[1, 2, 3]")["output"] == 12
        assert shell("promote", "sums:2").startswith("sums:2 is now the latest version of sums\n")
        assert run_json("predict", "total", "[1, 2, 3]")["output"] == 18
        assert shell("rollback", "sums").startswith(
            "sums:1 is now the latest version of sums, instead of sums:2\n"
        )
        assert run_json("predict", "total", "[1, 2, 3]")["output"] == 12
        assert shell("scale", "sums:2", "2").startswith("sums:2 has 2 replicas\n")
        assert "a batch of 1" in shell("logs", "sums:1")
        server = clipper.connect(state="state")
        server.set_application("other", ["sums:2"], slo_ms=30_000, default=[1, 2])
        first.stop(signal.SIGKILL)
    assert "no server of this user runs on this host on the state" in shell("models", code=1)
    with command("up") as second:
        second.until("sums:1/0 is connected", "sums:2/1 is connected", "state: ")
        rows = [line.split()[:4] for line in shell("models").splitlines()[1:]]
        assert rows == [["sums:1", "*", "f64[3]", "1/1"], ["sums:2", "f64[3]", "2/2", "other"]]
        assert run_json("predict", "total", "[1, 2, 3]")["output"] == 12
        assert run_json("predict", "other", "[1, 2, 3]")["output"] == 18
        assert run_json("app", "show", "other")["default"] == [1, 2]
        verbs = [(row["verb"], row["actor"].partition("@")[0]) for row in run_json("history")]
        mine = verbs[1][1]
        assert [verb for verb, _ in verbs] == [
            "deploy",
            "set",
            "deploy",
            "promote",
            "rollback",
            "scale",
            "set",
        ], verbs
        assert mine == "the configuration"
        assert second.stop() == 0


def test_every_verb_by_hand(here: Path) -> None:
    with command("up") as server:
        server.until("sums:1/0 is connected", "state: ")
        run_json("deploy", "more", "mine:quadruple", "--input", "f64[3]", "--replicas", "1-2")
        run_json(
            "app",
            "set",
            "mean",
            "--model",
            "sums",
            "--slo-ms",
            "30000",
            "--policy",
            "stacking",
            "--default",
            "0",
        )
        assert run_json("link", "mean", "more")["message"] == "mean uses more"
        assert run_json("unlink", "mean", "more", "--dry-run")["dry_run"]
        assert run_json("unlink", "mean", "more")["message"] == "mean no longer uses more"
        run_json("challenge", "mean", "more", "--share", "0.5")
        assert run_json("app", "show", "mean")["roles"] == {"more": "challenger(share=0.5)"}
        run_json("shadow", "mean", "more")
        assert run_json("app", "show", "mean")["roles"] == {"more": "shadow"}
        answer = run_json("predict", "mean", "[1, 1, 1]", "--user", "ann", "--slo-ms", "20000")
        assert answer["output"] == 6
        told = ("feedback", "mean", answer["id"], "--label", "6")
        for _ in range(2):  # the first has learned nothing
            assert run_json(*told, "--dry-run") == {"counted": True}
        assert run_json(*told) == {"counted": True}
        assert run_json(*told) == {"counted": False}
        assert run_json(*told, "--dry-run") == {"counted": False}
        nobody = shell("feedback", "mean", "nobody-1", "--label", "6", "--dry-run", code=1)
        assert "no prediction 'nobody-1'" in nobody
        assert {"total", "mean"} == {row["name"] for row in run_json("apps")}
        assert run_json("stats")["applications"]["mean"]["queries"] == 1
        for table in ("apps", "stats", "history"):
            assert "mean" in shell(table)
        assert "slo_ms" in shell("app", "show", "mean")
        run_json("deploy", "sums", "mine:triple", "--input", "f64[3]", "--behind")
        assert "no rollouts" in shell("rollout", "status")
        rollout_command = (
            "rollout",
            "--app",
            "total",
            "sums:2",
            "--canary",
            "10%",
            "--stages",
            "100",
            "--hold",
            "1h",
        )
        assert (
            run_json(*rollout_command, "--dry-run")["message"]
            == "total uses sums:2 instead of sums:1 for a growing share: 0.1 -> 1"
        )
        run_json(*rollout_command)
        assert "total: sums:2 instead of sums:1: running, [0.1] -> 1" in shell(
            "rollout", "status", "total"
        )
        assert (
            run_json("rollout", "pause", "total")["message"]
            == "the rollout of sums:2 in total is paused"
        )
        assert (
            run_json("rollout", "resume", "total")["message"]
            == "the rollout of sums:2 in total is running"
        )
        assert (
            run_json("rollout", "abort", "total")["message"]
            == "the rollout of sums:2 in total is aborted"
        )
        assert "the rollout in total (aborted: abort, by " in shell("history", "-n", "1")
        assert run_json("rollout", "status")[0]["state"] == "aborted"
        assert "no running rollout" in run_json("rollout", "promote", "total", code=1)
        run_json("retire", "sums:2")
        assert "is still linked to: mean" in run_json("retire", "more", code=1)
        run_json("retire", "more", "--force", "--dry-run")
        run_json("retire", "more", "--force")
        run_json("app", "remove", "mean")
        assert [row["name"] for row in run_json("models")] == ["sums"]
        assert "no model 'smus' - did you mean 'sums'?" in run_json("scale", "smus", "2", code=1)
        assert "no application 'totl' - did you mean 'total'?" in run_json(
            "predict", "totl", "[1, 2, 3]", code=1
        )
        assert "is not JSON" in run_json("predict", "total", "[1, 2", code=1)
        assert "is not a number or MIN-MAX" in run_json("scale", "sums", "many", code=1)
        assert "does not know" not in run_json("predict", "total", "[1, 2]", code=1)
        assert "management needs the token" in run_json("models", "--token", "wrong", code=1)
        assert server.stop() == 0


def test_the_file_is_followed(here: Path) -> None:
    file = here / "clipper.toml"
    with command("up", "--reload", "--http", "127.0.0.1:0", "--http-workers", "2") as server:
        server.until("sums:1/0 is connected", "state: ")
        file.write_text(
            FILE.replace("mine:double", "mine:triple")
            + '[apps.more]\nmodels = ["sums"]\nslo_ms = 30000\n'
        )
        server.until("model sums:2 is deployed", "application more is made")
        assert run_json("predict", "more", "[1, 2, 3]")["output"] == 18
        file.write_text(FILE.replace("slo_ms", "slo"))
        server.until(
            "stays: clipper.toml:10: unknown key 'slo' in [apps.total] - did you mean 'slo_ms'?"
        )
        file.write_text(
            FILE.replace("mine:double", "mine:triple").replace("drain_s = 1.0", "drain_s = 2.0")
        )
        server.until(
            "application more is not declared any more",
            "[server] has changed: drain_s 1.0 -> 2.0. Restart the server for that to hold",
        )
        assert run_json("predict", "more", "[1, 2, 3]")["output"] == 18
        assert "[http] has changed" not in server.output
        assert server.stop() == 0


def test_sighup_reads_the_file_again(here: Path) -> None:
    file = here / "clipper.toml"
    logging = '[logging]\nformat = "json"\naccess_lines_s_max = 50\n'
    file.write_text(FILE + logging)
    with command("up", "--http", "127.0.0.1:0") as server:
        server.until("sums:1/0 is connected", "state: ")
        run_json("predict", "total", "[1, 2, 3]")
        server.until('"path": "/admin/applications/total/predict"')
        file.write_text(
            FILE.replace("slo_ms = 30000", "slo_ms = 20000").replace("drain_s = 1.0", "drain_s = 2")
            + logging.replace("50", "60").replace("json", "text")
            + 'level = "debug"\n[grpc]\ncalls_max = 7\n[tracing]\nheaders = "key=secret"\n'
        )
        os.kill(server.pid, signal.SIGHUP)
        server.until(
            "[logging] level is debug",
            "[logging] format is text",
            "application total is changed",
            "[server] has changed: drain_s 1.0 -> 2.0. Restart",
            "[grpc] has changed: calls_max 8192 -> 7. Restart",
            "[logging] has changed: access_lines_s_max 50 -> 60. Restart",
            '[tracing] has changed: headers "" -> "***". Restart',
        )
        file.write_text("[server\n")
        os.kill(server.pid, signal.SIGHUP)
        server.until("clipper.toml is not used, and what was stays: ")
        file.write_text(FILE)
        assert run_json("predict", "total", "[1, 2, 3]")["output"] == 12
        assert "secret" not in server.output
        assert server.stop() == 0


WAITING = """
import threading
from clipper.cli.servers.up import on_hangup
stopping, asked = threading.Event(), threading.Event()
on_hangup(stopping, asked)
print("waits", flush=True)
while not stopping.wait(0.01):
    if asked.is_set():
        asked.clear()
        print("asked", flush=True)
with open("ended", "x"):
    pass
"""


def test_a_closed_terminal_ends_a_server_and_a_signal_does_not(bare_folder: Path) -> None:
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-c", WAITING])
    with open(terminal, "rb", buffering=0) as screen:
        seen = b""
        while b"waits" not in seen:
            seen += screen.read(100)
        os.kill(child, signal.SIGHUP)
        while b"asked\r\n" not in seen:
            seen += screen.read(100)
    assert os.waitpid(child, 0)[1] == 0
    assert (bare_folder / "ended").exists()


def test_the_page_states_what_commands_print(here: Path) -> None:
    """Run each command of docs/managing.md in order, on the file that the page shows; times, names
    and ids are not compared."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "managing.md").read_text()
    (file,) = re.findall(r"^```toml\n(.*?)^```", page, re.M | re.S)
    (console,) = re.findall(r"^```console\n(.*?)^```", page, re.M | re.S)
    (here / "clipper.toml").write_text(file)
    code = (
        "def total(rows):\n    return rows.sum(axis=1)\n\n\ndef doubled(rows):\n    return"
        " rows.sum(axis=1) * 2\n"
    )
    (here / "mine.py").write_text(code)
    with command("up") as server:
        server.until("sums:1/0 is connected", "state: ")
        for example in console.split("$ clipper ")[1:]:
            line, _, shown = example.partition("\n")
            result = click.testing.CliRunner().invoke(main, shlex.split(line), prog_name="clipper")
            assert normalized(result.output) == normalized(shown), line
        assert server.stop() == 0


def normalized(text: str) -> str:
    """Return the text without what differs from run to run and without the widths of columns that
    depend on it."""
    for what in (r"\d+\.\d\d ms", r"id \S+", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", r"\S+@\S+"):
        text = re.sub(what, "...", text)
    return re.sub(r" +", " ", text)


# -- clipper.connect, on a server of this process


@pytest.fixture(scope="module")
def managed() -> Iterator[clipper.ClipperServer]:
    with clipper.start(admin="127.0.0.1:0", http={"token": "secret"}, drain_s=1.0) as server:
        server.deploy("sums", lambda rows: rows.sum(axis=1), input="f64[3]")
        server.app("total", ["sums"], slo_ms=30_000)
        server.app("learns", ["sums"], slo_ms=30_000, policy="stacking")
        warm_workers(server)
        yield server


@pytest.fixture
def client(managed: clipper.ClipperServer) -> Client:
    return clipper.connect(managed.admin_address, "secret")


def test_errors_are_those_of_the_server(client: Client) -> None:
    for raises, what in (
        (errors.UnknownModel, lambda: client.scale("smus", 1)),
        (errors.UnknownVersion, lambda: client.promote("sums:9")),
        (errors.UnknownVersion, lambda: client.rollback("sums")),
        (errors.UnknownApplication, lambda: client.link("totl", "sums")),
        (errors.StillLinked, lambda: client.retire("sums")),
        (errors.InvalidInput, lambda: client.set_application("total", slo_ms=-1)),
        (errors.InvalidInput, lambda: client.deploy("x", "nothing")),
        (errors.PackagingError, lambda: client.deploy("x", "missing.onnx")),
        (errors.PackagingError, lambda: client.deploy("x", print)),  # type: ignore[arg-type]
        (errors.AlreadyExists, lambda: client.deploy("sums", "a:b", version=1)),
        (errors.DeployFailed, lambda: client.deploy("gone", "nowhere.at.all:f")),
        (errors.InvalidInput, lambda: client.predict("total", float("nan"))),
        (errors.InvalidInput, lambda: client.predict("total", [1, 2])),
        (errors.UnknownPrediction, lambda: client.feedback("learns", "nobody-1", label=1)),
        (errors.InvalidInput, lambda: client.application("")),
    ):
        with pytest.raises(raises) as caught:
            what()
        assert type(caught.value) is raises
        assert caught.value.message
    with pytest.raises(errors.UnknownModel, match="did you mean 'sums'"):
        client.models("smus")


def test_values_travel(client: Client) -> None:
    answer = client.predict("total", np.array([1.5, 2, 3]))
    assert (answer.output, str(answer.models[0]), answer.is_default) == (6.5, "sums:1", False)
    assert client.predict("total", [1, 2, 3], user="ann").output == 6
    assert client.stats()["models"]["sums:1"]["has"] == 1
    assert client.application("total")["slo_ms"] == 30_000
    assert "total" in {row["name"] for row in client.applications()}
    assert client.logs("sums") == []
    assert client.history(1)[0]["verb"]


def test_a_verb_in_this_process_is_the_same(managed: clipper.ClipperServer) -> None:
    change = managed.manage.by("ann", dry_run=True).scale("sums", (1, 3))
    assert change.message == "sums:1 has 1 to 3 replicas"
    assert managed.manage.models("sums")[0]["replicas_max"] == 0
    managed.manage.by("ann").set_application("total", settings={"slo_ms": 29_000})
    assert managed.manage.history(1)[0]["actor"] == "ann"
    assert managed.catalog.application("total").slo_ms == 29_000
    managed.app("total", slo_ms=30_000)


def test_the_state_moves_to_another_server(tmp_path: Path) -> None:
    with clipper.start(state=str(tmp_path / "old"), drain_s=1.0) as old:
        for factor in (1, 2, 3):
            old.deploy(
                "sums", lambda rows, factor=factor: rows.sum(axis=1) * factor, input="f64[3]"
            )
        old.manage.promote("sums:2")
        old.manage.retire("sums:1")
        old.app("total", ["sums"], slo_ms=30_000, default=b"\0x", policy="stacking")
        answer = old.app("total").predict([1, 2, 3]).result(PATIENCE_S)
        assert old.app("total").feedback(answer, label=12)
        old._learning.states.close()  # writes
        text = to_json(old.manage.export_state())
    with clipper.start(state=str(tmp_path / "new"), admin="127.0.0.1:0", drain_s=1.0) as new:
        client = clipper.connect(new.admin_address)
        assert client.import_state(text, dry_run=True)["changed"] == []
        assert client.import_state(text)["message"] == "imported sums:2, sums:3, total"
        assert [(row["version"], row["latest"]) for row in client.models("sums")] == [
            (2, True),
            (3, False),
        ]
        assert client.predict("total", [1, 2, 3]).output == 12
        assert new.catalog.application("total").default == b"\0x"
        keys = [record.key for record in new._store.range("selection/")[0]]
        assert keys
        assert client.import_state(text)["changed"] == []
        again = json.loads(client.export_state())
        assert [model["target"] for model in again["models"]] == [
            model["target"] for model in json.loads(text)["models"]
        ]
        new.deploy("sums", lambda rows: rows.sum(axis=1), input="f64[3]", version=7)
        assert (
            client.rollback("sums")["message"]
            == "sums:3 is now the latest version of sums, instead of sums:7"
        )
        other = json.loads(text)
        other["models"][0] |= {"version": 7}
        with pytest.raises(errors.AlreadyExists, match="'sums:7' is another one here"):
            client.import_state(json.dumps(other).encode())
        other["files"] = {}
        for wrong in (json.dumps(other).encode(), b"[]", b"no JSON", b"{}"):
            with pytest.raises(errors.InvalidInput):
                client.import_state(wrong)


def test_the_url_and_the_token_of_a_server(
    managed: clipper.ClipperServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = f"http://{managed.admin_address}"
    with pytest.raises(errors.NotAllowed, match="needs the token"):
        clipper.connect(url, "").models()
    # its private token is found, for it is a server of this user
    assert clipper.connect(url).models()
    assert clipper.connect(url.replace("127.0.0.1", "localhost")).models()
    with pytest.raises(errors.NotAllowed, match="--token"):
        clipper.connect(url, "wrong").models()
    monkeypatch.setenv("CLIPPER_URL", url)
    monkeypatch.setenv("CLIPPER_ADMIN_TOKEN", "secret")
    assert clipper.connect().models()
    for wrong in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(errors.InvalidInput):
            clipper.connect(wrong)
    with pytest.raises(
        errors.NoServer, match=re.escape("Start one with: clipper up --admin 127.0.0.1:1 ")
    ):
        clipper.connect("127.0.0.1:1").models()


def test_servers_publish_their_addresses(managed: clipper.ClipperServer, tmp_path: Path) -> None:
    (mine,) = [one for one in running() if one.pid == os.getpid()]
    assert (mine.url, mine.token, mine.state) == (f"http://{managed.admin_address}", "secret", "")
    place = tmp_path / "clipper-dead"
    place.mkdir()
    (place / "alive").touch()
    announce(place, Running("http://127.0.0.1:1", 1))
    assert (place / "manage.json").stat().st_mode & 0o777 == 0o600
    with pytest.raises(errors.NoServer, match=re.escape(str(tmp_path))):
        the_one(str(tmp_path / "state"))
