"""A Python image made of this machine's own files, where no registry can be reached: the
interpreter, its libraries, a shell, and the installed packages as wheels that pip finds without a
network."""

import base64
import csv
import hashlib
import importlib.metadata
import io
import os
import platform
import re
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

LEFT_OUT = (
    "site-packages",
    "test",
    "tests",
    "idlelib",
    "tkinter",
    "turtledemo",
    "__pycache__",
    "lib2to3",
)
NOT_SHIPPED = ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")
TOOLS = ("/bin/sh", "/usr/bin/sleep", "/usr/bin/chmod")
SETTINGS = (
    "ENV PATH=/usr/local/bin:/usr/bin:/bin",
    "ENV PIP_NO_INDEX=1",
    "ENV PIP_FIND_LINKS=/wheels",
    "ENV LD_LIBRARY_PATH=/usr/local/lib",
    "CMD python3",
)


def base_tar(packages: Iterable[str]) -> bytes:
    """Return the tar for `docker import`."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for path, content, mode in _files(packages):
            about = tarfile.TarInfo(path)
            about.size, about.mode = len(content), mode
            tar.addfile(about, io.BytesIO(content))
        for folder, mode in (
            ("tmp", 0o1777),
            ("run", 0o755),
            ("proc", 0o755),
            ("dev", 0o755),
            ("sys", 0o755),
        ):
            about = tarfile.TarInfo(folder)
            about.type, about.mode = tarfile.DIRTYPE, mode
            tar.addfile(about)
    return out.getvalue()


def _files(packages: Iterable[str]) -> Iterator[tuple[str, bytes, int]]:
    python = Path(os.path.realpath(sys.executable))
    yield "usr/local/bin/python3", python.read_bytes(), 0o755
    yield "usr/local/bin/python", python.read_bytes(), 0o755
    version = ".".join(platform.python_version_tuple()[:2])
    library = Path(sys.base_prefix, "lib", f"python{version}")
    natives = [python, *map(Path, TOOLS)]
    for folder, folders, names in os.walk(library):
        folders[:] = [
            name for name in folders if name not in LEFT_OUT and not name.startswith("config-")
        ]
        for name in names:
            path = Path(folder, name)
            natives += [path] if path.suffix == ".so" else []
            yield (
                f"usr/local/lib/python{version}/{path.relative_to(library)}",
                path.read_bytes(),
                0o644,
            )
    for path in Path("/usr/share/python-wheels").glob("*.whl"):  # of Debian's ensurepip
        yield str(path)[1:], path.read_bytes(), 0o644
    for tool in TOOLS:
        yield tool[1:], Path(tool).read_bytes(), 0o755
    wheels = [wheel(name) for name in packages]
    for shared in sorted({*_libraries([*natives, *_gcc()]), *map(str, _gcc())}):
        own = shared.startswith(sys.base_prefix)
        where = "usr/local/lib/" + Path(shared).name if own else shared[1:]
        yield where, Path(shared).read_bytes(), 0o755
    yield "etc/passwd", b"root:x:0:0:root:/:/bin/sh\n", 0o644
    for name, content in wheels:
        yield f"wheels/{name}", content, 0o644


def _gcc() -> list[Path]:
    """Return the libraries that wheels need beside libc."""
    names = (
        "libstdc++.so.6",
        "libgcc_s.so.1",
        "libz.so.1",
        "librt.so.1",
        "libpthread.so.0",
        "libdl.so.2",
        "libutil.so.1",
    )
    found = subprocess.run(
        ["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=True
    ).stdout
    return [
        Path(match[1])
        for name in names
        if (match := re.search(rf"{re.escape(name)} .*=> (\S+)", found))
    ]


def _libraries(natives: list[Path]) -> set[str]:
    found = subprocess.run(["ldd", *map(str, natives)], capture_output=True, text=True).stdout
    return set(re.findall(r"(?:=> |^\s+)(/\S+) \(0x", found, re.MULTILINE))


def dependencies(lines: Iterable[str]) -> set[str]:
    """Return the names of the packages of others that packages need, in turn. lines: as for pip, so
    also with extras. Raises importlib.metadata.PackageNotFoundError."""
    waiting = [*map(Requirement, lines)]
    found: set[tuple[str, str]] = set()  # names and extras
    while waiting:
        one = waiting.pop()
        new = {(canonicalize_name(one.name), extra) for extra in ("", *one.extras)} - found
        found |= new
        for name, extra in new:
            needed = map(Requirement, importlib.metadata.requires(name) or [])
            waiting += [
                each for each in needed if not each.marker or each.marker.evaluate({"extra": extra})
            ]
    return {name for name, _ in found if not name.startswith("clipper-")}


def wheel(name: str) -> tuple[str, bytes]:
    """Rebuild the wheel of an installed package; return its path."""
    found = importlib.metadata.distribution(name)
    tags = [
        line.partition(": ")[2]
        for line in (found.read_text("WHEEL") or "").splitlines()
        if line.startswith("Tag: ")
    ]
    folder = f"{re.sub('[-.]+', '_', found.metadata['Name'])}-{found.version}"
    info = next(str(path.parent) for path in found.files or () if path.name == "METADATA")
    rows, out = [], io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for path in found.files or ():
            if path.parts[0] == ".." or path.suffix == ".pyc" or path.name in NOT_SHIPPED:
                continue
            content = Path(path.locate()).read_bytes()
            digest = (
                base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            )
            rows.append((str(path), f"sha256={digest}", len(content)))
            archive.writestr(zipfile.ZipInfo(str(path)), content)
        record = io.StringIO()
        csv.writer(record).writerows([*rows, (f"{info}/RECORD", "", "")])
        archive.writestr(zipfile.ZipInfo(f"{info}/RECORD"), record.getvalue())
    return f"{folder}-{tags[0]}.whl", out.getvalue()
