"""The image of a server, built from our wheels without a network, and what KServe and Compose make
of it."""

import importlib
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from clipper.deploy.kubernetes.images import SERVER_IMAGE
from tests.images.base_image import dependencies, wheel
from tests.images.engines import BASE, PATIENCE_S, Engine
from tests.images.exports import check_objects, yaml
from tests.images.test_manifests import compose_schema
from tests.memory_container import wait_until
from tests.sizes import sized

ROOT = Path(__file__).resolve().parents[2]
RUNTIME = ROOT / "deploy" / "kserve" / "clipper-servingruntime.yaml"
COMPOSE = ROOT / "deploy" / "compose.yml"
in_full = pytest.mark.skipif(
    not sized(False, True), reason="CLIPPER_TESTS=full: an image of 150 MB is built"
)
ASK = """\
import json, sys, urllib.request
url, body = sys.argv[1], sys.argv[2].encode() if len(sys.argv) > 2 else None
print(urllib.request.urlopen(url, body, timeout=5).read().decode())
"""


def kserve_container() -> dict[str, Any]:
    (found,) = yaml.safe_load(RUNTIME.read_text())["spec"]["containers"]
    assert found["name"] == "kserve-container"
    return found


def compose_server() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())["services"]["server"]
    return found


def test_kubernetes_takes_the_container_of_kserve() -> None:
    spec = yaml.safe_load(RUNTIME.read_text())["spec"]
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "one"},
        "spec": {"containers": spec["containers"], "volumes": spec["volumes"]},
    }
    check_objects([pod])
    assert kserve_container()["image"] == compose_server()["image"] == SERVER_IMAGE


def test_compose_takes_the_file() -> None:
    import jsonschema

    jsonschema.validate(yaml.safe_load(COMPOSE.read_text()), compose_schema())


@pytest.fixture(scope="module")
def image(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Build the image as `make image` does, without extras."""
    place = tmp_path_factory.mktemp("image")
    with pytest.MonkeyPatch.context() as patched:
        patched.syspath_prepend(str(ROOT / "tools"))
        wheels, context = map(importlib.import_module, ("wheels", "image"))
    ours = [wheels.build_wheel(folder, place, "prebuilt") for folder in wheels.FOLDERS]
    context.write(place / "context", ours, [])
    for name in dependencies(["clipper-serving"]):
        file, content = wheel(name)
        (place / "context" / "wheels" / file).write_bytes(content)
    network = engine.settings["build_network"]
    words = ("--network", network, "--build-arg", f"BASE={BASE}", "-t", SERVER_IMAGE)
    engine.run("build", *words, str(place / "context"))
    return SERVER_IMAGE


@pytest.fixture
def models(tmp_path: Path) -> Path:
    """Return a folder with a model, as KServe pulls it."""

    class Total:
        def predict(self, rows: Any) -> Any:
            return rows.sum(axis=1)

    folder = tmp_path / "models"
    folder.mkdir()
    (folder / "model.pkl").write_bytes(cloudpickle.dumps(Total()))
    folder.chmod(0o755)
    (folder / "model.pkl").chmod(0o644)
    return folder


class Container:
    """A container of the image, without a network and without rights."""

    def __init__(self, engine: Engine, image: str, models: Path, place: str, *words: str) -> None:
        self._engine = engine
        given = ("--network=none", "--volume", f"{models}:{place}:ro", "--health-interval=1s")
        confined = ("--read-only", "--tmpfs=/tmp", "--cap-drop=ALL")
        confined += ("--security-opt=no-new-privileges",)
        self.id = engine.run("run", "-d", *given, *confined, image, *words).strip()

    def inspect(self, what: str) -> str:
        return self._engine.run("inspect", "--format", f"{{{{{what}}}}}", self.id).strip()

    def ask(self, url: str, body: str = "") -> Any:
        """Query the server from inside; return None while it does not answer."""
        words = ("exec", self.id, "python", "-c", ASK, url, *([body] if body else []))
        try:
            return json.loads(self._engine.run(*words))
        except subprocess.CalledProcessError:
            assert self.inspect(".State.Running") == "true", self.logs()
            return None

    def logs(self) -> str:
        return self._engine.run("logs", self.id)


@pytest.fixture
def containers(engine: Engine) -> Iterator[list[Container]]:
    started: list[Container] = []
    yield started
    for one in started:
        engine.run("rm", "-f", one.id)


@in_full
def test_kserve_serves_a_pulled_model(
    engine: Engine, image: str, models: Path, containers: list[Container]
) -> None:
    args = [word.replace("{{.Name}}", "prices") for word in kserve_container()["args"]]
    one = Container(engine, image, models, "/mnt/models", *args)
    containers.append(one)
    url = f"http://127.0.0.1:{kserve_container()['ports'][0]['containerPort']}"
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = kserve_container()[probe]["httpGet"]["path"]
        wait_until(lambda path=path: one.ask(f"{url}{path}"), path, PATIENCE_S)
    body = {"name": "x", "shape": [2, 3], "datatype": "FP64", "data": [1, 2, 3, 4, 5, 6]}
    answer = one.ask(f"{url}/v2/models/prices/infer", json.dumps({"inputs": [body]}))
    assert answer["model_name"] == "prices"
    assert answer["outputs"][0]["data"] == [6.0, 15.0]
    assert one.ask(f"{url}/v2/models/prices/ready") is not None
    assert one.inspect(".Config.User") == "10001:10001"
    engine.run("stop", "--time=30", one.id)
    assert one.inspect(".State.ExitCode") == "0", one.logs()
    assert "closed" in one.logs()


@in_full
def test_compose_starts_a_server_that_becomes_healthy(
    engine: Engine, image: str, models: Path, containers: list[Container]
) -> None:
    server = compose_server()
    (volume,) = server["volumes"]
    one = Container(engine, image, models, volume.split(":")[1], *server["command"])
    containers.append(one)
    wait_until(
        lambda: one.inspect(".State.Health.Status") == "healthy", "it is healthy", PATIENCE_S
    )
    url = f"http://127.0.0.1:{server['ports'][0].rpartition(':')[2]}"
    answer = wait_until(
        lambda: one.ask(f"{url}/api/model/predict", '{"input": [1, 2, 3]}'),
        "it answers",
        PATIENCE_S,
    )
    assert answer["output"] == 6.0
