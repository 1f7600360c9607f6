"""Servers that are measured over gRPC, each in a process of its own: our server, and the least that
grpcio.aio can do.

`python -m bench.system.frontends.grpc_servers KIND` prints its address, then its CPU seconds for
every line it reads.
"""

import asyncio
import sys
from typing import Any

import grpc.aio
import numpy as np

import clipper
from bench.system.fixtures.noop import first
from bench.system.frontends.http_servers import report
from clipper.frontend.protocols import message

METHOD = "ModelInfer"
SERVICE = "inference.GRPCInferenceService"


def request_of(model: str, row: "np.ndarray[Any, Any]") -> bytes:
    made = message("inference.ModelInferRequest")(model_name=model, id="1")
    made.inputs.add(name="input", datatype="FP64", shape=[1, *row.shape])
    made.raw_input_contents.append(row.tobytes())
    return bytes(made.SerializeToString())


def response_of(value: float) -> Any:
    made = message("inference.ModelInferResponse")(
        model_name="noop", id="1", raw_output_contents=[np.float64(value).tobytes()]
    )
    made.outputs.add(name="output", datatype="FP64", shape=[1])
    return made


async def _trivial() -> None:
    """Serve the upper bound: accept any bytes, and always return the same ones."""
    always = response_of(1.0).SerializeToString()

    async def echo(request: bytes, context: Any) -> bytes:
        return bytes(always)

    await _serve(grpc.unary_unary_rpc_method_handler(echo))


async def _parsing() -> None:
    """Serve the same, but parse the message and serialize a reply."""
    request, response = (
        message("inference.ModelInferRequest"),
        message("inference.ModelInferResponse"),
    )

    async def echo(asked: Any, context: Any) -> Any:
        return response_of(float(np.frombuffer(asked.raw_input_contents[0])[0]))

    words = {
        "request_deserializer": request.FromString,
        "response_serializer": response.SerializeToString,
    }
    await _serve(grpc.unary_unary_rpc_method_handler(echo, **words))


async def _serve(handler: Any) -> None:
    server = grpc.aio.server()
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await asyncio.get_running_loop().run_in_executor(None, report, f"127.0.0.1:{port}")
    await server.stop(0)


def _ours() -> None:
    with clipper.start(grpc="127.0.0.1:0") as server:
        server.deploy("noop", first, input="f64[1]")
        server.app("noop", models=["noop"], slo_ms=1000)
        three = ["noop", "noop2", "noop3"]
        for name in three[1:]:
            server.deploy(name, first, input="f64[1]")
        server.app("three", models=three, slo_ms=1000)
        report(server.grpc_address)


if __name__ == "__main__":
    which = sys.argv[1]
    if which == "ours":
        _ours()
    else:
        asyncio.run(_parsing() if which == "parsing" else _trivial())
