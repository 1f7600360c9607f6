"""The verbs: their help has examples, their errors are one line, and `up` stops its processes when
it ends."""

import http.client
import importlib.metadata
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import time
import tomllib
from functools import partial
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from clipper import __version__
from clipper.cli import main
from clipper.cli.amounts import Share, Size
from clipper.cli.command_group import CommandGroup
from clipper.cli.mesh.models import _ago, _clock
from clipper.cli.output import table
from clipper.cli.servers import doctor
from clipper.clock import wall_time_us
from clipper.config import describe
from clipper.frontend.http import tls as http_tls
from clipper.manage.change_words import lines_of, moment_of
from tests.frontend.certificates import Authority
from tests.processes import Program

PATIENCE_S = 60.0


def run(*words: str) -> Result:
    return CliRunner().invoke(main, words, prog_name="clipper")


def every_command(group: click.Group, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = []
    for name, command in group.commands.items():
        found.append((*at, name))
        if isinstance(command, click.Group):
            found += every_command(command, (*at, name))
    return found


@pytest.fixture
def here(bare_folder: Path) -> Path:
    return bare_folder


# -- help


# commands without `-o`, and why
WITHOUT_OUTPUT = {
    "completion": "a script for a shell",
    "config schema": "a file for editors",
    "export alerts": "a file for Prometheus",
    "export grafana": "a file for Grafana",
    "help": "text",
    "node run": "runs until it is ended",
    "params metrics": "the format of Prometheus",
    "params shard": "runs until it is ended",
    "serve": "runs until it is ended",
    "up": "runs until it is ended",
}
# commands that change something, and have no --dry-run
CHANGE_AT_ONCE = {
    "cluster down": "what runs on Ray is known to Ray alone",
    "cluster up": "what runs on Ray is known to Ray alone",
}
READ = (
    *("apps", "bench", "completion", "dashboard", "demo", "doctor", "evaluate", "explain", "help"),
    *("history", "logs", "ls", "metrics", "models", "predict", "profile", "ps", "pull", "schema"),
    *("show", "stats", "status", "top", "version", "watch", "list", "check"),
    *("run", "serve", "up", "shard", "alerts", "chart", "compose", "dockerfile", "grafana"),
    *("k8s", "openapi", "ray", "state", "export"),
)


def test_all_commands_print_data_and_changes_can_be_tried() -> None:
    every = {}
    for words in every_command(main):
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            found = command.get_command(click.Context(command), word)
            assert found is not None
            command = found
        if not isinstance(command, click.Group):
            every[" ".join(words)] = {word for one in command.params for word in one.opts}
    without = {name for name, options in every.items() if "--output" not in options}
    assert without == WITHOUT_OUTPUT.keys()
    changing = {name for name in every if name.split()[-1] not in READ or name == "params up"}
    at_once = {name for name in changing if "--dry-run" not in every[name]}
    assert at_once | {"cluster up"} == CHANGE_AT_ONCE.keys()


@pytest.mark.parametrize("words", every_command(main), ids=" ".join)
def test_the_help_of_every_verb_has_an_example(words: tuple[str, ...]) -> None:
    result = run(*words, "--help")
    assert result.exit_code == 0
    assert f"  clipper {' '.join(words)}" in result.output.partition("\n")[2]


@pytest.mark.parametrize("words", every_command(main), ids=" ".join)
def test_the_default_of_every_option_is_a_value_that_it_takes(words: tuple[str, ...]) -> None:
    command: click.Command = main
    for word in words:
        assert isinstance(command, click.Group)
        command = command.commands[word]
    context = click.Context(command)
    for option in command.params:
        default = option.get_default(context)
        if isinstance(default, bool | int | float | str):
            option.type_cast_value(context, default)


def test_help_names_the_verbs_in_whole_sentences() -> None:
    result = run("--help")
    assert all(name in result.output for name in main.commands)
    assert "..." not in result.output.partition("\n")[2]


def test_the_version() -> None:
    assert run("--version").output == f"clipper {__version__}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("dmeo",), "no command 'dmeo' - did you mean 'demo'?"),
        (("config", "chek"), "no command 'chek' - did you mean 'check'?"),
        (
            ("frobnicate",),
            "no command 'frobnicate'.",
        ),
    ],
)
def test_a_slip_of_the_pen(words: tuple[str, ...], message: str) -> None:
    result = run(*words)
    assert result.exit_code == 2
    assert message in result.output


def test_the_shell_command_is_quick_to_help() -> None:
    """This is checked by the modules that it imports, not by the clock."""
    code = (
        "import sys; from clipper.cli import main; main(['-h'], standalone_mode=False);"
        " print(*sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"rich", "sklearn", "clipper_demo", "clipper.cli.servers.doctor"}


# -- the grammar


def test_a_verb_of_a_noun_is_the_command_that_its_short_form_is() -> None:
    def at(*words: str) -> click.Command:
        command: click.Command = main
        for word in words:
            assert isinstance(command, click.Group)
            command = command.commands[word]
        return command

    for noun, short in (
        (("model", "ls"), ("models",)),
        (("model", "deploy"), ("deploy",)),
        (("app", "ls"), ("apps",)),
        (("app", "link"), ("link",)),
        (("name", "set"), ("mesh", "vmodel", "set")),
        (("table", "create"), ("params", "create")),
        (("node", "ls"), ("mesh", "ps")),
        (("store", "copy"), ("registry", "copy")),
    ):
        assert at(*noun).callback is at(*short).callback
        assert at(*noun).params is at(*short).params
    result = run("node", "--store", "memory", "--name", "a")
    assert "the nodes of a mesh need a store" in result.output


def test_help_has_each_command_under_one_title() -> None:
    result = run("--help")
    assert "Others:" not in result.output
    for name in main.commands:
        assert len(re.findall(rf"^  {name} ", result.output, re.M)) == 1
    assert run("help", "model", "deploy").output == run("model", "deploy", "--help").output
    assert run("-V").output == f"clipper {__version__}\n"
    assert json.loads(run("version", "-o", "json").output)["clipper"] == __version__


def test_the_formats_of_output(here: Path) -> None:
    rows = json.loads(run("config", "show", "-o", "json").output)
    assert json.loads(run("config", "show", "--json").output) == rows
    assert run("version", "-o", "yaml").output.startswith(f'clipper: "{__version__}"\n')
    assert run("config", "show", "-o", "text").output == run("config", "show").output
    result = run("config", "show", "-o", "xml")
    assert (result.exit_code, "'xml' is not one of" in result.output) == (2, True)


def test_a_state_has_a_colour_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [("NAME", "STATE"), ("ready-made", "ready"), ("b", "failed")]
    shown = table(rows, "")
    assert shown == (
        "NAME        STATE\nready-made  \x1b[32mready\x1b[0m\nb           \x1b[31mfailed\x1b[0m"
    )
    group = CommandGroup("group")
    group.add_command(click.Command("show", callback=lambda: click.echo(shown)))
    for colours, text in ((True, shown), (False, click.unstyle(shown))):
        assert CliRunner().invoke(group, ["show"], color=colours).output == f"{text}\n"
    monkeypatch.setenv("NO_COLOR", "1")
    assert CliRunner().invoke(group, ["show"], color=True).output == f"{click.unstyle(shown)}\n"


@pytest.mark.parametrize(
    ("text", "mib"),
    [("512", 512), ("512Mi", 512), ("2Gi", 2048), ("2gib", 2048), ("2G", 1907), ("0.5Gi", 512)],
)
def test_a_size(text: str, mib: int) -> None:
    assert Size().convert(text, None, None) == mib


@pytest.mark.parametrize("text", ["", "x", "-1", "5Q", "1 2", "0", "9999999Ti", "1e3"])
def test_no_size(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Size().convert(text, None, None)


@pytest.mark.parametrize(("text", "share"), [("5%", 0.05), ("0.05", 0.05), ("100%", 1.0), (1, 1.0)])
def test_a_share(text: object, share: float) -> None:
    assert Share(0, 1).convert(text, None, None) == share


@pytest.mark.parametrize("text", ["", "x%", "101%", "-1%", "5%%", "2", "nan"])
def test_no_share(text: str) -> None:
    with pytest.raises(click.BadParameter):
        Share(0, 1).convert(text, None, None)


def test_keys_are_listed_and_revoked(here: Path) -> None:
    assert run("key", "create", "ann", "--dry-run").output.startswith("dry run: a key of ann")
    assert not Path("api-keys").exists()
    made = run("key", "create", "ann").stdout.strip()
    run("key", "bob", "--role", "read")
    file = here / "api-keys"
    os.chmod(file, 0o640)
    file.write_text(f"# those who may\n{file.read_text()}")
    assert json.loads(run("key", "list", "-o", "json").output) == [
        {"name": "ann", "role": "", "limits": ""},
        {"name": "bob", "role": "read", "limits": ""},
    ]
    assert run("key", "list", "-o", "yaml").output == (
        '- name: ann\n  role: ""\n  limits: ""\n- name: bob\n  role: read\n  limits: ""\n'
    )
    assert made not in run("key", "list").output
    assert "1 key of ann removed" in run("key", "revoke", "ann", "--dry-run").output
    assert "ann" in file.read_text()
    assert run("key", "revoke", "ann").output == "1 key of ann removed from api-keys\n"
    assert file.read_text().startswith("# those who may\nbob read sha256:")
    assert file.stat().st_mode & 0o777 == 0o640
    for words, message in (
        (("revoke", "bo"), "api-keys has no key of 'bo' - did you mean 'bob'?"),
        (("list", "--file", "absent"), "cannot read absent: No such file or directory."),
        (("create", "a", "--file", "no/where"), "cannot write no/where: No such file"),
    ):
        result = run("key", *words)
        assert (result.exit_code, message in result.output) == (1, True), result.output


def test_changes_in_words() -> None:
    changed = [
        {"key": "model/sums/2", "before": None, "after": {"schema": "x"}},
        {"key": "scale/sums/2", "before": None, "after": {"replicas": 1}},
        {"key": "promoted/sums", "before": None, "after": {"version": 1, "upto": 2}},
        {
            "key": "scale/sums/1",
            "before": {"replicas": 1, "retired_us": 0},
            "after": {"replicas": 0, "retired_us": 1_795_923_594_463_886},
        },
        {
            "key": "promoted/sums",
            "before": {"version": 1, "upto": 2},
            "after": {"version": 2, "upto": 3},
        },
        {
            "key": "application/total",
            "before": {"models": [{"name": "a", "version": 1}], "roles": {}, "policy": ""},
            "after": {"models": [{"name": "a", "version": None}], "roles": {"a": "shadow"}},
        },
        {"key": "rollout/total", "before": {"stage_us": 1}, "after": {"stage_us": 2}},
        {"key": "mesh/x", "before": {}, "after": None},
        {"key": "application/b", "before": {"default": "x" * 99}, "after": {"default": 0}},
    ]
    assert lines_of(changed) == [
        "model sums:2 is new",
        "the latest version of sums is 1",
        "model sums:1: replicas 1 -> 0",
        f"model sums:1 is retired since {moment_of(1_795_923_594_463_886)}",
        "the latest version of sums is 2 instead of 1",
        "application total: models a:1 -> a",
        "application total: roles none -> a shadow",
        "mesh x is gone",
        f"application b: default {'x' * 57}... -> 0",
    ]
    assert re.fullmatch(r"2026-11-\d\d \d\d:\d\d:\d\d", moment_of(1_795_923_594_463_886))


# -- errors


def test_an_error_is_a_line_and_a_hint(here: Path) -> None:
    result = run("config", "show", "nowhere.toml")
    assert result.exit_code == 1
    assert (
        result.stderr
        == "error: cannot read nowhere.toml: No such file or directory.\nName another file, or"
        " none.\n"
    )
    assert result.stdout == ""


def test_an_error_is_an_object_where_output_is_data(here: Path) -> None:
    result = run("models", "--url", "http://127.0.0.1:1", "-o", "yaml")
    assert 'type: "urn:clipper:error:no-server"\n' in result.stderr
    result = run("models", "--url", "http://127.0.0.1:1", "-o", "json")
    assert result.exit_code == 1
    assert result.stdout == ""
    found = json.loads(result.stderr)
    assert found["type"] == "urn:clipper:error:no-server"
    assert found["error"] == f"{found['detail']} {found['hint']}"
    assert "no server answers at http://127.0.0.1:1" in found["detail"]


def test_init_has_a_dry_run(here: Path) -> None:
    shown = run("init", "shop", "--dry-run").output
    assert shown == "dry run: would write shop/clipper.toml and shop/model.py\n"
    assert not (here / "shop").exists()
    run("init", "shop")
    assert "already exists" in run("init", "shop", "--dry-run").output


def test_an_error_is_red_on_a_terminal(here: Path) -> None:
    result = CliRunner().invoke(main, ["config", "show", "nowhere.toml"], color=True)
    assert result.stderr.startswith("\x1b[31merror: ")


# -- config


def test_show_lists_every_key_and_where_it_comes_from(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here / "clipper.toml").write_text(
        "[limits]\ntasks_max = 1000\n[models.svm]\nreplicas = 2\n"
        "[streams.a]\napp = 'x'\nurl = 'redis://me:s3cr3t@host'\n"
    )
    monkeypatch.setenv("CLIPPER_SERVER__TOKEN", "s3cr3t")
    result = run("config", "show", "--json")
    rows = {row["key"]: row for row in json.loads(result.output)}
    assert {info.key for info in describe() if "NAME" not in info.key} <= set(rows)
    assert rows["limits.tasks_max"]["value"] == 1000
    assert rows["limits.tasks_max"]["unit"] == "tasks"
    assert rows["limits.tasks_max"]["origin"] == "clipper.toml:2"
    assert rows["models.svm.replicas"]["origin"] == "clipper.toml:4"
    assert rows["server.token"]["origin"] == "CLIPPER_SERVER__TOKEN"
    assert rows["server.heartbeat_ms"]["origin"] == "default"
    assert rows["streams.a.url"]["value"] == "redis://me:***@host"
    assert "s3cr3t" not in result.output


def test_show_prints_a_table_of_what_changed(here: Path) -> None:
    (here / "mine.toml").write_text('[batching]\nmode = "static"\n[models.svm]\nbatching = "fit"\n')
    result = run("config", "show", "mine.toml", "--changed")
    assert result.exit_code == 0
    lines = [line.split() for line in result.output.splitlines()[3:] if line.strip()]
    assert [(line[0], line[1]) for line in lines] == [
        ("batching.mode", "static"),
        ("models.svm.batching", "fit"),
    ]


def test_check_prints_what_is_valid(here: Path) -> None:
    assert run("config", "check").output == "ok: defaults: 0 keys, 0 models, 0 applications\n"
    app = '[apps.digits]\nmodels = ["svm"]\nslo_ms = 5\n'
    (here / "clipper.toml").write_text("[models.svm]\n" + app)
    assert run("config", "check").output == "ok: clipper.toml: 3 keys, 1 model, 1 application\n"
    (here / "clipper.toml").write_text(app)
    result = run("config", "check")
    assert result.exit_code == 1
    assert "clipper.toml:2: application 'digits': no model 'svm' is declared" in result.output
    (here / "clipper.toml").write_text('[server]\nstate = "st"\n' + app)
    assert run("config", "check").output.startswith("note: application 'digits' links 'svm'")
    assert not (here / "st").exists()


def test_check_finds_the_certificate_of_shards(here: Path) -> None:
    tls = 'tls_cert = "shard.crt"\ntls_key = "shard.key"\n'
    (here / "clipper.toml").write_text(f'[params]\naddress = "127.0.0.1:7000"\n{tls}')
    result = run("config", "check")
    assert result.exit_code == 1
    assert "shard.crt' cannot be read" in result.output


def test_check_prints_what_is_invalid(here: Path) -> None:
    (here / "clipper.toml").write_text("[apps.digits]\nslo = 5\n")
    result = run("config", "check")
    assert result.exit_code == 1
    assert result.stderr.startswith(
        "error: clipper.toml:2: unknown key 'slo' in [apps.digits] - did you mean 'slo_ms'?"
    )


# -- doctor


def only(monkeypatch: pytest.MonkeyPatch, trial: str) -> None:
    """Have the doctor run this check only."""
    early = ("core", "machine", "memory", "descriptors", "control_groups", "interpreter")
    for name in (*early, "round_trip", "disk", "tls", "certificates", "packages", "containers"):
        if name != trial:
            monkeypatch.setattr(doctor, name, list)


def test_doctor_finds_this_machine_in_order(here: Path) -> None:
    result = run("doctor", "--json")
    findings = json.loads(result.output)
    assert result.exit_code == 0, result.output
    assert not [finding for finding in findings if finding["verdict"] == "fail"]
    assert any("a model in a process of its own" in finding["text"] for finding in findings)
    assert list(here.iterdir()) == []


def test_doctor_tells_whether_what_models_start_ends_with_them(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "control_groups")
    monkeypatch.setattr(doctor, "own_group", partial(Path, "/group"))
    assert doctor.examine() == [("ok", "what models start ends with them (cgroup v2, /group)")]
    monkeypatch.setattr(doctor, "own_group", Path("/no/such").read_text)
    ((verdict, text),) = doctor.examine()
    assert verdict == "skip"
    assert text.endswith("what a model starts in a session of its own outlives the model")


def test_doctor_says_who_speaks_tls(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "tls")
    assert doctor.examine() == [("ok", f"TLS by {ssl.OPENSSL_VERSION}")]

    def lacking() -> str:
        raise OSError("python lacks SSL_new")

    monkeypatch.setattr(http_tls, "openssl", lacking)
    why = "TLS is spoken by Python, which is slower: python lacks SSL_new"
    assert doctor.examine() == [("warn", why)]


def test_doctor_checks_certificates(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "certificates")
    authority = Authority(here)
    findings = []
    for name, days in (("good", 60), ("soon", 3), ("gone", -2)):
        cert, key = authority.sign(name, days=days)
        (here / "clipper.toml").write_text(f"[http]\ntls_cert = {cert!r}\ntls_key = {key!r}\n")
        findings += [
            (finding.verdict, finding.text.partition(": ")[0]) for finding in doctor.examine()
        ]
    assert findings == [
        ("ok", "http.tls_cert"),
        ("warn", "http.tls_cert"),
        ("fail", "http.tls_cert"),
    ]
    Path(key).chmod(0o644)
    assert [finding.verdict for finding in doctor.examine()] == ["fail", "warn"]
    (here / "clipper.toml").write_text("[http]\napi_keys_file = 'nothing'\n")
    assert "cannot be read" in doctor.examine()[0].text


def test_doctor_reports_a_trial_that_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> list[doctor.Finding]:
        raise OSError("no such luck")

    only(monkeypatch, "disk")
    monkeypatch.setattr(doctor, "disk", broken)
    result = run("doctor")
    assert result.exit_code == 1
    assert result.output == "fail  broken: OSError: no such luck\n"


def test_doctor_names_the_line_that_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        if name == "mlflow":
            return "3.1"
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(doctor, "version", missing)
    findings = list(doctor.packages())
    assert findings[0] == ("fail", "numpy is not installed. Run: pip install numpy")
    assert (
        "skip",
        'scikit-learn is not installed. Run: pip install "clipper-serving[demo]"',
    ) in findings
    assert ("ok", "mlflow 3.1") in findings, "either of two does"


def test_doctor_knows_what_the_package_needs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    needed = {
        re.split("[^a-z0-9-]", line)[0] for line in project["dependencies"] if ";" not in line
    }
    assert set(doctor._NEEDED) == needed
    for names, extra in doctor._OPTIONAL.items():
        assert names[0] in {
            re.split("[^a-z0-9-]", line)[0] for line in project["optional-dependencies"][extra]
        }


def test_doctor_names_what_the_cpu_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    only(monkeypatch, "machine")
    monkeypatch.setattr(os, "uname", lambda: os.uname_result(("Linux", "h", "6", "", "x86_64")))
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"sse2", "avx2"})
    found = doctor.examine()[0]
    assert found.verdict == "warn"
    assert found.text.startswith("this CPU has no BMI2, which a core that was compiled on another")
    assert found.text.endswith("make build")
    monkeypatch.setattr(doctor, "_cpu_flags", lambda: {"bmi2", "avx2"})
    assert "BMI2" not in str(doctor.examine())


def test_doctor_reports_an_engine_that_does_not_answer(
    here: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "containers")
    folder = tmp_path_factory.mktemp("bin")
    monkeypatch.setenv("PATH", str(folder))
    assert [finding.verdict for finding in doctor.examine()] == ["skip"]
    (folder / "docker").write_text("#!/bin/sh\necho nobody listens >&2\nexit 1\n")
    (folder / "docker").chmod(0o755)
    text = (
        "docker is installed, but its engine does not answer: nobody listens. Run: systemctl start"
        " docker"
    )
    assert doctor.examine() == [("skip", text)]
    (folder / "docker").write_text("#!/bin/sh\n")
    assert doctor.examine() == [("ok", "docker answers")]


def test_doctor_finds_a_folder_that_cannot_be_written(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only(monkeypatch, "disk")
    monkeypatch.setattr(os, "access", lambda *_: False)
    found = doctor.examine()
    assert [finding.verdict for finding in found] == ["fail"]
    assert "cannot be written" in found[0].text


# -- up


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_up_serves_a_file_until_it_is_stopped(here: Path, number: signal.Signals) -> None:
    (here / "doubler.py").write_text("def double(rows):\n    return rows.sum(axis=1) * 2\n")
    (here / "clipper.toml").write_text(
        '[models.doubler]\ntarget = "doubler:double"\ninput = "f64[3]"\n[apps.double]\nmodels ='
        ' ["doubler"]\n'
    )
    command = [sys.executable, "-u", "-m", "clipper", "up"]
    with Program(*command) as process:
        process.until("doubler:1/0 is connected", "state: ")
        assert process.stop(number) == 0
    seen = process.output
    assert seen.endswith("closed\n")
    assert "models: doubler:1" in seen
    assert "applications: double" in seen
    assert "clipper-container" not in seen, "how a container is started by hand concerns few"


def test_up_keeps_pauses_short(here: Path) -> None:
    (here / "clipper.toml").write_text("")
    report_script = (
        "atexit.register(lambda: print('frozen', gc.get_freeze_count() > 10_000,"
        " sys.getswitchinterval()))"
    )
    command = [
        sys.executable,
        "-u",
        "-c",
        f"import atexit, gc, sys; {report_script}; import clipper.cli as c; c.main(['up'])",
    ]
    with Program(*command, until="state: memory") as process:
        assert process.stop() == 0
    assert "frozen True 0.001" in process.output


def test_up_takes_queries_over_http(here: Path) -> None:
    (here / "doubler.py").write_text("def double(rows):\n    return rows.sum(axis=1) * 2\n")
    (here / "clipper.toml").write_text(
        '[models.doubler]\ntarget = "doubler:double"\ninput = "f64[3]"\n[apps.double]\nmodels ='
        ' ["doubler"]\nslo_ms = 5000\n'
    )
    command = ["up", "--http", "127.0.0.1:0", "--http-workers", "2", "--admin", "127.0.0.1:0"]
    with Program(sys.executable, "-u", "-m", "clipper", *command) as process:
        process.until("doubler:1/0 is connected", "state: ")
        found = dict(
            re.findall(
                r"^(queries|management|dashboard)\b.*? at http://(127\.0\.0\.1:\d+)",
                process.output,
                re.M,
            )
        )
        query, admin = found["queries"], found["management"]
        assert found["dashboard"] == admin
        lines = [
            http.client.HTTPConnection(address, timeout=PATIENCE_S) for address in (query, admin)
        ]
        lines[0].request("POST", "/api/double/predict", '{"input": [1, 2, 3]}')
        assert json.loads(lines[0].getresponse().read())["output"] == 12
        lines[1].request("GET", "/admin/applications/double")
        assert json.loads(lines[1].getresponse().read())["slo_ms"] == 5000
        assert process.stop() == 0
        for line in lines:
            line.close()


def test_up_prints_what_is_wrong_with_its_file(here: Path) -> None:
    (here / "clipper.toml").write_text('[server]\nadress = "unix"\n')
    result = run("up")
    assert result.exit_code == 1
    assert "did you mean 'address'?" in result.stderr


@pytest.mark.parametrize(
    ("age_s", "shown"),
    [
        (0, "0 s ago"),
        (119, "119 s ago"),
        (120, "2 min ago"),
        (90 * 60, "90 min ago"),
        (2 * 3600, "2 h ago"),
        (47 * 3600, "47 h ago"),
        (48 * 3600, "2 d ago"),
    ],
)
def test_ages_are_shown_in_a_unit_of_which_there_are_two(age_s: int, shown: str) -> None:
    assert _ago(wall_time_us() // 1000 - age_s * 1000) == shown
    assert _ago(0) == "-", "never"


def test_the_time_of_an_event_is_that_of_the_clock_on_the_wall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    try:
        assert _clock(1_000_000_000_999) == "01:46:40"
    finally:
        monkeypatch.undo()
        time.tzset()
