"""The build backend of clipper-serving: setuptools, and in its wheel the container SDK and the
query client.

`pip install .` must give all three, on a machine whose package index has none of them. A wheel that
held `clipper_container` itself would own the same files as the SDK's own wheel, and removing either
would break the other; and so with `clipper_client`. So they are put below `clipper/_sdk`, and a
path file, clipper_sdk.pth, appends that folder to sys.path. A clipper-container or clipper-client
that is installed by itself comes first on sys.path; the server checks that its version is the right
one.
"""

import base64
import hashlib
import os
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from setuptools import build_meta

get_requires_for_build_wheel = build_meta.get_requires_for_build_wheel
get_requires_for_build_sdist = build_meta.get_requires_for_build_sdist
get_requires_for_build_editable = build_meta.get_requires_for_build_editable
prepare_metadata_for_build_wheel = build_meta.prepare_metadata_for_build_wheel
prepare_metadata_for_build_editable = build_meta.prepare_metadata_for_build_editable
build_sdist = build_meta.build_sdist
build_editable = build_meta.build_editable

ROOT = Path(__file__).resolve().parent.parent
ADDED = (
    ROOT / "container_sdk" / "src" / "clipper_container",
    ROOT / "python" / "clipper_client",
)
PLACE = "clipper/_sdk"
THEN = (2020, 1, 1, 0, 0, 0)  # the same files give the same bytes


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """-> the wheel's name. What an earlier build left in build/ does not get into it."""
    with tempfile.TemporaryDirectory(prefix="clipper-build-") as folder:
        settings = Path(folder) / "settings.cfg"
        settings.write_text(f"[build]\nbuild_base = {folder}/build\n")
        before = os.environ.get("DIST_EXTRA_CONFIG")
        os.environ["DIST_EXTRA_CONFIG"] = str(settings)
        try:
            name: str = build_meta.build_wheel(folder, config_settings, metadata_directory)
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before
        add_sdk(Path(folder) / name, Path(wheel_directory) / name)
    return name


def add_sdk(wheel: Path, to: Path) -> None:
    """Write the wheel again, with the other packages in it."""
    with zipfile.ZipFile(wheel) as source, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as target:
        record = next(name for name in source.namelist() if name.endswith(".dist-info/RECORD"))
        lines = [
            line
            for line in source.read(record).decode().splitlines()
            if line and not line.startswith(f"{record},")
        ]
        for entry in source.infolist():
            if entry.filename != record:
                target.writestr(entry, source.read(entry))
        for name, data in added():
            target.writestr(_entry(name), data)
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            lines.append(f"{name},sha256={digest},{len(data)}")
        target.writestr(_entry(record), "\n".join([*lines, f"{record},,", ""]))


def added() -> Iterator[tuple[str, bytes]]:
    yield "clipper_sdk.pth", f"{PLACE}\n".encode()
    for package in ADDED:
        for path in sorted(package.rglob("*")):
            inside = path.relative_to(package)
            if path.suffix in (".py", ".typed") and inside.parts[0] != "build":
                yield f"{PLACE}/{package.name}/{inside.as_posix()}", path.read_bytes()


def _entry(name: str) -> zipfile.ZipInfo:
    entry = zipfile.ZipInfo(name, THEN)
    entry.external_attr = 0o644 << 16
    entry.compress_type = zipfile.ZIP_DEFLATED
    return entry
