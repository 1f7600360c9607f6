"""The build backend of clipper-serving: setuptools. What an earlier build left in build/ does not
get into a wheel. setup.py and tools/build_core.py compile the core."""

import os
import tempfile
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


def build_wheel(
    wheel_directory: str, config_settings: Any = None, metadata_directory: str | None = None
) -> str:
    """Build the wheel in a folder of its own; return its name."""
    with tempfile.TemporaryDirectory(prefix="clipper-build-") as folder:
        settings = Path(folder) / "settings.cfg"
        settings.write_text(f"[build]\nbuild_base = {folder}/build\n")
        before = os.environ.get("DIST_EXTRA_CONFIG")
        os.environ["DIST_EXTRA_CONFIG"] = str(settings)
        try:
            name: str = build_meta.build_wheel(wheel_directory, config_settings, metadata_directory)
        finally:
            os.environ.pop("DIST_EXTRA_CONFIG")
            if before is not None:
                os.environ["DIST_EXTRA_CONFIG"] = before
    return name
