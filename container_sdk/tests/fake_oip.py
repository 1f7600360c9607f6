"""A minimal fake of four model servers' HTTP protocols. A model's file is JSON:
{"factor": 2, ...}."""

import contextlib
import json
import re
import socket
import struct
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from container_sdk.tests import fake_server as fake

DTYPES = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}


class FakeServer:
    """Use it in a `with` block. requests: (method, path) of each request.  failing: (status, body)
    of a path instead of its answer. slow_s: before each answer to an infer request.  gathering: a
    barrier where requests for a model that is not loaded wait.
    """

    def __init__(self, type: str, folder: Path, binary: bool = False) -> None:
        self.type, self.folder, self.binary = type, folder, binary
        self.models: dict[str, dict[str, Any]] = {}
        self.requests: list[tuple[str, str]] = []
        self.failing: dict[str, tuple[int, bytes]] = {}  # path -> what it answers
        self.slow_s = 0.0
        self.gathering: threading.Barrier | None = None
        self._connections: list[socket.socket] = []
        fake = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def setup(self) -> None:
                super().setup()
                fake._connections.append(self.connection)

            def do_GET(self) -> None:
                self._answer("GET")

            def do_POST(self) -> None:
                self._answer("POST")

            def _answer(self, method: str) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                fake.requests.append((method, self.path))
                try:
                    status, data, headers = fake.answer(method, self.path, body, self.headers)
                except Exception as error:
                    status, data, headers = (
                        500,
                        json.dumps({"error": f"{type(error).__name__}: {error}"}).encode(),
                        {},
                    )
                try:
                    self.send_response(status)
                    for name, value in {"Content-Length": str(len(data)), **headers}.items():
                        self.send_header(name, value)
                    self.end_headers()
                    self.wfile.write(data)
                except OSError:
                    self.close_connection = True

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeServer":
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        fake.join(self._thread)
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)

    # -- what it answers

    def answer(
        self, method: str, path: str, body: bytes, headers: Any
    ) -> tuple[int, bytes, dict[str, str]]:
        if path in self.failing:
            return (*self.failing[path], {})
        if path in ("/v2/health/ready", "/v2/health/live"):
            return 200, b"", {}
        if path == "/v2":
            extensions = ["binary_tensor_data"] if self.binary else []
            return _json({"name": self.type, "extensions": extensions})
        if found := re.fullmatch(r"/v2/repository/models/([^/]+)/(load|unload)", path):
            if self.type not in ("mlserver", "triton"):
                return 404, b"", {}
            return self._load(found[1]) if found[2] == "load" else self._unload(found[1])
        if path == "/v1/config/reload":
            return self._reload()
        if found := re.fullmatch(r"/v2/models/([^/]+)(/ready|/infer)?", path):
            return self._model(found[1], found[2] or "", body, headers)
        if found := re.fullmatch(r"/v1/models/([^/:]+)(:predict)?", path):
            return self._tfserving(found[1], bool(found[2]), body)
        return 404, b'{"error": "no such path"}', {}

    def _load(self, name: str) -> tuple[int, bytes, dict[str, str]]:
        try:
            self.models[name] = self._model_of(name)
        except (OSError, ValueError, StopIteration) as error:
            return 400, json.dumps({"error": f"failed to load '{name}', {error!r}"}).encode(), {}
        return 200, b"", {}

    def _unload(self, name: str) -> tuple[int, bytes, dict[str, str]]:
        return _json({}) if self.models.pop(name, None) else (400, b'{"error": "not found"}', {})

    def _model_of(self, name: str) -> dict[str, Any]:
        folder = self.folder / name
        if self.type == "mlserver":
            settings = json.loads((folder / "model-settings.json").read_text())
            assert settings["name"] == name
            file = folder / settings.get("parameters", {}).get("uri", "model.json")
        else:
            file = next(iter(sorted((folder / "1").iterdir())))
        return dict(json.loads(file.read_text()))

    def _reload(self) -> tuple[int, bytes, dict[str, str]]:
        listed = json.loads((self.folder / "config.json").read_text())["model_config_list"]
        names = {one["config"]["name"] for one in listed}
        self.models = {name: model for name, model in self.models.items() if name in names}
        failed = [name for name in names - set(self.models) if self._load(name)[0] != 200]
        return (
            (412, json.dumps({"error": f"failed: {failed}"}).encode(), {}) if failed else _json({})
        )

    def _model(
        self, name: str, what: str, body: bytes, headers: Any
    ) -> tuple[int, bytes, dict[str, str]]:
        if name not in self.models:
            if self.gathering is not None:
                self.gathering.wait(60)
            return 404, json.dumps({"error": f"Model {name} not found"}).encode(), {}
        model = self.models[name]
        if what == "/ready":
            return 200, b"", {}
        if not what:
            return _json(
                {
                    "name": name,
                    "inputs": model.get("inputs", []),
                    "outputs": model.get("outputs", []),
                }
            )
        time.sleep(self.slow_s)
        if "raw" in model:
            return 200, model["raw"].encode(), {}
        return self._infer(
            model, body, int(headers.get("Inference-Header-Content-Length") or len(body))
        )

    def _infer(
        self, model: dict[str, Any], body: bytes, size: int
    ) -> tuple[int, bytes, dict[str, str]]:
        (tensor,) = json.loads(body[:size])["inputs"]
        if model.get("fails"):
            return 500, b'{"error": "the model\\nfailed"}', {}
        if tensor["datatype"] == "BYTES":
            values = tensor.get("data") or _strings(body[size:])
            out = {
                "name": "out",
                "datatype": "BYTES",
                "shape": tensor["shape"],
                "data": [value.upper() for value in values],
            }
            return _json({"outputs": [out]})
        dtype = DTYPES[tensor["datatype"]]
        values = (
            np.array(tensor["data"], dtype)
            if "data" in tensor
            else np.frombuffer(body[size:], dtype)
        )
        found = values.reshape(tensor["shape"]) * model["factor"]
        found = found.sum(axis=1, keepdims=True) if model.get("sum") else found
        out = {"name": "out", "datatype": tensor["datatype"], "shape": list(found.shape)}
        other = {"name": "other", "datatype": "FP64", "shape": [1], "data": [0.5]}
        if not self.binary:
            return _json({"outputs": [other, {**out, "data": found.ravel().tolist()}]})
        data = found.tobytes()
        head = json.dumps(
            {"outputs": [other, {**out, "parameters": {"binary_data_size": len(data)}}]}
        ).encode()
        return 200, head + data, {"Inference-Header-Content-Length": str(len(head))}

    def _tfserving(
        self, name: str, predicts: bool, body: bytes
    ) -> tuple[int, bytes, dict[str, str]]:
        listed = self.folder / "models.config"
        names = re.findall(r'name: "([^"]+)"', listed.read_text()) if listed.exists() else []
        if name not in names:
            return (
                404,
                json.dumps({"error": f"Servable not found for request: Latest({name})"}).encode(),
                {},
            )
        status, why, _ = self._load(name)
        if status != 200:
            fault = {"error_code": "INTERNAL", "error_message": why.decode()}
            return _json(
                {"model_version_status": [{"version": "1", "state": "END", "status": fault}]}
            )
        if not predicts:
            good = {"error_code": "OK", "error_message": ""}
            return _json(
                {"model_version_status": [{"version": "1", "state": "AVAILABLE", "status": good}]}
            )
        rows = np.array(json.loads(body)["instances"])
        return _json({"predictions": (rows * self.models[name]["factor"]).tolist()})


def _strings(data: bytes) -> list[str]:
    found, at = [], 0
    while at < len(data):
        (size,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + size].decode())
        at += 4 + size
    return found


def _json(value: Any) -> tuple[int, bytes, dict[str, str]]:
    return 200, json.dumps(value).encode(), {"Content-Type": "application/json"}
