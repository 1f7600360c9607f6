"""Containers in C++ and Java on a real server: deployed by a command, and through every fault."""

import os
import signal
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main as cli
from clipper.errors import (
    ConfigError,
    DeployFailed,
    InvalidInput,
    ModelFailed,
    ModelWarning,
    PackagingError,
    UnknownModel,
)
from tests.languages.compiled import CPP, JAVA, cpp, java, java_command
from tests.memory_container import wait_until
from tests.processes import Program

QUICK = {
    "heartbeat_ms": 2000,
    "restart_ms_min": 20,
    "restart_ms_max": 200,
    "drain_s": 1.0,
    "stop_grace_s": 1.0,
    "scale_interval_ms": 20,
    "stuck_s": 2.0,
    "eject_after": 0,
}
LANGUAGES = ("cpp", "java")
WIDE = 784
SLO_MS = 60_000


def program(language, name, *words):
    """Return the command of a test's program or of an example."""
    example = name in ("svm", "noop")
    if language == "cpp" and example:
        return [str(cpp(CPP / "examples" / f"{name}.cpp")), *words]
    if language == "cpp":
        return [str(cpp(CPP / "tests" / "models.cpp")), name, *words]
    folder = JAVA / ("examples" if example else "tests")
    main = name.title() if example else f"clipper.container.{name.title()}"
    return [*java_command(java(folder), main), *words]


@pytest.fixture(scope="module")
def server():
    admin = {"admin": "127.0.0.1:0"}
    with clipper.start(commands=("java",), http=admin, **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays, and so do those of HTTP
        with pytest.raises(UnknownModel):
            clipper.connect(f"http://{started.admin_address}").retire("nothing")
        yield started


@pytest.fixture(scope="module", params=LANGUAGES)
def language(request):
    return request.param


@pytest.fixture
def deploy(server, request):
    """Deploys a command under the test's own name, and retires it."""
    made = []

    def do(command, **settings):
        name = f"m{zlib.crc32(request.node.name.encode())}-{len(made)}"
        handle = server.deploy(name, command=command, cache=False, **settings)
        made.append(handle.name)
        return handle

    yield do
    for name in made:
        server.retire(name, force=True)


def started_by_hand(command, address, token, **variables):
    """Start a container without the server."""
    environment = {"CLIPPER_ADDRESS": address, "CLIPPER_TOKEN": token, "CLIPPER_MODEL": "hand"}
    environment |= {f"CLIPPER_{key}": value for key, value in variables.items()}
    return Program(*command, environment=environment)


def ended(process):
    """Return whether a process ends well when it is told to (a JVM's code is then 143), and its
    text."""
    return process.stop() in (0, 143), process.output


def weights_file(folder, classes, items):
    weights = np.random.default_rng(3).integers(-9, 9, (classes, items + 1)).astype(float)
    np.savetxt(folder / "svm.txt", weights)
    return weights


# -- what a model sees and returns


def test_a_linear_svm_deployed_by_a_command(server, deploy, language, tmp_path, monkeypatch):
    weights = weights_file(tmp_path, 10, WIDE)
    monkeypatch.chdir(tmp_path)
    model = deploy(program(language, "svm"), input=f"f64[{WIDE}]", replicas=2)
    xs = np.random.default_rng(4).integers(0, 50, (3000, WIDE)).astype(float)
    got = model.predict_many(xs, slo_ms=SLO_MS).result(60)
    assert np.array_equal(got, (weights[:, :1] + weights[:, 1:] @ xs.T).argmax(axis=0))
    rows = server.stats()["models"][model.name]
    assert rows["output"] == "i64"
    assert [row["state"] for row in rows["replicas"]] == ["ready", "ready"]
    maps = Path(f"/proc/{rows['replicas'][0]['pid']}/maps").read_text()
    assert ("memfd:clipper-rows" in maps) == (language == "cpp")
    record = server.catalog.models()[-1]
    assert (record.command[-1], record.folder) == (program(language, "svm")[-1], str(tmp_path))


def test_a_command_of_the_configuration_file(tmp_path):
    weights_file(tmp_path, 3, 2)
    (tmp_path / "svm").symlink_to(program("cpp", "svm")[0])
    file = tmp_path / "clipper.toml"
    file.write_text('[models.svm]\ncommand = ["./svm", "svm.txt"]\ninput = "f64[2]"\n')
    with clipper.start(file, drain_s=0.2) as one:
        assert one.model("svm").predict(np.zeros(2), slo_ms=SLO_MS).result(60) in (0, 1, 2)
    file.write_text('[models.svm]\ncommand = ["./svm"]\ntarget = "a:b"\n')
    with pytest.raises(ConfigError, match="a target or a command"):
        clipper.start(file)


@pytest.mark.parametrize(
    ("type_", "rows"),
    [
        ("str", ["", "a", "Grüße" * 500, "日本語"]),
        ("bytes", [b"", b"\0\xff", b"x" * 5000]),
        ("f32[*]", [np.arange(n, dtype="f4") for n in (1, 0, 7, 3000)]),
    ],
)
@pytest.mark.parametrize("address", ["unix", "tcp://127.0.0.1:0"])
def test_rows_of_any_length_are_echoed(language, type_, rows, address, tmp_path):
    with clipper.start(address=address, compression="full", heartbeat_ms=2000, drain_s=0.2) as one:
        command = program(language, "echo", type_, type_)
        model = one.deploy("echo", command=command, input=type_, cache=False)
        for got, row in zip(model.predict_many(rows * 50).result(60), rows * 50, strict=True):
            assert np.array_equal(got, row)


@pytest.mark.parametrize("address", ["unix", "tcp://127.0.0.1:0"])
@pytest.mark.parametrize("input", ["f64[4]", "f64[*]"])
def test_a_container_serves_with_protocol_1(language, address, input, tmp_path):
    weights = weights_file(tmp_path, 3, 4)
    command = program(language, "svm", str(tmp_path / "svm.txt"))
    with clipper.start(address=address, heartbeat_ms=2000, drain_s=0.2) as one:
        process = started_by_hand(command, one.address, one.token, PROTOCOL="1", INPUT=input)
        wait_until(lambda: "hand:1" in one.stats()["models"])
        xs = np.random.default_rng(5).integers(0, 50, (200, 4)).astype(float)
        got = one.model("hand").predict_many([*xs] if "*" in input else xs).result(60)
        assert np.array_equal(got, (weights[:, :1] + weights[:, 1:] @ xs.T).argmax(axis=0))
        assert ended(process)[0]


@pytest.mark.parametrize(
    ("inputs", "outputs"),
    [
        ({"ids": "i64[*]", "name": "str"}, {"sum": "i64", "names": "str[2]"}),
        ({"ids": "i64[3]"}, {"sum": "i64"}),
    ],
)
def test_a_container_serves_named_tensors(server, deploy, language, inputs, outputs):
    model = deploy(program(language, "tensors"), inputs=inputs, outputs=outputs)
    rows: list[dict[str, Any]] = [
        {"ids": np.arange(i, i + 3), "name": f"nö {i}"} for i in range(200)
    ]
    futures = [model.predict({key: row[key] for key in inputs}, slo_ms=SLO_MS) for row in rows]
    for row, future in zip(rows, futures, strict=True):
        got = future.result(60)
        assert got["sum"] == row["ids"].sum()
        assert [*got.get("names", ())] == [row["name"]] * 2 * ("names" in outputs)
    assert "{" in server.stats()["models"][model.name]["output"]
    assert "".join(server.logs(model.name)) == ""


def test_a_warm_up_that_fails_is_reported(server, deploy, language):
    with pytest.warns(ModelWarning, match="it failed in its warm-up"):
        model = deploy(program(language, "picky"), input="f64[2]", warmup=[[-1.0, 0.0]])
    assert "warm-up" in server.stats()["models"][model.name]["warmup_error"]


def test_rows_of_the_warm_up_are_those_given(server, deploy, language):
    model = deploy(program(language, "echo", "str", "str"), input="str", warmup=["one", "two"])
    assert server.stats()["models"][model.name]["output"] == "str"
    assert "warm-up" not in "".join(server.logs(model.name))


def test_feedback_sessions_and_accuracy(server, deploy, language):
    model = deploy(program(language, "learner"), input="f64[2]")
    app = server.app(f"learning-{language}", models=[model.name], slo_ms=SLO_MS, default=-1.0)
    for label in range(5):
        answer = app.predict(np.zeros(2), user="anna").result(60)
        app.feedback(answer, label=float(label))
    wait_until(lambda: app.predict(np.zeros(2)).result(60).output == 5.0)
    assert app.predict(np.zeros(2), user="anna").result(60).confidence == 1.0
    wait_until(lambda: server.stats()["models"][model.name]["accuracy"] == 0.75)
    server.catalog.unregister_application(f"learning-{language}")


# -- faults


@pytest.fixture
def faulty(server, deploy, language):
    model = deploy(program(language, "faulty"), input="str")
    app = server.app(f"faults-{language}", models=[model.name], slo_ms=SLO_MS, default="none")
    yield lambda text, slo_ms=SLO_MS: app.predict(text, slo_ms=slo_ms).result(60)
    server.catalog.unregister_application(f"faults-{language}")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("throw", "this row cannot be read"),
        ("row", "only this row"),
        ("count", "returned 2 outputs for 1 rows"),
        ("large", "the server's limit is"),
    ],
)
def test_an_error_of_the_model_fails_only_its_batch(faulty, server, deploy, text, reason):
    assert faulty("good").output == "good"
    (name,) = [str(model.id) for model in server.catalog.models()]
    (before,) = server.stats()["models"][name]["replicas"]
    with pytest.raises(ModelFailed, match=reason):
        server.model(name).predict(text, slo_ms=SLO_MS).result(60)
    assert (faulty(text).output, faulty("good").output) == ("none", "good")
    (after,) = server.stats()["models"][name]["replicas"]
    assert after["pid"] == before["pid"]


@pytest.mark.parametrize(
    ("text", "detail"),
    [("exit", "exit 7"), ("kill", "killed (SIGKILL)"), ("hang", "killed (SIGKILL)")],
)
def test_a_dead_or_hung_process_is_restarted(faulty, server, text, detail):
    assert faulty("good").output == "good"
    # one that hangs is noticed some time after the query's own
    answer = faulty(text, 3000)
    assert (answer.output, answer.is_default) == ("none", True)
    wait_until(lambda: faulty("good").output == "good")
    (name,) = [str(model.id) for model in server.catalog.models()]
    (replica,) = server.stats()["models"][name]["replicas"]
    assert replica["detail"] == detail
    assert replica["restart_count"] >= 1


def test_a_reply_to_an_unknown_batch_closes_the_connection(server, deploy, language):
    model = deploy(program(language, "faulty", "unknown"), input="str", warmup=False)
    with pytest.raises(clipper.errors.ClipperError):
        model.predict("a", slo_ms=300).result(60)
    wait_until(
        lambda: any(
            incident.model == model.name and incident.detail == "exit 1"
            for incident in server._deployment.incidents
        )
    )


def test_a_program_that_does_not_load_gives_the_reason(server, language):
    with pytest.raises(DeployFailed, match="no-such-weights"):
        server.deploy("unloaded", command=program(language, "svm", "no-such-weights"))


# -- life


def test_the_container_reconnects_to_a_server_that_comes_back(language, tmp_path):
    address, token = f"unix:{tmp_path}/clipper.sock", "t" * 32
    process = started_by_hand(program(language, "noop"), address, token)
    for _ in range(2):
        with clipper.start(address=address, token=token, drain_s=0.2) as one:
            wait_until(lambda one=one: "hand:1" in one.stats()["models"])
            assert one.model("hand").predict(np.ones(3), slo_ms=SLO_MS).result(60) == 0.0
    well, text = ended(process)
    assert well, text
    assert "reconnecting" in text


def test_a_container_with_a_wrong_token_ends(server, language):
    process = started_by_hand(program(language, "noop"), server.address, "wrong")
    assert (process.wait(), "rejected" in process.output) == (4, True)


def test_a_container_that_serves_ends_on_request(server, deploy, language):
    model = deploy(program(language, "noop"), input="f64[1]", replicas=2)
    pids = [row["pid"] for row in server.stats()["models"][model.name]["replicas"]]
    server.scale(model.name, 1)
    wait_until(lambda: sum(Path(f"/proc/{pid}").exists() for pid in pids) == 1)
    assert model.predict(np.zeros(1), slo_ms=SLO_MS).result(60) == 0.0


def test_a_killed_server_leaves_no_program_behind():
    code = (
        "import sys, clipper\n"
        "server = clipper.start()\n"
        f"server.deploy('noop', command={program('cpp', 'noop')!r})\n"
        "print(server.stats()['models']['noop:1']['replicas'][0]['pid'], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with Program(sys.executable, "-c", code, apart=True) as process:
        pid = int(process.line())
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: not Path(f"/proc/{pid}").exists())


# -- what is refused


def test_management_starts_only_programs_that_the_server_names(server, language, monkeypatch):
    command = program(language, "noop")
    with pytest.raises(PackagingError, match=r"server\.commands"):
        server.manage.deploy("shell", command=("/bin/sh", "-c", "true"))
    monkeypatch.setenv("CLIPPER_URL", f"http://{server.admin_address}")
    command[0] = "java" if language == "java" else command[0]
    words = ["deploy", "by-cli", "--command", " ".join(command), "--input", "f64[1]"]
    ran = CliRunner().invoke(cli, words)
    if language == "cpp":  # not named in server.commands
        assert (ran.exit_code, "server.commands" in ran.output) == (1, True)
        return
    assert ran.exit_code == 0, ran.output
    assert server.model("by-cli").predict(np.zeros(1), slo_ms=SLO_MS).result(60) == 0.0
    server.retire("by-cli")


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"command": []}, "command of model 'no' is"),
        ({"command": ["no-such-program"]}, "no program 'no-such-program'"),
        ({"command": ["./missing"]}, "no program './missing'"),
        ({"command": ["true", "\0"]}, "command of model 'no'"),
        ({"command": ["true"] * 300}, "at most 256 words"),
        ({"command": "true 'open"}, "command of model 'no'"),
        ({"command": ["true"], "row_by_row": True}, "row_by_row is for models in Python"),
        ({"command": ["true"], "requirements": ["numpy"]}, "requirements is for models in Python"),
        ({"command": ["true"], "deployer": "docker"}, "deployer is for models in Python"),
        ({"command": ["true"], "model": "module:function"}, "needs a model or a command"),
        ({"command": ["true"], "gpus": "all"}, "gpus"),
        ({"command": ["true"], "warmup": [["x"]], "input": "f64[1]"}, "warm-up"),
        ({}, "needs a model or a command"),
    ],
)
def test_invalid_deployments_of_programs_are_refused(server, settings, why):
    with pytest.raises(InvalidInput, match=why):
        server.deploy("no", **settings)
