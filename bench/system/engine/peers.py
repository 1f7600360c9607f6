"""Other people's libraries that rows stand beside: the extra `peers`. One that is not installed is
named, never left out."""

import importlib
from types import ModuleType

PIP = "pip install --group peers"


def peer(module: str) -> ModuleType | None:
    try:
        return importlib.import_module(module)
    except ImportError:
        return None


def not_installed(package: str) -> str:
    return f"{package} is not installed: {PIP}"
