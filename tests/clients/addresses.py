"""The server that clients by others are tested with, and the requests that they send to it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

import clipper

ROWS = np.arange(12.0).reshape(4, 3)
SUMS = ROWS.sum(axis=1)
FACTORS = np.arange(4.0)
SCALED = ROWS * FACTORS[:, None]
PATIENCE_S = 30.0


class Addresses(NamedTuple):
    http: str
    grpc: str
    admin: str


Done = Iterator[str]


_INPUTS = {"x": "f64[3]", "factor": "f64"}
_OUTPUTS = {"scaled": "f64[3]", "total": "f64"}


def _scaled(columns: Any) -> Any:
    scaled = columns["x"] * columns["factor"][:, None]
    return {"scaled": scaled, "total": scaled.sum(axis=1)}


@contextlib.contextmanager
def serving(
    prepare: Callable[[clipper.ClipperServer], None] = lambda server: None,
) -> Iterator[Addresses]:
    """Start a server with four applications. `total` and `learns` have a model `sum` of f64[3];
    only `learns` takes feedback. `shout` takes strings. `scaled` has a model of two named tensors
    as its input and output."""
    with clipper.start(http="127.0.0.1:0", grpc="127.0.0.1:0", admin="127.0.0.1:0") as server:
        server.deploy("sum", lambda rows: np.asarray(rows).sum(axis=1), input="f64[3]")
        server.deploy("words", lambda rows: [row.upper() for row in rows], input="str")
        server.deploy("scale", _scaled, inputs=_INPUTS, outputs=_OUTPUTS)
        server.app("total", models=["sum"], slo_ms=10_000)
        server.app("scaled", models=["scale"], slo_ms=10_000)
        server.app("shout", models=["words"], slo_ms=10_000)
        server.app("learns", models=["sum"], slo_ms=10_000, policy="stacking")
        prepare(server)
        yield Addresses(server.http_address, server.grpc_address, server.admin_address)


def check_error(call: Callable[[], Any], part: str) -> None:
    """Call and check that it raises an error that contains `part`."""
    found = ""
    try:
        call()
    except Exception as error:
        found = str(error) or repr(error)
    assert part in found, f"{part!r} is not in {found!r}"
