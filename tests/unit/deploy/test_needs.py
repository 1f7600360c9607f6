"""Requirements of a model to run elsewhere, and the SDK as a wheel."""

import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from clipper.deploy import pack
from clipper.deploy.needs import Needs, needs_of, packages_of, version_of
from clipper.deploy.packages.artifact import Artifact
from clipper.deploy.packages.sdk import digest, wheel, wheel_into
from clipper.errors import InvalidInput
from clipper.types import ANY, Model
from clipper_container.loading.targets import MAGIC


def total(rows):
    return np.sum(rows, axis=1)


def record(package, **more):
    return Model(
        "m", 1, ANY, target=package.target, sha256=package.sha256, code=package.code, **more
    )


def test_code_needs_the_python_and_the_packages_it_was_packed_with(tmp_path):
    needs = needs_of(record(pack(total, "m", 1, tmp_path)))
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert (needs.kind, needs.python, needs.is_file) == ("function", here, True)
    assert needs.packages["numpy"] == np.__version__
    assert f"numpy=={np.__version__}" in needs.pip()
    assert f"cloudpickle=={version_of('cloudpickle')}" in needs.pip()


def test_an_estimator_needs_its_own_version(tmp_path):
    linear = pytest.importorskip("sklearn.linear_model")
    fitted = linear.LogisticRegression().fit([[0.0], [1.0]], [0, 1])
    needs = needs_of(record(pack(fitted, "m", 1, tmp_path)))
    assert needs.python == ""
    assert f"scikit-learn=={version_of('scikit-learn')}" in needs.pip()


def test_requirements_come_first_and_lack_only_what_the_adapter_imports(tmp_path):
    package = pack(Artifact("onnx", b"x"), "m", 1, tmp_path)
    assert needs_of(record(package, requirements=("numpy==1.26.4",))).pip() == (
        "numpy==1.26.4",
        "onnxruntime",
    )
    requirements = ("onnxruntime_gpu>=1.18 ; python_version > '3'",)
    assert needs_of(record(package, requirements=requirements)).pip() == requirements


def test_a_local_version_is_not_requested_from_an_index():
    assert Needs("t", "torchscript", packages={"torch": "2.13.0+cpu"}).pip() == ("torch==2.13.0",)


def test_a_module_needs_no_packages_and_other_platforms_are_refused(tmp_path):
    assert needs_of(Model("m", 1, ANY, target="features:predict", code=("/src",))).pip() == ()
    with pytest.raises(InvalidInput, match="started elsewhere"):
        needs_of(Model("m", 1, ANY))
    with pytest.raises(InvalidInput, match="cannot be read"):
        needs_of(Model("m", 1, ANY, target=str(tmp_path / "gone.pkl"), sha256="00"))
    (tmp_path / "odd.pkl").write_bytes(b"{}\n")
    with pytest.raises(InvalidInput, match="not a packed model"):
        needs_of(Model("m", 1, ANY, target=str(tmp_path / "odd.pkl"), sha256="00"))


def test_modules_have_their_distributions():
    assert (
        packages_of(["os", "builtins", "__main__", "clipper", "clipper_container", "nowhere"]) == {}
    )
    assert set(packages_of(["numpy", "lz4"])) == {"numpy", "lz4"}


def test_the_first_line_of_a_packed_file_lists_its_packages(tmp_path):
    with open(pack(total, "m", 1, tmp_path).target, "rb") as file:
        head = json.loads(file.readline().removeprefix(MAGIC))
    assert head["packages"]["numpy"] == np.__version__


def test_the_sdk_is_a_wheel_that_installs(tmp_path):
    assert zipfile.ZipFile(io.BytesIO(wheel())).testzip() is None
    assert len(digest()) == 64
    path = wheel_into(tmp_path / "wheels")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--no-deps",
        "--no-index",
        "--target",
        str(tmp_path / "there"),
    ]
    subprocess.run([*pip, str(path)], check=True, timeout=120)
    where = "import clipper_container.__main__ as m; print(m.__file__)"
    words = [sys.executable, "-c", where]
    env = {"PYTHONPATH": str(tmp_path / "there"), "PATH": "/usr/bin"}
    completed = subprocess.run(
        words, check=True, timeout=60, env=env, capture_output=True, text=True
    ).stdout
    assert completed.startswith(str(tmp_path / "there"))
