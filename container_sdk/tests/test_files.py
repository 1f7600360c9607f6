"""Folders of models travel as a tar, and are unpacked nowhere else than in their folder."""

import io
import tarfile
from pathlib import Path

import pytest

from clipper_container.loading.errors import LoadError
from clipper_container.loading.files import unpack


def tar(*members: tuple[str, bytes, bytes]) -> bytes:
    """Return a tar of (name, type, content)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as archive:
        for name, kind, content in members:
            about = tarfile.TarInfo(name)
            about.type, about.size, about.linkname = kind, len(content), "/etc/passwd"
            archive.addfile(about, io.BytesIO(content))
    return out.getvalue()


def test_files_of_a_folder_are_unpacked(tmp_path: Path) -> None:
    file = tarfile.REGTYPE
    unpack(tar(("MLmodel", file, b"x"), ("data/model.bin", file, b"")), str(tmp_path))
    assert (tmp_path / "MLmodel").read_bytes() == b"x"
    assert (tmp_path / "data" / "model.bin").read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("/tmp/outside", tarfile.REGTYPE),
        ("../outside", tarfile.REGTYPE),
        ("a/../../outside", tarfile.REGTYPE),
        ("link", tarfile.SYMTYPE),
        ("link", tarfile.LNKTYPE),
        ("device", tarfile.CHRTYPE),
        ("pipe", tarfile.FIFOTYPE),
    ],
)
def test_a_tar_that_would_write_elsewhere_is_refused(
    tmp_path: Path, name: str, kind: bytes
) -> None:
    folder = tmp_path / "inside"
    with pytest.raises(LoadError, match="is not a file inside of it"):
        unpack(tar((name, kind, b"")), str(folder))
    assert [*tmp_path.rglob("*")] == []


def test_what_is_no_tar_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="cannot be unpacked"):
        unpack(b"no tar" * 200, str(tmp_path))
