"""Models that are data: ONNX and skops files of real scikit-learn models, and files that are
none."""

import io
import json
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import clipper
from clipper.deploy.packages.artifact import Artifact, check
from clipper.errors import DeployFailed, InvalidInput, PackagingError
from clipper.processes import Supervisor
from clipper_container.loading.check import examine
from tests.memory_container import wait_until

datasets = pytest.importorskip("sklearn.datasets")
onnx = pytest.importorskip("onnx")
skl2onnx = pytest.importorskip("skl2onnx")
skops = pytest.importorskip("skops.io")
pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def digits() -> tuple[Any, Any]:
    x, y = datasets.load_digits(return_X_y=True)
    return x, y


@pytest.fixture(scope="module")
def logreg(digits: tuple[Any, Any]) -> Any:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(StandardScaler(), LogisticRegression(max_iter=200)).fit(*digits)


@pytest.fixture(scope="module")
def forest(digits: tuple[Any, Any]) -> Any:
    from sklearn.ensemble import RandomForestClassifier

    return RandomForestClassifier(8, random_state=1).fit(*digits)


def as_onnx(estimator: Any, zipmap: bool = False) -> bytes:
    made = skl2onnx.to_onnx(estimator, np.zeros((1, 64), np.float32), options={"zipmap": zipmap})
    return bytes(made.SerializeToString())


@pytest.mark.parametrize("zipmap", [False, True])
def test_an_onnx_file_answers_as_its_estimator(
    server: clipper.ClipperServer,
    deploy: Any,
    digits: Any,
    logreg: Any,
    tmp_path: Path,
    zipmap: bool,
) -> None:
    (tmp_path / "digits.onnx").write_bytes(as_onnx(logreg, zipmap))
    model = deploy(str(tmp_path / "digits.onnx"))
    wait_until(lambda: model.describe_input() == "f32[64]")
    futures = [model.predict(x.astype(np.float32), slo_ms=10_000) for x in digits[0][:100]]
    assert [future.result(60) for future in futures] == logreg.predict(digits[0][:100]).tolist()
    sure = logreg.predict_proba(digits[0][:100]).max(axis=1)
    assert np.allclose([future.confidence() for future in futures], sure, atol=1e-4)


def test_rows_of_another_number_type_are_cast(
    server: clipper.ClipperServer, deploy: Any, digits: Any, logreg: Any
) -> None:
    model = deploy(Artifact("onnx", as_onnx(logreg)), input="f64[64]")
    assert [model.predict(x, slo_ms=10_000).result(60) for x in digits[0][:20]] == logreg.predict(
        digits[0][:20]
    ).tolist()


def test_a_skops_file_answers_as_its_estimator(
    server: clipper.ClipperServer, deploy: Any, digits: Any, forest: Any, tmp_path: Path
) -> None:
    skops.dump(forest, tmp_path / "forest.skops")
    model = deploy(str(tmp_path / "forest.skops"), input="f64[64]")
    futures = [model.predict(x, slo_ms=10_000) for x in digits[0][:50]]
    assert [future.result(60) for future in futures] == forest.predict(digits[0][:50]).tolist()
    assert futures[0].confidence() is not None


class Mine:
    """A type of this test, which is in no list of trusted types."""

    def predict(self, xs: Any) -> Any:
        return [0] * len(xs)


def bomb() -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as parts:
        parts.writestr("schema.json", b"0" * (1 << 20))
    raw = bytearray(packed.getvalue())
    raw[raw.index(b"PK\x01\x02") + 24 : raw.index(b"PK\x01\x02") + 28] = (0xFFFFFFF0).to_bytes(
        4, "little"
    )
    return bytes(raw)


def reaching_out(content: bytes) -> bytes:
    model = onnx.load_model_from_string(content)
    tensor = onnx.TensorProto(
        name="secret", data_type=1, dims=[1], data_location=onnx.TensorProto.EXTERNAL
    )
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.initializer.append(tensor)
    return bytes(model.SerializeToString())


@pytest.fixture
def processes() -> Iterator[Supervisor]:
    with Supervisor() as found:
        yield found


def test_a_check_knows_the_types(processes: Supervisor, digits: Any, logreg: Any) -> None:
    assert check(processes, Artifact("onnx", as_onnx(logreg)), "m", 60).input == "f32[64]"
    assert check(processes, Artifact("skops", skops.dumps(logreg)), "m", 60).input == "f64[64]"


@pytest.mark.parametrize(
    ("kind", "make", "why"),
    [
        ("onnx", lambda content: b"", "no input|no graph|checker|has 0"),
        ("onnx", lambda content: b"nonsense", "no ONNX model"),
        ("onnx", lambda content: content[: len(content) // 2], "no ONNX model"),
        ("onnx", reaching_out, "lies in a file of its own"),
        ("skops", lambda content: content, "no skops file"),
        ("skops", lambda content: skops.dumps(Mine()), "types that are not trusted: .*Mine"),
        ("skops", lambda content: skops.dumps({"a": 1}), "holds a dict, which has no predict"),
        ("skops", lambda content: bomb(), "unpacked it would have"),
    ],
    ids=[
        "empty",
        "nonsense",
        "half",
        "reaching out",
        "of another kind",
        "untrusted",
        "no model",
        "bomb",
    ],
)
def test_what_is_no_model_is_refused_with_the_reason(
    kind: str, make: Any, why: str, logreg: Any, tmp_path: Path
) -> None:
    """Models are examined in this process; in test_a_trusted_type_is_loaded another process does
    it."""
    path = tmp_path / "m.packed"
    path.write_bytes(Artifact(kind, make(as_onnx(logreg))).packed("m"))
    found = examine(str(path))
    assert not found["ok"]
    assert re.search(why, str(found["reason"]))


def test_a_trusted_type_is_loaded(processes: Supervisor) -> None:
    from textwrap import dedent

    from sklearn.linear_model import LinearRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    thing = make_pipeline(FunctionTransformer(dedent), LinearRegression())
    with pytest.raises(PackagingError, match=r"not trusted: textwrap\.dedent"):
        check(processes, Artifact("skops", skops.dumps(thing)), "m", 60)
    assert check(processes, Artifact("skops", skops.dumps(thing), ("textwrap.dedent",)), "m", 60).ok


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidInput, match="one of onnx, skops, xgboost"):
        Artifact("hdf5", b"")


def test_no_such_file(server: clipper.ClipperServer) -> None:
    with pytest.raises(PackagingError, match=r"cannot read 'none\.onnx'"):
        server.deploy("none", "none.onnx")


def test_a_bad_file_that_is_deployed_unchecked_fails_there(
    server: clipper.ClipperServer, tmp_path: Path
) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"nonsense")
    with pytest.raises(DeployFailed, match="onnxruntime cannot load this model"):
        server.deploy("bad-onnx", str(tmp_path / "bad.onnx"))


def test_a_person_can_check_a_file(tmp_path: Path, logreg: Any) -> None:
    (tmp_path / "digits.onnx").write_bytes(as_onnx(logreg))
    (tmp_path / "bad.skops").write_bytes(b"no")
    words = [sys.executable, "-m", "clipper_container", "check"]
    good = subprocess.run([*words, str(tmp_path / "digits.onnx")], capture_output=True, check=True)
    assert json.loads(good.stdout) == {
        "ok": True,
        "kind": "onnx",
        "input": "f32[64]",
        "output": "any",
    }
    bad = subprocess.run([*words, str(tmp_path / "bad.skops")], capture_output=True, check=False)
    assert bad.returncode == 3
    assert not json.loads(bad.stdout)["ok"]
