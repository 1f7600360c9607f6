"""Models that are data, not code: ONNX and skops bytes. They are looked at in a process of their own before they are deployed."""

import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from clipper.deploy.process import describe_exit
from clipper.errors import InvalidInput, PackagingError, ShuttingDown
from clipper_container.adapters.function import MAGIC, PACKED, RAW

KINDS: Final = tuple(RAW.values())
SUFFIX: Final = PACKED[-1]
_LOOK_S: Final = 0.1


@dataclass(frozen=True, slots=True)
class Artifact:
    """A model as bytes. kind: "onnx" or "skops".  trusted: types a skops file may ask for, beyond those skops trusts itself."""

    kind: str
    data: bytes
    trusted: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise InvalidInput(f"kind={self.kind!r}: a model that is data is one of {', '.join(KINDS)}.")

    def packed(self, name: str) -> bytes:
        """The file that a container loads; the same for the same bytes, name and trusted types."""
        python = ".".join(platform.python_version_tuple()[:2])
        about = {"format": 1, "kind": self.kind, "name": name, "python": python, "trusted": sorted(self.trusted)}
        return MAGIC + json.dumps(about).encode() + b"\n" + self.data

    def sha256(self, name: str) -> str:
        """Of `packed`, in hex: what the catalog keeps of a deployed version."""
        return hashlib.sha256(self.packed(name)).hexdigest()


def is_data(thing: Any) -> bool:
    """Whether `thing` is an Artifact, or names a file with one of its endings."""
    return isinstance(thing, Artifact) or (isinstance(thing, str | os.PathLike) and Path(thing).suffix in RAW)


def artifact_of(thing: Any) -> Artifact:
    """The Artifact that `thing` is or names. Raises: PackagingError for a file that cannot be read."""
    if isinstance(thing, Artifact):
        return thing
    try:
        return Artifact(RAW[Path(thing).suffix], Path(thing).read_bytes())
    except OSError as error:
        raise PackagingError(f"cannot read {str(thing)!r}: {error.strerror}.") from None


class Checked(msgspec.Struct, frozen=True):
    """What a check found: the types of a row and of an output, "any" where the file does not say."""

    ok: bool
    kind: str = ""
    input: str = "any"
    output: str = "any"
    reason: str = ""


def check(artifact: Artifact, name: str, patience_s: float, is_over: Callable[[], bool] = lambda: False) -> Checked:
    """Verify and load a model in a process that is thrown away: what hangs, crashes or eats memory there harms nobody.

    is_over: whether nobody waits any more.
    Raises: PackagingError with the reason: no such format, invalid, asks for untrusted types, does not load in time;
    ShuttingDown when it is over.
    """
    with tempfile.TemporaryDirectory(prefix="clipper-check-") as folder:
        path = Path(folder) / f"{name}{SUFFIX}"
        path.write_bytes(artifact.packed(name))
        words = [sys.executable, "-m", "clipper_container", "check", str(path), "--die-with-parent", str(os.getpid())]
        with subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            try:
                said = _await(process, name, time.monotonic() + patience_s, is_over)
            finally:
                process.kill()
    found = _read(process.returncode, *said)
    if not found.ok:
        raise PackagingError(f"model {name!r} is refused: {found.reason}.")
    return found


def _await(
    process: subprocess.Popen[bytes], name: str, until_s: float, is_over: Callable[[], bool]
) -> tuple[bytes, bytes]:
    """What it wrote until it ended."""
    while True:
        try:
            return process.communicate(timeout=_LOOK_S)
        except subprocess.TimeoutExpired:
            if time.monotonic() >= until_s:
                raise PackagingError(f"model {name!r} did not load in time.", hint="Raise server.load_s.") from None
            if is_over():
                raise ShuttingDown(f"the check of model {name!r} was given up.") from None


def _read(code: int, out: bytes, err: bytes) -> Checked:
    lines = out.strip().splitlines()
    try:
        return msgspec.json.decode(lines[-1] if lines else b"", type=Checked)
    except msgspec.MsgspecError:
        last = err.decode(errors="replace").strip().splitlines()[-1:]
        return Checked(False, reason=f"its check ended by {describe_exit(code)}{': ' + last[0] if last else ''}")
