"""The image of a model: a readable Dockerfile and its build context.

The context holds the model and nothing else of this host: the packed file (or the code beside a
"module:attribute"), pinned packages, and this version of the container SDK. It holds no secret: the
token is mounted when a container runs. The same model gives the same bytes, so the image's name,
which ends in their hash, tells if it has been built. The Dockerfile needs no BuildKit, and no
network except for the base image and pip.
"""

import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.deploy.deployer import ContainerSpec, options
from clipper.deploy.needs import Needs, packages_of, python_here
from clipper.deploy.packages import sdk
from clipper.deploy.packages.folders import CONTEXT_BYTES_MAX, contents_of
from clipper.deploy.packages.pins import pinned
from clipper.errors import PackagingError
from clipper.types import VERSION

TOKEN_FILE: Final = "/run/secrets/clipper_token"
ALIVE_FILE: Final = "/tmp/clipper.alive"
USER: Final = 10001
BASE: Final = "python:{python}-slim-bookworm"


@dataclass(frozen=True, slots=True)
class Image:
    """A build context. name: with its tag, `clipper/svm:3-0a1b2c3d4e5f`. files: by path,
    including the Dockerfile.
    """

    name: str
    files: Mapping[str, bytes]

    @property
    def dockerfile(self) -> str:
        """Return the text of the Dockerfile."""
        return self.files["Dockerfile"].decode()

    def context(self) -> bytes:
        """Return the files as a tar; the same files give the same bytes."""
        out = io.BytesIO()
        with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path in sorted(self.files):
                about = tarfile.TarInfo(path)
                about.size, about.mode = len(self.files[path]), 0o644
                tar.addfile(about, io.BytesIO(self.files[path]))
        return out.getvalue()

    def write(self, folder: Path) -> None:
        """Write the files into a folder."""
        write_files(folder, self.files)


def write_files(folder: Path, files: Mapping[str, str | bytes]) -> None:
    """Write files below a folder, by their relative paths.

    All users may read them, whatever the umask is: an image keeps the modes of the files that it is
    built from, and its processes run as another user.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder
        for part in Path(name).parent.parts:
            path /= part
            if not path.is_dir():
                path.mkdir()
                path.chmod(0o755)
        path = folder / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        path.chmod(path.stat().st_mode & 0o100 | 0o644)


def image_of(spec: ContainerSpec, needs: Needs, base: str = "") -> Image:
    """Build the context of a model's image.

    base: a Python image; `{python}` is replaced by the version that the model needs.

    Raises: PackagingError for a missing file or module, or too many files beside a model.
    """
    files = {f"sdk/{sdk.WHEEL}": sdk.wheel()}
    target, folders = _model(spec, needs, files)
    files["requirements.txt"] = "".join(f"{line}\n" for line in pinned(needs)).encode()
    content = hashlib.sha256(
        b"".join(framed(path, files[path]) for path in sorted(files))
    ).hexdigest()
    text = _dockerfile(
        spec, (base or BASE).format(python=_version(needs)), target, folders, content
    )
    files["Dockerfile"] = text.encode()
    whole = hashlib.sha256((text + content).encode()).hexdigest()
    return Image(f"clipper/{spec.name}:{spec.version}-{whole[:12]}", files)


def _version(needs: Needs) -> str:
    """Return the full Python version if it is the running one, else the minor version."""
    other = needs.python and "/" not in needs.python and needs.python != python_here()
    return needs.python if other else platform.python_version()


def framed(path: str, content: bytes) -> bytes:
    """Return a file's path, which need not be UTF-8, its size and its content, for a digest."""
    return os.fsencode(path) + f"\0{len(content)}\0".encode() + content


# -- contents


def _model(spec: ContainerSpec, needs: Needs, files: dict[str, bytes]) -> tuple[str, list[str]]:
    """Add the model to the files; return the target and code folders inside the image."""
    model, budget = f"{spec.name}:{spec.version}", CONTEXT_BYTES_MAX
    folders: list[str] = []
    for root, names in needs.sources().files.items():
        for name, content in contents_of(root, names, model, budget):
            files[f"code/{len(folders)}/{name}"] = content
            budget -= len(content)
        folders.append(f"/code/{len(folders)}")
    if needs.is_pulled:
        return needs.target, folders
    if not needs.is_file:
        _check_module(needs, model)
        return needs.target, folders
    path = Path(needs.target)
    try:
        files[f"model/{path.name}"] = path.read_bytes()
    except OSError as error:
        hint = "Deploy the model again."
        raise PackagingError(
            f"model '{model}': cannot read {path}: {error.strerror}.", hint=hint
        ) from None
    return f"/model/{path.name}", folders


def _check_module(needs: Needs, model: str) -> None:
    """Refuse a "module:attribute" whose module would not be in the image, unless requirements
    may provide it.
    """
    module = needs.module
    if (
        needs.requirements
        or module in sys.stdlib_module_names
        or module == "clipper_container"
        or packages_of([module])
    ):
        return
    if not any(
        Path(folder, f"{module}.py").is_file() or Path(folder, module).is_dir()
        for folder in needs.code
    ):
        searched = ", ".join(needs.code) or "it has none"
        raise PackagingError(
            f"model '{model}': the module {module!r} of {needs.target!r} is in no folder of its"
            f" code ({searched}) and in no installed package.",
            hint=(
                "Deploy it with the folder that holds the module: code=[...], clipper deploy --code"
                " FOLDER."
            ),
        )


# -- the text


def _dockerfile(
    spec: ContainerSpec, base: str, target: str, folders: list[str], content: str
) -> str:
    words = [
        "python",
        "-X",
        "faulthandler",
        "-m",
        "clipper_container",
        "serve",
        target,
        *options(spec),
    ]
    words += [word for folder in folders for word in ("--code", folder)]
    words += ["--token-file", TOKEN_FILE, "--alive-file", ALIVE_FILE]
    probe = ["python", "-m", "clipper_container", "healthy", ALIVE_FILE]
    copies = ["COPY model /model"] if target.startswith("/model/") else []
    copies += ["COPY code /code"] if folders else []
    parts = [
        (
            f"# Model {spec.name}:{spec.version} as a container that dials in at a clipper server."
            " Written by clipper; build it with"
        ),
        f"#   docker build -t {spec.name}:{spec.version} .",
        "# and run it with --connect tcp:HOST:PORT, the token of the server mounted at",
        f"# {TOKEN_FILE}.",
        f"ARG BASE={base}",
        "",
        "FROM ${BASE} AS packages",
        "COPY requirements.txt sdk/ /tmp/packages/",
        "RUN python -m venv /opt/model \\",
        " && /opt/model/bin/python -m pip install --no-cache-dir --disable-pip-version-check \\",
        "    -r /tmp/packages/requirements.txt /tmp/packages/*.whl",
        "",
        "FROM ${BASE}",
        "ENV PATH=/opt/model/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1",
        "WORKDIR /tmp",
        f"USER {USER}:{USER}",
        health_check(probe),
        "COPY --from=packages /opt/model /opt/model",
        *copies,
        labels(spec, content),
        f"ENTRYPOINT {json.dumps(words)}",
    ]
    return "\n".join(parts) + "\n"


def labels(spec: ContainerSpec, content: str) -> str:
    """Return the LABEL instruction of a model's image. content: hash of what it is built from."""
    return "LABEL " + pairs(
        {
            "org.opencontainers.image.title": f"clipper model {spec.name}",
            "org.opencontainers.image.version": str(spec.version),
            "clipper.model": f"{spec.name}:{spec.version}",
            "clipper.content": f"sha256:{content}",
            "clipper.sdk": VERSION,
        }
    )


def health_check(command: Sequence[str]) -> str:
    """Return the HEALTHCHECK instruction that runs a command."""
    return f"HEALTHCHECK --interval=10s --timeout=5s --start-period=120s CMD {json.dumps(command)}"


def pairs(values: Mapping[str, str]) -> str:
    """Write values for ENV and LABEL, where a dollar would begin a variable."""
    return " \\\n      ".join(
        f"{key}={json.dumps(value, ensure_ascii=False).replace('$', chr(92) + '$')}"
        for key, value in values.items()
    )
