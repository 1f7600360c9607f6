"""Commands that a person uses beside a real `clipper up`: bench, ps, top, logs, down."""

import contextlib
import json
import os
import re
import signal
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import clipper
from clipper import errors
from clipper.cli import main
from clipper.manage.running import the_one
from tests.end_to_end.commands import running
from tests.processes import Program

MODELS = """
import os, sys


def total(rows):
    print("a batch of", len(rows), flush=True)
    return rows.sum(axis=1)


def dies(rows):
    print("OSError: there is no such file", file=sys.stderr, flush=True)
    os._exit(3)


def fails(rows):
    raise ValueError("no luck")


def slow(rows):
    import time
    time.sleep(0.03)
    return rows.sum(axis=1)
"""
FILE = """
[server]
state = "state"
warmup = false
drain_s = 1.0
[http]
address = "127.0.0.1:0"
[grpc]
address = "127.0.0.1:0"
[models.sums]
target = "mine:total"
input = "f64[3]"
replicas = 2
[apps.total]
models = ["sums"]
slo_ms = 5000
default = -1
"""


@pytest.fixture
def here(bare_folder: Path) -> Path:
    (bare_folder / "mine.py").write_text(MODELS)
    (bare_folder / "clipper.toml").write_text(FILE)
    return bare_folder


@contextlib.contextmanager
def up() -> Iterator[Program]:
    with running("up") as started:
        started.until("sums:1/0 is connected", "sums:1/1 is connected", "state: ")
        yield started


def shell(*words: str, code: int = 0) -> str:
    result = click.testing.CliRunner().invoke(main, words, prog_name="clipper")
    assert result.exit_code == code, result.output
    return result.stdout if code in (0, 130) else result.stderr


def run_json(*words: str) -> Any:
    return json.loads(shell(*words, "-o", "json"))


# -- bench


def test_bench_over_http_grpc_and_management(here: Path) -> None:
    with up():
        for way in ((), ("--grpc",), ("--to", the_one("state").queries)):
            [step] = run_json("bench", "total", "--rate", "100", "--for", "200ms", *way)["steps"]
            assert step["outcomes"]["ok"] == step["sent"] > 0
        report = run_json(
            "bench",
            "total",
            "--rates",
            "50,100",
            "--for",
            "200ms",
            "--html",
            "report.html",
            "--steady",
        )
        assert [step["sent"] for step in report["steps"]] == [10, 20]
        assert set(report["machine"]) >= {"cpu", "cores", "python", "clipper"}
        assert "<svg" in (here / "report.html").read_text()
        found = run_json(
            "bench", "total", "--search", "--rate", "20000", "--for", "100ms", "--slo-ms", "0.01"
        )
        assert found["highest_rate"] == 0
        text = shell(
            "bench", "total", "--rate", "50", "--for", "200ms", "--cached", "--input", "[1, 2, 3]"
        )
        assert "  p99 " in text
        assert "does not take the queries: 400 " in shell(
            "bench", "total", "--input", "[1, 2]", code=1
        )
        assert "no application 'totl' - did you mean 'total'?" in shell("bench", "totl", code=1)
        assert "no folder for --html" in shell("bench", "total", "--html", "nowhere/r.html", code=1)
    assert "no server of this user runs on this host" in shell("bench", "total", code=1)


def test_bench_by_way_of_management_where_that_is_all(here: Path) -> None:
    (here / "clipper.toml").write_text(
        FILE.replace(
            '[http]\naddress = "127.0.0.1:0"\n[grpc]\naddress = "127.0.0.1:0"\n',
            '[http]\naddress = ""\n',
        )
    )
    with up():
        report = run_json("bench", "total", "--rate", "100", "--for", "200ms")
        assert "management" in report["to"]
        assert report["steps"][0]["outcomes"]["ok"] == report["steps"][0]["sent"]
        assert "this server has no gRPC address" in shell("bench", "total", "--grpc", code=1)


def test_bench_of_a_killed_server_reports_the_outcome_of_each_query(here: Path) -> None:
    with (
        up() as server,
        running("bench", "total", "--rate", "100", "--for", "60s", "-o", "json") as bench,
    ):
        bench.until(lambda: run_json("stats")["applications"]["total"]["queries"])
        server.stop(signal.SIGKILL)
        # it goes on without the server
        threading.Event().wait(1.5)
        assert bench.stop(signal.SIGINT) == 130
        report = json.loads(bench.output)
    [step] = report["steps"]
    assert sum(step["outcomes"].values()) == step["sent"] > 0
    assert step["outcomes"]["error"] > 0
    assert "no connection" in step["errors"]


def test_bench_interrupted_prints_what_was_measured(here: Path) -> None:
    with up(), running("bench", "total", "--rate", "100", "--for", "60s", "-o", "json") as bench:
        bench.until(lambda: run_json("stats")["applications"]["total"]["queries"] > 5)
        assert bench.stop(signal.SIGINT) == 130
        [step] = json.loads(bench.output)["steps"]
    assert step["interrupted"] is True
    assert step["sent"] > 0


# -- ps and logs


def test_ps_shows_the_state_of_each_model_and_the_next_step(here: Path) -> None:
    with up() as server:
        [row] = run_json("ps")
        assert (row["name"], row["version"], row["state"], row["ready"], row["wanted"]) == (
            "sums",
            1,
            "ready",
            2,
            2,
        )
        assert row["rss_bytes"] > 10_000_000
        assert row["roles"] == {"total": "primary"}
        assert (row["error"], row["next"]) == ("", "")
        for name in ("fails", "slow", "dies"):
            shell("deploy", name, f"mine:{name}", "--input", "f64[3]")
            shell(
                "app",
                "set",
                name,
                "--model",
                name,
                "--slo-ms",
                "4000" if name != "slow" else "20",
                "--default",
                "0",
            )
            shell("predict", name, "[1, 2, 3]", "--slo-ms", "4000")
        server.until(lambda: any("there is no such file" in row["error"] for row in run_json("ps")))
        rows = {row["name"]: row for row in run_json("ps")}
        assert rows["fails"]["error"] == "1 queries failed: ValueError: no luck"
        assert rows["dies"]["error"].startswith("OSError: there is no such file (")
        assert rows["dies"]["next"] == "clipper logs dies:1"
        assert re.match(r"one row takes \d+(\.\d)? ms", rows["slow"]["error"])
        assert rows["slow"]["error"].endswith("ms, the SLO of slow is 20 ms")
        assert rows["slow"]["next"] == "clipper profile slow:1"
        head, *lines = shell("ps").splitlines()
        names = ["NAME", "VER", "ROLE", "STATE", "REPL", "RSS", "(PSS)", "START", "QUEUE"]
        assert head.split()[:9] == names
        assert len(lines) == 4
        assert any(
            line.startswith("fails") and line.endswith("-> clipper logs fails:1") for line in lines
        )


def test_logs_are_followed_over_the_death_of_a_container_and_of_the_server(here: Path) -> None:
    with up() as server, running("logs", "-f", "sums") as logs:
        for number in range(10):  # both containers
            shell("predict", "total", f"[1, 2, {number}]")
        logs.until("| a batch of 1")
        pids = [row["pid"] for row in run_json("stats")["models"]["sums:1"]["replicas"]]
        os.kill(pids[0], signal.SIGKILL)
        server.until(
            lambda: (
                run_json("stats")["models"]["sums:1"]["has"] == 2
                and pids
                != [row["pid"] for row in run_json("stats")["models"]["sums:1"]["replicas"]]
            )
        )
        server.stop(signal.SIGKILL)
        logs.until("Waiting for it")
        with up():
            logs.until("-- the server is back")
            before = logs.output.count("| a batch of")
            shell("predict", "total", "[7, 7, 7]")
            logs.until(lambda: logs.output.count("| a batch of") > before)
            assert "sums:1/0 | " in logs.output or "sums:1/1 | " in logs.output
            assert logs.stop(signal.SIGINT) == 130


def test_logs_of_what_is_not_there(here: Path) -> None:
    with up():
        assert "no model 'smus' - did you mean 'sums'?" in shell("logs", "-f", "smus", code=1)
        assert "no container sums:1/7 was started here" in shell(
            "logs", "sums", "--replica", "7", code=1
        )
        error = shell_error_of_follow("sums", "nonsense")
        assert "is not a position that the server has returned" in error
    assert "no server of this user runs on this host" in shell("logs", "-f", "sums", code=1)


def shell_error_of_follow(model: str, after: str) -> str:
    with pytest.raises(errors.InvalidInput) as caught:
        clipper.connect(state="state").follow(model, after)
    return str(caught.value)


# -- top


def test_top_prints_a_frame_where_there_is_no_terminal(here: Path) -> None:
    with up():
        text = shell("top", "--svg", "frame.svg")
        assert "total" in text
        assert "sums:1" in text
        assert "2/2" in text
        picture = (here / "frame.svg").read_text()
        assert picture.startswith("<svg")
        assert "cdn" not in picture
        frame = run_json("top", "--once")
        assert [app["name"] for app in frame["applications"]] == ["total"]
        assert [model["state"] for model in frame["models"]] == ["ready"]
        assert "no folder for --svg" in shell("top", "--svg", "nowhere/f.svg", code=1)
    assert "no server of this user runs on this host" in shell("top", code=1)


def test_top_on_a_terminal_over_a_restart_of_the_server(here: Path) -> None:
    with up() as server, running("top", terminal=True) as top:
        top.see("sums:1")
        top.press("s")
        top.see("sorted by rate")
        top.press("p")
        top.see("paused")
        top.press("p")
        server.stop(signal.SIGKILL)
        top.see("the server has not answered for")
        with up():
            top.see("restarted 1 x while watched")
            top.press("q")
            assert top.wait() == 0


def test_top_of_a_server_without_readings(here: Path) -> None:
    (here / "clipper.toml").write_text(FILE.replace("[grpc]", "dashboard = false\n[grpc]"))
    with up():
        assert "has no readings to watch" in shell("top", code=1)


# -- profile


def test_profile_of_a_target_and_of_what_a_server_serves(here: Path) -> None:
    quick = ("--batch-max", "4", "--for", "20ms")
    text = shell(
        "profile",
        "mine:total",
        "--type",
        "f64[3]",
        *quick,
        "--slo-ms",
        "50",
        "--rate",
        "1000",
        "--html",
        "p.html",
    )
    assert "for an SLO of 50 ms: batches of " in text
    assert "<svg" in (here / "p.html").read_text()
    with up():
        assert "the server has not evaluated a batch" in shell("profile", "sums", "--seen", code=1)
        found = run_json("profile", "sums", *quick)
        assert [point["batch"] for point in found["points"]] == [1, 2, 4]
        assert found["advice"] is None
        assert "as sums:1 is deployed" in found["how"]
        shell("predict", "total", "[1, 2, 3]")
        seen = run_json("profile", "sums:1", "--seen")
        assert [point["batch"] for point in seen["points"]] == [1]
        assert "no model 'smus'" in shell("profile", "smus", code=1)
    assert "no server of this user runs on this host" in shell("profile", "sums", code=1)
    assert "No module named 'nowhere'" in shell("profile", "nowhere:f", code=1)


# -- the beginning and the end


def test_init_writes_what_works_and_down_ends_it(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "Next: cd shop && clipper up" in shell("init", "shop")
    assert "clipper.toml already exists" in shell("init", "shop", code=1)
    monkeypatch.chdir(here / "shop")
    assert shell("config", "check").startswith("ok: clipper.toml: ")
    text = Path("clipper.toml").read_text()
    Path("clipper.toml").write_text(text.replace(":8000", ":0").replace(":8002", ":0"))
    with running("up") as server:
        server.until("total:1/0 is connected", "state: ")
        assert run_json("predict", "total", "[1, 2, 3]", "--slo-ms", "5000")["output"] == 6
        assert "ended the server at http://127.0.0.1:" in shell("down")
        assert server.wait() == 0
        assert server.output.endswith("closed\n")
    assert "no server of this user runs on this host" in shell("down", code=1)


def test_the_tutorial_serves_a_saved_model_over_http(here: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "tutorial.md").read_text()
    section = page.partition("## Over HTTP\n")[2].partition("\n## ")[0]
    blocks = dict(re.findall(r"^```(\w+)\n(.*?)^```", section, re.M | re.S))
    pytest.importorskip("sklearn", reason='no scikit-learn: pip install "clipper-serving[demo]"')
    names: dict[str, Any] = {}
    exec(blocks["python"], names)
    (here / "clipper.toml").write_text(blocks["toml"].replace(":8000", ":0"))
    with running("up") as server:
        server.until("svm:1/0 is connected", "state: ")
        address = clipper.connect(state="state").about()["http"]
        body = json.dumps({"input": names["X"][900].tolist(), "slo_ms": 5000}).encode()
        with urllib.request.urlopen(f"{address}/api/digits/predict", body) as response:
            answer = json.load(response)
        assert (answer["output"], answer["models"]) == (names["y"][900], ["svm:1"])
        assert answer.keys() == json.loads(blocks["console"].split("\n")[3]).keys()


def test_down_leaves_a_server_within_a_program_alone(here: Path) -> None:
    (here / "clipper.toml").unlink()
    with clipper.start(admin="127.0.0.1:0", state="own"):
        (here / "clipper.toml").write_text('[server]\nstate = "own"\n')
        assert f"is part of process {os.getpid()}, not of `clipper up`" in shell("down", code=1)


def test_down_at_once_and_when_it_takes_too_long(here: Path) -> None:
    (here / "clipper.toml").write_text(FILE.replace("drain_s = 1.0", "drain_s = 60.0"))
    shell_of_slow = (
        "import time\ndef sleep(rows):\n    time.sleep(60)\n    return rows.sum(axis=1)\n"
    )
    (here / "sleeper.py").write_text(shell_of_slow)
    with up() as server:
        shell("deploy", "sleeper", "sleeper:sleep", "--input", "f64[3]")
        shell("app", "set", "sleeper", "--model", "sleeper", "--slo-ms", "60000", "--default", "0")
        with running("predict", "sleeper", "[1, 2, 3]") as waiting:
            waiting.until(
                lambda: any(
                    r.get("in_flight") for r in run_json("stats")["models"]["sleeper:1"]["replicas"]
                )
            )
            assert "is still closing after 0.1 s: clipper down --now" in shell(
                "down", "--wait", "0.1", code=1
            )
            assert "ended the server" in shell("down", "--now")
            server.wait()
