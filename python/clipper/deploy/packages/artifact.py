"""Models saved by their frameworks, from a file, folder or object.

Models from untrusted sources are verified in a separate process before they are deployed.
"""

import difflib
import hashlib
import io
import json
import os
import platform
import re
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import msgspec

from clipper.child_environment import child_environment
from clipper.deploy.needs import version_of
from clipper.errors import InvalidInput, Overloaded, PackagingError, ShuttingDown
from clipper.processes import Outcome, StartCommand, Supervisor, run_once
from clipper.types import UserValue
from clipper_container.adapters import (
    catboost,
    keras,
    lightgbm,
    mlflow,
    sentences,
    transformers,
    xgboost,
)
from clipper_container.adapters.classes import are_plain, labels_of
from clipper_container.artifacts import is_url
from clipper_container.loading import files
from clipper_container.loading.errors import LoadError
from clipper_container.loading.kinds import ENDINGS as BY_ENDING
from clipper_container.loading.kinds import KINDS as MODEL_KINDS
from clipper_container.loading.targets import MAGIC, PACKED
from clipper_container.model import is_own_estimator

KINDS: Final = (
    "onnx",
    "skops",
)  # kinds with parsers that are safe for untrusted files; streams accept only these
ENDINGS: Final = tuple(BY_ENDING)
SUFFIX: Final = PACKED[-1]
_FLAVOURS: Final = {
    "onnx": ("onnx", "onnxruntime"),
    "pytorch": ("torch",),
    "sklearn": ("scikit-learn",),
}


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model as bytes.

    kind: a name in `clipper_container.loading.kinds.KINDS`, such as "onnx". trusted: types that a
    skops file may use beyond those skops trusts. labels: one per class, of a classifier of xgboost
    or lightgbm. estimator: settings that the predict() of the estimator that made such a file uses
    besides it, such as {"type": "regressor", "missing": -999.0} for xgboost.
    """

    kind: str
    data: bytes
    trusted: tuple[str, ...] = ()
    labels: tuple[object, ...] | None = None
    estimator: Mapping[str, UserValue] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in MODEL_KINDS:
            raise InvalidInput(
                f"kind={self.kind!r}: a model's file is one of {', '.join(MODEL_KINDS)}."
            )

    @property
    def is_code(self) -> bool:
        """Return True if loading the model may run code."""
        return MODEL_KINDS[self.kind].is_code

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
        about |= {"estimator": dict(sorted(self.estimator.items()))} if self.estimator else {}
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
        try:
            return save(thing)
        except LoadError as error:
            raise PackagingError(f"cannot deploy a {type(thing).__name__}: {error}.") from None
    try:
        if not is_registered(thing):
            return Artifact(*files.read(thing))
        with tempfile.TemporaryDirectory(prefix="clipper-mlflow-") as place:
            return Artifact(*files.read(_fetched(str(thing), place)))
    except OSError as error:
        near = _near(Path(thing)) if isinstance(error, FileNotFoundError) else ""
        folder = Path(thing).absolute().parent
        raise PackagingError(
            f"cannot read {str(thing)!r} in {folder}: {error.strerror}{near}."
        ) from None
    except LoadError as error:
        raise PackagingError(f"cannot deploy {error}.") from None


def trusting(thing: object, trusted: Sequence[str]) -> Artifact:
    """Return a .skops file that may use these types, beyond those that skops trusts.

    Raises: InvalidInput for anything else, PackagingError for an unreadable file.
    """
    is_path = isinstance(thing, str | os.PathLike) and not is_url(thing) and is_data(thing)
    artifact = artifact_of(thing) if is_path or isinstance(thing, Artifact) else None
    if artifact is None or artifact.kind != "skops":
        raise InvalidInput(
            "trusted names types of a .skops file, and this is none.", hint="Leave trusted out."
        )
    return replace(artifact, trusted=tuple(trusted))


def _near(path: Path) -> str:
    """Return the hint of an error that names a file of a similar name; empty if there is none."""
    try:
        names = [one.name for one in path.absolute().parent.iterdir()]
    except OSError:
        return ""
    close = difflib.get_close_matches(path.name, names, 1, 0.6)
    return f" (there is {close[0]})" if close else ""


# -- objects that their frameworks save


def _is_of(module: str, name: str) -> Callable[[object], bool]:
    """Return a function that tells objects of a class, of a framework that may not be imported."""

    def is_of(thing: object) -> bool:
        kind = getattr(sys.modules.get(module), name, None)
        return kind is not None and isinstance(thing, kind)

    return is_of


def _is_xgboost(thing: object) -> bool:
    return is_own_estimator(thing, "xgboost", "XGBModel")


def _is_lightgbm(thing: object) -> bool:
    return is_own_estimator(thing, "lightgbm", "LGBMModel") and are_plain(
        lightgbm.predicted_labels(thing)
    )


def _is_catboost(thing: object) -> bool:
    return is_own_estimator(thing, "catboost", "CatBoost")


def _saved_xgboost(thing: UserValue) -> Artifact:
    if not hasattr(thing, "get_booster"):
        return Artifact("xgboost", bytes(thing.save_raw(raw_format="ubj")))
    labels = labels_of(thing)
    return Artifact(
        "xgboost",
        bytes(thing.get_booster().save_raw(raw_format="ubj")),
        labels=None if labels is None else tuple(labels),
        estimator=xgboost.facts_of(thing),
    )


def _saved_lightgbm(thing: UserValue) -> Artifact:
    if not hasattr(thing, "booster_"):
        return Artifact("lightgbm", lightgbm.text_of(thing))
    labels = lightgbm.predicted_labels(thing)
    return Artifact(
        "lightgbm",
        lightgbm.text_of(thing.booster_),
        labels=None if labels is None else tuple(labels),
        estimator=lightgbm.facts_of(thing),
    )


def _saved_catboost(thing: UserValue) -> Artifact:
    return Artifact("catboost", catboost.bytes_of(thing), estimator=catboost.facts_of(thing))


def _saved_keras(thing: UserValue) -> Artifact:
    return Artifact("keras", keras.bytes_of(thing))


def _saved_sentences(thing: UserValue) -> Artifact:
    return Artifact("sentence-transformers", sentences.bytes_of(thing))


def _saved_pipeline(thing: UserValue) -> Artifact:
    return Artifact("transformers", transformers.bytes_of(thing))


def _saved_torchscript(thing: object) -> Artifact:
    out = io.BytesIO()
    sys.modules["torch"].jit.save(thing, out)
    return Artifact("torchscript", out.getvalue())


def _saved_export(thing: object) -> Artifact:
    out = io.BytesIO()
    sys.modules["torch"].export.save(thing, out)
    return Artifact("torch-export", out.getvalue())


# which objects a function saves
_SAVERS: Final[tuple[tuple[Callable[[object], bool], Callable[[object], Artifact]], ...]] = (
    (_is_of("xgboost", "Booster"), _saved_xgboost),
    (_is_xgboost, _saved_xgboost),
    (_is_of("lightgbm", "Booster"), _saved_lightgbm),
    (_is_lightgbm, _saved_lightgbm),
    (_is_catboost, _saved_catboost),
    (_is_of("keras", "Model"), _saved_keras),
    (_is_of("sentence_transformers", "SentenceTransformer"), _saved_sentences),
    (_is_of("transformers", "Pipeline"), _saved_pipeline),
    (_is_of("torch.jit", "ScriptModule"), _saved_torchscript),
    (_is_of("torch.export", "ExportedProgram"), _saved_export),
)


def _saver_of(thing: object) -> Callable[[object], Artifact] | None:
    """Return the function that saves an object, or None. Does not import frameworks."""
    return next((save for is_its, save in _SAVERS if is_its(thing)), None)


# -- MLflow


def _fetched(name: str, place: str) -> str:
    """Download a model of MLflow's registry into a folder; return its own folder. Raises:
    PackagingError."""
    try:
        from mlflow.artifacts import download_artifacts
    except ModuleNotFoundError:
        raise PackagingError(
            f"{name!r} is in MLflow's registry, and mlflow is not installed here. Run: pip install"
            " mlflow-skinny"
        ) from None
    try:
        return str(download_artifacts(artifact_uri=name, dst_path=place))
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
    processes: Supervisor,
    artifact: Artifact,
    name: str,
    patience_s: float,
    is_over: Callable[[], bool] | None = None,
) -> Checked:
    """Verify and load a model in a temporary process, so that a hang, a crash or excessive memory
    is harmless.

    processes: runs it. is_over: returns True when the result is no longer needed.

    Raises: PackagingError with the reason; Overloaded when no process could be started;
    ShuttingDown when is_over() is True.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-check-") as folder:
        path, result = Path(folder) / f"{name}{SUFFIX}", Path(folder) / "result.json"
        path.write_bytes(artifact.packed(name))
        words = [sys.executable, "-P", "-m", "clipper_container", "check", str(path)]
        words += ["--result", str(result), "--die-with-parent", str(os.getpid())]
        command = StartCommand(words, child_environment(), joins=True)
        outcome = run_once(processes, f"check of {name}", command, patience_s, is_over)
        found = _read(result, outcome)
    if not outcome.started:
        raise Overloaded(f"model {name!r} is not checked: {outcome.detail}.")
    if outcome.late:
        raise PackagingError(f"model {name!r} did not load in time.", hint="Raise server.load_s.")
    if outcome.code is None:
        raise ShuttingDown(f"the check of model {name!r} was given up.")
    if not found.ok:
        raise PackagingError(f"model {name!r} is refused: {found.reason}.")
    return found


def _read(result: Path, outcome: Outcome) -> Checked:
    try:
        return msgspec.json.decode(result.read_bytes(), type=Checked)
    except (OSError, msgspec.MsgspecError):
        last = f": {outcome.lines[-1].strip()}" if outcome.lines else ""
        return Checked(False, reason=f"its check ended by {outcome.detail}{last}")
