"""Models saved by their frameworks, from a file, folder or object.

Models from untrusted sources are verified in a separate process before they are deployed.
"""

import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from clipper.deploy.needs import version_of
from clipper.deploy.processes.process import describe_exit
from clipper.errors import InvalidInput, PackagingError, ShuttingDown
from clipper.types import UserValue
from clipper_container.adapters import mlflow
from clipper_container.artifacts import is_url
from clipper_container.loading import files
from clipper_container.loading.errors import LoadError
from clipper_container.loading.targets import MAGIC, PACKED

KINDS: Final = (
    "onnx",
    "skops",
)  # kinds with parsers that are safe for untrusted files; streams accept only these
ENDINGS: Final = tuple(files.ENDINGS)
SUFFIX: Final = PACKED[-1]
_FLAVOURS: Final = {
    "onnx": ("onnx", "onnxruntime"),
    "pytorch": ("torch",),
    "sklearn": ("scikit-learn",),
}
_CHECK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model as bytes.

    kind: "onnx", "skops", "xgboost", "lightgbm", "torchscript", "torch-export", "pickle" or
    "mlflow". trusted: types that a skops file may use beyond those skops trusts. labels: one per
    class, of a classifier of xgboost or lightgbm.
    """

    kind: str
    data: bytes
    trusted: tuple[str, ...] = ()
    labels: tuple[object, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in files.KINDS:
            raise InvalidInput(
                f"kind={self.kind!r}: a model's file is one of {', '.join(files.KINDS)}."
            )

    @property
    def is_code(self) -> bool:
        """Return True if loading the model may run code."""
        return self.kind in files.CODE

    def packed(self, name: str) -> bytes:
        """Return the file that a container loads. The same bytes, name and trusted types give
        the same file.
        """
        python = ".".join(platform.python_version_tuple()[:2])
        about = {
            "format": 1,
            "kind": self.kind,
            "name": name,
            "python": python,
            "trusted": sorted(self.trusted),
        }
        about |= {"labels": self.labels} if self.labels is not None else {}
        about |= {"packages": _flavoured(self.data)} if self.kind == "mlflow" else {}
        return MAGIC + json.dumps(about).encode() + b"\n" + self.data

    def sha256(self, name: str) -> str:
        """Return the SHA-256 of `packed` in hex, which the catalog stores for a deployed
        version."""
        return hashlib.sha256(self.packed(name)).hexdigest()


def is_data(thing: object) -> bool:
    """Return True for an Artifact, the path or URL of a model file or folder, or an object that its
    framework can save.
    """
    if isinstance(thing, str | os.PathLike):
        if is_url(thing):
            return True
        return is_registered(thing) or (":" not in str(thing) and bool(files.kind_by_name(thing)))
    return isinstance(thing, Artifact) or _saver_of(thing) is not None


def is_registered(thing: object) -> bool:
    """Return True for a name in MLflow's registry, such as `models:/fraud@champion`."""
    return isinstance(thing, str) and thing.startswith("models:/")


def artifact_of(thing: object) -> Artifact:
    """Convert `thing` to an Artifact. Raises: PackagingError for an unreadable or invalid file."""
    if isinstance(thing, Artifact):
        return thing
    if not isinstance(thing, str | os.PathLike):
        save = _saver_of(thing)
        if save is None:
            raise PackagingError(f"a {type(thing).__name__} is no model's file.")
        return save(thing)
    try:
        return Artifact(*files.read(_fetched(str(thing)) if is_registered(thing) else thing))
    except OSError as error:
        raise PackagingError(f"cannot read {str(thing)!r}: {error.strerror}.") from None
    except LoadError as error:
        raise PackagingError(f"cannot deploy {error}.") from None


# -- objects that their frameworks save


def _saver_of(thing: object) -> Callable[[object], Artifact] | None:
    """Return the function that saves an object, or None. Does not import frameworks."""
    if _is_of(thing, "xgboost", "Booster", "XGBModel"):
        return _saved_xgboost
    if _is_of(thing, "lightgbm", "Booster") or (
        _is_of(thing, "lightgbm", "LGBMModel") and _plain(_labels_of(thing))
    ):
        return _saved_lightgbm
    if _is_of(thing, "torch.jit", "ScriptModule"):
        return _saved_torchscript
    if _is_of(thing, "torch.export", "ExportedProgram"):
        return _saved_export
    return None


def _is_of(thing: object, module: str, *names: str) -> bool:
    kinds = (getattr(sys.modules.get(module), name, None) for name in names)
    return any(isinstance(thing, kind) for kind in kinds if kind is not None)


def _labels_of(estimator: object) -> list[object] | None:
    found = getattr(estimator, "classes_", None)
    return None if found is None else list(found.tolist())


def _plain(labels: list[object] | None) -> bool:
    return labels is None or all(isinstance(label, bool | int | float | str) for label in labels)


def _saved_xgboost(thing: UserValue) -> Artifact:
    booster = thing.get_booster() if hasattr(thing, "get_booster") else thing
    labels = _labels_of(thing) if hasattr(thing, "get_booster") else None
    return Artifact(
        "xgboost",
        bytes(booster.save_raw(raw_format="ubj")),
        labels=None if labels is None else tuple(labels),
    )


def _saved_lightgbm(thing: UserValue) -> Artifact:
    booster: UserValue = getattr(thing, "booster_", thing)
    labels = _labels_of(thing)
    data = booster.model_to_string(num_iteration=booster.best_iteration).encode()
    return Artifact("lightgbm", data, labels=None if labels is None else tuple(labels))


def _saved_torchscript(thing: object) -> Artifact:
    out = io.BytesIO()
    sys.modules["torch"].jit.save(thing, out)
    return Artifact("torchscript", out.getvalue())


def _saved_export(thing: object) -> Artifact:
    out = io.BytesIO()
    sys.modules["torch"].export.save(thing, out)
    return Artifact("torch-export", out.getvalue())


# -- MLflow


def _fetched(name: str) -> str:
    """Download a model of MLflow's registry; return its folder. Raises: PackagingError."""
    try:
        from mlflow.artifacts import download_artifacts
    except ModuleNotFoundError:
        raise PackagingError(
            f"{name!r} is in MLflow's registry, and mlflow is not installed here. Run: pip install"
            " mlflow-skinny"
        ) from None
    try:
        return str(download_artifacts(artifact_uri=name))
    except Exception as error:
        raise PackagingError(
            f"MLflow's registry does not give {name!r}: {str(error)[:500]}. It is searched for"
            " at MLFLOW_TRACKING_URI."
        ) from None


def _flavoured(data: bytes) -> dict[str, str]:
    """Return the packages of a folder's flavour, at the versions installed here."""
    about = files.member(data, "MLmodel")
    flavour = mlflow.flavour(about)
    names = [
        *_FLAVOURS.get(flavour, (flavour,) if flavour else ()),
        "mlflow",
        "mlflow-skinny",
        "pandas",
    ]
    names += ["skops"] if re.search(r"^\s*serialization_format:\s*skops\s*$", about, re.M) else []
    return {name: version for name in names if (version := version_of(name))}


class Checked(msgspec.Struct, frozen=True):
    """Result of a check: the types of a row and of an output, "any" if the file does not say."""

    ok: bool
    kind: str = ""
    input: str = "any"
    output: str = "any"
    reason: str = ""


def check(
    artifact: Artifact, name: str, patience_s: float, is_over: Callable[[], bool] = lambda: False
) -> Checked:
    """Verify and load a model in a temporary process, so that a hang, a crash or excessive memory
    is harmless.

    is_over: returns True when the result is no longer needed.

    Raises: PackagingError with the reason; ShuttingDown when is_over() is True.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-check-") as folder:
        path = Path(folder) / f"{name}{SUFFIX}"
        path.write_bytes(artifact.packed(name))
        words = [
            sys.executable,
            "-m",
            "clipper_container",
            "check",
            str(path),
            "--die-with-parent",
            str(os.getpid()),
        ]
        with subprocess.Popen(
            words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process:
            try:
                output = _await(process, name, time.monotonic() + patience_s, is_over)
            finally:
                process.kill()
    found = _read(process.returncode, *output)
    if not found.ok:
        raise PackagingError(f"model {name!r} is refused: {found.reason}.")
    return found


def _await(
    process: subprocess.Popen[bytes], name: str, until_s: float, is_over: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """Return the output of the process when it has ended."""
    while True:
        try:
            return process.communicate(timeout=_CHECK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until_s:
                raise PackagingError(
                    f"model {name!r} did not load in time.", hint="Raise server.load_s."
                ) from None
            if is_over():
                raise ShuttingDown(f"the check of model {name!r} was given up.") from None


def _read(code: int, out: bytes, err: bytes) -> Checked:
    lines = out.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=Checked)
    except msgspec.MsgspecError:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        return Checked(
            False,
            reason=f"its check ended by {describe_exit(code)}{': ' + last[0] if last else ''}",
        )
