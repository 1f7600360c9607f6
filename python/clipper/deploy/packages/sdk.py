"""The container SDK as a wheel, built from the files of this process, so that no index is
needed. The same files give the same bytes.
"""

import base64
import functools
import hashlib
import importlib.metadata
import io
import zipfile
from pathlib import Path
from typing import Final

import clipper_container
from clipper.types import VERSION

_REQUIRES: Final = ("numpy>=1.24", "lz4>=4", "msgpack>=1.0")
_THEN: Final = (2020, 1, 1, 0, 0, 0)
WHEEL: Final = f"clipper_container-{VERSION}-py3-none-any.whl"


def wheel_into(folder: Path) -> Path:
    """Write the wheel; return its path."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / WHEEL
    path.write_bytes(wheel())
    return path


def digest() -> str:
    """Return the SHA-256 of the wheel in hex."""
    return hashlib.sha256(wheel()).hexdigest()


@functools.cache
def wheel() -> bytes:
    """Return the wheel's bytes. Threads: any."""
    root = Path(next(iter(clipper_container.__path__)))
    files = {
        f"clipper_container/{path.relative_to(root).as_posix()}": path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    about = f"clipper_container-{VERSION}.dist-info"
    lines = [
        "Metadata-Version: 2.1",
        "Name: clipper-container",
        f"Version: {VERSION}",
        "Requires-Python: >=3.11",
    ]
    files[f"{about}/METADATA"] = "\n".join(
        [*lines, *(f"Requires-Dist: {one}" for one in _requires()), ""]
    ).encode()
    files[f"{about}/WHEEL"] = (
        b"Wheel-Version: 1.0\nGenerator: clipper\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    files[f"{about}/entry_points.txt"] = (
        b"[console_scripts]\nclipper-container = clipper_container.__main__:command\n"
    )
    record = f"{about}/RECORD"
    files[record] = "".join(
        [*(f"{name},{_hash(data)},{len(data)}\n" for name, data in files.items()), f"{record},,\n"]
    ).encode()
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            info = zipfile.ZipInfo(name, _THEN)
            info.external_attr = 0o644 << 16
            archive.writestr(info, data, zipfile.ZIP_DEFLATED)
    return out.getvalue()


def _requires() -> tuple[str, ...]:
    try:
        found = importlib.metadata.requires("clipper-container") or ()
    except importlib.metadata.PackageNotFoundError:
        found = ()
    return tuple(one for one in found if "extra" not in one.partition(";")[2]) or _REQUIRES


def _hash(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
