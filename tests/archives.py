"""Archives that tests unpack."""

import tarfile
from pathlib import Path


def unpack(archive: tarfile.TarFile, folder: Path) -> None:
    """Unpack a tar into a folder, without what would be outside of it where Python can tell."""
    if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
        archive.extractall(folder, filter="data")
    else:
        archive.extractall(folder)
