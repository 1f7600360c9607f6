"""Models of another server, by the Open Inference Protocol: tested with a minimal fake server."""

import json
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper_container.adapters.oip import Oip, ServerFailed
from clipper_container.adapters.oip.http import HttpServer, Unreachable
from clipper_container.adapters.oip.repository import MARK, ModelRepository
from clipper_container.adapters.oip.server_memory import memory_of
from clipper_container.adapters.oip.tensors import (
    BadTensor,
    Signature,
    outputs_of,
    request,
    signature_of,
)
from clipper_container.runtime import Artifact, ArtifactError
from container_sdk.tests.fake_oip import FakeServer
from container_sdk.tests.fake_server import join

PATIENT: dict[str, Any] = {"start_s": 30, "load_s": 30, "answer_s": 30}
ROWS = np.arange(6.0).reshape(2, 3)


def tensor(name: str, shape: list[int], datatype: str = "FP64") -> dict[str, Any]:
    return {"name": name, "shape": shape, "datatype": datatype}


def artifact_of(folder: Path, type: str, model: str = "m1", **about: Any) -> Artifact:
    """Write a model file for the fake server and return its path."""
    path = folder / f"{model}.json"
    path.write_text(json.dumps({"factor": 2, "outputs": [tensor("out", [-1, 3])], **about}))
    return Artifact(model, type, str(path), "some.Implementation" if type == "mlserver" else "")


KINDS = [("mlserver", False), ("triton", True), ("openvino", False), ("tfserving", False)]


@pytest.fixture(params=KINDS, ids=lambda p: p[0])
def fake(request: Any, tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer(request.param[0], tmp_path / "repository", request.param[1]) as started:
        yield started


@pytest.fixture
def triton(tmp_path: Path) -> Iterator[FakeServer]:
    with FakeServer("triton", tmp_path / "repository", binary=True) as started:
        yield started


def runtime_of(fake: FakeServer, **more: Any) -> Oip:
    found = Oip(fake.type, fake.url, str(fake.folder), **{**PATIENT, **more})
    found.start()
    return found


def test_a_model_is_loaded_queried_and_unloaded(fake: FakeServer, tmp_path: Path) -> None:
    runtime = runtime_of(fake)
    artifact = artifact_of(tmp_path, fake.type)
    assert runtime.types == (fake.type,)
    loaded = runtime.load(artifact)
    assert not loaded.inside
    assert loaded.size_bytes > 0
    found = loaded.model.predict_batch(ROWS)
    np.testing.assert_array_equal(found, ROWS * 2)
    runtime.unload(artifact, loaded)
    if fake.type != "tfserving":  # which looks at its list when it is next asked
        assert fake.models == {}
    assert not (fake.folder / "m1").exists()
    runtime.load_s = 0.2
    # it tries to have it loaded again
    with pytest.raises((ArtifactError, TimeoutError, ServerFailed, Unreachable)):
        loaded.model.predict_batch(ROWS)
    runtime.server.close()


def test_a_corrupt_model_is_its_own_fault_and_leaves_nothing(
    fake: FakeServer, tmp_path: Path
) -> None:
    runtime = runtime_of(fake)
    artifact = artifact_of(tmp_path, fake.type)
    Path(artifact.path).write_text("no JSON")
    with pytest.raises(ArtifactError, match="does not load 'm1'"):
        runtime.load(artifact)
    assert not (fake.folder / "m1").exists()
    with pytest.raises(ArtifactError, match="no file or folder"):
        runtime.load(Artifact("m2", fake.type, str(tmp_path / "nothing")))
    runtime.server.close()


def test_models_of_an_earlier_run_are_removed_and_unloaded(
    fake: FakeServer, tmp_path: Path
) -> None:
    before = runtime_of(fake)
    before.load(artifact_of(tmp_path, fake.type))
    (fake.folder / "theirs").mkdir()
    again = runtime_of(fake)
    assert sorted(entry.name for entry in fake.folder.iterdir() if entry.is_dir()) == ["theirs"]
    if fake.type != "tfserving":
        assert fake.models == {}
    with pytest.raises(FileExistsError, match="was not created by clipper"):
        again.load(artifact_of(tmp_path, fake.type, "theirs"))
    assert (fake.folder / "theirs").exists()
    before.server.close()
    again.server.close()


def test_a_server_that_lost_its_models_gets_them_again_once(
    triton: FakeServer, tmp_path: Path
) -> None:
    runtime = runtime_of(triton)
    model = runtime.load(artifact_of(tmp_path, "triton")).model
    triton.models.clear()
    triton.requests.clear()
    triton.gathering = threading.Barrier(8)  # all find it gone
    with_trouble: list[BaseException] = []

    def predict_once() -> None:
        try:
            np.testing.assert_array_equal(model.predict_batch(ROWS), ROWS * 2)
        except BaseException as error:
            with_trouble.append(error)

    threads = [threading.Thread(target=predict_once) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert not with_trouble
    assert sum(path.endswith("/load") for _, path in triton.requests) == 1
    runtime.server.close()


def test_types_are_those_that_the_server_reports(triton: FakeServer, tmp_path: Path) -> None:
    runtime = runtime_of(triton)
    about = {
        "inputs": [tensor("x", [-1, 3], "FP32")],
        "outputs": [tensor("out", [-1, 1], "FP32")],
        "sum": True,
    }
    model = runtime.load(artifact_of(tmp_path, "triton", **about)).model
    assert (model.input, model.output, model.batch_max) == ("f32[3]", "f32[1]", 0)
    found = model.predict_batch(ROWS)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, ROWS.sum(axis=1) * 2)
    loaded = runtime.load(Artifact("m2", "triton", str(tmp_path / "m1.json"), "", "f32[*]", "f64"))
    assert (loaded.model.input, loaded.model.output) == ("f32[*]", "f64")
    many = artifact_of(tmp_path, "triton", "m3", inputs=[tensor("a", [-1]), tensor("b", [-1])])
    with pytest.raises(ArtifactError, match=r"2 \(a, b\); concatenate them"):
        runtime.load(many)
    assert "m3" not in triton.models
    runtime.server.close()


@pytest.mark.parametrize("fake", KINDS[:3], ids=lambda p: p[0], indirect=True)
def test_strings(fake: FakeServer, tmp_path: Path) -> None:
    runtime = runtime_of(fake)
    model = runtime.load(
        artifact_of(tmp_path, fake.type, inputs=[tensor("text", [-1, 1], "BYTES")])
    ).model
    assert model.input == "str"
    assert model.predict_batch(["one", "zwölf", ""]) == ["ONE", "ZWÖLF", ""]
    runtime.server.close()


@pytest.mark.parametrize(
    ("about", "why"),
    [
        ({"fails": True}, "triton answers 500: the model failed"),
        ({"raw": "nothing of use"}, "holds no outputs"),
        ({"raw": '{"outputs": []}'}, "holds no outputs"),
        (
            {
                "raw": (
                    '{"outputs": [{"name": "out", "datatype": "FP64", "shape": [5], "data":'
                    " [1,2,3,4,5]}]}"
                )
            },
            r"\[5\] to 2 rows",
        ),
        (
            {
                "raw": (
                    '{"outputs": [{"name": "out", "datatype": "FP99", "shape": [2], "data":'
                    " [1,2]}]}"
                )
            },
            "holds no outputs",
        ),
        (
            {
                "raw": (
                    '{"outputs": [{"name": "out", "datatype": "BYTES", "shape": [1], "data":'
                    ' ["a"]}]}'
                )
            },
            "1 strings to 2 rows",
        ),
        (
            {
                "raw": (
                    '{"outputs": [{"name": "out", "datatype": "FP64", "shape": [2,9], "data":'
                    " [1,2]}]}"
                )
            },
            "holds no outputs",
        ),
    ],
)
def test_a_batch_that_fails_gives_the_reason(
    triton: FakeServer, tmp_path: Path, about: dict[str, Any], why: str
) -> None:
    runtime = runtime_of(triton)
    model = runtime.load(artifact_of(tmp_path, "triton", **about)).model
    with pytest.raises(ServerFailed, match=why):
        model.predict_batch(ROWS)
    runtime.server.close()


def test_time_is_bounded(triton: FakeServer, tmp_path: Path) -> None:
    runtime = runtime_of(triton)
    model = runtime.load(artifact_of(tmp_path, "triton")).model
    triton.slow_s, runtime.answer_s = 1.0, 0.1
    with pytest.raises(ServerFailed, match="does not answer: timed out"):
        model.predict_batch(ROWS)
    triton.slow_s, runtime.answer_s = 0, PATIENT["answer_s"]
    np.testing.assert_array_equal(model.predict_batch(ROWS), ROWS * 2)
    triton.failing["/v2/models/m2/ready"] = 503, b""
    runtime.load_s = 0.2
    with pytest.raises(
        (TimeoutError, Unreachable), match=r"has not loaded 'm2' within 0\.2 s|timed out"
    ):
        runtime.load(artifact_of(tmp_path, "triton", "m2"))
    assert not (triton.folder / "m2").exists()
    runtime.load_s = PATIENT["load_s"]
    triton.failing.clear()
    triton.models["m2"] = {}  # the server was still at it
    runtime.load(artifact_of(tmp_path, "triton", "m3"))
    assert sorted(triton.models) == ["m1", "m3"]
    runtime.server.close()


@pytest.mark.parametrize(
    ("status", "why"), [(503, b"busy"), (500, b"std::bad_alloc"), (400, b"CUDA out of memory")]
)
def test_trouble_of_the_server_is_not_the_models(
    triton: FakeServer, tmp_path: Path, status: int, why: bytes
) -> None:
    runtime = runtime_of(triton)
    triton.failing["/v2/repository/models/m1/load"] = status, why
    with pytest.raises(Unreachable):
        runtime.load(artifact_of(tmp_path, "triton"))
    triton.failing["/v2/repository/models/m1/load"] = 500, b"Internal Server Error"
    with pytest.raises(ArtifactError, match="Internal Server Error"):
        runtime.load(artifact_of(tmp_path, "triton"))
    triton.failing["/v2/health/live"] = 500, b""
    with pytest.raises(Unreachable):
        runtime.load(artifact_of(tmp_path, "triton"))
    runtime.server.close()


def test_a_server_that_is_not_there(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    runtime = Oip("triton", url, str(tmp_path), start_s=0.1)
    with pytest.raises(Unreachable, match=r"is not ready after 0\.1 s"):
        runtime.start()


def test_a_kept_connection_that_was_closed_is_replaced(tmp_path: Path) -> None:
    with FakeServer("triton", tmp_path) as fake:
        server = HttpServer(fake.url)
        assert server.request("GET", "/v2/health/live").status == 200
        (kept,) = server._idle
        kept.sock.shutdown(socket.SHUT_RDWR)
        assert server.request("GET", "/v2/health/live").status == 200
    with pytest.raises(Unreachable):
        server.request("GET", "/v2/health/live", within_s=1)
    server.close()


@pytest.mark.parametrize(
    "answer", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nabc", b"SSH-2.0\r\n"]
)
def test_half_an_answer_is_none(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def serve() -> None:
            connection, _ = listening.accept()
            connection.recv(1 << 16)
            connection.sendall(answer)
            connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(Unreachable):
            HttpServer(f"http://127.0.0.1:{listening.getsockname()[1]}").request(
                "GET", "/", within_s=2
            )
        join(thread)


def test_settings_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name, value in {
        "TYPE": "triton",
        "URL": "http://h:1/x",
        "FOLDER": str(tmp_path),
        "CAPACITY_MIB": "2",
    }.items():
        monkeypatch.setenv(f"CLIPPER_OIP_{name}", value)
    runtime = Oip()
    assert (runtime.types, runtime.server.port, runtime.capacity_bytes()) == (
        ("triton",),
        1,
        2 << 20,
    )
    given = runtime._start_s, runtime.load_s, runtime.answer_s, runtime._concurrency
    assert given == (60, 60, 30, 4)
    for name, value, why in [
        ("LOAD_S", "soon", "is not a number"),
        ("URL", "h:1", "is not a server.s URL"),
        ("TYPE", "torch", "is unknown; known"),
        ("FOLDER", "", "is not set"),
    ]:
        monkeypatch.setenv(f"CLIPPER_OIP_{name}", value)
        with pytest.raises(ValueError, match=why):
            Oip()


def test_the_size_of_a_model_is_that_of_its_files(tmp_path: Path) -> None:
    runtime = Oip("triton", "http://h:1", str(tmp_path))
    folder, file, none = tmp_path / "m", tmp_path / "f", tmp_path / "none"
    (folder / "1").mkdir(parents=True)
    for path, size in ((folder / "config", 3), (folder / "1" / "model", 40), (file, 500)):
        path.write_bytes(bytes(size))
    found = [runtime.predict_size(Artifact("m", "triton", str(at))) for at in (folder, file, none)]
    assert found == [43, 500, 0]


# -- places


def test_a_folder_keeps_its_own_files_and_gets_the_models_name(tmp_path: Path) -> None:
    source = tmp_path / "theirs"
    (source / "1").mkdir(parents=True)
    (source / "1" / "model.onnx").write_bytes(b"onnx")
    (source / "config.pbtxt").write_text(
        'backend: "onnxruntime"\nname: "theirs"\ninput [ { name: "x" } ]\n'
    )
    (source / "model-settings.json").write_text(
        '{"name": "theirs", "implementation": "a.B", "parameters": {"version": "v3"}}'
    )
    before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
    triton = ModelRepository("triton", str(tmp_path / "triton")).put(
        Artifact("m1", "triton", str(source))
    )
    assert (
        triton / "config.pbtxt"
    ).read_text() == 'backend: "onnxruntime"\nname: "m1"\ninput [ { name: "x" } ]\n'
    assert (triton / "1" / "model.onnx").stat().st_ino == (
        source / "1" / "model.onnx"
    ).stat().st_ino  # no copy
    mlserver = ModelRepository("mlserver", str(tmp_path / "mlserver")).put(
        Artifact("m1", "mlserver", str(source))
    )
    found = json.loads((mlserver / "model-settings.json").read_text())
    assert found == {"name": "m1", "implementation": "a.B", "parameters": {"version": "v3"}}
    assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before


def test_lists_of_models(tmp_path: Path) -> None:
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "saved_model.pb").write_bytes(b"pb")
    for type, name in (("openvino", "config.json"), ("tfserving", "models.config")):
        places = ModelRepository(type, str(tmp_path / type), "/models")
        for model in ("b", "a"):
            assert (
                places.put(Artifact(model, type, str(tmp_path / "saved"))) / "1" / "saved_model.pb"
            ).exists()
        places.list()
        text = (tmp_path / type / name).read_text()
        assert text.index("/models/a") < text.index("/models/b")
        places.remove("a")
        places.list()
        assert "/models/a" not in (tmp_path / type / name).read_text()
        assert places.clear() == ["b"]


@pytest.mark.parametrize("model", ["../up", "a/b", "", ".hidden", "Up"])
def test_an_id_that_is_no_folder_is_refused(tmp_path: Path, model: str) -> None:
    (tmp_path / "m.json").write_text("{}")
    with pytest.raises(ArtifactError, match="no folder's name"):
        ModelRepository("triton", str(tmp_path / "r")).put(
            Artifact(model, "triton", str(tmp_path / "m.json"))
        )


def test_settings_that_are_none_are_refused(tmp_path: Path) -> None:
    places = ModelRepository("mlserver", str(tmp_path / "r"))
    (tmp_path / "m.bin").write_bytes(b"")
    with pytest.raises(ArtifactError, match="needs key='its implementation'"):
        places.put(Artifact("m1", "mlserver", str(tmp_path / "m.bin")))
    (tmp_path / "m").mkdir()
    for text in ("no JSON", "[]"):
        (tmp_path / "m" / "model-settings.json").write_text(text)
        with pytest.raises(ArtifactError, match=r"model-settings\.json"):
            places.put(Artifact("m1", "mlserver", str(tmp_path / "m")))
    assert not [*(tmp_path / "r").glob(f"*/{MARK}")]


# -- tensors


@pytest.mark.parametrize(
    ("shape", "datatype", "type", "row", "batch_max"),
    [
        ([-1, 4], "FP32", "f32[4]", (4,), 0),
        ([-1], "INT64", "i64", (), 0),
        ([1, 3, 2], "UINT8", "u8[3,2]", (3, 2), 1),
        ([-1, -1], "FP64", "f64[*]", None, 0),
        ([-1, -1, 3], "FP64", "any", None, 0),
        ([-1, 1], "BYTES", "str", (1,), 0),
        ([-1, 2], "STRANGE", "any", None, 0),
        ([], "FP32", "any", None, 0),
        (["x", 2], "FP32", "any", None, 0),
    ],
)
def test_types_of_metadata(shape: Any, datatype: str, type: str, row: Any, batch_max: int) -> None:
    found = signature_of({"inputs": [tensor("x", shape, datatype)]})
    assert (found.input_type, found.shape, found.batch_max) == (type, row, batch_max)


@pytest.mark.parametrize("binary", [False, True])
@pytest.mark.parametrize("dtype", ["?", "u1", "<u2", "<i4", "<i8", "<f2", "<f4", ">f8"])
def test_numbers_there_and_back(binary: bool, dtype: str) -> None:
    rows = np.array([[0, 1, 1], [1, 0, 1]], dtype)
    body, headers = request(Signature(), rows, binary)
    size = headers.get("Inference-Header-Content-Length", "")
    head = json.loads(body[: int(size or len(body))])
    (made,) = head["inputs"]
    assert made["shape"] == [2, 3]
    answer = json.dumps({"outputs": [made]}).encode()
    found = outputs_of(
        Signature(), answer + (body[int(size) :] if size else b""), str(len(answer)), 2
    )
    np.testing.assert_array_equal(found, rows)


@pytest.mark.parametrize("binary", [False, True])
def test_strings_there_and_back(binary: bool) -> None:
    rows = ["snow", "", "\u00fcber \U0001f680"]
    body, headers = request(Signature(datatype="BYTES"), rows, binary)
    size = headers.get("Inference-Header-Content-Length", "")
    (made,) = json.loads(body[: int(size or len(body))])["inputs"]
    answer = json.dumps({"outputs": [made]}).encode()
    data = body[int(size) :] if size else b""
    assert outputs_of(Signature(), answer + data, str(len(answer)), 3) == rows
    with pytest.raises(BadTensor, match="3 strings to 4 rows"):
        outputs_of(Signature(), answer + data, str(len(answer)), 4)


def test_rows_that_are_no_tensor() -> None:
    for rows in ([np.zeros(2), np.zeros(3)], np.array(["a"])):
        with pytest.raises(BadTensor):
            request(Signature(), rows, False)


def test_memory_of_the_process_that_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        assert memory_of("127.0.0.1", port) > 1 << 20
        assert memory_of("203.0.113.1", port) == 0
    assert memory_of("127.0.0.1", port) == 0
