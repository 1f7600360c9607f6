"""Build contexts of the images of all that is exported: of servers, of servers on Ray, and of their
models."""

import json
from collections.abc import Mapping, Sequence
from typing import Final

from clipper.deploy.docker.image import USER, Image
from clipper.deploy.needs import python_here
from clipper.deploy.packages import sdk
from clipper.settings.ports import HTTP_PORT
from clipper.types import VERSION, Model

EXTRAS: Final = ("etcd", "grpc", "redis", "onnx", "skops")  # of the one image of all exports
SERVER_IMAGE: Final = f"clipper/server:{VERSION}"
RAY_IMAGE: Final = f"clipper/ray:{VERSION}"
RAY: Final = "2.52.0"
APP: Final = "/app"  # in the image of Ray: the folder of the configuration
_TOML: Final = "/etc/clipper/clipper.toml"
_LIVE: Final = [
    "python",
    "-c",
    f"import urllib.request as r; r.urlopen('http://127.0.0.1:{HTTP_PORT}/v2/health/live',"
    " timeout=2)",
]
Files = dict[str, str | bytes]


def build_contexts(models: Mapping[str, tuple[Model, Image]], folder: str = "") -> Files:
    """Return the files from which the images of the server and of models are built.

    folder: where they are, with a slash at the end.
    """
    found: Files = {
        f"{folder}server/Dockerfile": server_dockerfile(EXTRAS),
        f"{folder}server/wheels/{sdk.WHEEL}": sdk.wheel(),
    }
    for name, (_, image) in models.items():
        found |= {f"{folder}models/{name}/{path}": data for path, data in image.files.items()}
    return found


def ray_context(files: Mapping[str, bytes], requirements: Sequence[str]) -> Files:
    """Return the files from which the image of servers on Ray is built.

    files: of the folder of the configuration, by relative path; with the code of models.
    requirements: lines for pip of what models need.
    """
    return {
        "image/Dockerfile": ray_dockerfile(),
        "image/requirements.txt": "".join(f"{line}\n" for line in requirements),
        f"image/wheels/{sdk.WHEEL}": sdk.wheel(),
        **{f"image/app/{name}": content for name, content in files.items()},
    }


def server_dockerfile(extras: Sequence[str]) -> str:
    """Return the Dockerfile of the server's image, with extras of the package."""
    some = f"[{','.join(extras)}]" if extras else ""
    what = f'"clipper-serving{some}=={VERSION}"'
    return f"""\
# The clipper server. Where no index has clipper-serving, put the wheels of `make wheels` here:
#   cp PATH-OF-THE-CHECKOUT/dist/*.whl server/wheels/
ARG BASE=python:3.11-slim-bookworm

FROM ${{BASE}} AS packages
COPY wheels/ /tmp/wheels/
RUN python -m venv /opt/server \\
 && /opt/server/bin/python -m pip install --no-cache-dir --disable-pip-version-check --find-links /tmp/wheels {what}

FROM ${{BASE}}
ENV PATH=/opt/server/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp
COPY --from=packages /opt/server /opt/server
RUN python -c "import os; os.mkdir('/state'); os.chown('/state', {USER}, {USER})"
WORKDIR /tmp
USER {USER}:{USER}
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s CMD {json.dumps(_LIVE)}
ENTRYPOINT ["clipper"]
CMD ["up", "{_TOML}"]
"""  # noqa: E501


def ray_dockerfile() -> str:
    """Return the Dockerfile of head and workers: Ray, the server, its models and what they need."""
    return f"""\
# A clipper server in Ray's own image. Where no index has clipper-serving, put the wheels of
# `make wheels` into wheels/ first:  cp PATH-OF-THE-CHECKOUT/dist/*.whl image/wheels/
ARG BASE=rayproject/ray:{RAY}-py{python_here().replace(".", "")}

FROM ${{BASE}}
COPY wheels/ /tmp/wheels/
COPY requirements.txt /tmp/requirements.txt
RUN pip install --no-cache-dir --find-links /tmp/wheels \\
    "clipper-serving[{",".join(EXTRAS)},ray]=={VERSION}" "ray[default]=={RAY}" -r /tmp/requirements.txt
COPY app {APP}
WORKDIR {APP}
"""  # noqa: E501
