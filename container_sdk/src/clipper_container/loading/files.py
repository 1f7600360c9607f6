"""Detects the kind of a model file by its ending and its bytes. Nothing is loaded and no
framework imported.
"""

from __future__ import annotations

import io
import os
import tarfile
import zipfile
from pathlib import Path, PurePosixPath

from clipper_container.loading.errors import LoadError
from clipper_container.loading.kinds import ENDINGS, KINDS

_PACKED = b"CLIPPER-MODEL "


def kind_by_name(path: str | os.PathLike[str]) -> str:
    """Return the kind of a folder by what it contains, of a file by its ending; "" if unknown."""
    for name, kind in KINDS.items():
        if kind.mark and (Path(path) / kind.mark).is_file():
            return name
    return ENDINGS.get(Path(path).suffix.lower(), "")


def marks() -> str:
    """Return the files by which folders of models are recognized, for texts of errors."""
    return " or ".join(kind.mark for kind in KINDS.values() if kind.mark)


def read(path: str | os.PathLike[str]) -> tuple[str, bytes]:
    """Return the kind and the bytes of a model file; a folder becomes a tar. Raises: LoadError,
    OSError.
    """
    kind = kind_by_name(path)
    if Path(path).is_dir():
        if not kind or not KINDS[kind].mark:
            raise LoadError(f"{str(path)!r} is a folder without {marks()}")
        return kind, tarred(Path(path))
    content = Path(path).read_bytes()
    verify(kind, content, str(path))
    return kind, content


def verify(kind: str, content: bytes, name: str) -> None:
    """Refuse bytes of another kind, and truncated files. Raises: LoadError that says what they are.

    Some parsers handle damaged files badly (they read out of bounds or exhaust memory), so obvious
    damage is found here first.
    """
    trouble = ""
    if kind == "xgboost":
        trouble = _trouble_of_xgboost(content)
    elif kind == "lightgbm":
        trouble = _trouble_of_lightgbm(content)
    elif kind in ("torchscript", "torch-export"):
        trouble = _trouble_of_torch(kind, content)
    elif kind == "pickle" and content.startswith(_PACKED):
        trouble = (
            "was packed by clipper: deploy what it was packed from, or import an exported state"
        )
    if trouble:
        raise LoadError(f"{name} {trouble}")


def _trouble_of_xgboost(content: bytes) -> str:
    is_ubj, is_json = (
        content.startswith(b"{L\0\0\0\0\0\0\0\x07learner"),
        content.lstrip()[:1] == b"{",
    )
    if not is_ubj and not (is_json and b'"learner"' in content[:4096]):
        return "is not a model of XGBoost; save one by booster.save_model('model.ubj')"
    if not content.rstrip(b" \r\n" if is_json and not is_ubj else b"").endswith(b"}"):
        return "is cut short: it does not end as a model of XGBoost does"
    return ""


def _trouble_of_lightgbm(content: bytes) -> str:
    if not content.startswith((b"tree\n", b"tree\r\n")):
        return "is not a model of LightGBM; save one by booster.save_model('model.txt')"
    if b"\nend of trees" not in content:
        return "is cut short: it lacks the end of its trees"
    return ""


def _trouble_of_torch(kind: str, content: bytes) -> str:
    how = "torch.jit.save (TorchScript)" if kind == "torchscript" else "torch.export.save"
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as parts:
            names = {name.partition("/")[2] for name in parts.namelist()}
    except (zipfile.BadZipFile, ValueError, OSError):
        return f"is damaged, or no file of PyTorch; save one by {how}"
    found = "torch-export" if "archive_format" in names or "models/model.json" in names else ""
    found = found or (
        "torchscript" if "constants.pkl" in names else "torch.save" if "data.pkl" in names else ""
    )
    if found == kind:
        return ""
    if found == "torch.save":
        return (
            "was made by torch.save: it holds weights, or a pickle. Deploy the module itself, or"
            f" save it by {how}"
        )
    if found:
        return (
            f"holds a model of kind {found}: name it {'.pt2' if found == 'torch-export' else '.pt'}"
        )
    return f"is not a model of PyTorch; save one by {how}"


# -- folders


def tarred(folder: Path) -> bytes:
    """Pack a folder as a tar; the same files give the same bytes."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                about = tarfile.TarInfo(path.relative_to(folder).as_posix())
                about.size, about.mode = path.stat().st_size, 0o600
                with path.open("rb") as file:
                    archive.addfile(about, file)
    return out.getvalue()


def unpack(content: bytes, folder: str) -> None:
    """Unpack the tar of a folder. Raises: LoadError for a tar that would write elsewhere."""
    # not extractall(filter="data"), which Python lacks before 3.11.4
    try:
        with tarfile.open(fileobj=io.BytesIO(content)) as archive:
            for about in archive:
                if not about.isfile() or not _is_inside(about.name):
                    raise LoadError(
                        f"the folder of this model cannot be unpacked: {about.name!r} is not a file"
                        " inside of it."
                    )
                file = archive.extractfile(about)
                path = Path(folder, about.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(file.read() if file else b"")
    except (tarfile.TarError, OSError) as error:
        raise LoadError(f"the folder of this model cannot be unpacked: {error}") from None


def _is_inside(name: str) -> bool:
    """Return whether a path stays in the folder that it is relative to."""
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def member(content: bytes, name: str) -> str:
    """Return the text of one file of a tar; "" if it is missing."""
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        try:
            file = archive.extractfile(name)
        except KeyError:
            return ""
        return file.read().decode("utf-8", "replace") if file else ""
