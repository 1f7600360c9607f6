"""Advice about a module that cannot be imported.

Only a package of a known name is advised to be installed: under any other name an index may hold
the package of a stranger, above all where the user's own module is misspelled.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import platform
import sys
from collections.abc import Iterable
from pathlib import Path

# module -> distribution, where the names differ
DISTRIBUTIONS = {
    "sklearn": "scikit-learn",
    "cv2": "opencv-python",
    "PIL": "pillow",
    "yaml": "pyyaml",
    "mlflow": "mlflow-skinny",
}
KNOWN = frozenset(
    {
        *DISTRIBUTIONS,
        *("catboost", "cloudpickle", "cupy", "datasets", "fastai", "flax", "gensim", "grpc"),
        *("imblearn", "jax", "joblib", "keras", "lightgbm", "matplotlib", "msgpack", "msgspec"),
        *("networkx", "nltk", "numba", "numpy", "onnx", "onnxruntime", "pandas", "polars"),
        *("prophet", "pyarrow", "pydantic", "redis", "requests", "scipy", "seaborn", "shap"),
        *("skl2onnx", "skops", "spacy", "statsmodels", "tensorflow", "timm", "tokenizers"),
        *("torch", "torchvision", "tqdm", "transformers", "xgboost", "sentence_transformers"),
    }
)
_DISTRIBUTION = {
    **DISTRIBUTIONS,
    "grpc": "grpcio",
    "imblearn": "imbalanced-learn",
    "sentence_transformers": "sentence-transformers",
}
_ENTRIES_MAX = 10_000


def explain_missing(name: str, folders: Iterable[str] = ()) -> str:
    """Return why a module cannot be imported, and the next step.

    folders: where the user's own modules are; sys.path and the current folder are looked in, too.
    """
    top = name.partition(".")[0]
    text = f"No module named '{name}'."
    places = _places(folders)
    for place in places:
        if os.path.exists(os.path.join(place, top + ".py")):
            return (
                f"{text} It is a local file; packed by value on the next deploy, or add"
                f' code=["{top}.py"].'
            )
    python = ".".join(platform.python_version_tuple()[:2])
    venv = os.path.basename(sys.prefix)
    if top in KNOWN:
        package = _DISTRIBUTION.get(top, top)
        run = f'Run: pip install {package}, or deploy with requirements=["{package}"]'
        return f"{text} '{top}' is not installed in venv {venv} (Python {python}). {run}"
    near = difflib.get_close_matches(top, _modules_in(places), 1, 0.6)
    there = f" (there is {near[0]}.py)" if near else ""
    where = places[0] if places else "any folder"
    return (
        f"{text} There is no {top}.py in {where}{there}, and no package of that name in venv"
        f" {venv} (Python {python}). A module of yours in another folder: code=[FOLDER]; a package:"
        " requirements=[NAME]"
    )


def _places(folders: Iterable[str]) -> list[str]:
    """Return the folders that may hold the user's own modules, without copies of sources."""
    own = [*folders]
    with contextlib.suppress(OSError):  # it was removed
        own.append(os.getcwd())
    own += (entry for entry in sys.path if entry)
    inside = (sys.prefix + os.sep, sys.base_prefix + os.sep)
    found = [os.path.abspath(entry) for entry in own if not entry.startswith(inside)]
    return [
        place
        for place in dict.fromkeys(found)
        if os.path.isdir(place) and not os.path.dirname(place).endswith(".code")
    ]


def _modules_in(places: Iterable[str]) -> list[str]:
    """Return the names of the modules that lie in these folders."""
    found = []
    for place in places:
        try:
            names = os.listdir(place)[:_ENTRIES_MAX]
        except OSError:
            continue
        found += [Path(name).stem for name in names if name.endswith(".py")]
    return found
