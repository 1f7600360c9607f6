"""The `host` command: one process that holds many models for a node of the mesh.

The node sends requests over a control connection (docs/hosts.md): pull, load, unload, serve,
leave, status.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import threading
from argparse import Namespace
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

import msgpack

from clipper_container.artifacts import (
    ArtifactUrl,
    CachedArtifact,
    PullError,
    PullLimits,
    is_url,
    pull,
)
from clipper_container.host.model_cache import (
    OVERRUNS_MAX,
    UNLOAD_S,
    ModelCache,
    RequestFailed,
)
from clipper_container.host.server_connections import ServerConnections
from clipper_container.host.timers import Timers
from clipper_container.host.work_record import WorkRecord
from clipper_container.loading.runtimes import FileRuntime, PythonRuntime
from clipper_container.loading.targets import explain
from clipper_container.machine import cores, memory_bytes, raise_files_max
from clipper_container.runtime import Artifact, Runtime
from clipper_container.threads import CallPool
from clipper_container.wire.transport import Disconnected, StopSwitch, connect, parse_address
from clipper_container.worker.evaluation import user_traceback
from clipper_container.worker.handshake import ContainerRejected

MESSAGE_BYTES_MAX = 1 << 20
PULLS_MAX = 4  # at once
SERVE_MS = 10_000
OLD_COLLECTED = 1000  # collections of younger objects for one of old ones, which stops all threads
SWITCH_S = 0.001  # a load is handed between threads several times: Python's 5 ms add up
END_S = 5.0  # for batches in hand, once the host must end
_LENGTH = struct.Struct("<I")
T = TypeVar("T")
_Answer = Callable[["ControlRequest"], "dict[str, object] | Future[Any]"]


class ControlRequest:
    """One request of the node. A missing field has its default; a field of another type is
    refused.
    """

    def __init__(self, fields: dict[str, object]) -> None:
        self._fields = fields

    def text(self, name: str, default: str = "") -> str:
        """Return a field of type str. Raises: RequestFailed."""
        return str(self._of(name, default, str))

    def number(self, name: str, default: int = 0) -> int:
        """Return a field of type int. Raises: RequestFailed."""
        return int(self._of(name, default, int))

    def _of(self, name: str, default: object, kind: type[T]) -> T:
        value = self._fields.get(name, default)
        if not isinstance(value, kind):
            raise RequestFailed("none", f"{name} must be {kind.__name__}, not {value!r:.60}")
        return value

    def names(self, name: str) -> list[str]:
        """Return a field that is a list of models; [] when it is missing. Raises: RequestFailed."""
        found = self._of(name, [], list)
        if not all(isinstance(one, str) for one in found):
            raise RequestFailed("none", f"{name} must be a list of models, not {found!r:.60}")
        return found

    def model(self) -> str:
        """Return the model's id. Raises: RequestFailed when the request names none."""
        if not (model := self.text("model")):
            raise RequestFailed("none", "the request names no model")
        return model

    def artifact(self) -> Artifact:
        """Return the description of the model to load. Raises: RequestFailed."""
        type, path, key = (self.text(name) for name in ("type", "path", "key"))
        return Artifact(
            self.model(), type, path, key, self.text("input", "any"), self.text("output", "any")
        )


class ControlChannel:
    """The control connection: msgpack maps, each after its length as u32.

    Threads: one receives; any may send.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._lock = threading.Lock()
        self._got = bytearray()

    def fileno(self) -> int:
        """Return the descriptor, for poll()."""
        return self._sock.fileno()

    def send(self, message: dict[str, object]) -> None:
        """Send a message. A lost connection is ignored here; receive() reports it."""
        body = msgpack.packb(message)
        if len(body) > MESSAGE_BYTES_MAX:
            body = msgpack.packb(
                {
                    "n": message.get("n"),
                    "ok": False,
                    "fault": "host",
                    "why": f"an answer of {len(body)} bytes",
                }
            )
        with self._lock, contextlib.suppress(OSError):
            self._sock.sendall(_LENGTH.pack(len(body)) + body)

    def receive(self) -> list[dict[str, object]]:
        """Read once and return the complete messages.

        Raises: EOFError when the node closed the connection; ValueError for malformed bytes;
        OSError.
        """
        piece = self._sock.recv(1 << 16)
        if not piece:
            raise EOFError("the node has closed the control connection")
        self._got += piece
        found = []
        while len(self._got) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._got)
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(
                    f"a message of {size} bytes; at most {MESSAGE_BYTES_MAX} are taken"
                )
            if len(self._got) < _LENGTH.size + size:
                break
            message = msgpack.unpackb(bytes(self._got[_LENGTH.size : _LENGTH.size + size]))
            if not isinstance(message, dict):
                raise ValueError("a message must be a msgpack map")
            del self._got[: _LENGTH.size + size]
            found.append(message)
        return found

    def close(self) -> None:
        """Close the socket."""
        self._sock.close()


class ModelHost:
    """A host of models: answers the node's requests.

    Threads: one runs `serve`; requests are answered from several.
    """

    def __init__(
        self,
        channel: ControlChannel,
        runtimes: Iterable[Runtime],
        capacity_bytes: int,
        loading_max: int,
        load_s: float,
        work: WorkRecord,
    ) -> None:
        self._channel, self._load_s = channel, load_s
        self._runtimes = tuple(runtimes)
        self._timers = Timers()
        self._connections = ServerConnections(self._timers, self._left)
        self._models = ModelCache(
            self._runtimes, self._connections, self._timers, capacity_bytes, loading_max, work
        )
        # for requests that may block; all others run in order
        self._asking = CallPool("clipper-host-ask", 4)
        self._pulling = CallPool("clipper-host-pull", PULLS_MAX)
        self._pulled: dict[str, CachedArtifact] = {}  # by model: in the cache while it is loaded
        self._state = "STARTING"
        self._verbs: dict[str, _Answer] = {
            "status": self._status, "load": self._load, "unload": self._unload, "size": self._size,
            "predict_size": self._predict_size, "serve": self._serve, "leave": self._leave,
            "pull": self._pull,
        }  # fmt: skip

    def serve(self, token: str, name: str, stop: StopSwitch) -> None:
        """Say hello to the node, then answer requests until the node disconnects or `stop` is
        requested.
        """
        hello = {
            "verb": "hello",
            "token": token,
            "pid": os.getpid(),
            "types": self._models.types,
        }
        self._channel.send({**hello, "runtime": "clipper/0.1", "name": name})
        self._asking.submit(self._start)
        poll = select.poll()
        poll.register(self._channel, select.POLLIN)
        poll.register(stop, select.POLLIN)
        while not stop.requested:
            if any(fd == self._channel.fileno() for fd, _ in poll.poll()):
                for message in self._channel.receive():
                    self._take(message)

    def _start(self) -> None:
        try:
            for runtime in self._runtimes:
                runtime.start()
            self._state = "READY"
        except BaseException as error:
            print(
                f"a runtime of this host failed to start:\n{user_traceback(error)}",
                file=sys.stderr,
                flush=True,
            )
            self._state = "FAILING"

    def close(self) -> None:
        """Say goodbye to all servers, finish running batches (at most END_S), and stop the threads.

        A thread that runs a user's load cannot be stopped and is left behind.
        """
        wait(self._connections.leave_all(), END_S)
        self._connections.close()
        self._models.close()
        self._asking.close()
        self._pulling.close()
        self._timers.close()
        self._channel.close()

    # -- requests

    def _take(self, message: dict[str, object]) -> None:
        n, verb = message.get("n"), message.get("verb")
        try:
            answer = self._verbs.get(str(verb))
            if answer is None:
                raise RequestFailed(
                    "none", f"unknown verb {verb!r}; known: {', '.join(self._verbs)}"
                )
            answered = answer(ControlRequest(message))
        except Exception as error:
            self._refuse(n, error)
            return
        if isinstance(answered, Future):
            answered.add_done_callback(lambda future: self._answer(n, future))
        else:
            self._channel.send({"n": n, "ok": True, **answered})

    def _answer(self, n: object, future: Future[object]) -> None:
        error = future.exception()
        if error is not None:
            self._refuse(n, error)
            return
        found = future.result()
        self._channel.send({"n": n, "ok": True, **(found if isinstance(found, dict) else {})})

    def _refuse(self, n: object, error: BaseException) -> None:
        whose = error.whose if isinstance(error, RequestFailed) else "host"
        known = isinstance(error, (RequestFailed, ContainerRejected, Disconnected))
        self._channel.send(
            {"n": n, "ok": False, "fault": whose, "why": str(error) if known else explain(error)}
        )

    def _status(self, request: ControlRequest) -> dict[str, object]:
        models = self._models
        found = models.sizes_of_all()
        return {
            "state": "FAILING" if models.overruns >= OVERRUNS_MAX else self._state,
            "capacity_bytes": models.capacity_bytes,
            "used_bytes": sum(size for _, size in found),
            "loading_max": models.loading_max,
            "loading": models.loading,
            "load_timeout_ms": int(self._load_s * 1000),
            "default_size_bytes": models.sizes.default_bytes(),
            "connections": self._connections.count(),
            "resident": [] if request.number("brief") else found,
        }

    def _load(self, request: ControlRequest) -> Future[dict[str, object]]:
        """Unload the models of `evict`, then load the model."""
        timeout_s = request.number("timeout_ms") / 1000 or self._load_s
        artifact, evict = request.artifact(), request.names("evict")
        if not evict:
            answer = self._models.load(artifact, timeout_s)
        else:
            answer = self._models.load_after(
                [self._unload_one(model, UNLOAD_S) for model in evict], artifact, timeout_s
            )
        answer.add_done_callback(
            lambda done: self._release(artifact.model) if done.exception() else None
        )
        return answer

    def _pull(self, request: ControlRequest) -> Future[dict[str, str]]:
        artifact, sha256 = request.artifact(), request.text("sha256")
        return self._pulling.submit(lambda: self._pull_now(artifact, sha256))

    def _pull_now(self, artifact: Artifact, sha256: str) -> dict[str, str]:
        """Pull the files of a model; return where they are, and their SHA-256."""
        if not is_url(artifact.path):
            return {"path": artifact.path, "sha256": sha256}  # for a runtime that knows it
        try:
            url = ArtifactUrl.parse(artifact.path, sha256)
            found = pull(url, PullLimits.from_environment())
        except PullError as error:
            raise RequestFailed("artifact" if error.is_final else "host", str(error)) from None
        self._release(artifact.model)
        self._pulled[artifact.model] = found
        return {"path": str(found.path), "sha256": found.sha256}

    def _release(self, model: str) -> None:
        """Allow the cache to remove the files of a model."""
        if (held := self._pulled.pop(model, None)) is not None:
            held.close()

    def _unload(self, request: ControlRequest) -> Future[None]:
        timeout_s = request.number("timeout_ms") / 1000 or UNLOAD_S
        return self._unload_one(request.model(), timeout_s)

    def _unload_one(self, model: str, timeout_s: float) -> Future[None]:
        gone = self._models.unload(model, timeout_s)
        gone.add_done_callback(lambda _: self._release(model))
        return gone

    def _size(self, request: ControlRequest) -> dict[str, object]:
        return {"size_bytes": self._models.get(request.model()).size_bytes}

    def _predict_size(self, request: ControlRequest) -> Future[dict[str, object]]:
        artifact = request.artifact()
        return self._asking.submit(lambda: {"size_bytes": self._models.predict_size(artifact)})

    def _serve(self, request: ControlRequest) -> Future[None]:
        one, address = self._models.get(request.model()), request.text("address")
        options = one.options(request.text("token"), request.number("replica"))
        evaluator = one.evaluator
        if evaluator is None:
            raise RequestFailed("none", f"model {one.artifact.model!r} is being unloaded")
        try:
            return self._connections.serve(
                evaluator, one.gate, address, options, request.number("timeout_ms", SERVE_MS) / 1000
            )
        except ValueError as error:
            raise RequestFailed("none", str(error)) from None

    def _leave(self, request: ControlRequest) -> Future[str]:
        return self._connections.leave(request.model(), request.text("address"))

    def _left(self, model: str, address: str, why: str) -> None:
        self._channel.send({"event": "left", "model": model, "address": address, "why": why})


def runtimes_of(named: Iterable[str]) -> list[Runtime]:
    """Import the runtimes named `module:Class` and append the built-in ones.

    Raises: whatever the import raises; TypeError when a class is not a Runtime.
    """
    found: list[Runtime] = []
    for name in named:
        module, _, attribute = name.partition(":")
        made = getattr(importlib.import_module(module), attribute)()
        if not isinstance(made, Runtime):
            raise TypeError(f"{name} is not a clipper_container.runtime.Runtime")
        found.append(made)
    return [*found, FileRuntime(), PythonRuntime()]


def run(arguments: Namespace, token: str) -> int:
    """Run the `host` command. Does not return once the host is connected.

    arguments: parsed by `__main__`. Returns: exit code 2 when the control address or a runtime is
    invalid.
    """
    raise_files_max()
    with contextlib.suppress(OSError):  # it may have been removed
        sys.path.insert(0, os.getcwd())
    try:
        parse_address(arguments.control)
        runtimes = runtimes_of(arguments.runtime)
        work = WorkRecord(arguments.work_file)
        sock = connect(arguments.control, 10.0)
    except Exception as error:
        print(f"clipper-container host: {explain(error)}", file=sys.stderr, flush=True)
        return 2
    sock.settimeout(None)
    stop = StopSwitch()
    stop.on_signals(
        signal.SIGTERM, *([] if arguments.die_with_parent is not None else [signal.SIGINT])
    )
    capacities = [runtime.capacity_bytes() for runtime in runtimes]
    capacity = arguments.capacity_mib << 20 or max(capacities) or memory_bytes() // 2
    loading = arguments.loading_max or max(2, cores())
    gc.collect()
    # exempt start-up objects from garbage collection; models, which can be unloaded, come later
    gc.freeze()
    gc.set_threshold(*gc.get_threshold()[:2], OLD_COLLECTED)
    sys.setswitchinterval(SWITCH_S)
    host = ModelHost(ControlChannel(sock), runtimes, capacity, loading, arguments.load_s, work)
    try:
        host.serve(token, arguments.name, stop)
    except (EOFError, ValueError, OSError) as error:
        print(f"clipper-container host: {error}", file=sys.stderr, flush=True)
    host.close()
    sys.stdout.flush()
    os._exit(0)  # a load that exceeded its timeout may still run and cannot be stopped
