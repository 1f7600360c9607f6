"""Clients that use only `GET /openapi.json`: one tries everything that it describes, others are
generated from it."""

import contextlib
import json
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import clipper
from clipper.selection import POLICIES
from clipper.types import NAME_GRAMMAR
from tests.clients.addresses import Addresses, Done
from tests.sizes import sized

EXAMPLES, SEED = 3, 1
PHASES = "examples,fuzzing,stateful"  # and "coverage", half of the time, in the full tier
# the first two would start processes of what is made up; the last has no end
LEFT_OUT = (
    "deploy",
    "importState",
    "stream",
    "createTable",  # which settings are possible depends on the optimizer
    # a URL of Redis is described as any text
    "createStream",
    "createModelStream",
)
_PATIENCE_S = 900


# of settings of an application what is possible, so that few requests are refused: any text is
# described, and which policies, deciders and roles there are depends on the models
_ROLE = "^(primary|(challenger|shadow|canary|decoy)(\\(share=0?\\.[0-9]{0,5}[1-9]\\))?)$"
_MODEL = f"{NAME_GRAMMAR}(:[1-9][0-9]{{0,8}})?"
_TYPE = "[iu](8|16|32|64)|f(16|32|64)|bool"
_SETTINGS: dict[str, dict[str, object]] = {
    "models": {"items": {"type": "string", "pattern": f"^{_MODEL}$"}},
    "input": {"pattern": f"^(({_TYPE})(\\[([1-9][0-9]{{0,4}}|\\*)\\])?|str|bytes|any)$"},
    "policy": {"pattern": f"^({'|'.join(sorted(POLICIES))})$"},
    "decider": {"pattern": "^(all|first|majority)$"},
    "slo_ms": {"maximum": 60_000},
    "default": {"type": ["number", "string", "boolean", "null"]},
    "roles": {
        "type": "object",
        "patternProperties": {
            f"^{NAME_GRAMMAR}$": {"type": "string", "pattern": _ROLE},
            f"^{_MODEL}$": {"type": "string", "pattern": _ROLE.replace("|decoy", "")},
        },
        "additionalProperties": False,
    },
}


def narrowed(found: Any) -> Any:
    """Return a description of management in which the settings of applications are such as are
    possible."""
    routes = found["paths"]
    for path in routes:
        for method, route in routes[path].items():
            if path.startswith("/admin/applications/{name}") and "requestBody" in route:
                body = route["requestBody"]["content"]["application/json"]["schema"]
                properties = body.get("properties", {})
                if method in ("put", "patch") or path.endswith("/set"):
                    properties |= {key: properties[key] | more for key, more in _SETTINGS.items()}
                    properties["roles"].pop("anyOf", None)
    return found


def document(address: str) -> Any:
    with urllib.request.urlopen(f"http://{address}/openapi.json", timeout=10) as reply:
        return json.load(reply)


def openapi_spec_validator(at: Addresses) -> Done:
    import openapi_spec_validator as validator

    for name, address in (("queries", at.http), ("management", at.admin)):
        validator.validate(document(address))
        yield name


@contextlib.contextmanager
def _fuzzed() -> Iterator[Addresses]:
    """Start a server only for this test, as the management API is tried, too. It has an application
    for inputs of each kind, each with a default output."""
    kinds = {"sums": "f64[3]", "words": "str", "counts": "i32[*]", "blobs": "bytes"}
    with clipper.start(http="127.0.0.1:0", grpc="127.0.0.1:0", admin="127.0.0.1:0") as server:
        for name, type_ in kinds.items():
            server.deploy(name, lambda rows: [float(len(rows))] * len(rows), input=type_)
            server.app(name, models=[name], slo_ms=10_000, default=0.0)
        server.app("learns", models=["sums"], slo_ms=10_000, default=0.0, policy="stacking")
        server.app("chooses", models=["counts"], slo_ms=10_000, default=0.0, policy="exp3")
        yield Addresses(server.http_address, server.grpc_address, server.admin_address)


def schemathesis(at: Addresses) -> Done:
    """Run its command line on both addresses, with nothing set but the phases and the number of
    examples."""
    with _fuzzed() as at:
        for name, address in (("queries", at.http), ("management", at.admin)):
            _schemathesis(address, LEFT_OUT if address == at.admin else ())
            yield f"{name}: no findings"


def _schemathesis(address: str, without: tuple[str, ...]) -> None:
    described = narrowed(document(address))
    left_out = [word for id in without for word in ("--exclude-operation-id", id)]
    words = [
        "run",
        "openapi.json",
        "--url",
        f"http://{address}",
        "--phases",
        sized(PHASES, f"{PHASES},coverage"),
        "--max-examples",
        str(EXAMPLES),
        "--seed",
        str(SEED),
        "--no-color",
    ]
    command = [str(Path(sys.executable).parent / "schemathesis"), *words, *left_out]
    with tempfile.TemporaryDirectory(prefix="clipper-schemathesis-") as folder:
        (Path(folder) / "openapi.json").write_text(json.dumps(described))
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_S
        )
    assert done.returncode == 0, (done.stdout + done.stderr)[-8000:]


def openapi_python_client(at: Addresses) -> Done:
    """Generate a client from either description, without a warning; use the one of queries."""
    with tempfile.TemporaryDirectory(prefix="clipper-generated-") as folder:
        for name, address in (("generated_management", at.admin), ("generated_queries", at.http)):
            (Path(folder) / "openapi.json").write_text(json.dumps(document(address)))
            words = [
                "generate",
                "--path",
                "openapi.json",
                "--output-path",
                name,
                "--meta",
                "none",
                "--fail-on-warning",
            ]
            command = [str(Path(sys.executable).parent / "openapi-python-client"), *words]
            done = subprocess.run(
                command, cwd=folder, capture_output=True, text=True, timeout=_PATIENCE_S
            )
            assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
        yield "generate"
        sys.path.insert(0, folder)
        try:
            yield from _use_generated(f"http://{at.http}")
        finally:
            sys.path.remove(folder)
            for module in [
                name for name in sys.modules if name.partition(".")[0] == "generated_queries"
            ]:
                del sys.modules[module]


def _use_generated(url: str) -> Done:
    from importlib import import_module

    def of(name: str) -> Any:
        return import_module(f"generated_queries.{name}")

    models, applications = of("models"), "api.applications"
    with of("client").Client(url, raise_on_unexpected_status=True) as client:
        answer = of(f"{applications}.predict_learns").sync(
            client=client, body=models.PredictLearns(input_=[1, 2, 3], user="ann")
        )
        assert isinstance(answer, models.PredictResponse), answer
        assert answer.output == 6
        two = models.PredictManyTotal(inputs=[[1, 2, 3], [0, 0, 1]])
        many = of(f"{applications}.predict_total").sync(client=client, body=two)
        assert [one.output for one in many.predictions] == [6, 1]
        yield "predict"
        response = of(f"{applications}.feedback_learns").sync(
            client=client, body=models.FeedbackByIdLearns(id=answer.id, label=6)
        )
        assert response.counted is True
        yield "feedback"
        refused = of(f"{applications}.predict").sync(
            "totl", client=client, body=models.Predict(input_=[1, 2, 3])
        )
        assert "did you mean 'total'?" in refused.error
        yield "errors"
