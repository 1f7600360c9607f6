"""Models with several named tensors, and records, over every protocol: clients that others wrote
get the outputs that onnxruntime gives, and errors have the same words everywhere."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput
from tests.frontend.conftest import QUICK, ask, warm_workers
from tests.onnx_models import encoder, two_by_two

pytest.importorskip("onnx", reason="pip install onnx")
runtime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
triton_http = pytest.importorskip("tritonclient.http", reason="pip install 'tritonclient[http]'")
triton_grpc = pytest.importorskip("tritonclient.grpc", reason="pip install 'tritonclient[grpc]'")
PATIENCE_S = 20.0
Named = dict[str, Any]
RECORD = {"age": "f64", "city": "str"}


def price(columns: Named) -> list[float]:
    ages = np.asarray(columns["age"])
    return [float(age) + len(city) for age, city in zip(ages, columns["city"], strict=True)]


MODELS = {"pair": two_by_two(), "encoder": encoder()}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[clipper.ClipperServer]:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    with clipper.start(
        http="127.0.0.1:0", grpc="127.0.0.1:0", admin="127.0.0.1:0", **QUICK
    ) as started:
        started._learning.states.start_writing()  # its thread stays
        for name, content in MODELS.items():
            path = tmp_path_factory.mktemp("models") / f"{name}.onnx"
            path.write_bytes(content)
            started.deploy(name, str(path))
            started.app(f"of-{name}", models=[name], slo_ms=10_000)
        started.app("totals", models=["pair"], slo_ms=10_000, output="total")
        started.deploy("prices", price, inputs=RECORD)
        started.app("homes", models=["prices"], slo_ms=10_000)
        warm_workers(started)
        yield started


def direct(model: str, feed: Named) -> Named:
    session = runtime.InferenceSession(MODELS[model], providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, feed), strict=True))


FEEDS: dict[str, Named] = {
    "pair": {
        "x": np.arange(12, dtype=np.float32).reshape(4, 3),
        "factor": np.array([1, -2, 0.5, 0], np.float32),
    },
    "encoder": {
        "input_ids": np.array([[1, 2, 3, 0], [9, 8, 0, 0]]),
        "attention_mask": np.array([[1, 1, 1, 0], [1, 1, 0, 0]]),
    },
}


def datatype(array: Any) -> str:
    return str(
        triton_http.np_to_triton_dtype(array.dtype)
        if hasattr(triton_http, "np_to_triton_dtype")
        else {"f": "FP32", "i": "INT64"}[array.dtype.kind]
    )


def by_tritonclient(
    module: Any, address: str, model: str, feed: Named, outputs: Any = None, **more: Any
) -> Named:
    """Return the outputs of a model as tritonclient gives them."""
    with module.InferenceServerClient(address) as client:
        inputs = []
        for name, values in feed.items():
            one = module.InferInput(name, list(values.shape), datatype(values))
            one.set_data_from_numpy(values, **more)
            inputs.append(one)
        wanted = None if outputs is None else [module.InferRequestedOutput(n) for n in outputs]
        result = client.infer(model, inputs, outputs=wanted)
        response = result.get_response()
        names = (
            [one["name"] for one in response["outputs"]]
            if isinstance(response, dict)
            else [one.name for one in response.outputs]
        )
        return {name: result.as_numpy(name) for name in names}


def clients(server: clipper.ClipperServer) -> dict[str, Callable[..., Named]]:
    """Yield a client of each kind: (model, feed, outputs) -> outputs by name."""

    def http(binary: bool) -> Callable[..., Named]:
        return lambda model, feed, outputs=None: by_tritonclient(
            triton_http, server.http_address, model, feed, outputs, binary_data=binary
        )

    def grpc(model: str, feed: Named, outputs: Any = None) -> Named:
        return by_tritonclient(triton_grpc, server.grpc_address, model, feed, outputs)

    def curl(model: str, feed: Named, outputs: Any = None) -> Named:
        if shutil.which("curl") is None:
            pytest.skip("no curl: apt-get install curl")
        inputs = [
            {
                "name": name,
                "shape": values.shape,
                "datatype": datatype(values),
                "data": values.tolist(),
            }
            for name, values in feed.items()
        ]
        body = {"inputs": inputs, "outputs": [{"name": name} for name in outputs or ()]}
        url = f"http://{server.http_address}/v2/models/{model}/infer"
        done = subprocess.run(
            ["curl", "-s", url, "-d", json.dumps(body)], capture_output=True, timeout=PATIENCE_S
        )
        return {
            one["name"]: np.reshape(one["data"], one["shape"])
            for one in json.loads(done.stdout)["outputs"]
        }

    return {"json": http(False), "binary": http(True), "grpc": grpc, "curl": curl}


CLIENTS = ("json", "binary", "grpc", "curl")


@pytest.mark.parametrize("client", CLIENTS)
@pytest.mark.parametrize("name", ["pair", "of-pair", "encoder", "of-encoder"])
def test_outputs_are_those_of_onnxruntime(
    server: clipper.ClipperServer, client: str, name: str
) -> None:
    model = name.removeprefix("of-")
    wanted = direct(model, FEEDS[model])
    found = clients(server)[client](name, FEEDS[model])
    assert found.keys() == wanted.keys()
    for key, values in wanted.items():
        np.testing.assert_allclose(found[key], values, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("client", CLIENTS)
def test_some_outputs_only(server: clipper.ClipperServer, client: str) -> None:
    infer = clients(server)[client]
    wanted = direct("pair", FEEDS["pair"])
    found = infer("pair", FEEDS["pair"], ["total"])
    assert [*found] == ["total"]
    np.testing.assert_allclose(found["total"], wanted["total"])


def test_more_rows_than_single_queries(server: clipper.ClipperServer) -> None:
    rng = np.random.default_rng(3)
    feed = {
        "x": rng.normal(size=(100, 3)).astype(np.float32),
        "factor": rng.normal(size=100).astype(np.float32),
    }
    wanted = direct("pair", feed)
    for client in ("binary", "grpc"):
        found = clients(server)[client]("of-pair", feed)
        for key, values in wanted.items():
            np.testing.assert_allclose(found[key], values, rtol=1e-5, atol=1e-6)


def test_metadata_lists_tensors(server: clipper.ClipperServer) -> None:
    inputs = [
        {"name": "x", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "factor", "datatype": "FP32", "shape": [-1]},
    ]
    outputs = [
        {"name": "scaled", "datatype": "FP32", "shape": [-1, 3]},
        {"name": "total", "datatype": "FP32", "shape": [-1]},
    ]
    with triton_http.InferenceServerClient(server.http_address) as http:
        for name in ("pair", "of-pair"):
            about = http.get_model_metadata(name)
            assert (about["inputs"], about["outputs"]) == (inputs, outputs)
        assert [one["dims"] for one in http.get_model_config("pair")["input"]] == [[3], []]
        assert [one["shape"] for one in http.get_model_metadata("encoder")["inputs"]] == [
            [-1, -1],
            [-1, -1],
        ]
    with triton_grpc.InferenceServerClient(server.grpc_address) as grpc:
        about = grpc.get_model_metadata("pair")
        for listed, wanted in ((about.inputs, inputs), (about.outputs, outputs)):
            found = [{"name": o.name, "datatype": o.datatype, "shape": [*o.shape]} for o in listed]
            assert found == wanted


@pytest.mark.parametrize("client", CLIENTS)
def test_an_application_of_one_output(server: clipper.ClipperServer, client: str) -> None:
    wanted = direct("pair", FEEDS["pair"])["total"]
    infer = clients(server)[client]
    for outputs in (None, ["total"]):
        found = infer("totals", FEEDS["pair"], outputs)
        assert [*found] == ["total"]
        np.testing.assert_allclose(found["total"], wanted)
    about = ask(server.http_address, "GET", "/v2/models/totals").json
    assert [one["name"] for one in about["outputs"]] == ["total"]
    if client != "curl":
        with pytest.raises(Exception, match="no output 'scaled': it is named 'total'"):
            infer("totals", FEEDS["pair"], ["scaled"])


def test_rest_takes_one_row_rows_and_columns(server: clipper.ClipperServer) -> None:
    def predict(body: Named) -> Any:
        reply = ask(server.http_address, "POST", "/api/of-pair/predict", body)
        assert reply.status == 200, reply.body
        return reply.json

    wanted = {"scaled": [2.0, 4.0, 6.0], "total": 12.0}
    row = {"x": [1, 2, 3], "factor": 2}
    assert predict({"input": row})["output"] == wanted
    several = [{"output": one["output"]} for one in predict({"inputs": [row, row]})["predictions"]]
    assert several == [{"output": wanted}] * 2
    columns = {"x": [[1, 2, 3], [0, 0, 1]], "factor": [2, 5]}
    found = [one["output"]["total"] for one in predict({"inputs": columns})["predictions"]]
    assert found == [12.0, 5.0]


def test_records(server: clipper.ClipperServer) -> None:
    app = server._handle("homes") if hasattr(server, "_handle") else server.app("homes")
    row = {"age": 31, "city": "Bern"}
    assert app.predict(row).result(PATIENCE_S).output == 35
    again = app.predict({"city": "Bern", "age": 31.0})
    assert again.result(PATIENCE_S).latency_us == 0  # it was cached, whatever the order of keys
    rows = [row, {"age": 1.5, "city": ""}]
    assert list(app.predict_many(rows).result(PATIENCE_S).outputs) == [35, 1.5]
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    assert list(app.predict_many(pandas.DataFrame(rows)).result(PATIENCE_S).outputs) == [35, 1.5]
    reply = ask(server.http_address, "POST", "/api/homes/predict", {"input": row})
    assert reply.json["output"] == 35
    reply = ask(server.http_address, "POST", "/api/homes/predict", {"inputs": rows})
    assert [one["output"] for one in reply.json["predictions"]] == [35, 1.5]
    feed = {"age": np.array([31.0, 1.5]), "city": np.array(["Bern", ""], object)}
    for shape in ((2,), (2, 1)):
        shaped = {name: values.reshape(shape) for name, values in feed.items()}
        for module, address in (
            (triton_http, server.http_address),
            (triton_grpc, server.grpc_address),
        ):
            with module.InferenceServerClient(address) as client:
                inputs = [
                    module.InferInput("age", [*shape], "FP64"),
                    module.InferInput("city", [*shape], "BYTES"),
                ]
                for one, values in zip(inputs, shaped.values(), strict=True):
                    one.set_data_from_numpy(values)
                assert client.infer("homes", inputs).as_numpy("output").tolist() == [35, 1.5]


def test_the_service_of_applications_takes_records(server: clipper.ClipperServer) -> None:
    import grpc

    from clipper.frontend.protocols import message

    request = message("clipper.v1.PredictRequest")(application="homes")
    request.input.record.values["age"].number = 31
    request.input.record.values["city"].text = "Bern"
    many = message("clipper.v1.PredictRequest")(application="of-pair")
    many.input.record.values["x"].numbers.values.extend([1, 2, 3])
    many.input.record.values["factor"].tensor.datatype = "FP32"
    many.input.record.values["factor"].tensor.data = np.float32(2).tobytes()
    with grpc.insecure_channel(server.grpc_address) as channel:
        predict = channel.unary_unary(
            "/clipper.v1.Applications/Predict",
            request_serializer=lambda made: made.SerializeToString(),
            response_deserializer=message("clipper.v1.Prediction").FromString,
        )
        assert predict(request, timeout=PATIENCE_S).output.number == 35
        output = predict(many, timeout=PATIENCE_S).output.record.values
        assert np.frombuffer(output["scaled"].tensor.data, np.float32).tolist() == [2, 4, 6]
        assert output["total"].number == 12
        request.input.record.values["cty"].text = "Bern"
        with pytest.raises(grpc.RpcError, match="unknown tensor 'cty' - did you mean 'city'"):
            predict(request, timeout=PATIENCE_S)


BAD: dict[str, tuple[Named, str]] = {
    "missing": ({"x": [1, 2, 3]}, "tensor 'factor' is missing"),
    "unknown": ({"x": [1, 2, 3], "factr": 2}, "unknown tensor 'factr' - did you mean 'factor'?"),
    "shape": ({"x": [1, 2], "factor": 2}, "tensor 'x': expected "),
    "type": ({"x": ["a", "b", "c"], "factor": 2}, "tensor 'x': expected "),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_tensors_are_named_in_the_same_words_everywhere(
    server: clipper.ClipperServer, name: str
) -> None:
    row, words = BAD[name]
    app = server.app("of-pair")
    with pytest.raises(InvalidInput) as raised:
        app.predict(row)
    assert words in str(raised.value)
    with pytest.raises(InvalidInput) as raised:
        app.predict_many([row])
    assert words in str(raised.value)
    for member in ({"input": row}, {"inputs": [row]}, {"inputs": {k: [v] for k, v in row.items()}}):
        reply = ask(server.http_address, "POST", "/api/of-pair/predict", member)
        assert reply.status == 400
        assert words in reply.json["error"], member
    is_text = name == "type"
    feed = {
        key: np.array([value], object if is_text and key == "x" else np.float32)
        for key, value in row.items()
    }
    for module, address in ((triton_http, server.http_address), (triton_grpc, server.grpc_address)):
        with module.InferenceServerClient(address) as client:
            inputs = []
            for key, values in feed.items():
                kind = "BYTES" if values.dtype == object else "FP32"
                inputs.append(module.InferInput(key, [*values.shape], kind))
                inputs[-1].set_data_from_numpy(values)
            with pytest.raises(Exception, match=r".") as refused:
                client.infer("of-pair", inputs)
            assert words in str(refused.value)
            assert any(code in str(refused.value) for code in ("400", "INVALID_ARGUMENT"))


def test_rows_of_different_number_are_refused(server: clipper.ClipperServer) -> None:
    words = "tensor 'factor' has 1 rows, and 'x' has 2."
    columns = {"x": [[1, 2, 3], [1, 2, 3]], "factor": [2]}
    with pytest.raises(InvalidInput, match=words):
        server.app("of-pair").predict_many(columns)
    reply = ask(server.http_address, "POST", "/api/of-pair/predict", {"inputs": columns})
    assert (reply.status, words in reply.json["error"]) == (400, True)
    feed = {name: np.array(values, np.float32) for name, values in columns.items()}
    for client in ("json", "binary", "grpc"):
        with pytest.raises(Exception, match=words):
            clients(server)[client]("pair", feed)


def test_an_output_that_there_is_not(server: clipper.ClipperServer) -> None:
    for client in ("json", "grpc"):
        with pytest.raises(Exception, match="no output 'totl': they are named 'scaled', 'total'"):
            clients(server)[client]("pair", FEEDS["pair"], ["totl"])


def test_the_description_has_the_tensors(server: clipper.ClipperServer) -> None:
    found = ask(server.http_address, "GET", "/openapi.json").json
    schema = found["components"]["schemas"]["Input.homes"]
    assert schema["properties"] == {"age": {"type": "number"}, "city": {"type": "string"}}
    assert schema["required"] == ["age", "city"]


def test_a_schema_from_a_shell(server: clipper.ClipperServer, tmp_path: Path) -> None:
    runner = pytest.importorskip("click.testing", reason="pip install click").CliRunner()
    from clipper.cli import main

    (tmp_path / "of_the_shell.py").write_text(
        'def f(rows):\n    return {"n": [len(city) for city in rows["city"]], "age": rows["age"]}\n'
    )
    url = ["--url", f"http://{server.admin_address}"]
    deploy = ["deploy", "shell", "of_the_shell:f", "--code", str(tmp_path), *url, "--schema"]
    made = runner.invoke(
        main, [*deploy, '{"age": "f64", "city": "str"} -> {"n": "i64", "age": "f64"}']
    )
    assert made.exit_code == 0, made.output
    server.app("shells", models=["shell"], slo_ms=10_000)
    try:
        response = runner.invoke(main, ["predict", "shells", '{"age": 3, "city": "Bern"}', *url])
        assert response.output.startswith('{"n": 4, "age": 3.0}\t')
        wrong = runner.invoke(main, ["predict", "shells", '{"age": 3, "cty": "Bern"}', *url])
        assert (wrong.exit_code, "unknown tensor 'cty'" in wrong.output) == (1, True)
        wrong = runner.invoke(main, [*deploy, '{"age": "f65"}'])
        assert (wrong.exit_code, "tensor 'age': 'f65' is not a type" in wrong.output) == (2, True)
    finally:
        server.retire("shell", force=True)


def test_feedback_is_about_a_record(server: clipper.ClipperServer) -> None:
    server.app("taught", models=["prices"], slo_ms=10_000, policy="stacking")

    def send_feedback(body: Named) -> Any:
        return ask(server.http_address, "POST", "/api/taught/feedback", body)

    assert send_feedback({"input": {"city": "Ulm", "age": 30}, "label": 33}).json == {
        "counted": True
    }
    reply = send_feedback({"input": {"age": 30}, "label": 33})
    assert (reply.status, "tensor 'city' is missing" in reply.json["error"]) == (400, True)


def test_a_pipeline_over_a_table(server: clipper.ClipperServer, tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas", reason="pip install pandas")
    pytest.importorskip("sklearn", reason="pip install scikit-learn")
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    table = pandas.DataFrame({"age": np.arange(30.0), "city": ["Bern", "Ulm", "Rom"] * 10})
    ages = make_pipeline(SimpleImputer(), StandardScaler())
    steps = make_column_transformer((ages, ["age"]), (OneHotEncoder(), ["city"]))
    labels = np.where((table.age > 12) ^ (table.city == "Ulm"), "buys", "leaves")
    pipeline = make_pipeline(steps, LogisticRegression()).fit(table, labels)
    server.deploy("pipeline", pipeline)
    try:
        app = server.app("buys", models=["pipeline"], slo_ms=10_000)
        wanted = pipeline.predict(table)
        assert list(app.predict_many(table).result(PATIENCE_S).outputs) == list(wanted)
        reply = ask(
            server.http_address, "POST", "/api/buys/predict", {"input": {"age": 3, "city": "Ulm"}}
        )
        assert reply.json["output"] == wanted[table[(table.age == 4)].index[0]]
        row = {"age": None, "city": "Ulm"}
        wanted = pipeline.predict(pandas.DataFrame([row]).astype({"age": float}))
        reply = ask(server.http_address, "POST", "/api/buys/predict", {"input": row})
        assert [reply.json["output"], app.predict(row).result(PATIENCE_S).output] == [*wanted] * 2
        many = pandas.DataFrame([row] * 9).astype({"age": "Int64"})
        assert list(app.predict_many(many).result(PATIENCE_S).outputs) == [*wanted] * 9
        reply = ask(
            server.http_address, "POST", "/api/buys/predict", {"input": {"age": 1, "city": None}}
        )
        assert (reply.status, "'city'" in reply.json["error"]) == (400, True)
        answer = app.predict({"age": 31, "city": "Bern"}).result(PATIENCE_S)
        assert answer.output == pipeline.predict(
            pandas.DataFrame({"age": [31.0], "city": ["Bern"]})
        )
        assert 0.5 <= answer.confidence <= 1
        reply = ask(
            server.http_address,
            "POST",
            "/api/buys/predict",
            {"input": {"age": "old", "city": "Ulm"}},
        )
        assert (reply.status, "tensor 'age'" in reply.json["error"]) == (400, True)
    finally:
        server.retire("pipeline", force=True)
