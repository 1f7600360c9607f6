"""The image of a model that a program serves (`command=`), and of any model.

The context holds the files and folders that the words of the command line name, and nothing else of
this host. The program itself is one of them, or a word such as `java`, which the base image has. A
program that was compiled here runs in the base image only if its libraries are there too.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Final

from clipper.deploy.deployer import ContainerSpec, spec_of
from clipper.deploy.docker.image import (
    ALIVE_FILE,
    TOKEN_FILE,
    USER,
    Image,
    framed,
    health_check,
    image_of,
    labels,
    pairs,
)
from clipper.deploy.needs import needs_of
from clipper.deploy.packages.folders import CONTEXT_BYTES_MAX, files_under
from clipper.deploy.processes.command import program, variables
from clipper.errors import PackagingError
from clipper.types import Model

JAVA_BASE: Final = "eclipse-temurin:17-jre"
PROGRAM_BASE: Final = "debian:bookworm-slim"
HEALTHY: Final = ("sh", "-c", f'test -n "$(find {ALIVE_FILE} -mmin -1)"')
_OF_THE_IMAGE: Final = ("/usr/", "/bin/", "/sbin/", "/lib", "/etc/", "/proc/", "/dev/", "/opt/")


def image_of_model(model: Model, base: str = "") -> Image:
    """Return the image of a model of the catalog.

    base: a Python image, for models that are no programs.

    Raises: PackagingError, InvalidInput.
    """
    if model.command:
        return program_image(spec_of(model))
    return image_of(spec_of(model), needs_of(model), base)


def program_image(spec: ContainerSpec) -> Image:
    """Build the context of a program's image. Raises: PackagingError for a program that is not on
    this host, and for files that cannot be read or have the same name.
    """
    model, folder = f"{spec.name}:{spec.version}", spec.folder or os.getcwd()
    files: dict[str, bytes] = {}
    first, *rest = spec.command
    is_path = os.sep in first  # else it is found on PATH, whatever has its name here
    words = [_placed(first, folder, model, files)] if is_path else [first]
    words += [_placed(word, folder, model, files) for word in rest]
    if is_path and program(first, folder) is None:
        raise PackagingError(
            f"model '{model}': there is no program {first!r} on this host.",
            hint="Export it on the host of its server, or from the file that declares it.",
        )
    content = hashlib.sha256(
        b"".join(framed(path, files[path]) for path in sorted(files))
    ).hexdigest()
    text = _dockerfile(spec, words, bool(files), content)
    whole = hashlib.sha256((text + content).encode()).hexdigest()
    name = f"clipper/{spec.name}:{spec.version}-{whole[:12]}"
    return Image(name, {**files, "Dockerfile": text.encode()})


def _placed(word: str, folder: str, model: str, files: dict[str, bytes]) -> str:
    """Add what a word names to the files; return the word as it is in the image."""
    path = Path(os.path.abspath(os.path.join(folder, word)))
    is_there = os.path.isfile(path) or os.path.isdir(path)  # False for a word that no path can be
    if not (word and path.name) or str(path).startswith(_OF_THE_IMAGE) or not is_there:
        return word
    place = f"model/{path.name}"
    try:
        size = path.stat().st_size
        if size > CONTEXT_BYTES_MAX:
            raise PackagingError(f"model '{model}': {path} has more than 2 GiB.")
        found = (
            {f"{place}/{name}": content for name, content in files_under(path, model)}
            if path.is_dir()
            else {place: path.read_bytes()}
        )
    except OSError as error:
        raise PackagingError(f"model '{model}': cannot read {path}: {error.strerror}.") from None
    for name, content in found.items():
        if files.setdefault(name, content) != content:
            raise PackagingError(
                f"model '{model}': two words of its command name a file {path.name!r}.",
                hint="Give the files different names: they are in one folder of the image.",
            )
    return f"/{place}"


def _dockerfile(spec: ContainerSpec, words: list[str], copies: bool, content: str) -> str:
    base = JAVA_BASE if Path(words[0]).name == "java" else PROGRAM_BASE
    settings = {
        **variables(spec, 0),
        "CLIPPER_ADDRESS": "",
        "CLIPPER_TOKEN_FILE": TOKEN_FILE,
        "CLIPPER_ALIVE_FILE": ALIVE_FILE,
    }
    is_ours = words[0].startswith("/model/")
    lines = [
        f"# Model {spec.name}:{spec.version}, a program that dials in at a clipper server. Written",
        f"# by clipper; build it with  docker build -t {spec.name}:{spec.version} .",
        "# and run it with CLIPPER_ADDRESS=tcp:HOST:PORT in its environment, and the token of the",
        f"# server mounted at {TOKEN_FILE}. The base image needs the libraries of the program.",
        f"ARG BASE={base}",
        "",
        "FROM ${BASE}",
        *(["COPY model /model"] if copies else []),
        *([f"RUN chmod 755 {json.dumps(words[0])}"] if is_ours else []),
        f"WORKDIR {'/model' if copies else '/tmp'}",
        "ENV " + pairs({key: text for key, text in settings.items() if text}),
        f"USER {USER}:{USER}",
        health_check(HEALTHY),
        labels(spec, content),
        f"ENTRYPOINT {json.dumps(words)}",
    ]
    return "\n".join(lines) + "\n"
