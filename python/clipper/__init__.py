"""Clipper: predictions from models in any framework, each by its own deadline.

with clipper.start() as server:
    server.deploy("svm", estimator)
    app = server.app("digits", models=["svm"], slo_ms=20, default=-1)
    answer = app.predict(x).result()
"""

import os
from typing import Any

try:
    import clipper_container
    import clipper_core.engine.engine  # noqa: F401  # a core that cannot be loaded is told here, with the way to one
except ImportError as error:
    raise ImportError(
        f"{error}. Install clipper anew: in its checkout, make build, or elsewhere, pip install ."
    ) from error

from clipper.types import VERSION

if clipper_container.__version__ != VERSION:
    raise ImportError(
        f"clipper-container {clipper_container.__version__} is installed beside clipper {VERSION},"
        " which has an SDK of its own. Run: pip uninstall clipper-container"
    )

from clipper import errors
from clipper.config import Config
from clipper.config import load as load_config
from clipper.errors import ClipperError
from clipper.manage.client import Client, connect
from clipper.server import ClipperServer
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.dispatch import as_completed
from clipper.serving.query.progress import progress
from clipper.types import (
    Answer,
    Answers,
    Application,
    InputType,
    PredictionRequest,
    Similar,
    VersionedModel,
)
from clipper_core.results.future import Future

__version__ = VERSION


def start(
    config: "str | os.PathLike[str] | None" = None, *, wait: bool = True, **settings: Any
) -> ClipperServer:
    """Start a server in this process: `clipper.start()`, `clipper.start("clipper.toml")`,
    `clipper.start(state="dir")`.

    wait: until the replicas of every model that the configuration declares are connected; otherwise
    see `server.wait_ready()`. settings: any key of docs/configuration.md, by its
    name or as `section=dict(...)`. Raises ConfigError; DeployFailed when a declared model does not
    run, with its name, the cause and its container's last lines; then there is no server.
    """
    server = ClipperServer(load_config(config, **settings)).start()
    if wait:
        try:
            server.wait_ready(models=server.config.models)
        except BaseException:
            server.close(drain_s=0)
            raise
    return server


__all__ = [
    "Answer",
    "Answers",
    "Application",
    "ApplicationHandle",
    "Client",
    "ClipperError",
    "ClipperServer",
    "Config",
    "Future",
    "InputType",
    "PredictionRequest",
    "Similar",
    "VersionedModel",
    "as_completed",
    "connect",
    "errors",
    "load_config",
    "progress",
    "start",
]
