"""A runtime whose models run in another server: Triton, MLServer, OpenVINO or TensorFlow Serving.

    CLIPPER_OIP_TYPE=mlserver CLIPPER_OIP_URL=http://127.0.0.1:8080 CLIPPER_OIP_FOLDER=/models
      python -m clipper_container host --runtime clipper_container.adapters.oip:Oip ...

A model's files are laid out in the server's repository, the server gets a load request, its
metadata gives the types of rows, and each batch is one infer request. Triton must run with
`--model-control-mode=explicit`, MLServer with `load_models_at_startup: false`, TensorFlow Serving
with `--model_config_file=FOLDER/models.config --model_config_file_poll_wait_seconds=1`. After a
restart of the server its models are loaded again on their next query.
"""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from typing import Final

import numpy as np

from clipper_container.adapters.oip.http import HttpReply, HttpServer, Unreachable
from clipper_container.adapters.oip.repository import LISTS, TYPES, ModelRepository
from clipper_container.adapters.oip.server_memory import memory_of
from clipper_container.adapters.oip.tensors import (
    BINARY,
    HEAD_SIZE,
    BadTensor,
    Signature,
    outputs_of,
    request,
    signature_of,
)
from clipper_container.backoff import Backoff
from clipper_container.model import Model, UserValue
from clipper_container.runtime import Artifact, ArtifactError, Loaded, Runtime

_LIVE_S: Final = 10.0
_CHECK_S: Final = 0.05
_CHECK_S_MAX: Final = 1.0
_RATIO: Final = 1.25  # of what a model occupies to its files, where it cannot be measured
_BYTES_MIN: Final = 4096
_NOT_THERE = re.compile(
    r"not found|unknown model|not ready|no versions? (available|of)|not loaded", re.I
)
_NO_ROOM = re.compile(r"out of memory|cannot allocate|bad_?alloc|no space left", re.I)


class ServerFailed(Exception):
    """The server did not answer a batch, or answered with an error."""


class Oip(Runtime):
    """A server beside this host. Missing arguments come from the environment: CLIPPER_OIP_ and the
    name in capitals.

    type: one of `TYPES`; models are registered with it. url: of its HTTP port. folder: its
    repository as seen from here; folder_there: as the server sees it. capacity_mib: memory for its
    models. start_s, load_s, answer_s: timeouts of start, load and batch. concurrency: batches of
    one model at once. Raises: ValueError.
    """

    def __init__(
        self,
        type: str = "",
        url: str = "",
        folder: str = "",
        folder_there: str = "",
        capacity_mib: float = 0,
        start_s: float = 0,
        load_s: float = 0,
        answer_s: float = 0,
        concurrency: float = 0,
    ) -> None:
        self.type, folder = type or _environment("TYPE"), folder or _environment("FOLDER")
        if not folder:
            raise ValueError(
                "CLIPPER_OIP_FOLDER is not set: the folder from which the server loads its models."
            )
        if self.type not in TYPES:
            raise ValueError(
                f"CLIPPER_OIP_TYPE = {self.type!r} is unknown; known: {', '.join(TYPES)}."
            )
        self.types = (self.type,)
        self.server = HttpServer(url or _environment("URL"))
        self.places = ModelRepository(
            self.type, folder, folder_there or _environment("FOLDER_THERE")
        )
        self._capacity = round((capacity_mib or _number("CAPACITY_MIB", 0)) * 2**20)
        self._start_s, self.load_s = (
            start_s or _number("START_S", 60),
            load_s or _number("LOAD_S", 60),
        )
        self.answer_s = answer_s or _number("ANSWER_S", 30)
        self._concurrency = round(concurrency or _number("CONCURRENCY", 4))
        self._places = threading.Lock()  # guards the folder
        self._reload_lock = threading.Lock()  # one reload of the list at a time
        # models whose load timed out here and may still finish in the server
        self._late: set[str] = set()
        self.binary = False

    def start(self) -> None:
        """Remove leftovers of an earlier process and wait until the server is ready. Raises:
        Unreachable.
        """
        until_s = time.monotonic() + self._start_s
        ready = "/v1/models/" if self.type == "tfserving" else "/v2/health/ready"
        with self._places:
            left = self.places.clear()
            self.places.list()
        pauses = Backoff(_CHECK_S, _CHECK_S_MAX)
        while True:
            try:
                status = self.server.request("GET", ready, within_s=2.0).status
                if status < 500 and (status == 200 or self.type == "tfserving"):
                    break
                why = f"status {status} at {ready}"
            except Unreachable as error:
                why = str(error)
            if time.monotonic() > until_s:
                raise Unreachable(
                    f"{self.server.url} is not ready after {self._start_s:g} s: {why}"
                ) from None
            time.sleep(pauses.next_s())
        if self.type != "tfserving":
            metadata = self.server.request("GET", "/v2", within_s=self.answer_s).json()
            self.binary = BINARY in (metadata.get("extensions") or [])
        for model in left:
            self._request_unload(model)

    # -- loading

    def load(self, artifact: Artifact) -> Loaded:
        """Lay out the files, load the model in the server, and read its signature."""
        self._forget_late(artifact.model)
        before = self._memory()
        with self._places:
            self.places.put(artifact)
        try:
            self.request_load(artifact.model)
            signature = self._signature(artifact)
            occupied = self._memory() - before if before else 0
            size = (
                max(occupied, _BYTES_MIN)
                if before
                else max(_BYTES_MIN, round(_RATIO * self.predict_size(artifact)))
            )
        except BaseException as error:
            self._forget(artifact.model)
            if isinstance(error, Unreachable | TimeoutError):
                self._late.add(artifact.model)
            raise
        return Loaded(OipModel(self, artifact, signature), size, self._concurrency, inside=False)

    def unload(self, artifact: Artifact, loaded: Loaded) -> None:
        """Unload the model and remove its files."""
        self._forget(artifact.model)

    def predict_size(self, artifact: Artifact) -> int:
        """Return the size of the model's files."""
        found = [
            os.path.join(at, name) for at, _, names in os.walk(artifact.path) for name in names
        ] or [artifact.path]
        try:
            return sum(os.stat(one).st_size for one in found)
        except OSError:
            return 0

    def capacity_bytes(self) -> int:
        """Return the memory for models, as configured."""
        return self._capacity

    def _memory(self) -> int:
        return memory_of(self.server.host, self.server.port)

    def _forget(self, model: str) -> None:
        """Unload a model and remove its files. A server that is down has forgotten it already."""
        if self.type in LISTS:
            with self._places:
                self.places.remove(model)
            self._request_unload(model)
            return
        self._request_unload(model)
        with self._places:
            self.places.remove(model)

    def _forget_late(self, but: str) -> None:
        """Unload models whose load finished after its timeout."""
        self._late.discard(but)
        for model in tuple(self._late):
            if self._state(model).status == 200:
                self._forget(model)
                self._late.discard(model)

    def request_load(self, model: str) -> None:
        """Load a model in the server; return once it can be queried.

        Raises: ArtifactError when the server cannot load it; Unreachable or TimeoutError when the
        server does not answer or lacks memory.
        """
        until_s = time.monotonic() + self.load_s
        if self.type in LISTS:
            with self._reload_lock:
                reply = self._read_list()
            if reply is not None and reply.status >= 300 and self._state(model).status != 200:
                self._refused(model, reply)
            self._wait(model, until_s)
            return
        reply = self.server.request(
            "POST", f"/v2/repository/models/{model}/load", b"{}", self.load_s
        )
        if reply.status >= 300:
            self._refused(model, reply)
        self._wait(model, until_s)

    def _read_list(self) -> HttpReply | None:
        with self._places:
            self.places.list()
        if self.type == "openvino":
            return self.server.request("POST", "/v1/config/reload", b"{}", self.load_s)
        return None  # the server polls the list

    def _refused(self, model: str, reply: HttpReply) -> None:
        """Raise ArtifactError if the model is at fault, Unreachable if the server is."""
        why = f"{self.type} does not load {model!r}: {reply.trouble}"
        if reply.status in (408, 429, 502, 503, 504) or _NO_ROOM.search(reply.trouble):
            raise Unreachable(why)
        if self.server.request("GET", "/v2/health/live", within_s=_LIVE_S).status >= 500:
            raise Unreachable(why)
        raise ArtifactError(why)

    def _wait(self, model: str, until_s: float) -> None:
        """Wait until the model can be queried. Raises: TimeoutError."""
        pauses = Backoff(_CHECK_S / 4, _CHECK_S_MAX / 4)
        while True:
            reply = self._state(model)
            if reply.status == 200:
                return
            if time.monotonic() > until_s:
                raise TimeoutError(
                    f"{self.type} has not loaded {model!r} within {self.load_s:g} s:"
                    f" {reply.trouble}"
                )
            time.sleep(pauses.next_s())

    def _state(self, model: str) -> HttpReply:
        """Return a reply with status 200 if the model can be queried. Raises: ArtifactError if
        the server gave up.
        """
        if self.type != "tfserving":
            return self.server.request("GET", f"/v2/models/{model}/ready", within_s=self.answer_s)
        reply = self.server.request("GET", f"/v1/models/{model}", within_s=self.answer_s)
        if reply.status != 200:
            return reply
        for version in reply.json().get("model_version_status") or []:
            status = version.get("status") or {}
            if version.get("state") == "AVAILABLE":
                return reply
            if status.get("error_code", "OK") != "OK":
                raise ArtifactError(
                    f"tfserving does not load {model!r}: {status.get('error_message', '')[:500]}"
                )
        return HttpReply(503, {}, b'{"error": "no version is available yet"}')

    def _request_unload(self, model: str) -> None:
        try:
            if self.type in LISTS:
                with self._reload_lock:
                    self._read_list()
            else:
                self.server.request(
                    "POST", f"/v2/repository/models/{model}/unload", b"{}", self.load_s
                )
        except Unreachable:
            pass  # a stopped server has no models; a running one drops it with the folder

    def _signature(self, artifact: Artifact) -> Signature:
        if self.type == "tfserving":
            return Signature(input_type=artifact.input, output_type=artifact.output)
        reply = self.server.request("GET", f"/v2/models/{artifact.model}", within_s=self.answer_s)
        if reply.status != 200:
            raise Unreachable(f"{self.type} does not mention {artifact.model!r}: {reply.trouble}")
        try:
            return signature_of(reply.json())
        except BadTensor as error:
            raise ArtifactError(str(error)) from None


class OipModel(Model):
    """One model of the server. Threads: several."""

    def __init__(self, runtime: Oip, artifact: Artifact, signature: Signature) -> None:
        self._runtime, self._artifact, self._signature = runtime, artifact, signature
        self.input = artifact.input if artifact.input != "any" else signature.input_type
        self.output = artifact.output if artifact.output != "any" else signature.output_type
        self.batch_max = signature.batch_max
        self._again = threading.Lock()
        self._loads = 0
        self._request = self._rows if runtime.type == "tfserving" else self._tensors

    def predict_batch(self, inputs: object) -> UserValue:
        """Send an infer request. Raises: ServerFailed."""
        loads = self._loads
        reply, outputs = self._request(inputs)
        if reply.status in (400, 404, 503) and _NOT_THERE.search(reply.trouble):
            self._load_again(loads)
            reply, outputs = self._request(inputs)
        if reply.status != 200:
            raise ServerFailed(f"{self._runtime.type} answers {reply.status}: {reply.trouble}")
        try:
            return outputs(reply)
        except BadTensor as error:
            raise ServerFailed(str(error)) from None

    def _load_again(self, known: int) -> None:
        """Load the model again after the server was restarted; once for all waiting batches."""
        with self._again:
            if self._loads == known:
                self._runtime.request_load(self._artifact.model)
                self._loads += 1

    def _send(self, path: str, body: bytes, headers: dict[str, str]) -> HttpReply:
        try:
            return self._runtime.server.request("POST", path, body, self._runtime.answer_s, headers)
        except Unreachable as error:
            raise ServerFailed(str(error)) from None

    def _tensors(self, inputs: UserValue) -> tuple[HttpReply, Callable[[HttpReply], UserValue]]:
        body, headers = request(self._signature, inputs, self._runtime.binary)
        reply = self._send(f"/v2/models/{self._artifact.model}/infer", body, headers)
        return reply, lambda response: outputs_of(
            self._signature, response.body, response.headers.get(HEAD_SIZE.lower(), ""), len(inputs)
        )

    def _rows(self, inputs: UserValue) -> tuple[HttpReply, Callable[[HttpReply], UserValue]]:
        """Send a batch in TensorFlow Serving's format."""
        rows = (
            inputs.tolist() if isinstance(inputs, np.ndarray) else [_plain(row) for row in inputs]
        )
        body = json.dumps({"instances": rows}).encode()
        return self._send(
            f"/v1/models/{self._artifact.model}:predict", body, {}
        ), lambda response: _predictions(response, len(rows))


def _plain(row: UserValue) -> object:
    if isinstance(row, np.ndarray):
        return row.tolist()
    return row if isinstance(row, str) else bytes(row).decode()


def _predictions(reply: HttpReply, rows: int) -> UserValue:
    found = reply.json().get("predictions")
    if not isinstance(found, list) or len(found) != rows:
        raise BadTensor(f"the server's answer holds no predictions of {rows} rows")
    try:
        array = np.asarray(found)
    except ValueError:
        raise BadTensor("the predictions of the rows differ in shape") from None
    if array.dtype.kind not in "biufU":
        raise BadTensor("the predictions are no numbers, and no strings")
    return (
        found if array.dtype.kind == "U" else array.reshape(rows) if array.size == rows else array
    )


def _environment(name: str) -> str:
    return os.environ.get(f"CLIPPER_OIP_{name}", "")


def _number(name: str, otherwise: float) -> float:
    text = _environment(name)
    try:
        return float(text) if text else otherwise
    except ValueError:
        raise ValueError(f"CLIPPER_OIP_{name} = {text!r} is not a number.") from None
