"""Requests that the verbs send to a server, and their printed output."""

import shlex
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from clipper.cli import main, server_command
from clipper.cli.monitoring.top_screen import screen
from clipper.cli.monitoring.top_state import ServerReadings
from clipper.errors import ClipperError, NoServer, UnknownModel
from clipper.mesh.records import Copy, Failure, Instance, MeshModel, VModel
from clipper.mesh.reports import (
    CopyStatus,
    Decision,
    Explanation,
    MeshEvent,
    ModelStatus,
    Verdict,
    VModelStatus,
)
from tests.expected import check_expected

NOW_MS = 1_700_000_000_000
MIB = 2**20


class RecordingServer:
    """A fake server that records its requests and answers from a table."""

    def __init__(self, answers: dict[str, Any], notes: list[str], path: str = "") -> None:
        self._answers, self._notes, self._path = answers, notes, path

    def __getattr__(self, name: str) -> "RecordingServer":
        return RecordingServer(self._answers, self._notes, f"{self._path}.{name}".lstrip("."))

    def __call__(self, *words: object, **named: object) -> Any:
        arguments = [
            *map(repr, words),
            *(f"{key}={value!r}" for key, value in sorted(named.items())),
        ]
        self._notes.append(f"> {self._path}({', '.join(arguments)})\n")
        answer = self._answers[self._path]
        answer = answer(*words) if callable(answer) else answer
        if isinstance(answer, Exception):
            raise answer
        return answer


def plain(text: str) -> str:
    """Return the text with colours as ^[, and without blanks at the ends of lines."""
    return "".join(f"{line.rstrip()}\n" for line in text.replace("\x1b", "^").splitlines())


@pytest.fixture
def transcript(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs a command line against given answers, and returns its requests
    and its output."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    time.tzset()
    monkeypatch.setattr("clipper.clock.wall_time_us", lambda: NOW_MS * 1000)
    monkeypatch.setattr("clipper.cli.mesh.models.wall_time_us", lambda: NOW_MS * 1000)

    def run(line: str, answers: dict[str, Any]) -> str:
        notes: list[str] = []

        def connected(url: str | None, token: str | None, ca: str | None) -> RecordingServer:
            notes.append(f"> server at {url} {token} {ca}\n" if url else "")
            return RecordingServer(answers, notes)

        monkeypatch.setattr(server_command, "_connected", connected)
        words = shlex.split(line)
        done = CliRunner().invoke(main, words, prog_name="clipper", color=words[0] == "mesh")
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        text = f"$ clipper {line}\n{''.join(notes)}{done.output}"
        text += f"exit {done.exit_code}\n" if done.exit_code else ""
        return plain(text.replace(str(tmp_path), "HERE"))

    yield run
    monkeypatch.undo()
    time.tzset()


MODEL = MeshModel(
    "m1",
    "onnx",
    "/models/m1.onnx",
    key="tree",
    input="f64[3]",
    output="f64",
    refs=2,
    copies={"a": Copy(NOW_MS - 9000, NOW_MS - 8000, MIB), "b": Copy(NOW_MS - 100)},
    size_bytes=7,
)
LOADED = ModelStatus(
    "m1",
    "LOADED",
    copies=(
        CopyStatus("b", "LOADING", NOW_MS - 100),
        CopyStatus("a", "LOADED", NOW_MS - 8000, 3 * MIB // 2),
    ),
    info=MODEL,
    used_ms=NOW_MS - 125_000,
)
FAILED = ModelStatus(
    "m2",
    "LOADING_FAILED",
    errors=("no such file", "older"),
    copies=(CopyStatus("a", "FAILED", NOW_MS - 7_300_000, why="no such file"),),
    info=MeshModel("m2", "skops", "m2.skops", refs=1, size_bytes=5 * 2**30),
)
NOTHING = ModelStatus("m9", "NOT_FOUND")
NODE = Instance(
    "a",
    1,
    "tcp:h:1",
    "tcp:h:2",
    host="h",
    labels=("gpu", "big"),
    zone="north",
    capacity_bytes=1000 * MIB,
    used_bytes=130 * MIB,
    models=3,
    lru_ms=NOW_MS - 86_400_000 * 3,
    loading=2,
    queued=5,
    rate=12.4,
)
FULL = Instance("b", 2, "", "", capacity_bytes=1023, used_bytes=5000, stopping=True)
EMPTY = Instance("c", 3, "", "")
MOVING = VModelStatus(
    "best", "TRANSITIONING", "m1", "m2", "LOADED", "LOADING", "ann", previous="m0", why="slow"
)
SPLIT = VModelStatus("half", "DEFINED", "m1", "m2", "LOADED", "LOADED", share=0.125)
STILL = VModelStatus("still", "DEFINED", "m1", "m1", "LOADED", "LOADED")
BROKEN = VModelStatus("broken", "TRANSITION_FAILED", "m1", "m2", "LOADED", "LOADING_FAILED")
V_NOTHING = VModelStatus("none", "NOT_FOUND")
EVENTS = [
    MeshEvent("PUT", "model", "m1", 4, MODEL),
    MeshEvent("PUT", "model", "m2", 5, MeshModel("m2", "onnx", failures={"a": Failure(1)})),
    MeshEvent("PUT", "instance", "a", 6, NODE),
    MeshEvent("SYNC", "", "", 6),
    MeshEvent("PUT", "vmodel", "best", 7, VModel("best", "m1", "m2")),
    MeshEvent("DELETE", "model", "m1", 8),
    MeshEvent("RESET", "", "", 9),
]


def test_the_verbs_of_a_mesh(transcript: Any) -> None:
    one = {"m1": LOADED, "m2": FAILED, "m9": NOTHING}
    name = {"best": MOVING, "half": SPLIT, "still": STILL, "broken": BROKEN, "none": V_NOTHING}
    answers = {
        "mesh.register": lambda id, *_: one[id],
        "mesh.unregister": None,
        "mesh.status": lambda id: one[id],
        "mesh.ensure_loaded": lambda id: one[id],
        "mesh.models": lambda prefix, after, limit: [LOADED, FAILED] if prefix != "none" else [],
        "mesh.instances": [NODE, FULL, EMPTY],
        "mesh.explain": lambda id: (
            Explanation(id, "LOADED")
            if id == "m2"
            else Explanation(
                id,
                "LOADING_FAILED",
                (
                    Verdict("a", True, "least used", 1),
                    Verdict("b", False, "full"),
                    Verdict("c", True, "alone", 0),
                ),
                (Decision(NOW_MS, "load", "asked"), Decision(NOW_MS + 3_600_000, "drop", "idle")),
                "it is tried again",
            )
        ),
        "mesh.watch": EVENTS,
        "mesh.set_vmodel": lambda id, *_: name[id],
        "mesh.delete_vmodel": None,
        "mesh.vmodel_status": lambda id, *_: name[id],
        "mesh.rollback_vmodel": lambda id: name[id],
        "mesh.vmodels": lambda prefix, *_: list(name.values()) if not prefix else [],
    }
    Path("here.onnx").touch()
    lines = """mesh register m1 here.onnx
mesh register m1 there.onnx --type onnx --key k --input f64[3] --output-type f64 --load
mesh register m1 x:y --copies-min 1 --copies-max 4 --pin --slo-ms 5 --requires gpu --prefers big
mesh register m2 x --sync
mesh register m2 x --sync --dry-run --owner ann
mesh register m1 x --sync
mesh register m9 x
mesh unregister m1 m2
mesh unregister m1 --dry-run
mesh unregister m1 m2 -o json
mesh status m1
mesh status m2
mesh status m9
mesh status m2 -o json
mesh ensure m1
mesh ensure m2 --sync
mesh ls
mesh ls m -n 2 --after l
mesh ls -n 2
mesh ls -n 3
mesh ls none
mesh ls none -o json
mesh ps
mesh explain m1
mesh explain m1 -o json
mesh explain m2
mesh watch
mesh watch m -o json
mesh vmodel set still m1
mesh vmodel set best m2 --path here.onnx --type onnx --auto-delete --owner ann
mesh vmodel set best m2 --path gone.onnx --sync
mesh vmodel set best m2 --sync --dry-run
mesh vmodel set half m2 --share 0.125 --update-only --expected m1 --load --force --sync
mesh vmodel set none m1
mesh vmodel delete best
mesh vmodel delete best --dry-run --owner ann -o json
mesh vmodel status best --owner ann
mesh vmodel status half
mesh vmodel status broken
mesh vmodel status still -o json
mesh vmodel status none
mesh vmodel rollback best
mesh vmodel rollback still --dry-run
mesh vmodel ls
mesh vmodel ls none -n 3"""
    check_expected(
        "mesh-verbs.txt", "\n".join(transcript(line, answers) for line in lines.split("\n"))
    )


CHANGE = {
    "dry_run": False,
    "message": "svm:2 is the latest",
    "changed": [
        {
            "key": "models/svm",
            "before": {"latest": 1, "same": 5},
            "after": {"latest": 2, "same": 5},
        },
        {
            "key": "apps/digits",
            "before": {"models": [{"name": "svm", "version": None}], "long": "x" * 58},
            "after": {"models": [{"name": "svm", "version": 2}], "long": "x" * 59},
        },
        {"key": "new", "before": None, "after": {"a": 1}},
        {"key": "gone", "before": {"a": 1}, "after": None},
        {"key": "other", "before": [1], "after": [2]},
    ],
}
DONE = {"dry_run": False, "message": "done", "changed": []}
WOULD = {"dry_run": True, "message": "nothing is new", "changed": []}


def change(*words: object) -> dict[str, Any]:
    return CHANGE if words == ("svm",) else WOULD if "other" in words else DONE


APPLICATIONS = [
    {
        "name": "digits",
        "input": "f64[64]",
        "models": ["svm", "forest:2", "new:1"],
        "roles": {"new:1": "canary(share=0.1)"},
        "slo_ms": 20.0,
        "policy": "exp3",
        "default": -1,
    },
    {
        "name": "words",
        "input": "str",
        "models": [],
        "roles": {},
        "slo_ms": 0.25,
        "policy": "stacking",
        "default": "it is longer than sixty characters, in all of what it is",
    },
]
COUNTS = {
    "answers": 900,
    "defaults": 2,
    "p50_us": 1234.0,
    "p99_us": None,
    "feedbacks": 8.0,
    "reward": 6.0,
}
ROLLOUT = {
    "application": "digits",
    "model": "svm:2",
    "control": "svm:1",
    "state": "running",
    "stages": [5.0, 25.0, 100.0],
    "stage": 1,
    "stage_us": NOW_MS * 1000,
    "waits": "for 60 s",
    "new": COUNTS,
    "before": {**COUNTS, "p50_us": None, "p99_us": 99_999.0, "feedbacks": 0.0},
    "guards": [{"guard": "p99<20ms", "outcome": "holds", "reason": "12 ms"}],
}
REVERTED = {
    "application": "words",
    "model": "w:3",
    "control": "w:2",
    "state": "reverted",
    "stages": [33.3333333, 100.0],
    "stage": 0,
    "stage_us": 0,
    "reason": "error<1% is broken",
    "new": {},
    "before": {},
    "guards": [],
}
ROW = {
    "name": "svm",
    "version": 2,
    "latest": True,
    "roles": {},
    "state": "ready",
    "ready": 1,
    "wanted": 2,
    "rss_bytes": 123_600_000,
    "queued": 7,
    "batch": 16,
    "why": "aimd, 20 ms",
    "error": "",
    "next": "",
}
ROWS = [
    ROW,
    {
        **ROW,
        "version": 1,
        "latest": False,
        "state": "failing",
        "ready": 0,
        "rss_bytes": 0,
        "batch": 0,
        "error": "no module x",
        "next": "clipper logs svm:1",
    },
    {
        **ROW,
        "name": "new",
        "roles": {"a": "primary", "b": "shadow", "c": "canary"},
        "pss_bytes": 51_000_000,
        "starts": {"0": "forked: numpy", "1": "plain"},
        "error": "late",
    },
]


def test_the_verbs_of_models_and_applications(transcript: Any) -> None:
    verbs = (
        "deploy",
        "promote",
        "rollback",
        "scale",
        "retire",
        "link",
        "unlink",
        "challenge",
        "shadow",
        "set_application",
        "remove_application",
        "rollout",
        "pause_rollout",
        "resume_rollout",
        "abort_rollout",
        "promote_rollout",
    )
    empty = iter([APPLICATIONS, APPLICATIONS, []])
    reply = {
        "output": [1, 2],
        "default": False,
        "models": ["svm:2", "forest:1"],
        "latency_us": 1234.5,
        "id": "4b-1",
        "reason": "",
    }
    answers = {
        **dict.fromkeys(verbs, change),
        "applications": lambda: next(empty),
        "application": {"name": "digits", "slo_ms": 20.0, "default": "x" * 70},
        "rollouts": lambda app: [ROLLOUT, REVERTED] if not app else [],
        "ps": ROWS,
        "about": {"store": "store redis://one has lost the catalog"},
        "accept_store": change,
        "logs": lambda model, replica: ["one", "two"] if replica == 1 else [],
        "predict_plainly": lambda app, input: (
            reply
            if app == "digits"
            else {**reply, "default": True, "reason": "no model", "output": -1}
        ),
        "feedback": lambda app, id: id == "new",
    }
    Path("doubler.py").touch()
    Path("packed").mkdir()
    Path("packed/__init__.py").touch()
    lines = """apps
apps -o json --url http://h:1 --token t --ca f.pem
apps
app set digits --model svm --model forest:2 --slo-ms 20 --default -1
app set digits --policy exp3 --decider first --confidence-min 0.5 --input str --missing skip
app set digits --coverage 0.9 --context-table t --output-tensor y --default '{"a": 1}' --dry-run
app set other --default word
app set other --default '{'
app show digits
app show digits -o json
app remove digits
link digits svm
link other svm:2 --role shadow --dry-run
unlink digits svm
challenge digits svm:2
challenge digits svm:2 --share 0.05 --dry-run
challenge digits svm:2 --share 1
shadow digits svm:2
shadow digits svm:2 --share 1
shadow digits svm:2 --share 0
deploy svm doubler:double
deploy svm packed.inner:double --input f64[3] --version 3 --behind --no-wait --dry-run
deploy svm other:double --replicas 1-4 --code lib --code /abs
deploy svm s3://bucket/doubler:1 --no-warmup --batching aimd
deploy svm x.onnx --warmup '[[1, 2]]' --batching cost=length,padded=true,max=3
deploy svm x.pkl --schema '{"rooms": "i64", "city": "str"} -> f64' --reads taste=0,1 --tolerance 0
deploy svm x.pkl --schema 'f64[2] -> f64' --input f64
deploy svm x.pkl --schema 'f65 -> f64'
deploy svm x.pkl --deployer docker --memory 0 --cpus 2 --gpus all --trust a.B --trust c.D
deploy svm x.pkl --requirements r.txt --python 3.12
deploy svm --command 'java -jar x.jar'
deploy svm
deploy svm x --command y
deploy svm x --warmup 5
deploy svm x --warmup [
deploy svm x --batching a=1,b
deploy svm x --reads taste
deploy svm x --reads taste=a
deploy svm x --version 0
deploy svm x --replicas 1-
deploy svm x --replicas -2
promote svm:2
promote svm:2 --app digits --dry-run
rollback svm
scale svm 2
scale svm 1-4 --dry-run
scale svm x
retire svm --force
retire svm:1 --dry-run
store accept
store accept --restore
store accept --as-is --dry-run
rollout svm:2 --app digits
rollout svm:2 --app digits --canary 5% --stages 5,50 --hold 5m --guard p99<20ms --error-rate 0.5
rollout start svm:2 --app digits --error-rate 0
rollout status
rollout status other
rollout pause digits
rollout resume digits --dry-run
rollout abort digits
rollout promote digits
ps
logs svm
logs svm --replica 1
logs svm --replica 1 -o json
predict digits '[0, 1]'
predict other word --user ann --slo-ms 5
predict digits '[0'
predict digits 1 -o json
feedback digits new --label 7
feedback digits old --correct --score 1
feedback digits new --wrong -o json"""
    shown = [transcript(line, answers) for line in lines.split("\n")]
    check_expected("verbs.txt", "\n".join(shown))


def test_logs_that_are_followed(transcript: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server closes the connection, cannot be reached, is back, and reports lost lines; then
    Ctrl-C is pressed."""

    def arguments(after: str, *replicas: tuple[int, list[str], int]) -> dict[str, Any]:
        rows = [
            {"replica": n, "lines": lines, "lost": lines_lost} for n, lines, lines_lost in replicas
        ]
        return {"model": "svm:2", "after": after, "replicas": rows}

    def answers() -> Iterator[Any]:
        yield arguments("x", (0, ["a", "b"], 0), (1, ["c"], 0))
        yield ClipperError("closing.")
        yield NoServer("no server.", hint="clipper up")
        yield UnknownModel("no model.")
        yield arguments("", (6, ["d"], 3), (1, [], 0))
        yield arguments("y", (0, ["e"], 0))
        raise KeyboardInterrupt

    shown = []
    for line in ("logs svm -f", "logs svm -f -o json", "logs svm -f --replica 1"):
        replies = answers()
        monkeypatch.setattr("clipper.cli.monitoring.status._CHECK_S", 0.0)
        shown.append(transcript(line, {"follow": lambda *_, replies=replies: next(replies)}))
    check_expected("logs.txt", "\n".join(shown))


def readings() -> ServerReadings:
    watched = ServerReadings()
    watched.take(
        "about",
        {
            "version": "0.1",
            "state": "redis",
            "started_us": 1e6,
            "pid": 1,
            "applications": [
                {"name": "digits", "slo_ms": 20.0},
                {"name": "words", "slo_ms": 1500.0},
            ],
        },
    )
    past = [{"t": 100 + i, "dt": 0.5, "apps": {"digits": {"q": i}}, "models": {}} for i in range(5)]
    watched.take("past", past)
    watched.take("past", past)  # known already
    watched.take(
        "row",
        {
            "t": 7300,
            "dt": 2.0,
            "apps": {
                "digits": {
                    "q": 30,
                    "ok": 20,
                    "default": 4,
                    "refused": 3,
                    "error": 3,
                    "us": [900, 1, 20_500],
                },
                "words": {"q": 3, "ok": 1, "us": [12_345, 1, 1_100_000]},
            },
            "models": {"svm:2": {"rows": 24, "us": [9_996, 120_000]}, "new:2": {"rows": 2500}},
        },
    )
    watched.models = ROWS
    return watched


def drawn(*words: Any, **named: Any) -> str:
    console = Console(
        width=120, record=True, force_terminal=True, color_system="standard", _environ={}
    )
    with console.capture() as capture:
        console.print(screen(*words, **named))
    return plain(capture.get())


def test_the_display_of_top(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = [drawn(readings(), "http://h:1", width) for width in (120, 105, 200)]
    shown += [drawn(readings(), "h", 80, sort) for sort in ("rate", "p99", "queue", "memory")]
    shown.append(drawn(ServerReadings(), "nowhere", 80, keys=False))
    watched = readings()
    now = [1000.0]
    monkeypatch.setattr("clipper.cli.monitoring.top_state.time.monotonic", lambda: now[0])
    watched.take("about", {**watched.about, "pid": 2})
    watched.lose("refused.")
    now[0] += 5
    watched.lose("refused again.")
    shown.append(drawn(watched, "h", 80, paused=True))
    watched.take("now", {})
    assert (watched.lost_s, watched.why, watched.restarts, watched.readings) == (0, "", 1, 1)
    assert len(watched.rows) == 0
    for i in range(400):
        watched.take("row", {"t": i, "dt": 1})
    assert len(watched.rows) == 300
    check_expected("top.txt", "\n".join(shown))
