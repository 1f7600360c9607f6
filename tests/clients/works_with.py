"""Clients that others wrote, used on our server as their own documentation uses them.

`python -m tests.clients.works_with` prints the table of README.md; `--write` puts it there. The
tests run the same functions. A client yields the name of each thing that it has done; what is not
as it should be is an AssertionError.
"""

import asyncio
import datetime
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from tests.clients import described, installed, operators
from tests.clients.addresses import (
    FACTORS,
    PATIENCE_S,
    ROWS,
    SCALED,
    SUMS,
    Addresses,
    Done,
    check_error,
    serving,
)

README = Path(__file__).resolve().parents[2] / "README.md"
NAMES = {"learns", "scale", "scaled", "total", "shout", "sum", "words"}
BEGIN, END = "<!-- works with: begin -->", "<!-- works with: end -->"


# -- tritonclient


def tritonclient_http(at: Addresses) -> Done:
    import tritonclient.http as triton

    with triton.InferenceServerClient(at.http) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("sum", "1")
        yield "health"
        assert client.get_server_metadata()["name"] == "clipper"
        assert client.get_model_metadata("total")["inputs"][0]["shape"] == [-1, 3]
        assert client.get_model_config("total")["input"][0]["dims"] == [3]
        yield "metadata, config"
        for binary in (False, True):
            given = triton.InferInput("input", [4, 3], "FP64")
            given.set_data_from_numpy(ROWS, binary_data=binary)
            wanted = [triton.InferRequestedOutput("output", binary_data=binary)]
            result = client.infer(
                "total", [given], outputs=wanted, request_id="7", priority=1, timeout=5_000_000
            )
            np.testing.assert_array_equal(result.as_numpy("output"), SUMS)
            assert result.get_response()["id"] == "7"
            yield "infer (binary)" if binary else "infer (JSON)"
        for coding in ("gzip", "deflate"):
            result = client.infer("total", [given], request_compression_algorithm=coding)
            np.testing.assert_array_equal(result.as_numpy("output"), SUMS)
        yield "compression"
        np.testing.assert_array_equal(
            client.async_infer("total", [given]).get_result().as_numpy("output"), SUMS
        )
        yield "async_infer"
        words = triton.InferInput("input", [2], "BYTES")
        words.set_data_from_numpy(np.array(["hi", "ho"], dtype=object))
        assert client.infer("shout", [words]).as_numpy("output").tolist() == [b"HI", b"HO"]
        yield "strings"
        _named_tensors(client, triton)
        yield "named tensors"
        assert client.get_inference_statistics("total")["model_stats"][0]["inference_count"] >= 4
        yield "statistics"
        assert {row["name"] for row in client.get_model_repository_index()} == NAMES
        client.load_model("sum")
        yield "repository"
        check_error(lambda: client.infer("totl", [given]), "did you mean 'total'?")
        yield "errors"


def tritonclient_http_aio(at: Addresses) -> Done:
    import tritonclient.http.aio as triton

    async def ask(binary: bool) -> Any:
        async with triton.InferenceServerClient(at.http) as client:
            assert await client.is_server_live()
            given = triton.InferInput("input", [4, 3], "FP64")
            given.set_data_from_numpy(ROWS, binary_data=binary)
            return (await client.infer("total", [given])).as_numpy("output")

    for binary in (False, True):
        np.testing.assert_array_equal(asyncio.run(ask(binary)), SUMS)
        yield "infer (binary)" if binary else "infer (JSON)"


def tritonclient_grpc(at: Addresses) -> Done:
    import tritonclient.grpc as triton

    with triton.InferenceServerClient(at.grpc) as client:
        assert client.is_server_live()
        assert client.is_server_ready()
        assert client.is_model_ready("sum", "1")
        yield "health"
        assert client.get_server_metadata().name == "clipper"
        assert list(client.get_model_metadata("total").inputs[0].shape) == [-1, 3]
        assert list(client.get_model_config("total").config.input[0].dims) == [3]
        yield "metadata, config"
        given = triton.InferInput("input", [4, 3], "FP64")
        given.set_data_from_numpy(ROWS)
        result = client.infer(
            "total",
            [given],
            request_id="7",
            priority=1,
            timeout=5_000_000,
            client_timeout=PATIENCE_S,
        )
        np.testing.assert_array_equal(result.as_numpy("output"), SUMS)
        assert result.get_response().id == "7"
        yield "infer"
        result = client.infer("total", [given], compression_algorithm="gzip")
        np.testing.assert_array_equal(result.as_numpy("output"), SUMS)
        yield "compression"
        yield from _async_infer(client, given)
        words = triton.InferInput("input", [2], "BYTES")
        words.set_data_from_numpy(np.array(["hi", "ho"], dtype=object))
        assert client.infer("shout", [words]).as_numpy("output").tolist() == [b"HI", b"HO"]
        yield "strings"
        _named_tensors(client, triton)
        yield "named tensors"
        assert client.get_inference_statistics("total").model_stats[0].inference_count >= 4
        yield "statistics"
        assert {row.name for row in client.get_model_repository_index().models} == NAMES
        client.load_model("sum")
        yield "repository"
        check_error(lambda: client.infer("totl", [given]), "did you mean 'total'?")
        yield "errors"


def _named_tensors(client: Any, triton: Any) -> None:
    """Infer with two named inputs; request both outputs, and then only one."""
    given = []
    for name, values in (("x", ROWS), ("factor", FACTORS)):
        given.append(triton.InferInput(name, [*values.shape], "FP64"))
        given[-1].set_data_from_numpy(values)
    result = client.infer("scaled", given)
    np.testing.assert_array_equal(result.as_numpy("scaled"), SCALED)
    np.testing.assert_array_equal(result.as_numpy("total"), SCALED.sum(axis=1))
    result = client.infer("scaled", given, outputs=[triton.InferRequestedOutput("total")])
    np.testing.assert_array_equal(result.as_numpy("total"), SCALED.sum(axis=1))
    assert result.as_numpy("scaled") is None
    check_error(lambda: client.infer("scaled", given[:1]), "tensor 'factor' is missing")


def _async_infer(client: Any, given: Any) -> Done:
    """Infer with callbacks, alone and in a stream."""
    import queue

    came: queue.Queue[tuple[Any, Any]] = queue.Queue()
    client.async_infer("total", [given], lambda result, error: came.put((result, error)))
    result, error = came.get(timeout=PATIENCE_S)
    assert error is None
    np.testing.assert_array_equal(result.as_numpy("output"), SUMS)
    yield "async_infer"
    client.start_stream(lambda result, error: came.put((result, error)))
    for name, id in (("total", "1"), ("totl", "2"), ("total", "3")):
        client.async_stream_infer(name, [given], request_id=id)
    found = [came.get(timeout=PATIENCE_S) for _ in range(3)]
    client.stop_stream()
    assert [result.get_response().id for result, error in found if error is None] == ["1", "3"]
    assert "did you mean 'total'?" in str(found[1][1])
    yield "stream"


def tritonclient_grpc_aio(at: Addresses) -> Done:
    import tritonclient.grpc.aio as triton

    async def ask() -> Any:
        async with triton.InferenceServerClient(at.grpc) as client:
            assert await client.is_server_live()
            given = triton.InferInput("input", [4, 3], "FP64")
            given.set_data_from_numpy(ROWS)

            async def requests() -> Any:
                for id in ("1", "2"):
                    yield {"model_name": "total", "inputs": [given], "request_id": id}

            streamed = [(result, error) async for result, error in client.stream_infer(requests())]
            return (await client.infer("total", [given])).as_numpy("output"), streamed

    found, streamed = asyncio.run(ask())
    np.testing.assert_array_equal(found, SUMS)
    yield "infer"
    assert [(result.get_response().id, error) for result, error in streamed] == [
        ("1", None),
        ("2", None),
    ]
    yield "stream"


# -- tools


def grpcio(at: Addresses) -> Done:
    """Call as grpcurl does: the methods are read from the server by reflection."""
    import grpc
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    from clipper.frontend.protocols import message

    def call(channel: Any, kind: str, path: str, request: Any, response: Any) -> Any:
        make = getattr(channel, kind)
        return make(
            path,
            request_serializer=type(request).SerializeToString,
            response_deserializer=response.FromString,
        )

    with grpc.insecure_channel(at.grpc) as channel:
        request = message("grpc.health.v1.HealthCheckRequest")()
        response = message("grpc.health.v1.HealthCheckResponse")
        check = call(channel, "unary_unary", "/grpc.health.v1.Health/Check", request, response)
        assert check(request, timeout=PATIENCE_S).status == 1
        yield "health"
        request = message("grpc.reflection.v1.ServerReflectionRequest")(
            file_containing_symbol="clipper.v1.Applications"
        )
        response = message("grpc.reflection.v1.ServerReflectionResponse")
        path = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
        (found,) = call(channel, "stream_stream", path, request, response)(
            iter([request]), timeout=PATIENCE_S
        )
        pool = descriptor_pool.DescriptorPool()
        for data in found.file_descriptor_response.file_descriptor_proto:
            pool.Add(descriptor_pb2.FileDescriptorProto.FromString(data))
        yield "reflection"
        method = pool.FindServiceByName("clipper.v1.Applications").methods_by_name["Predict"]
        kinds = [
            message_factory.GetMessageClass(kind)
            for kind in (method.input_type, method.output_type)
        ]
        request = kinds[0](application="total", input={"numbers": {"values": [1, 2, 3]}})
        predict = call(
            channel, "unary_unary", "/clipper.v1.Applications/Predict", request, kinds[1]
        )
        assert predict(request, timeout=PATIENCE_S).output.number == 6
        yield "Applications.Predict"


def curl(at: Addresses) -> Done:
    def post(path: str, body: Any) -> Any:
        command = ["curl", "-s", f"http://{at.http}{path}", "-d", json.dumps(body)]
        return json.loads(
            subprocess.run(command, capture_output=True, check=True, timeout=30).stdout
        )

    assert post("/api/total/predict", {"input": [1, 2, 3]})["output"] == 6
    yield "predict"
    tensor = {"name": "input", "shape": [1, 3], "datatype": "FP64", "data": [1, 2, 3]}
    assert post("/v2/models/total/infer", {"inputs": [tensor]})["outputs"][0]["data"] == [6]
    yield "infer (JSON)"
    found = post("/api/scaled/predict", {"input": {"x": [1, 2, 3], "factor": 2}})["output"]
    assert found == {"scaled": [2, 4, 6], "total": 12}
    yield "named tensors"


CLIENTS: dict[str, Callable[[Addresses], Done]] = {
    "tritonclient.http": tritonclient_http,
    "tritonclient.http.aio": tritonclient_http_aio,
    "tritonclient.grpc": tritonclient_grpc,
    "tritonclient.grpc.aio": tritonclient_grpc_aio,
    "grpcio": grpcio,
    "curl": curl,
    "openapi-spec-validator": described.openapi_spec_validator,
    "schemathesis": described.schemathesis,
    "openapi-python-client": described.openapi_python_client,
    **operators.OPERATORS,
}
_NEEDS = {
    "tritonclient.http": ("tritonclient", "geventhttpclient"),
    "tritonclient.http.aio": ("tritonclient", "aiohttp"),
    "tritonclient.grpc": ("tritonclient", "grpc"),
    "tritonclient.grpc.aio": ("tritonclient", "grpc"),
    "grpcio": ("grpc",),
    "openapi-spec-validator": ("openapi_spec_validator",),
    "schemathesis": ("schemathesis",),
    "openapi-python-client": ("openapi_python_client", "httpx"),
}


def lacking(client: str) -> str:
    """Return what a client needs and is not installed; empty when it can run."""
    if client in operators.OPERATORS:
        return operators.lacking(client)
    if client == "curl":
        return "" if shutil.which("curl") else "curl"
    needed = ("grpc", *_NEEDS[client])  # the server's own frontend too
    return ", ".join(name for name in needed if importlib.util.find_spec(name) is None)


def version_of(client: str) -> str:
    if client in installed.INSTALLED:
        return installed.version_of(client)
    if client in operators.OPERATORS:
        return operators.version_of(client)
    if client == "curl":
        return subprocess.run(
            ["curl", "--version"], capture_output=True, text=True, check=True
        ).stdout.split()[1]
    return importlib.metadata.version(client.partition(".")[0])


def table() -> str:
    lines = ["| client | version | what passed |", "|---|---|---|"]
    with serving() as at:
        for name, client in {**CLIENTS, **installed.INSTALLED}.items():
            if missing := installed.lacking(name) if name in installed.INSTALLED else lacking(name):
                lines.append(f"| {name} | | not run: {missing} is not installed |")
            else:
                lines.append(f"| {name} | {version_of(name)} | {', '.join(client(at))} |")
    return "\n".join([*lines, "", f"Run on {datetime.date.today():%Y-%m-%d}."])


def main() -> None:
    found = table()
    print(found)
    if "--write" in sys.argv[1:]:
        text = README.read_text()
        before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
        README.write_text(f"{before}\n{found}\n{after}")


if __name__ == "__main__":
    main()
