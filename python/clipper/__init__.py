"""Clipper: predictions from models in any framework, each by its own deadline.

with clipper.start() as server:
    server.deploy("svm", estimator)
    app = server.app("digits", models=["svm"], slo_ms=20, default=-1)
    answer = app.predict(x).result()

Importing this package is cheap: its parts, numpy and the compiled core are imported when one of the
names below is first used.
"""

import os
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

import clipper_container
from clipper.version import VERSION

if clipper_container.__version__ != VERSION:
    raise ImportError(
        f"clipper-container {clipper_container.__version__} is installed beside clipper {VERSION}."
        f" Run: pip install clipper-container=={VERSION}"
    )

if TYPE_CHECKING:
    from clipper.config import Config
    from clipper.config import load as load_config
    from clipper.errors import ClipperError
    from clipper.manage.client import connect
    from clipper.options import Environment, Resources, TableAccess
    from clipper.server import ClipperServer
    from clipper.serving.query.application import ApplicationHandle
    from clipper.serving.query.dispatch import as_completed
    from clipper.serving.query.progress import progress
    from clipper.types import (
        Answer,
        AnswerPart,
        Answers,
        Application,
        Batching,
        InputType,
        PartsFuture,
        PredictionRequest,
        Similar,
        VersionedModel,
    )
    from clipper_client import AsyncClient, Client
    from clipper_core.results.future import Future

__version__ = VERSION

_PLACES = {
    "clipper.config": ("Config", "load"),
    "clipper.errors": ("ClipperError",),
    "clipper.manage.client": ("connect",),
    "clipper.options": ("Environment", "Resources", "TableAccess"),
    "clipper.server": ("ClipperServer",),
    "clipper.serving.query.application": ("ApplicationHandle",),
    "clipper.serving.query.dispatch": ("as_completed",),
    "clipper.serving.query.progress": ("progress",),
    "clipper.types": (
        "Answer",
        "AnswerPart",
        "Answers",
        "Application",
        "Batching",
        "InputType",
        "PartsFuture",
        "PredictionRequest",
        "Similar",
        "VersionedModel",
    ),
    "clipper_client": ("AsyncClient", "Client"),
    "clipper_core.results.future": ("Future",),
}
_PUBLIC = {name: (module, name) for module, names in _PLACES.items() for name in names}
_PUBLIC["load_config"] = _PUBLIC.pop("load")
_ELSEWHERE = (
    "Run it on Linux, for example in a container (docs/images.md), and query it from here:"
    " pip install clipper-client"
)
_SUBMODULES = ("catalog", "config", "errors", "options", "selection", "server", "store", "types")


def __getattr__(name: str) -> Any:
    """Import a public name at its first use. Raises ImportError when the core cannot be loaded, and
    for what belongs to the server elsewhere than on Linux."""
    if name in _SUBMODULES:
        return import_module(f"clipper.{name}")
    if name not in _PUBLIC:
        raise AttributeError(f"module 'clipper' has no attribute {name!r}")
    module, attribute = _PUBLIC[name]
    try:
        found = getattr(import_module(module), attribute)
    except ImportError as error:
        if sys.platform != "linux":
            raise ImportError(
                f"clipper.{name} is part of the server, which does not run on {sys.platform}."
                f" {_ELSEWHERE}"
            ) from error
        if not (error.name or "").startswith("clipper_core"):
            raise
        raise ImportError(
            f"{error}. Install clipper again: in its checkout, make build; elsewhere, pip install"
            f" --force-reinstall --no-deps clipper-serving=={VERSION}"
        ) from error
    if module == "clipper_client":
        _check_client()
    globals()[name] = found
    return found


def _check_client() -> None:
    """Raise ImportError for a query client of another version."""
    version = import_module("clipper_client").__version__
    if version != VERSION:
        raise ImportError(
            f"clipper-client {version} is installed beside clipper {VERSION}."
            f" Run: pip install clipper-client=={VERSION}"
        )


def __dir__() -> list[str]:
    return sorted({*globals(), *_PUBLIC})


def start(
    config: "str | os.PathLike[str] | None" = None, *, wait: bool = True, **settings: object
) -> "ClipperServer":
    """Start a server in this process.

    Examples: `clipper.start()`, `clipper.start("clipper.toml")`, `clipper.start(state="dir")`.

    config: a TOML file. settings: any key of the configuration (docs/operating.md), by its name or
    as `section=dict(...)`. wait: return when the replicas of every declared model are connected;
    otherwise see `server.wait_ready()`. Raises ConfigError; DeployFailed when a declared model does
    not run, with its name, the cause and its container's last lines; then no server is left;
    NotStarted elsewhere than on Linux.

    In IPython, a cell that runs again closes the servers that it has started before.
    """
    if sys.platform != "linux":
        raise import_module("clipper.errors").NotStarted(
            f"A clipper server does not run on {sys.platform}.", hint=_ELSEWHERE
        )
    server_class, load = __getattr__("ClipperServer"), __getattr__("load_config")
    cells = (
        import_module("clipper.notebook.cells").cells_of_session() if _is_interactive() else None
    )
    loaded = load(config, **settings)
    if cells is not None:
        cells.close_earlier()
    server: ClipperServer = server_class(loaded).start()
    if cells is not None:
        cells.started(server)
    if wait:
        try:
            server.wait_ready(models=server.config.models)
        except BaseException:
            server.close(drain_s=0)
            raise
    return server


def _is_interactive() -> bool:
    """Return whether this is a session of IPython, such as a notebook."""
    return "IPython" in sys.modules


__all__ = [
    "Answer",
    "AnswerPart",
    "Answers",
    "Application",
    "ApplicationHandle",
    "AsyncClient",
    "Batching",
    "Client",
    "ClipperError",
    "ClipperServer",
    "Config",
    "Environment",
    "Future",
    "InputType",
    "PartsFuture",
    "PredictionRequest",
    "Resources",
    "Similar",
    "TableAccess",
    "VersionedModel",
    "as_completed",
    "connect",
    "errors",
    "load_config",
    "progress",
    "start",
]
