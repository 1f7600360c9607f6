"""Loads a target of the command line: `module:attribute`, a model file or folder or its URL, or a
packed file.

A packed file (`clipper deploy`) is one line of JSON with a description, then a pickle (`.pkl`) or
the bytes of a model file (`.packed`). Pickles run code, so they are opened only here, in the
model's own process, and only if their SHA-256 is the expected one.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import importlib
import json
import os
import pickle
import platform
import re
import sys
from collections.abc import Iterable, Mapping

from clipper_container.artifacts import ArtifactUrl, CachedArtifact, PullLimits, is_url, pull
from clipper_container.loading import files
from clipper_container.loading.errors import LoadError
from clipper_container.loading.kinds import ENDINGS, KINDS
from clipper_container.loading.missing_modules import DISTRIBUTIONS, explain_missing
from clipper_container.model import UserValue

MAGIC = b"CLIPPER-MODEL "
PACKED = (".pkl", ".packed")
_in_use: list[CachedArtifact] = []  # what this process serves stays in the cache
__all__ = [
    "DISTRIBUTIONS",
    "MAGIC",
    "PACKED",
    "LoadError",
    "explain",
    "load_as",
    "load_target",
    "open_data",
]


def load_target(target: str, sha256: str = "", code: Iterable[str] = ()) -> UserValue:
    """Return the object that `target` names; a URL is pulled first.

    sha256: of the whole file, in hex; empty for any. code: directories, or files whose directories,
    are put at the front of sys.path.

    Raises: LoadError, and whatever importing the user's code raises.
    """
    if is_url(target):
        target = _pulled(target)
    for entry in reversed([*code]):
        _prepend(entry if os.path.isdir(entry) else os.path.dirname(os.path.abspath(entry)))
    if target.endswith(PACKED) and _is_packed(target):
        return _load_file(target, sha256)
    if ":" not in target and files.kind_by_name(target):
        kind, content = files.read(target)
        _check(target, content, sha256)
        return _load_data(kind, content, {})
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        known = f"{', '.join(ENDINGS)}, or a folder with {files.marks()}"
        raise LoadError(
            f"target {target!r} is neither module:attribute nor the path of a model: {known}"
        )
    with contextlib.suppress(OSError):  # the folder of start may have been removed
        _prepend(os.getcwd(), last=True)
    thing: object = importlib.import_module(module)
    for name in attribute.split("."):
        try:
            thing = getattr(thing, name)
        except AttributeError:
            raise LoadError(f"module {module!r} has no attribute {attribute!r}") from None
    return thing


def _pulled(target: str) -> str:
    """Pull a URL; return the path of its file or folder."""
    reported = [0]

    def progress(done: int, total: int) -> None:
        if total > 0 and done * 10 // total > reported[0]:
            reported[0] = done * 10 // total
            print(f"pulling {done * 100 // total} % of {total} bytes", flush=True)

    _in_use.append(pull(ArtifactUrl.parse(target), PullLimits.from_environment(), progress))
    return str(_in_use[-1].path)


def _prepend(directory: str, last: bool = False) -> None:
    if directory not in sys.path:
        sys.path.insert(len(sys.path) if last else 0, directory)


def _is_packed(path: str) -> bool:
    """Return True for a packed file; also for a missing one, so that opening it reports the
    error.
    """
    if not os.path.isfile(path) or path.endswith(PACKED[1]):
        return True
    with open(path, "rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def _content(path: str, sha256: str) -> bytes:
    with open(path, "rb") as file:
        content = file.read()
    _check(path, content, sha256)
    return content


def _check(path: str, content: bytes, sha256: str) -> None:
    if sha256 and not hmac.compare_digest(hashlib.sha256(content).hexdigest(), sha256.lower()):
        raise LoadError(f"{path} is not the file that was deployed (its SHA-256 differs)")


def _load_data(kind: str, content: bytes, about: Mapping[str, UserValue]) -> UserValue:
    """Load the bytes of a model file. about: `labels` of classes, what else an `estimator` had
    beside the file, and `trusted` types, if any.
    """
    adapter = importlib.import_module(f"clipper_container.adapters.{KINDS[kind].adapter}")
    return adapter.load_file(kind, content, about)


def load_as(
    kind: str, path: str, sha256: str = "", about: Mapping[str, UserValue] = {}
) -> UserValue:
    """Load a file of a kind of `kinds.KINDS`, or `packed`. about: as in the first line of a packed
    file.

    Raises: LoadError, OSError.
    """
    if kind == "packed":
        return _load_file(path, sha256)
    content = _content(path, sha256)
    files.verify(kind, content, path)
    return _load_data(kind, content, about)


def _load_file(path: str, sha256: str) -> UserValue:
    about, body = _unpacked(path, sha256)
    kind = str(about["kind"])
    if kind in KINDS:
        return _load_data(kind, body, about)
    here = ".".join(platform.python_version_tuple()[:2])
    packed_by = str(about["python"])
    if kind != "estimator" and packed_by != here:
        raise LoadError(
            f"{path} holds code packed by Python {packed_by}, this is Python {here}. "
            f"Deploy from Python {here}, or as 'module:function'."
        )
    others = _others(about)
    try:
        thing = pickle.loads(body)  # a cloudpickle is a pickle
    except ModuleNotFoundError:
        raise
    except Exception as error:
        if others:
            raise LoadError(f"{explain(error)}. It was packed with {others}") from error
        raise
    if others:
        print(f"this model was packed with {others}", file=sys.stderr, flush=True)
    return thing


def _others(about: Mapping[str, object]) -> str:
    """Describe packages whose version differs from when the model was packed, and how to pin
    them; "" if none.
    """
    found = []
    packages = about.get("packages")
    for name, then in packages.items() if isinstance(packages, dict) else ():
        now = _installed_version(name)
        if now and now.split(".")[:2] != str(then).split(".")[:2]:
            found.append((name, str(then), now))
    differences = ", ".join(f"{name} {then} (here: {now})" for name, then, now in found)
    lines = ", ".join(f'"{name}=={then}"' for name, then, _ in found)
    return f"{differences}. The same versions: deploy with requirements=[{lines}]" if found else ""


def _installed_version(distribution: str) -> str:
    """Return the version of a distribution as the name of its folder says it, "" for an unknown
    one.

    `importlib.metadata` is asked only where no folder says it: its import takes as long as half of
    numpy's.
    """
    name = re.escape(re.sub(r"[-_.]+", "-", distribution)).replace(r"\-", "[-_.]+")
    folder_name = re.compile(rf"{name}-(\d[^-]*)\.dist-info", re.ASCII | re.IGNORECASE)
    for place in sys.path:
        with contextlib.suppress(OSError):
            for entry in os.listdir(place or "."):
                if found := folder_name.fullmatch(entry):
                    return found[1]
    import importlib.metadata

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _unpacked(path: str, sha256: str = "") -> tuple[dict[str, object], bytes]:
    """Return the description and the body of a packed file. Raises: LoadError."""
    head, _, body = _content(path, sha256).partition(b"\n")
    if not head.startswith(MAGIC):
        raise LoadError(f"{path} was not packed by clipper; deploy the model again")
    try:
        about = json.loads(head[len(MAGIC) :])
        if not isinstance(about, dict) or not {"python", "kind"} <= about.keys():
            raise ValueError("no description")
    except ValueError as error:
        raise LoadError(f"{path} is damaged in its first line") from error
    return about, body


def open_data(path: str) -> tuple[str, bytes]:
    """Return the kind and the bytes of a model file without code. Raises: LoadError for anything
    else.
    """
    if path.endswith(PACKED) and _is_packed(path):
        about, body = _unpacked(path)
        kind = str(about["kind"])
    else:
        kind, body = files.read(path)
    if kind not in KINDS or KINDS[kind].is_code:
        raise LoadError(
            f"{path} holds code; only files that are data can be inspected without running them"
        )
    return kind, body


def explain(error: BaseException) -> str:
    """Return why loading failed, in one line, with the next command if one is known."""
    if isinstance(error, ModuleNotFoundError) and error.name:
        return explain_missing(error.name)
    if isinstance(error, LoadError):
        return str(error)
    return f"{type(error).__name__}: {error}".rstrip(": ")
