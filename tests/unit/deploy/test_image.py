"""The image of a model: what is in it, what is not, and that the same model gives the same
bytes."""

import importlib.metadata
import io
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np
import pytest

import clipper
from clipper.deploy import pack
from clipper.deploy.deployer import spec_of
from clipper.deploy.docker import image
from clipper.deploy.docker.image import Image, image_of
from clipper.deploy.docker.program_image import image_of_model
from clipper.deploy.needs import needs_of
from clipper.deploy.packages import folders
from clipper.deploy.packages.pins import pinned
from clipper.errors import PackagingError
from clipper.types import InputType, Model

DOCKERFILE = """\
# Model svm:3 as a container that dials in at a clipper server. Written by clipper; build it with
#   docker build -t svm:3 .
# and run it with --connect tcp:HOST:PORT, the token of the server mounted at
# /run/secrets/clipper_token.
ARG BASE=registry.example/python:3

FROM ${BASE} AS packages
COPY requirements.txt sdk/ /tmp/packages/
RUN python -m venv /opt/model \\
 && /opt/model/bin/python -m pip install --no-cache-dir --disable-pip-version-check \\
    -r /tmp/packages/requirements.txt /tmp/packages/*.whl

FROM ${BASE}
ENV PATH=/opt/model/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1
WORKDIR /tmp
USER 10001:10001
HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD ["python", "-m", "clipper_container", "healthy", \
"/tmp/clipper.alive"]
COPY --from=packages /opt/model /opt/model
COPY model /model
LABEL org.opencontainers.image.title="clipper model svm" \\
      org.opencontainers.image.version="3" \\
      clipper.model="svm:3" \\
      clipper.content="sha256:CONTENT" \\
      clipper.sdk="VERSION"
ENTRYPOINT ["python", "-X", "faulthandler", "-m", "clipper_container", "serve", "/model/svm-3-PACKED.pkl", "--name", "svm", \
"--version", "3", "--input", "f64[2]", "--sha256", "CONTENT", "--token-file", "/run/secrets/clipper_token", \
"--alive-file", "/tmp/clipper.alive"]
"""  # noqa: E501


def summed(rows):
    return np.asarray(rows).sum(axis=1)


def packed(thing: object, folder: Path, code: tuple[str, ...] = (), version: int = 3) -> Model:
    package = pack(thing, "svm", version, folder, code)
    return Model(
        "svm",
        version,
        InputType.parse("f64[2]"),
        target=package.target,
        sha256=package.sha256,
        code=package.code,
    )


def made(model: Model, base: str = "") -> Image:
    return image_of(
        spec_of(model, token="not-for-images", connect="unix:/here"), needs_of(model), base
    )


def folder_of(tmp_path: Path, **files: str) -> Path:
    folder = tmp_path / "code"
    for name, text in files.items():
        path = folder / name.replace("__", "/").replace("-init-", "__init__")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def test_the_dockerfile_of_a_function(tmp_path: Path) -> None:
    text = made(packed(summed, tmp_path), "registry.example/python:3").dockerfile
    masked = re.sub(r"[0-9a-f]{64}", "CONTENT", re.sub(r"svm-3-[0-9a-f]{12}", "svm-3-PACKED", text))
    assert masked.replace(f'"{clipper.__version__}"', '"VERSION"') == DOCKERFILE


def test_the_same_model_gives_the_same_bytes(tmp_path: Path) -> None:
    first, second = made(packed(summed, tmp_path / "a")), made(packed(summed, tmp_path / "b"))
    assert first.name == second.name
    assert first.context() == second.context()
    assert made(packed(summed, tmp_path / "a", version=4)).name != first.name
    assert made(packed(lambda rows: rows, tmp_path / "c")).name != first.name
    assert made(packed(summed, tmp_path / "a"), "other:1").name != first.name
    assert re.fullmatch(r"clipper/svm:3-[0-9a-f]{12}", first.name)


def test_the_context_is_a_tar_without_an_owner(tmp_path: Path) -> None:
    made_ = made(packed(summed, tmp_path))
    with tarfile.open(fileobj=io.BytesIO(made_.context())) as tar:
        members = tar.getmembers()
        assert [member.name for member in members] == sorted(made_.files)
        assert {
            (member.mtime, member.uid, member.gid, member.uname, member.mode) for member in members
        } == {(0, 0, 0, "", 0o644)}
    made_.write(tmp_path / "out")
    assert (tmp_path / "out" / "Dockerfile").read_text() == made_.dockerfile


def test_no_secret_and_nothing_of_this_host_goes_in(tmp_path: Path) -> None:
    context = made(packed(summed, tmp_path)).context()
    assert b"not-for-images" not in context
    assert b"unix:/here" not in context
    assert str(tmp_path).encode() not in context


def test_packages_are_pinned_with_all_that_comes_along(tmp_path: Path) -> None:
    from sklearn.svm import SVC

    lines = (
        made(packed(SVC().fit([[0, 0], [1, 1]], [0, 1]), tmp_path))
        .files["requirements.txt"]
        .decode()
        .splitlines()
    )
    assert lines == sorted(lines)
    names = {line.partition("==")[0] for line in lines}
    assert {
        "scikit-learn",
        "scipy",
        "joblib",
        "threadpoolctl",
        "numpy",
        "lz4",
        "msgpack",
        "cloudpickle",
    } <= names
    assert lines == [f"{name}=={importlib.metadata.version(name)}" for name in sorted(names)]
    assert "pytest" not in names


def test_what_was_requested_stays_as_it_was_requested(tmp_path: Path) -> None:
    import msgspec

    model = msgspec.structs.replace(packed(summed, tmp_path), requirements=("numpy<3", "einops"))
    lines = pinned(needs_of(model))
    assert "numpy<3" in lines
    assert "einops" in lines
    assert not any(line.startswith("numpy==") for line in lines)


def test_what_a_module_needs_goes_in_but_not_what_lies_there_by_chance(tmp_path: Path) -> None:
    folder = folder_of(
        tmp_path,
        **{
            "mine.py": "import sklearn.svm\nimport sub.deep\nopen('weights.bin')\n",
            "weights.bin": "w",
            "sub__-init-.py": "",
            "sub__deep.py": "import json\n",
            "sub__tls.key": "secret",
            "up.out": "log",
            "clipper.toml": "password",
            "out__models__svm__code__0__mine.py": "",
            "unused.py": "",
            ".env": "secret",
            "prod.env": "secret",
            "tls.key": "secret",
            "tls.pem": "secret",
            ".git__config": "secret",
            "id_rsa": "secret",
            "deployed__secrets__clipper_token": "secret",
            "venv__pyvenv.cfg": "",
            "venv__lib.py": "import torch\n",
            "__pycache____x.pyc": "c",
            "broken.py": "def (",
        },
    )
    (folder / "loop").symlink_to(folder)
    (folder / "gone").symlink_to(folder / "not-there")
    model = Model("svm", 1, InputType.parse("any"), target="mine:total", code=(str(folder),))
    found = made(model)
    assert [name for name in sorted(found.files) if name.startswith("code/")] == [
        "code/0/mine.py",
        "code/0/sub/__init__.py",
        "code/0/sub/deep.py",
        "code/0/weights.bin",
    ]
    assert (
        '"mine:total", "--name", "svm", "--version", "1", "--code", "/code/0"' in found.dockerfile
    )
    assert "COPY code /code\n" in found.dockerfile
    assert "COPY model" not in found.dockerfile
    assert b"scikit-learn==" in found.files["requirements.txt"]
    (folder / "up.out").write_text("more of it")
    (folder / "another.py").write_text("import torch\n")
    assert made(model).name == found.name  # the same code, the same tag


def test_a_file_name_that_is_not_utf_8_goes_in(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, **{"serve.sh": "#!/bin/sh\n"})
    (folder / "serve.sh").chmod(0o755)
    odd = os.fsdecode(b"weights-\xff.bin")
    (folder / odd).write_bytes(b"w")
    words = ("./serve.sh", str(folder))
    model = Model("svm", 1, InputType.parse("any"), command=words, folder=str(folder))
    found = image_of_model(model)
    place = next(name for name in found.files if name.endswith(odd))
    with tarfile.open(fileobj=io.BytesIO(found.context())) as tar:
        assert place in tar.getnames()
    found.write(tmp_path / "out")
    assert (tmp_path / "out" / place).read_bytes() == b"w"


def test_a_folder_that_is_too_much_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "CONTEXT_BYTES_MAX", 4)
    monkeypatch.setattr(image, "CONTEXT_BYTES_MAX", 4)
    folder = folder_of(tmp_path, **{"mine.py": "x = 1\n"})
    model = Model("svm", 1, InputType.parse("any"), target="mine:x", code=(str(folder),))
    with pytest.raises(PackagingError, match=re.escape(f"model 'svm:1': {folder} holds more than")):
        made(model)


def test_the_base_fits_the_python_of_the_model(tmp_path: Path) -> None:
    import msgspec

    here = packed(summed, tmp_path)
    version = "{}.{}.{}".format(*sys.version_info)
    assert f"ARG BASE=python:{version}-slim-bookworm\n" in made(here).dockerfile
    assert (
        "ARG BASE=python:3.99-slim-bookworm\n"
        in made(msgspec.structs.replace(here, python="3.99")).dockerfile
    )


@pytest.mark.parametrize(("age_s", "code"), [(0, 0), (60, 1), (None, 1)])
def test_a_container_is_healthy_while_it_is_connected(
    tmp_path: Path, age_s: float | None, code: int
) -> None:
    import os
    import time

    alive = tmp_path / "alive"
    if age_s is not None:
        alive.touch()
        then = time.clock_gettime(time.CLOCK_REALTIME) - age_s
        os.utime(alive, (then, then))
    words = [sys.executable, "-m", "clipper_container", "healthy", str(alive), "--within", "30"]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == code
    assert bool(done.stderr) == bool(code)
