"""Model repositories of other servers: the layout of files, and the list of models.

`mlserver`, `triton`: a folder per model, loaded through the repository API of the Open Inference
Protocol. `openvino` (OpenVINO Model Server), `tfserving` (TensorFlow Serving): a folder per model
and a file that lists them, which the server polls. Files are hard-linked, or copied across file
systems. A folder that has the server's layout is used as it is; only the model's name in it becomes
its id.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

from clipper_container.runtime import Artifact, ArtifactError

MARK = ".clipper"  # marks a folder that clipper created and may remove
TYPES = ("mlserver", "triton", "openvino", "tfserving")
LISTS = {"openvino": "config.json", "tfserving": "models.config"}
_ID = re.compile(r"[a-z0-9][a-z0-9._-]{0,127}")
_FILES = {
    ".onnx": "model.onnx",
    ".pt": "model.pt",
    ".plan": "model.plan",
    ".py": "model.py",
}  # as Triton names them
_PBTXT_NAME = re.compile(rb'^name\s*:\s*"[^"]*"\s*$', re.M)


class ModelRepository:
    """The folder that a server reads. there: the same folder as the server sees it. Threads: one
    at a time.
    """

    def __init__(self, type: str, folder: str, there: str = "") -> None:
        if type not in TYPES:
            raise ValueError(f"unknown kind of server {type!r}; known: {', '.join(TYPES)}.")
        self._type, self._folder, self._there = (
            type,
            Path(folder),
            there or str(Path(folder).absolute()),
        )

    def put(self, artifact: Artifact) -> Path:
        """Lay out a model's files; return its folder. Raises: ArtifactError."""
        source, place = Path(artifact.path), self.of(artifact.model)
        if not artifact.path or not source.exists():
            raise ArtifactError(f"no file or folder at {artifact.path!r}")
        self.remove(artifact.model)
        place.mkdir(parents=True)
        (place / MARK).touch()
        try:
            getattr(self, f"_put_{self._type}")(artifact, source, place)
        except BaseException:
            shutil.rmtree(place, ignore_errors=True)
            raise
        return place

    def remove(self, model: str) -> None:
        """Remove a model's folder. Raises: FileExistsError if clipper did not create it."""
        place = self.of(model)
        if (place / MARK).exists():
            shutil.rmtree(place, ignore_errors=True)
        elif place.exists():
            raise FileExistsError(f"{place} exists and was not created by clipper")

    def clear(self) -> list[str]:
        """Remove what an earlier process left; return the names of these models."""
        self._folder.mkdir(parents=True, exist_ok=True)
        left = sorted(mark.parent.name for mark in self._folder.glob(f"*/{MARK}"))
        for model in left:
            shutil.rmtree(self._folder / model, ignore_errors=True)
        return left

    def of(self, model: str) -> Path:
        """Return the folder of a model. Raises: ArtifactError for an invalid name."""
        if not _ID.fullmatch(model):
            raise ArtifactError(f"{model[:100]!r} can be no folder's name")
        return self._folder / model

    def list(self) -> None:
        """Write the file that lists all models, for servers that read one."""
        if self._type not in LISTS:
            return
        models = sorted(mark.parent.name for mark in self._folder.glob(f"*/{MARK}"))
        if self._type == "openvino":
            rows = [
                {"config": {"name": model, "base_path": f"{self._there}/{model}"}}
                for model in models
            ]
            text = json.dumps({"model_config_list": rows}, indent=2)
        else:
            one = '  config {{ name: "{0}" base_path: "{1}/{0}" model_platform: "tensorflow" }}\n'
            text = (
                "model_config_list {\n"
                + "".join(one.format(model, self._there) for model in models)
                + "}\n"
            )
        new = self._folder / f".{LISTS[self._type]}"
        new.write_text(text)
        new.replace(self._folder / LISTS[self._type])

    # -- the layout of each server

    def _put_mlserver(self, artifact: Artifact, source: Path, place: Path) -> None:
        """Lay out an MLServer model. key: its implementation (`mlserver_sklearn.SKLearnModel`),
        if `path` has no model-settings.json.
        """
        settings: dict[str, object] = {}
        if source.is_dir():
            _link(source, place)
            if (place / "model-settings.json").exists():
                settings = _object(place / "model-settings.json")
        else:
            _link(source, place / source.name)
            settings = {"parameters": {"uri": f"./{source.name}"}}
        if artifact.key:
            settings["implementation"] = artifact.key
        if "implementation" not in settings:
            raise ArtifactError(
                "an MLServer model needs key='its implementation', or a folder with a"
                " model-settings.json"
            )
        _write(
            place / "model-settings.json", json.dumps({**settings, "name": artifact.model}).encode()
        )

    def _put_triton(self, artifact: Artifact, source: Path, place: Path) -> None:
        """Lay out a Triton model. key: its backend (`onnxruntime`), if config.pbtxt is missing
        and Triton cannot tell.
        """
        if source.is_dir():
            _link(source, place)
        else:
            (place / "1").mkdir()
            _link(source, place / "1" / _FILES.get(source.suffix, source.name))
        config = place / "config.pbtxt"
        if config.exists():
            name = f'name: "{artifact.model}"'.encode()
            text, found = _PBTXT_NAME.subn(name, config.read_bytes(), count=1)
            _write(config, text if found else name + b"\n" + text)
        elif artifact.key:
            _write(
                config, f'name: "{artifact.model}"\nbackend: "{_quoted(artifact.key)}"\n'.encode()
            )

    def _put_openvino(self, artifact: Artifact, source: Path, place: Path) -> None:
        if source.is_file():
            (place / "1").mkdir()
            _link(source, place / "1" / source.name)
        elif any(entry.name.isdecimal() and entry.is_dir() for entry in source.iterdir()):
            _link(source, place)
        else:
            _link(source, place / "1")

    _put_tfserving = _put_openvino


def _link(source: Path, place: Path) -> None:
    """Link a file or folder; symbolic links inside it are followed."""
    if source.is_dir():
        shutil.copytree(source, place, copy_function=_link_file, dirs_exist_ok=True)
    else:
        _link_file(str(source), str(place))


def _link_file(source: str, place: str) -> str:
    try:
        os.link(os.path.realpath(source), place)
    except OSError:
        shutil.copy(source, place)
    return place


def _write(path: Path, content: bytes) -> None:
    """Replace a file without writing through a link into the user's own file."""
    path.unlink(missing_ok=True)
    path.write_bytes(content)


def _object(path: Path) -> dict[str, object]:
    try:
        found = json.loads(path.read_bytes())
    except ValueError as error:
        raise ArtifactError(f"model-settings.json is not JSON: {error}") from None
    if not isinstance(found, dict):
        raise ArtifactError("model-settings.json holds no object")
    return found


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ")
