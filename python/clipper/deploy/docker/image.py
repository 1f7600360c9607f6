"""The image of a model: a readable Dockerfile and its build context.

The context holds the model and nothing else of this host: the packed file (or the code beside a
"module:attribute"), pinned packages, and this version of the container SDK. It holds no secret: the
token is mounted when a container runs. The same model gives the same bytes, so the image's name,
which ends in their hash, tells if it has been built. The Dockerfile needs no BuildKit, and no
network except for the base image and pip.
"""

import fnmatch
import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clipper.deploy.deployer import ContainerSpec, options
from clipper.deploy.needs import Needs, packages_of, python_here
from clipper.deploy.packages import sdk
from clipper.deploy.packages.pins import pinned
from clipper.errors import PackagingError
from clipper.types import VERSION

TOKEN_FILE: Final = "/run/secrets/clipper_token"
ALIVE_FILE: Final = "/tmp/clipper.alive"
USER: Final = 10001
BASE: Final = "python:{python}-slim-bookworm"
CONTEXT_BYTES_MAX: Final = 2 << 30
_LEFT_OUT: Final = (
    "__pycache__",
    "node_modules",
    "*.pyc",
    "*.pem",
    "*.key",
    "*.env",
    "secrets",  # of our exports
    "id_rsa*",
    "id_ed25519*",
    "*.egg-info",
)


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
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content)


def image_of(spec: ContainerSpec, needs: Needs, base: str = "") -> Image:
    """Build the context of a model's image.

    base: a Python image; `{python}` is replaced by the version that the model needs.

    Raises: PackagingError for a missing file or module, or too many files beside a model.
    """
    files = {f"sdk/{sdk.WHEEL}": sdk.wheel()}
    target, folders = _model(spec, needs, files)
    files["requirements.txt"] = "".join(f"{line}\n" for line in pinned(needs)).encode()
    content = hashlib.sha256(
        b"".join(_framed(path, files[path]) for path in sorted(files))
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


def _framed(path: str, content: bytes) -> bytes:
    return f"{path}\0{len(content)}\0".encode() + content


# -- contents


def _model(spec: ContainerSpec, needs: Needs, files: dict[str, bytes]) -> tuple[str, list[str]]:
    """Add the model to the files; return the target and code folders inside the image."""
    model, budget, folders = f"{spec.name}:{spec.version}", CONTEXT_BYTES_MAX, []
    for number, folder in enumerate(needs.code):
        for name, content in files_under(Path(folder), model, budget):
            files[f"code/{number}/{name}"] = content
            budget -= len(content)
        folders.append(f"/code/{number}")
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


def files_under(
    root: Path, model: str, budget: int = CONTEXT_BYTES_MAX
) -> Iterator[tuple[str, bytes]]:
    """Yield the files of a folder, without hidden files, environments, caches, and files that look
    like keys. Raises: PackagingError for more than `budget` bytes.
    """
    for folder, folders, names in os.walk(root):
        folders[:] = sorted(
            name
            for name in folders
            if _goes_in(name) and not Path(folder, name, "pyvenv.cfg").exists()
        )
        for name in sorted(filter(_goes_in, names)):
            path = Path(folder, name)
            if not path.is_file():
                continue
            budget -= path.stat().st_size
            if budget < 0:
                hint = (
                    "Put what the model imports into a folder of its own: code=[...], clipper"
                    " deploy --code FOLDER."
                )
                raise PackagingError(
                    f"model '{model}': {root} holds more than {CONTEXT_BYTES_MAX >> 20} MiB.",
                    hint=hint,
                )
            yield path.relative_to(root).as_posix(), path.read_bytes()


def _goes_in(name: str) -> bool:
    return not name.startswith(".") and not any(
        fnmatch.fnmatchcase(name, pattern) for pattern in _LEFT_OUT
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
