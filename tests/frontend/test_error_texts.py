"""Error messages to clients over every interface: neither paths of files nor addresses in memory
nor stacks."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from tests.frontend.conftest import QUICK, ask

SECRET = "/srv/models/secret-7f3a"


def failing_model(rows: Any) -> Any:
    raise FileNotFoundError(2, f"\x1b]0;owned\x07 {object()!r} is not in", f"{SECRET}/weights.bin")


TENSOR = {"name": "x", "shape": [1, 1], "datatype": "FP64", "data": [1]}
FAILING: dict[str, tuple[str, Any]] = {
    "a model that raises": ("/api/lost/predict", {"input": [1]}),
    "several queries": ("/api/lost/predict", {"inputs": [[1], [2]]}),
    "a stream of answers": ("/api/lost/predict/stream", {"inputs": [[1]]}),
    "a default": ("/api/careful/predict", {"input": [1]}),
    "by the name of the model": ("/v2/models/bare/infer", {"inputs": [TENSOR]}),
    "the original's route": ("/lost/predict", {"input": [1.0]}),
    "no JSON": ("/api/lost/predict", b"{"),
    "a wrong shape": ("/api/lost/predict", {"input": [[1]]}),
    "a path": (f"/api{SECRET}/../../etc/passwd", {}),
    "an unknown application": ("/api/none/predict", {"input": [1]}),
    "feedback": ("/api/lost/feedback", {"input": [1], "label": {"a": object.__name__}}),
}


@pytest.fixture(scope="module")
def losing() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", **QUICK) as server:
        server.deploy("bare", failing_model, input="f64[1]", cache=False)
        server.app("lost", models=["bare"], slo_ms=10_000)
        server.app("careful", models=["bare"], slo_ms=10_000, default=-1.0)
        yield server


@pytest.mark.parametrize("what", FAILING)
def test_no_error_discloses_a_path_an_address_or_a_stack(
    losing: clipper.ClipperServer, what: str
) -> None:
    path, body = FAILING[what]
    reply = ask(losing.http_address, "POST", path, body)
    shown = reply.body.decode() + str(reply.headers)
    given = path if what == "a path" else ""
    package = str(Path(clipper.__file__).parent)
    for secret in (
        SECRET,
        "secret-7f3a",
        package,
        "Traceback",
        ".py",
        " at 0x7",
        "\x1b",
        losing.address,
    ):
        assert secret in given or secret not in shown, shown
