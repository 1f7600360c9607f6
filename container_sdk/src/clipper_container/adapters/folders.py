"""Folders of models, packed as a tar, unpacked for the frameworks that read folders."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

from clipper_container.loading.files import unpack


@contextmanager
def unpacked(content: bytes, framework: str) -> Iterator[str]:
    """Unpack the tar of a folder for as long as a framework reads it. Raises: LoadError."""
    folder = tempfile.mkdtemp(prefix=f"clipper-{framework}-")
    try:
        unpack(content, folder)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
