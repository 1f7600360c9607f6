"""Settings of Docker and Podman: `[docker]`."""

from typing import Annotated

import msgspec

from clipper.settings.setting import about


class DockerSettings(msgspec.Struct, frozen=True):
    """Settings for models with `deployer = "docker"` or `"podman"`."""

    socket: Annotated[
        str,
        about(
            "`unix:/path` of the engine's socket; empty: DOCKER_HOST (podman: "
            "CONTAINER_HOST), else the usual path"
        ),
    ] = ""
    base: Annotated[
        str,
        about(
            "base image of model images, with Python; `{python}` is the version that the "
            "model needs"
        ),
    ] = "python:{python}-slim-bookworm"
    network: Annotated[
        str,
        about(
            "network of containers; empty: `none` when they connect to a unix socket, else `host`"
        ),
    ] = ""
    build_network: Annotated[
        str,
        about(
            "network during image builds, from which pip must reach its index; empty: the "
            "engine's default"
        ),
    ] = ""
    build_s: Annotated[
        float, about("timeout for building the image of a model", "s", ge=1, le=86_400)
    ] = 1800.0
    answer_s: Annotated[
        float, about("timeout of all other requests to the engine", "s", ge=1, le=3600)
    ] = 60.0
    tmp_mib: Annotated[
        int,
        about(
            "size of a container's /tmp, the only place it can write to", "MiB", ge=1, le=1 << 20
        ),
    ] = 256
    processes_max: Annotated[
        int,
        about(
            "processes and threads of a container; more cannot be started",
            "processes",
            ge=8,
            le=1 << 20,
        ),
    ] = 1024
    log_mib: Annotated[
        int,
        about(
            "output of a container that Docker keeps; older output is dropped",
            "MiB",
            ge=1,
            le=10_240,
        ),
    ] = 10
