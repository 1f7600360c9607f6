"""Numbers of any type and size through every door: the same output at each, or a refusal at
each."""

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput
from tests.frontend.conftest import QUICK, ask

triton = pytest.importorskip("tritonclient.http")
triton_grpc = pytest.importorskip("tritonclient.grpc")

TYPES = ("u8", "i8", "u16", "i32", "u64", "i64", "f16", "f32", "f64", "bool")
NAMES = {
    "bool": "BOOL",
    **{f"u{bits}": f"UINT{bits}" for bits in (8, 16, 32, 64)},
    **{f"i{bits}": f"INT{bits}" for bits in (8, 16, 32, 64)},
    **{f"f{bits}": f"FP{bits}" for bits in (16, 32, 64)},
}
REFUSED = "refused"


def numpy_type(name: str) -> Any:
    return np.dtype("?" if name == "bool" else f"{name[0]}{int(name[1:]) // 8}")


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    with clipper.start(http="127.0.0.1:0", grpc="127.0.0.1:0", **QUICK) as started:
        for name in TYPES:
            started.deploy(f"m-{name}", lambda rows: rows, input=f"{name}[2]", output=f"{name}[2]")
            started.app(f"a-{name}", models=[f"m-{name}"], slo_ms=10_000)
            started.deploy(
                f"n-{name}",
                lambda batch: {"y": batch["x"]},
                inputs={"x": f"{name}[2]"},
                outputs={"y": f"{name}[2]"},
            )
            started.app(f"b-{name}", models=[f"n-{name}"], slo_ms=10_000)
        yield started


def some_values(rng: random.Random, name: str) -> list[Any]:
    """Return two values of a type: small, at a border, or special."""
    if name == "bool":
        return [rng.random() < 0.5, rng.random() < 0.5]
    if name[0] == "f":
        most = float(np.finfo(numpy_type(name)).max)
        choices = [0.0, -0.0, 0.1, 65504.0, 65520.0, 3.4e38, 3.5e38, 1e-40, 1e300, -most, most]
        specials = [float("nan"), float("inf"), -float("inf")] if rng.random() < 0.3 else []
        kept = [value for value in choices if abs(value) <= most] + specials
        return [numpy_type(name).type(rng.choice(kept)).item() for _ in range(2)]
    bounds = np.iinfo(numpy_type(name))
    near = [-1, 0, 1, 127, 128, 255, 256, 65535, 70000, 2**31, 2**53 + 1, 2**63 - 1, 2**63]
    choices = [each for each in (*near, bounds.min, bounds.max) if bounds.min <= each <= bounds.max]
    return [int(rng.choice(choices)) for _ in range(2)]


def verdict(call: Callable[[], Any]) -> Any:
    """Return what a door answers, as text that tells every value apart."""
    try:
        found = call()
    except InvalidInput:
        return REFUSED
    if found is None:
        return None
    return [repr(each) for each in (found.tolist() if isinstance(found, np.ndarray) else found)]


def json_doors(server: clipper.ClipperServer, target: str, source: str, values: list[Any]) -> Any:
    """Return the verdicts of the doors that take JSON."""

    def post(path: str, body: dict[str, Any]) -> Any:
        reply = ask(server.http_address, "POST", path, body)
        if reply.status == 400:
            raise InvalidInput(reply.json["error"])
        assert reply.status == 200, (path, body, reply.json)
        return reply.json

    tensor = {"shape": [1, 2], "datatype": NAMES[source], "data": values}
    infer = {"inputs": [{"name": "input", **tensor}]}
    named = {"inputs": [{"name": "x", **tensor}]}
    return {
        "api": verdict(lambda: post(f"/api/a-{target}/predict", {"input": values})["output"]),
        "api many": verdict(
            lambda: post(f"/api/a-{target}/predict", {"inputs": [values]})["predictions"][0][
                "output"
            ]
        ),
        "api named": verdict(
            lambda: post(f"/api/b-{target}/predict", {"input": {"x": values}})["output"]["y"]
        ),
        "v2": verdict(lambda: post(f"/v2/models/m-{target}/infer", infer)["outputs"][0]["data"]),
        "v2 named": verdict(
            lambda: post(f"/v2/models/n-{target}/infer", named)["outputs"][0]["data"]
        ),
    }


def array_doors(server: clipper.ClipperServer, target: str, array: Any) -> Any:
    """Return the verdicts of the doors that take arrays."""

    def infer(module: Any, address: str, model: str, name: str, output: str) -> Any:
        given = module.InferInput(
            name,
            [1, 2],
            NAMES[array.dtype.kind + str(8 * array.itemsize) if array.dtype != bool else "bool"],
        )
        given.set_data_from_numpy(array[None])
        client = module.InferenceServerClient(address)
        try:
            return client.infer(model, [given]).as_numpy(output)[0]
        except Exception as error:
            if "INVALID_ARGUMENT" in str(error) or "400" in str(error):
                raise InvalidInput(str(error)) from error
            raise
        finally:
            client.close()

    model, named = server.model(f"m-{target}"), server.model(f"n-{target}")
    doors: dict[str, Callable[[], Any]] = {
        "predict": lambda: model.predict(array).result(60),
        "predict_many": lambda: model.predict_many(array[None]).result(60)[0],
        "many": lambda: model.predict_many(np.repeat(array[None], 40, axis=0)).result(60)[39],
        "named": lambda: named.predict({"x": array}).result(60)["y"],
        "named many": lambda: named.predict_many({"x": array[None]}).result(60)["y"][0],
    }
    if np.isfinite(array).all():  # an application answers its default for other outputs
        doors["app"] = lambda: server.app(f"a-{target}").predict(array).result(60).output
    for kind, module, address in (
        ("http", triton, server.http_address),
        ("grpc", triton_grpc, server.grpc_address),
    ):
        doors[kind] = lambda m=module, a=address: infer(m, a, f"m-{target}", "input", "output")
        doors[f"{kind} named"] = lambda m=module, a=address: infer(m, a, f"n-{target}", "x", "y")
    return {name: verdict(door) for name, door in doors.items()}


def fits(array: Any, target: str) -> Any:
    """Return the row of a model's type, or REFUSED."""
    wanted = numpy_type(target)
    if not np.can_cast(array.dtype, wanted, "same_kind"):
        return None  # doors differ in what they convert: lists of JSON have no type
    if wanted.kind in "iu":
        bounds = np.iinfo(wanted)
        if any(not bounds.min <= value <= bounds.max for value in array.tolist()):
            return REFUSED
    with np.errstate(over="ignore"):
        row = array.astype(wanted)
    if wanted.kind == "f" and (np.isinf(row) & np.isfinite(array.astype(np.float64))).any():
        return REFUSED
    return [repr(each) for each in row.tolist()]


@pytest.mark.parametrize("target", TYPES)
def test_a_value_gets_one_verdict_at_every_door(server: clipper.ClipperServer, target: str) -> None:
    rng = random.Random(target)
    for _ in range(20):
        source = rng.choice(TYPES)
        values = some_values(rng, source)
        array = np.array(values, numpy_type(source))
        expected = fits(array, target)
        if expected is None or (source == "bool") != (target == "bool"):
            continue
        for door, found in array_doors(server, target, array).items():
            assert found == expected, (door, source, target, values)
        if np.isfinite(array).all():  # JSON has no others
            for door, found in json_doors(server, target, source, values).items():
                assert found == expected, (door, source, target, values)


def test_a_list_of_python_is_as_its_array(server: clipper.ClipperServer) -> None:
    for target, values in (
        ("u64", [2**53 + 1, 2**64 - 1]),
        ("u64", [0, 2**63]),
        ("i64", [-1, 2**63]),
        ("f32", [0.5, 1e39]),
        ("f32", [0.5, float("inf")]),
        ("f16", [0, 65536]),
        ("u8", [0, 256]),
    ):
        model, named = server.model(f"m-{target}"), server.model(f"n-{target}")
        found = {
            name: verdict(door)
            for name, door in {
                "predict": lambda m=model, v=values: m.predict(v).result(60),
                "many": lambda m=model, v=values: m.predict_many([v]).result(60)[0],
                "named": lambda m=named, v=values: m.predict({"x": v}).result(60)["y"],
            }.items()
        }
        assert len({json.dumps(each) for each in found.values()}) == 1, (target, values, found)
