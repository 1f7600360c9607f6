"""Models that are data, deployed from a stream under load: no query fails at the switch, and
invalid models are refused."""

import hashlib
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.errors import InvalidInput
from clipper.frontend.streams.model_updates import descriptor_of
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.threads import join

redis = pytest.importorskip("redis")
onnx = pytest.importorskip("onnx")
skl2onnx = pytest.importorskip("skl2onnx")
skops = pytest.importorskip("skops.io")
datasets = pytest.importorskip("sklearn.datasets")
pytest.importorskip("onnxruntime")
Client = Any
START_S = 60.0  # for a container that imports what its model needs, on a busy machine


@pytest.fixture(scope="module")
def serving() -> Iterator[clipper.ClipperServer]:
    """Yield a server of this module; its models are deployed and retired by the tests."""
    with clipper.start(drain_s=1.0) as started:
        yield started


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    x, y = datasets.load_digits(return_X_y=True)
    return x, y


def trained(digits: tuple[Any, Any], rows: int) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(
        digits[0][:rows], digits[1][:rows]
    )


def as_onnx(estimator: Any) -> bytes:
    made = skl2onnx.to_onnx(estimator, np.zeros((1, 64), np.float32), options={"zipmap": False})
    return bytes(made.SerializeToString())


def described(name: str, kind: str, content: bytes, **more: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "sha256": hashlib.sha256(content).hexdigest(), **more}


def entries(client: Client, stream: str) -> list[dict[str, str]]:
    return [fields for _, fields in client.xrange(stream)]


@pytest.fixture
def updates(
    serving: clipper.ClipperServer, redis_server: RedisServer, fresh: Callable[[], str]
) -> Iterator[str]:
    """Yield the name of a stream of models; retire what it deployed after the test."""
    stream = fresh()
    with serving.models_from(redis_server.url, stream=stream, keep=0):
        yield stream
    for model in serving.catalog.models():
        serving.retire(model.id, force=True)


def test_versions_are_deployed_from_a_stream_without_a_failed_query(
    serving: clipper.ClipperServer, client: Client, updates: str, digits: Any
) -> None:
    """ONNX and skops models are deployed by data, by key and in chunks, while queries are sent:
    none fails or gets the default."""
    stream = updates
    old = trained(digits, 300)
    new = trained(digits, 1500)
    contents = [as_onnx(old), as_onnx(new), skops.dumps(old)]
    with redis.Redis.from_url("unix://" + client.connection_pool.connection_kwargs["path"]) as raw:
        raw.xadd(
            stream, described("digits", "onnx", contents[0], input="f64[64]", data=contents[0])
        )
        wait_until(lambda: client.xlen(stream + ".deployed") == 1, patience_s=START_S)
        app = serving.app("digits", models=["digits"], slo_ms=60_000, default=-1)
        answers, stopping, ready = [], threading.Event(), []
        unhook = serving.catalog.on_change(
            lambda view: ready.append(
                all(serving._deployment.containers.of(model.id) for model in view.models())
            )
        )

        def ask() -> None:  # without end, but not so fast that it starves the containers that start
            for i in itertools.count():
                answers.append((i % 1797, app.predict(digits[0][i % 1797], salt=i).result(60)))
                if stopping.wait(0.002):
                    return

        askers = [threading.Thread(target=ask) for _ in range(2)]
        for asker in askers:
            asker.start()
        try:
            raw.set(stream + ".bytes", contents[1])
            raw.xadd(
                stream,
                described("digits", "onnx", contents[1], input="f64[64]", key=stream + ".bytes"),
            )
            wait_until(lambda: client.xlen(stream + ".deployed") == 2, patience_s=START_S)
            half = len(contents[2]) // 2
            raw.mset(
                {stream + ".part:0": contents[2][:half], stream + ".part:1": contents[2][half:]}
            )
            raw.xadd(
                stream,
                described(
                    "digits", "skops", contents[2], input="f64[64]", key=stream + ".part", chunks=2
                ),
            )
            wait_until(lambda: client.xlen(stream + ".deployed") == 3, patience_s=START_S)
            seen = len(answers)
            wait_until(lambda: len(answers) > seen + 50)
        finally:
            stopping.set()
            for asker in askers:
                join(asker)
        unhook()
    assert all(ready), "a version is the latest only when its container is connected"
    assert not [answer for _, answer in answers if answer.is_default or answer.missing]
    right = [old.predict(digits[0]), new.predict(digits[0]), old.predict(digits[0])]
    versions = [answer.models[0].version for _, answer in answers]
    assert set(versions) == {1, 2, 3}
    assert all(right[answer.models[0].version - 1][i] == answer.output for i, answer in answers)
    assert [one["version"] for one in entries(client, stream + ".deployed")] == ["1", "2", "3"]
    assert [model.version for model in serving.catalog.models()] == [3], (
        "keep=0: older ones are retired"
    )
    assert not entries(client, stream + ".refused")
    serving.catalog.unregister_application("digits")


def test_an_invalid_model_is_refused_and_changes_nothing(
    serving: clipper.ClipperServer, client: Client, updates: str, digits: Any
) -> None:
    stream, good = updates, as_onnx(trained(digits, 300))
    with redis.Redis.from_url("unix://" + client.connection_pool.connection_kwargs["path"]) as raw:
        raw.rpush(stream + ".list", "x")
        raw.xadd(stream, described("m", "onnx", good, data=good))
        wait_until(lambda: client.xlen(stream + ".deployed") == 1, patience_s=START_S)
        serving.app("asks", models=["m"])
        bad = [
            ({"name": "m"}, "invalid-input", "'kind' is missing"),
            (described("M!", "onnx", good, data=good), "invalid-input", "bad model name"),
            (described("m", "pickle", good, data=good), "invalid-input", "one of onnx, skops"),
            (described("m", "onnx", good), "invalid-input", "one of the two"),
            (
                described("m", "onnx", good, data=good, version="0"),
                "invalid-input",
                "whole number from 1",
            ),
            (
                described("m", "onnx", good, data=good, input="f99"),
                "invalid-input",
                "bad input type",
            ),
            (described("m", "onnx", b"other", data=good), "packaging", "another SHA-256"),
            (described("m", "onnx", b"nonsense", data=b"nonsense"), "packaging", "no ONNX model"),
            (described("m", "skops", good, data=good), "packaging", "no skops file"),
            (described("m", "onnx", good, key=stream + ".none"), "packaging", "is not there"),
            (described("m", "onnx", good, key=stream + ".list"), "packaging", "is not a string"),
            (
                described("m", "onnx", b"more", data=b"more", version="1"),
                "already-exists",
                "other bytes",
            ),
            (
                described("m", "onnx", good, input="f64[7]", data=good, version="9"),
                "type-conflict",
                "has the input f64",
            ),
        ]
        for fields, _, _ in bad:
            raw.xadd(stream, fields)
        wait_until(lambda: client.xlen(stream + ".refused") == len(bad))
    for (fields, kind, why), refused in zip(bad, entries(client, stream + ".refused"), strict=True):
        assert (refused["refused.kind"], why in refused["refused.reason"]) == (kind, True), (
            fields,
            refused,
        )
    assert [str(model.id) for model in serving.catalog.models()] == ["m:1"]
    assert (
        serving.app("asks")
        .predict(digits[0][0].astype(np.float32), slo_ms=60_000)
        .result(60)
        .output
        == 0
    )
    serving.catalog.unregister_application("asks")


def test_large_and_untrusted_models_are_refused(
    serving: clipper.ClipperServer,
    redis_server: RedisServer,
    client: Client,
    digits: Any,
    fresh: Callable[[], str],
) -> None:
    from textwrap import dedent

    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    stream = fresh()
    content = skops.dumps(make_pipeline(FunctionTransformer(dedent), trained(digits, 100)))
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.set(stream + ".key", b"x" * 200_001)
        with serving.models_from(redis_server.url, stream=stream, bytes_max=200_000):
            raw.xadd(stream, described("m", "onnx", b"x", data=b"x" * 200_001))
            raw.xadd(stream, described("m", "onnx", b"x", key=stream + ".key"))
            raw.xadd(stream, described("m", "skops", content, data=content))
            wait_until(lambda: client.xlen(stream + ".refused") == 3)
    large, too, untrusted = entries(client, stream + ".refused")
    assert large["refused.kind"] == too["refused.kind"] == "too-large"
    assert "not trusted: textwrap.dedent" in untrusted["refused.reason"]
    assert len(large.get("data", "")) == 0, "dead letters do not repeat the bytes"


def test_an_entry_that_is_delivered_again_is_deployed_once(
    serving: clipper.ClipperServer, client: Client, updates: str, digits: Any
) -> None:
    stream, content = updates, as_onnx(trained(digits, 300))
    with redis.Redis.from_url("unix://" + client.connection_pool.connection_kwargs["path"]) as raw:
        for _ in range(2):
            raw.xadd(stream, described("again", "onnx", content, data=content))
        wait_until(lambda: client.xlen(stream + ".deployed") == 2, patience_s=START_S)
    assert [model.version for model in serving.catalog.models()] == [1]


def test_a_server_that_closes_in_the_middle_leaves_the_model_to_the_next(
    redis_server: RedisServer, client: Client, digits: Any, fresh: Callable[[], str]
) -> None:
    stream, content = fresh(), as_onnx(trained(digits, 300))
    with redis.Redis.from_url(redis_server.url) as raw:
        raw.xadd(stream, described("m", "onnx", content, data=content))
    with clipper.start(drain_s=0) as server:
        running = server.models_from(redis_server.url, stream=stream, claim_s=0.2)
        wait_until(lambda: running.stats()["read"] == 1)
    assert client.xlen(stream + ".deployed") + client.xpending(stream, "clipper")["pending"] == 1
    with (
        clipper.start() as server,
        server.models_from(redis_server.url, stream=stream, claim_s=0.2),
    ):
        wait_until(lambda: client.xlen(stream + ".deployed") == 1, patience_s=START_S)
    assert not entries(client, stream + ".refused")


@pytest.mark.parametrize("field", ["versoin", "x"])
def test_an_unknown_field_of_a_descriptor_is_reported(field: str) -> None:
    with pytest.raises(InvalidInput, match=f"unknown field '{field}'"):
        descriptor_of({field.encode(): b"1"})
