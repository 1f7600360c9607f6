"""Compiles programs of the C++ and Java SDKs, once per content of their sources."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CPP = ROOT / "container_sdk" / "cpp"
JAVA = ROOT / "container_sdk" / "java"
BUILT = ROOT / "build" / "languages"
VENV_BIN = ROOT / ".venv" / "bin"
CPP_FLAGS = ("-std=c++17", "-O0", "-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def tool(name: str, hint: str = "To fetch it: python tools/fetch.py java") -> str:
    """Return the path of a compiler or of java; skip the test without it."""
    path = f"{VENV_BIN}{os.pathsep}{os.environ.get('PATH', '')}"
    found = shutil.which(name, path=path)
    if found is None:
        pytest.skip(f"no {name}. {hint}")
    return found


def cpp(source: Path, *flags: str) -> Path:
    """Return the program that a C++ file is compiled to."""
    headers = sorted(CPP.rglob("*.hpp"))
    words = [
        tool("g++", "Install g++"),
        *CPP_FLAGS,
        *flags,
        "-I",
        str(CPP / "include"),
        str(source),
    ]
    return _made(source.stem, [source, *headers], words, lambda to: ["-pthread", "-o", str(to)])


def java(folder: Path) -> Path:
    """Return a folder with the classes of the SDK and of a folder of sources."""
    sources = sorted([*(JAVA / "src").rglob("*.java"), *folder.rglob("*.java")])
    words = [tool("javac"), "-Xlint:all", "-Werror", "--release", "17", *map(str, sources)]
    return _made(f"java-{folder.name}", sources, words, lambda to: ["-d", str(to)])


def _made(name, sources, words, output):
    key = hashlib.sha256(repr(words).encode())
    for source in sources:
        key.update(source.read_bytes())
    place = BUILT / f"{name}-{key.hexdigest()[:16]}"
    if not place.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        part = BUILT / f".{place.name}.{os.getpid()}"
        subprocess.run([*words, *output(part)], check=True, timeout=300)
        part.replace(place)
    return place


def java_command(classes: Path, main: str) -> list[str]:
    """Return the command that runs a class: a small heap and the quick compiler alone, so that it
    starts fast."""
    flags = ["-Xshare:auto", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m"]
    return [tool("java"), *flags, "-cp", str(classes), main]
