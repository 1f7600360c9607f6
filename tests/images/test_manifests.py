"""Exports for Compose and Kubernetes are valid by their schemas, and a container of an export
connects to a server of it."""

import json
import os
import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main
from clipper.config import load
from clipper.errors import InvalidInput
from tests.images.engines import BASE, PATIENCE_S, QUICK, Engine
from tests.images.exports import check_objects, export, objects_of, yaml

check_jsonschema = pytest.importorskip("check_jsonschema", reason="python tools/fetch.py clients")

DECLARED = """\
[models.sums]
target = "ours_for_export:total"
input = "f64[3]"
replicas = 2
memory_mib = 512
cpus = 2
[models."big.model"]
target = "ours_for_export:total"
input = "f64[3]"
replicas_max = 4
gpus = "2"
[apps.total]
models = ["sums", "big.model"]
slo_ms = 2000
default = -1
roles = ["big.model = shadow"]
"""


@pytest.fixture
def declared(tmp_path: Path) -> Path:
    (tmp_path / "ours_for_export.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    (tmp_path / "clipper.toml").write_text(DECLARED)
    return tmp_path / "clipper.toml"


def compose_schema() -> dict[str, Any]:
    vendored = (
        Path(check_jsonschema.__file__).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    )
    schema: dict[str, Any] = json.loads(vendored.read_text())
    return schema


@pytest.mark.parametrize("more", [[], ["--redis"]], ids=["volume", "redis"])
def test_compose_is_what_compose_takes(declared: Path, tmp_path: Path, more: list[str]) -> None:
    import jsonschema

    out = tmp_path / "out"
    result = export("compose", out, "--from", declared, *more)
    assert result.exit_code == 0, result.output
    found = yaml.safe_load((out / "docker-compose.yml").read_text())
    jsonschema.validate(found, compose_schema())
    services = found["services"]
    assert [*services] == ["server", "model-sums", "model-big-model", *(["redis"] if more else [])]
    assert services["server"]["ports"] == ["127.0.0.1:8000:8000"]
    assert found["networks"]["models"] == {"internal": True}
    sums, big = services["model-sums"], services["model-big-model"]
    assert sums["deploy"] == {
        "replicas": 2,
        "resources": {"limits": {"memory": "512M", "cpus": "2"}},
    }
    assert big["deploy"]["resources"]["reservations"]["devices"] == [
        {"driver": "nvidia", "capabilities": ["gpu"], "count": 2}
    ]
    for service in (sums, big):
        assert (out / service["build"] / "Dockerfile").exists()
        assert "ports" not in service
        assert service["networks"] == ["models"]


@pytest.mark.parametrize("more", [[], ["--redis"]], ids=["volume", "redis"])
def test_kubernetes_takes_each_object(declared: Path, tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "out"
    result = export("k8s", out, "--from", declared, *more)
    assert result.exit_code == 0, result.output
    kinds = objects_of(out)
    secret = kinds["Secret", "clipper-token"]["stringData"]
    assert secret == {
        name: (out / "secrets" / name).read_text() for name in ("clipper_token", "admin_token")
    }
    check_objects(kinds.values())
    server = kinds["Deployment", "clipper-server"]["spec"]
    if more:
        assert server["replicas"] == 2
        assert server["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    else:  # its volume has one owner
        assert (server["replicas"], server["strategy"]) == (1, {"type": "Recreate"})
    container = server["template"]["spec"]["containers"][0]
    assert {"startupProbe", "livenessProbe", "readinessProbe", "lifecycle", "resources"} <= {
        *container
    }
    # else neither is ever ready
    assert kinds["Service", "clipper-models"]["spec"]["publishNotReadyAddresses"]
    assert ("HorizontalPodAutoscaler", "clipper-model-big-model") in kinds
    # the autoscaler's
    assert "replicas" not in kinds["Deployment", "clipper-model-big-model"]["spec"]
    assert ("PodDisruptionBudget", "clipper-model-sums") in kinds
    for (kind, _), one in kinds.items():
        if kind == "Deployment":
            labels = one["spec"]["template"]["metadata"]["labels"]
            assert one["spec"]["selector"]["matchLabels"].items() <= labels.items()
            assert one["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"]


def test_values_of_the_chart_can_be_set(declared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--redis", "--set", "servers.awaySeconds=9", "--set", "imagePullPolicy=Never"]
    assert export("k8s", out, "--from", declared, *words).exit_code == 0
    pod = objects_of(out)["Deployment", "clipper-server"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "9"]
    assert pod["containers"][0]["imagePullPolicy"] == "Never"
    refused = export("k8s", tmp_path / "no", "--from", declared, "--set", "server.replicas=2")
    assert (refused.exit_code, "server" in refused.output) == (1, True)
    assert not (tmp_path / "no").exists()


def test_without_helm_nothing_is_written(
    declared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("importlib.util.find_spec", {"helm_python": None}.get)
    words = ["export", "k8s", str(tmp_path / "out"), "--from", str(declared)]
    refused = CliRunner().invoke(main, words, prog_name="clipper")
    assert refused.exit_code == 1
    assert "no `helm` on PATH" in refused.output
    assert "clipper export chart" in refused.output
    assert not (tmp_path / "out").exists()


def test_a_token_that_was_changed_is_in_the_next_export(declared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export("k8s", out, "--from", declared).exit_code == 0
    before = objects_of(out)
    (out / "secrets" / "admin_token").write_text("mine\n")
    assert export("k8s", out, "--from", declared).exit_code == 0
    after = objects_of(out)
    assert after["Secret", "clipper-token"]["stringData"]["admin_token"] == "mine"
    rolled = [
        found["Deployment", "clipper-server"]["spec"]["template"]["metadata"]["annotations"]
        for found in (before, after)
    ]
    assert rolled[0] != rolled[1]


def test_the_token_is_made_once_and_in_no_other_file(declared: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export("compose", out, "--from", declared)
    token = (out / "secrets" / "clipper_token").read_text()
    assert len(token) >= 32
    assert stat.S_IMODE((out / "secrets").stat().st_mode) == 0o700
    export("compose", out, "--from", declared)
    assert (out / "secrets" / "clipper_token").read_text() == token
    others = [path for path in out.rglob("*") if path.is_file() and path.name != "clipper_token"]
    assert not [path for path in others if token.encode() in path.read_bytes()]
    assert (out / ".gitignore").read_text() == "secrets/\n"


def test_the_same_code_gives_the_same_images(declared: Path, tmp_path: Path) -> None:
    def written(folder: str) -> dict[str, bytes]:
        out = tmp_path / folder
        assert export("k8s", out, "--from", declared).exit_code == 0
        found = {
            path.relative_to(out).as_posix(): path.read_bytes()
            for path in out.rglob("*")
            if path.is_file()
        }
        # tokens differ, and pods are replaced with them
        server = found["server.yaml"]
        found["server.yaml"] = re.sub(rb"clipper/settings: .*", b"", server)
        return {name: text for name, text in found.items() if not name.startswith("secrets/")}

    first = written("out")
    (tmp_path / "up.out").write_text("the log of a server")
    (tmp_path / "not_imported.py").write_text("import torch\n")
    assert written("again") == first
    assert {name.partition("/code/")[2] for name in first if "/code/" in name} == {
        "0/ours_for_export.py"
    }
    image = export("dockerfile", "sums", "--from", declared)
    assert image.exit_code == 0, image.output
    assert image.output == first["models/sums/Dockerfile"].decode()


def test_what_runs_is_exported_as_what_is_declared(
    declared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with clipper.start(http={"admin": "127.0.0.1:0"}, **QUICK) as server:
        for _ in range(2):
            server.deploy("svm", lambda rows: np.asarray(rows).sum(axis=1), input="f64[2]")
        server.app("asks", ["svm"], slo_ms=50, default="none", roles={})
        out, url = tmp_path / "out", ["--url", f"http://{server.admin_address}"]
        result = export("compose", out, *url)
        assert result.exit_code == 0, result.output
        server.app("asks", ["svm:1"])
        refused = export("compose", tmp_path / "no", *url)
    assert refused.exit_code == 1
    assert "application 'asks' links 'svm:1', which is not exported." in refused.output
    found = tomllib.loads((out / "clipper.toml").read_text())
    assert found["models"]["svm"] == {"version": 2, "replicas": 1, "input": "f64[2]"}
    assert found["apps"]["asks"]["models"] == ["svm"]
    assert (out / "models" / "svm" / "model").is_dir()


def test_bytes_that_no_file_can_hold_are_refused() -> None:
    from clipper.deploy.kubernetes.shipment import Shipment
    from clipper.types import ANY, Application

    with pytest.raises(InvalidInput, match=r"\[apps.odd\] holds bytes"):
        Shipment({}, (Application("odd", (), 20.0, b"\xff", ANY),)).settings()


def test_exported_containers_dial_in_at_an_exported_server(
    engine: Engine, declared: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    assert export("compose", out, "--from", declared, "--base", BASE).exit_code == 0
    services = yaml.safe_load((out / "docker-compose.yml").read_text())["services"]
    text = (out / "clipper.toml").read_text()
    token = out / "secrets" / "clipper_token"
    text = text.replace("/run/secrets/clipper_token", str(token))
    (out / "here.toml").write_text(
        text.replace("0.0.0.0:7000", "127.0.0.1:0").replace("0.0.0.0:8000", "127.0.0.1:0")
    )
    service = services["model-sums"]
    network = (
        ["--network=none"]
        if engine.kind == "podman"
        else ["--network", engine.settings["build_network"]]
    )
    engine.run("build", *network, "-t", service["image"], str(out / service["build"]))
    environment = services["server"]["environment"]
    assert environment["CLIPPER_SERVER__STATE"] == "/state"
    environment |= {"CLIPPER_SERVER__STATE": f"{tmp_path}/state"}
    settings = load(out / "here.toml", environment, http={"admin": ""})
    with clipper.ClipperServer(settings).start() as server:
        words = [word.replace("tcp:server:7000", server.address) for word in service["command"]]
        mounted = [
            "--volume",
            f"{token}:/run/secrets/clipper_token:ro",
            "--read-only",
            "--tmpfs=/tmp",
            "--cap-drop=ALL",
        ]
        made = [
            engine.run("run", "-d", "--network=host", *mounted, service["image"], *words).strip()
            for _ in range(2)
        ]
        try:
            model = clipper.VersionedModel("sums", 1)
            assert server._deployment.containers.wait_for(model, 2, PATIENCE_S)
            answer = server.app("total").predict(np.ones(3)).result(60)
            assert (answer.output, answer.is_default) == (3.0, False)
            rows = server.stats()["models"]["sums:1"]["replicas"]
            assert [(row["number"], row["pid"], row["state"]) for row in rows] == [
                (0, 1, "ready")
            ] * 2
        finally:
            engine.run("rm", "-f", *made)


# -- models that are programs


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the configuration of a model that a program serves."""
    (tmp_path / "svm").write_text("#!/bin/sh\n")
    (tmp_path / "svm").chmod(0o755)
    (tmp_path / "svm.txt").write_text("1 2 3\n")
    file = tmp_path / "clipper.toml"
    command = 'command = ["./svm", "svm.txt", "--fast"]'
    file.write_text(f'[models.svm]\n{command}\ninput = "f64[3]"\ncpus = 2\nreplicas = 2\n')
    monkeypatch.chdir(tmp_path)
    return file


def test_a_program_is_exported_with_the_files_that_its_command_names(
    program: Path, tmp_path: Path
) -> None:
    import jsonschema

    out = tmp_path / "out"
    result = export("compose", out, "--from", program)
    assert result.exit_code == 0, result.output
    found = yaml.safe_load((out / "docker-compose.yml").read_text())
    jsonschema.validate(found, compose_schema())
    service = found["services"]["model-svm"]
    assert service["environment"]["CLIPPER_ADDRESS"] == "tcp:server:7000"
    assert service["environment"]["OMP_NUM_THREADS"] == "2"
    assert "command" not in service
    image = out / "models" / "svm"
    text = (image / "Dockerfile").read_text()
    assert 'ENTRYPOINT ["/model/svm", "/model/svm.txt", "--fast"]' in text
    assert 'RUN chmod 755 "/model/svm"' in text
    assert 'CLIPPER_INPUT="f64[3]"' in text
    assert sorted(path.name for path in (image / "model").iterdir()) == ["svm", "svm.txt"]
    assert "target" not in tomllib.loads((out / "clipper.toml").read_text())["models"]["svm"]


def test_words_that_name_no_file_stay_as_they_are(program: Path, tmp_path: Path) -> None:
    """Words stay if they name a program of PATH, even if a folder has that name, or if they are
    longer than a path can be."""
    (tmp_path / "sh").mkdir()
    (tmp_path / "sh" / "notes.txt").write_text("of this host")
    os.mkfifo(tmp_path / "queue")
    words = ["sh", "svm.txt", "queue", "x" * 300]
    program.write_text(f"[models.svm]\ncommand = {json.dumps(words)}\n")
    out = tmp_path / "out"
    result = export("compose", out, "--from", program)
    assert result.exit_code == 0, result.output
    image = out / "models" / "svm"
    words[1] = "/model/svm.txt"
    assert f"ENTRYPOINT {json.dumps(words)}" in (image / "Dockerfile").read_text()
    assert [path.name for path in (image / "model").iterdir()] == ["svm.txt"]


def test_a_program_in_kubernetes_connects_to_all_servers(program: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert export("k8s", out, "--from", program, "--redis").exit_code == 0
    objects = objects_of(out)
    check_objects(objects.values())
    model = objects["Deployment", "clipper-model-svm"]
    (container,) = model["spec"]["template"]["spec"]["containers"]
    settings = {one["name"]: one["value"] for one in container["env"]}
    assert settings["CLIPPER_ADDRESS"] == "tcp:clipper-models:7000"
    assert settings["CLIPPER_ALL_SERVERS"] == "1"
    assert "args" not in container
    healthy = container["livenessProbe"]["exec"]["command"]
    assert healthy[0] == "sh"
    assert "clipper.alive" in healthy[-1]


def test_what_a_program_cannot_be_exported_with_is_refused(program: Path, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "svm.txt").write_text("others")
    text = program.read_text()
    program.write_text(text.replace('"--fast"', '"other/svm.txt"'))
    result = export("compose", tmp_path / "out", "--from", program)
    assert (result.exit_code, "two words of its command name" in result.output) == (1, True)
    program.write_text(text.replace("./svm", "./missing"))
    result = export("compose", tmp_path / "out", "--from", program)
    assert (result.exit_code, "no program './missing'" in result.output) == (1, True)
    assert not (tmp_path / "out").exists()


def test_an_exported_program_dials_in_at_a_server(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.languages.compiled import CPP, cpp

    static = ("-static-libstdc++", "-static-libgcc")
    (tmp_path / "total").symlink_to(cpp(CPP / "tests" / "total.cpp", *static))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clipper.toml").write_text('[models.t]\ncommand = ["./total"]\n')
    out = tmp_path / "out"
    assert export("compose", out, "--from", tmp_path / "clipper.toml").exit_code == 0
    service = yaml.safe_load((out / "docker-compose.yml").read_text())["services"]["model-t"]
    network = (
        ["--network=none"]
        if engine.kind == "podman"
        else ["--network", engine.settings["build_network"]]
    )
    base = ["--build-arg", f"BASE={BASE}"]
    engine.run("build", *network, *base, "-t", service["image"], str(out / service["build"]))
    token = out / "secrets" / "clipper_token"
    one, other = (
        clipper.start(address="tcp://127.0.0.1:0", token=token.read_text(), **QUICK)
        for _ in range(2)
    )
    with one, other:
        settings = {**service["environment"], "CLIPPER_ADDRESS": f"{one.address},{other.address}"}
        words = [word for key, value in settings.items() for word in ("-e", f"{key}={value}")]
        words += ["--volume", f"{token}:/run/secrets/clipper_token:ro", "--read-only"]
        words += ["--tmpfs=/tmp", "--cap-drop=ALL", "--network=host"]
        made = engine.run("run", "-d", *words, service["image"]).strip()
        try:
            model = clipper.VersionedModel("t", 1)
            for server in (one, other):
                assert server._deployment.containers.wait_for(model, 1, PATIENCE_S)
                assert server.model("t").predict([1.0, 2.0], slo_ms=9000).result(60) == 3.0
        finally:
            engine.run("rm", "-f", made)


def rendered(base: Path) -> list[dict[str, Any]]:
    """Return the objects of a base as `kubectl apply -k` sends them."""
    words = ["kubectl", "kustomize", str(base)]
    text = subprocess.run(words, capture_output=True, text=True, check=True).stdout
    return [*yaml.safe_load_all(text)]


@pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="no kubectl: python tools/fetch.py kubectl"
)
def test_all_exports_fit_into_one_namespace_and_twice(declared: Path, tmp_path: Path) -> None:
    everything: dict[tuple[str, str], str] = {}
    for name in ("clipper", "second"):
        for words in (["--from", declared, "--redis"], ["--mesh", STORE], ["--shards", 2]):
            out = tmp_path / name / str(words[0])[2:]
            assert export("k8s", out, *words, "--name", name).exit_code == 0
            for one in rendered(out):
                key = one["kind"], one["metadata"]["name"]
                assert key not in everything, f"{key} is in {everything[key]} and in {out}"
                everything[key] = str(out)
                chosen = one.get("spec", {}).get("selector", {})
                labels = chosen.get("matchLabels", chosen) if isinstance(chosen, dict) else {}
                instance = labels.get("app.kubernetes.io/instance", f"{name}-")
                assert instance.startswith(f"{name}-"), f"{key} selects pods of another export"
                others = re.findall(r'"(?:tcp:)?(?:clipper|second)-[a-z-]+', json.dumps(one))
                refers = {one.strip('"').removeprefix("tcp:") for one in others} - {"clipper-etcd"}
                assert all(one.startswith(f"{name}-") for one in refers), f"{key}: {refers}"
    assert len(everything) > 40


def test_a_name_that_objects_cannot_have_is_refused(declared: Path, tmp_path: Path) -> None:
    result = export("k8s", tmp_path / "out", "--from", declared, "--name", "Big_One")
    assert result.exit_code == 1
    assert "--name 'Big_One'" in result.output


# -- nodes of a mesh

STORE = "etcd://clipper:secret@etcd.default:2379/clipper?ca=/etc/clipper-etcd/ca.crt"


@pytest.mark.parametrize(
    "more", [[], ["--nodes-max", "10", "--label", "gpu", "--gpus", "1"]], ids=["fixed", "scaled"]
)
def test_kubernetes_takes_each_object_of_a_mesh(tmp_path: Path, more: list[str]) -> None:
    out = tmp_path / "out"
    result = export("k8s", out, "--mesh", STORE, *more)
    assert result.exit_code == 0, result.output
    kinds = objects_of(out)
    check_objects(kinds.values())
    needed = {
        "Deployment",
        "Service",
        "PodDisruptionBudget",
        "NetworkPolicy",
        "PersistentVolumeClaim",
    }
    assert needed <= {kind for kind, _ in kinds}
    spec = kinds["Deployment", "clipper-node"]["spec"]
    assert spec.get("replicas") == (None if more else 3)
    assert spec["strategy"]["rollingUpdate"] == {"maxUnavailable": 0, "maxSurge": 1}
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    assert {"startupProbe", "livenessProbe", "readinessProbe"} <= {*container}
    assert container["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "5"]
    # as `clipper node` has it
    toml = kinds["ConfigMap", "clipper-node"]["data"]["node.toml"]
    (tmp_path / "node.toml").write_text(toml)
    config = load(
        tmp_path / "node.toml",
        {"CLIPPER_SERVER__STATE": STORE, "CLIPPER_HTTP__TOKEN": "t"},
        server={"insecure": True},
    )
    assert pod["terminationGracePeriodSeconds"] > 5 + config.mesh.drain_s + config.server.drain_s
    assert (config.mesh.enabled, config.mesh.labels) == (True, ("gpu",) if more else ())
    http = tomllib.loads(toml)["http"]
    assert (http["metrics"], http["insecure"]) == (True, True)
    assert config.mesh.capacity_mib < int(
        container["resources"]["limits"]["memory"].removesuffix("Mi")
    )
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    bound = {"http": config.http.address, "grpc": config.grpc.address}
    bound |= {"peers": config.mesh.peers, "models": config.server.address}
    bound |= {"admin": config.http.admin}
    assert {name: int(at.rpartition(":")[2]) for name, at in bound.items()} == ports
    for (kind, _), one in kinds.items():
        if kind in ("PodDisruptionBudget", "NetworkPolicy", "Service"):
            chosen = one["spec"].get("selector") or one["spec"].get("podSelector")
            assert (
                chosen.get("matchLabels", chosen).items()
                <= spec["template"]["metadata"]["labels"].items()
            )


def test_the_nodes_start_with_the_verb_and_the_settings_that_they_are_given(tmp_path: Path) -> None:
    from clipper.cli.mesh.node import node

    export("k8s", tmp_path / "out", "--mesh", STORE)
    found = objects_of(tmp_path / "out")
    pod = found["Deployment", "clipper-node"]["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    verb, toml, *words = container["args"]
    assert verb == "node"
    assert str(Path(toml).parent) in {mount["mountPath"] for mount in container["volumeMounts"]}
    settings = found["ConfigMap", "clipper-node"]["data"]["node.toml"]
    (tmp_path / "node.toml").write_text(settings)
    with node.make_context("node", [str(tmp_path / "node.toml"), *words]) as context:
        assert (context.params["name"], context.params["advertise"]) == ("$(POD_NAME)", "$(POD_IP)")
    assert {one["name"] for one in container["env"]} == {
        "POD_NAME",
        "POD_IP",
        "CLIPPER_SERVER__STATE",
        "CLIPPER_HTTP__TOKEN",
    }


def test_the_autoscaler_goes_by_the_age_of_the_least_recently_used_model(tmp_path: Path) -> None:
    from clipper.metrics.families import FAMILIES

    export(
        "k8s", tmp_path / "out", "--mesh", STORE, "--nodes", 2, "--nodes-max", 9, "--lru-age", 600
    )
    scaler = objects_of(tmp_path / "out")["HorizontalPodAutoscaler", "clipper-node"]
    assert (scaler["spec"]["minReplicas"], scaler["spec"]["maxReplicas"]) == (2, 9)
    (metric,) = scaler["spec"]["metrics"]
    rules = yaml.safe_load((tmp_path / "out" / "prometheus-adapter.yaml").read_text())["rules"][
        "external"
    ]
    (rule,) = [one for one in rules if one["name"]["as"] == metric["external"]["metric"]["name"]]
    # 1e9 over the age, so that a pod is added when it is below 600 s
    assert rule["metricsQuery"].startswith("(1e9 /")
    assert int(metric["external"]["target"]["value"]) == 10**9 // 600
    metrics_named = set(re.findall(r"clipper_\w+", rule["metricsQuery"] + rule["seriesQuery"]))
    assert metrics_named <= set(FAMILIES)


def test_the_store_is_in_a_secret_and_in_no_other_file(tmp_path: Path) -> None:
    out = tmp_path / "out"
    for store in ("redis://first:6379/0", STORE):
        assert export("k8s", out, "--mesh", store).exit_code == 0
    assert objects_of(out)["Secret", "clipper-node-store"]["stringData"]["url"] == STORE
    secrets = out / "secrets" / "secrets.yaml"
    assert stat.S_IMODE(secrets.stat().st_mode) == 0o600
    others = [path for path in out.rglob("*") if path.is_file() and path != secrets]
    assert not [path for path in others if b"etcd.default" in path.read_bytes()]


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--mesh", "sqlite:/here"], "not a store that several pods share"),
        (["--mesh", "memory://"], "not a store that several pods"),
        (["--mesh", "etcd://"], "not a store that several pods"),
        (["--mesh", STORE, "--redis"], "--mesh cannot be combined with --from"),
        (["--mesh", STORE, "--nodes", "5", "--nodes-max", "4"], "nodes.replicas are 5 already"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused(tmp_path: Path, words: list[str], why: str) -> None:
    result = export("k8s", tmp_path / "out", *words)
    assert result.exit_code == (2 if "cannot be combined" in why else 1)
    assert why in result.output
    assert not (tmp_path / "out").exists()
