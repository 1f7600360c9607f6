"""What can be set of Docker and podman: `[docker]` of a file."""

from typing import Annotated

import msgspec

from clipper.setting import about


class DockerSettings(msgspec.Struct, frozen=True):
    """For models with `deployer = "docker"` or `"podman"`."""

    socket: Annotated[
        str,
        about(
            "`unix:/path` of the engine; empty: DOCKER_HOST (podman: CONTAINER_HOST), else where it"
            " usually is"
        ),
    ] = ""
    base: Annotated[
        str,
        about(
            "the image that models start from, with Python in it; `{python}` is the version that"
            " the model needs"
        ),
    ] = "python:{python}-slim-bookworm"
    network: Annotated[
        str, about("of containers; empty: `none` when they dial in at a unix socket, else `host`")
    ] = ""
    build_network: Annotated[
        str,
        about(
            "while an image is built: pip must reach its index there; empty for the engine's own"
        ),
    ] = ""
    build_s: Annotated[
        float, about("time that the image of a model has to be built", "s", ge=1, le=86_400)
    ] = 1800.0
    answer_s: Annotated[
        float, about("time that the engine has to answer anything else", "s", ge=1, le=3600)
    ] = 60.0
    tmp_mib: Annotated[
        int, about("/tmp of a container, the only place it can write", "MiB", ge=1, le=1 << 20)
    ] = 256
    processes_max: Annotated[
        int, about("processes and threads of a container", "processes", ge=8, le=1 << 20)
    ] = 1024
    log_mib: Annotated[
        int, about("what Docker keeps of the output of a container", "MiB", ge=1, le=10_240)
    ] = 10
