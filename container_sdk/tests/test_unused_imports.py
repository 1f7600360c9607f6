"""Array libraries that skops would import by the way, and never uses."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from clipper_container.loading.unused_imports import without_array_libraries

PLACE = "sklearn.externals.array_api_compat"


def test_adapters_are_hidden_within_and_found_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [*sys.modules]:
        if name.partition(".")[0] == "sklearn":
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    folder = tmp_path.joinpath(*PLACE.split("."))
    for name in ("numpy", "cupy", "dask", "torch"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").touch()
    for part in (folder, folder.parent, folder.parent.parent):
        (part / "__init__.py").touch()
    kept = ModuleType(f"{PLACE}.dask")
    monkeypatch.setitem(sys.modules, kept.__name__, kept)
    with without_array_libraries():
        importlib.import_module(f"{PLACE}.numpy")
        for name in ("cupy", "torch"):
            with pytest.raises(ModuleNotFoundError, match=name):
                importlib.import_module(f"{PLACE}.{name}")
        assert importlib.import_module(kept.__name__) is kept, "it was imported before"
    for name in ("cupy", "torch"):
        assert importlib.import_module(f"{PLACE}.{name}").__file__
    assert importlib.import_module(kept.__name__) is kept
