"""Benchmark of the design document's gRPC service, beside a bare grpcio service and our protocol.

The bare service is synchronous, has two threads over an array with known row numbers, and sends the
ids back. The shard's service asks its own loop, which finds rows by their ids, checks ids and
token, and sends no ids.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import numpy as np

from bench.harness import Goal, Row, absent, interleave, row
from bench.system.params import wire
from bench.system.params.wire import DIM, ROWS, TABLE, TOKEN, p50_us
from tests.processes import free_ports

BARE = "bare grpcio, the same messages"
OURS = "its own protocol"


def rows(quick: bool = False) -> list[Row]:
    n, turns = (50, 3) if quick else (300, 7)
    what = f"{ROWS} rows of {DIM} floats"
    try:
        with ExitStack() as stack:
            pull, push, client = stack.enter_context(shard())
            cases: dict[str, Callable[[Any], object]] = {
                "pull": pull, "push": push, BARE: stack.enter_context(wire.over_grpc()),
                OURS: lambda ids: client.pull("bench", ids),
            }  # fmt: skip
            draw = np.random.default_rng(1)
            found = interleave(
                {name: partial(p50_us, pull, draw, n) for name, pull in cases.items()}, turns
            )
    except ImportError as error:
        return [
            absent(
                f"pull of {what} by the document's service", "us", f"not measured: {error}", BARE
            )
        ]
    return [
        row(
            f"pull of {what} by the document's service",
            found["pull"],
            "us",
            BARE,
            found[BARE],
            Goal("at_most", 1),
        ),
        row(
            f"pull of {what} by the document's service, of ours",
            found["pull"],
            "us",
            OURS,
            found[OURS],
        ),
        row(
            f"push of {what} by the document's service",
            found["push"],
            "us",
            "its pull",
            found["pull"],
        ),
    ]


@contextmanager
def shard() -> Iterator[tuple[Any, Any, Any]]:
    """Start a shard with a table. Yields a pull and a push by gRPC, and a client of ours."""
    import grpc

    from clipper.frontend.protocols import message
    from clipper.params import Client, TableSpec

    with wire.process(module="bench.system.params.grpc") as addresses:
        plain, by_grpc = addresses.split()
        with Client([plain], token=TOKEN) as client, grpc.insecure_channel(by_grpc) as channel:
            client.create(TableSpec("bench", DIM))
            ids = np.arange(TABLE)
            for at in range(0, TABLE, 4096):
                client.push(
                    "bench",
                    ids[at : at + 4096],
                    np.ones((len(ids[at : at + 4096]), DIM), np.float32),
                )
            token = (("authorization", f"Bearer {TOKEN}"),)
            tensor, gradients = message("Tensor"), message("PushGradientRequest")
            asks, says = message("PullEmbeddingVectorRequest"), message("PushGradientResponse")
            pulled = channel.unary_unary(
                "/PServer/pull_embedding_vector", asks.SerializeToString, tensor.FromString
            )
            pushed = channel.unary_unary(
                "/PServer/push_gradient", gradients.SerializeToString, says.FromString
            )
            content = (
                np.random.default_rng(2).standard_normal((ROWS, DIM)).astype(np.float32).tobytes()
            )

            def pull(ids: Any) -> Any:
                answer = pulled(asks(name="bench", ids=ids.tolist()), metadata=token)
                return np.frombuffer(answer.content, np.float32).reshape(ROWS, DIM)

            def push(ids: Any) -> None:
                given = tensor(
                    name="bench",
                    data_type=5,
                    dim=(ROWS, DIM),
                    content=content,
                    indices=ids.tolist(),
                )
                if not pushed(gradients(gradients=[given]), metadata=token).accepted:
                    raise RuntimeError("the push was not accepted")

            yield pull, push, client


def main() -> None:
    from clipper.frontend.params_grpc.server import ShardGrpc
    from clipper.params.shard.server import ShardServer
    from clipper.params.shard.shard import ShardConfig
    from clipper.settings.params import ParamsSettings

    (port,) = free_ports(1)
    address, settings = f"tcp:127.0.0.1:{port}", ParamsSettings(shards=1, grpc="127.0.0.1:0")
    server = ShardServer(ShardConfig(0, (address,), settings, TOKEN, None)).start()
    server.ready.wait(20)
    print(address, ShardGrpc(server.shard).start().address, flush=True)
    server.wait()


if __name__ == "__main__":
    main()
