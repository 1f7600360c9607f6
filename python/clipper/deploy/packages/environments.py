"""Python environments of models, created from their `requirements` and shared by models with equal
ones.

Each is a folder named by a hash of its inputs: requirements, Python, SDK. A marker file, written
last, makes it valid. The builder holds a lock on a file beside it, and pip, which holds the lock
too, ends with this process. So a kill leaves at most a folder without a marker, which the next
start or build removes.
"""

import contextlib
import fcntl
import hashlib
import importlib.machinery
import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from clipper.child_environment import OF_PIP, child_environment
from clipper.deploy.packages.sdk import digest, wheel_into
from clipper.errors import DeployFailed, InvalidInput, Overloaded, ShuttingDown, without_secrets
from clipper.processes import StartCommand, Supervisor, run_once
from clipper_container import parent_death

_MARK: Final = "ready"
_FORMAT: Final = "1"
_TAIL_LINES: Final = 12
_LINES_MAX: Final = 1000
_NICE: Final = 19
_ANSWER_S: Final = 20.0  # of an interpreter that is asked for its version
OnProgress = Callable[[str], None]
_VERSION: Final = r"(?:[<>=!~]=?=?)\s*[\w.*+!][\w.*+!-]*"
# A requirement of PEP 508, without a URL, with hashes.
_PACKAGE: Final = re.compile(
    r"[A-Za-z0-9][\w.-]*\s*(?:\[[\w\s,.-]*\])?"
    rf"\s*\(?\s*(?:{_VERSION}(?:\s*,\s*{_VERSION})*)?\s*\)?"
    r"\s*(?:;[\w\s.*+'\"<>=!~()-]*?)?(?:\s+--hash=[a-z0-9]+:[0-9a-f]+)*",
    re.ASCII,
)
# Endings of files that pip takes for packages if they are in its folder.
_ARCHIVES: Final = (".whl", ".zip", ".tar", ".gz", ".tgz", ".bz2", ".tbz", ".xz", ".txz", ".lzma")


def lines_of(requirements: str | os.PathLike[str] | Sequence[str]) -> tuple[str, ...]:
    """Return pip's lines of a file or list, following `-r FILE`, without comments.

    Raises: InvalidInput for an unreadable file, and for lines that depend on a folder (`-e .`, `-c
    FILE`).
    """
    given = (
        [f"-r {os.fspath(requirements)}"]
        if isinstance(requirements, str | os.PathLike)
        else list(requirements)
    )
    found: list[str] = []
    for line in given:
        text = _uncommented(line)
        if file := _named(text, "-r", "--requirement"):
            found += _read(Path(file))
        elif text:
            found.append(text)
    for line in found:
        if (
            _named(line, "-e", "--editable")
            or _named(line, "-c", "--constraint")
            or _named(line, "-r", "--requirement")
        ):
            raise InvalidInput(
                f"requirement {line!r}: it means another thing elsewhere.",
                hint="List packages, in one file.",
            )
    if len(found) > _LINES_MAX:
        raise InvalidInput(
            f"{len(found)} requirements: at most {_LINES_MAX} are taken.",
            hint="List what the model imports.",
        )
    return tuple(found)


def check_packages(lines: Sequence[str]) -> None:
    """Raise InvalidInput for a line that is more than a package of an index and its versions.

    For lines of another process: an option of pip could read a file of this host, or send pip to
    another index, and a path or a URL could be anything.
    """
    for line in lines:
        if not _PACKAGE.fullmatch(line) or line.lower().endswith(_ARCHIVES):
            raise InvalidInput(
                f"requirement {without_secrets(line)[:80]!r}: the management API takes packages and"
                " their versions, no options, paths or URLs.",
                hint="Deploy it in the server's file or process, or set server.pip_args there.",
            )


def _read(file: Path) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise InvalidInput(
            f"requirements: cannot read {str(file)!r}: {why}.", hint="Name a file, or give a list."
        ) from None
    return [line for raw in text.replace("\\\n", " ").splitlines() if (line := _uncommented(raw))]


def _uncommented(line: str) -> str:
    return "" if line.lstrip().startswith("#") else line.partition(" #")[0].strip()


def _named(line: str, short: str, long: str) -> str:
    """Return the file of an option such as "-r x.txt", "-rx.txt" or "--requirement=x.txt"; else
    "".
    """
    for option in (long, short):
        if line.startswith(option):
            return line[len(option) :].strip(" =\t")
    return ""


class Environments:
    """Creates and removes environments. processes: runs pip. folder: holds all environments.
    pip_args: for every installation. build_s: timeout of one. env_pass: variables that pip gets
    besides the usual ones. Threads: any.
    """

    def __init__(
        self,
        processes: Supervisor,
        folder: Path,
        pip_args: Sequence[str] = (),
        build_s: float = 900.0,
        env_pass: Sequence[str] = (),
    ) -> None:
        self._processes, self.folder = processes, folder
        self._env_pass = env_pass
        self._pip_args, self._build_s = tuple(pip_args), build_s
        self._pythons: dict[str, tuple[str, str]] = {}
        self._closed = threading.Event()

    def close(self) -> None:
        """Stop running builds, which raise ShuttingDown."""
        self._closed.set()

    def key(self, lines: Sequence[str], python: str = "") -> str:
        """Return the name of an environment. Raises: InvalidInput if the Python does not exist."""
        _, version = self._python(python)
        return hashlib.sha256("\0".join((_FORMAT, version, digest(), *lines)).encode()).hexdigest()[
            :24
        ]

    def ready(self, lines: Sequence[str], python: str = "") -> str:
        """Return the interpreter of a finished environment, else ""."""
        return self._interpreter(self.key(lines, python))

    def _interpreter(self, key: str) -> str:
        place = self.folder / key
        return str(place / "bin" / "python") if (place / _MARK).exists() else ""

    def build(
        self, lines: Sequence[str], python: str = "", on_progress: OnProgress = lambda text: None
    ) -> str:
        """Create an environment if needed, or wait for another builder; return its interpreter.

        on_progress: receives pip's lines.

        Raises: DeployFailed with pip's last lines; InvalidInput; ShuttingDown after close().
        """
        key = self.key(lines, python)
        with self._alone(key) as lock:
            if there := self._interpreter(key):
                return there
            place = self.folder / key
            shutil.rmtree(place, ignore_errors=True)
            try:
                self._make(place, lines, self._python(python)[0], on_progress, lock)
            except BaseException:
                shutil.rmtree(place, ignore_errors=True)
                raise
            _put(place / _MARK, "\n".join(lines) + "\n")
        return self._interpreter(key)

    @contextmanager
    def _alone(self, key: str) -> Iterator[int]:
        """Hold the lock of an environment."""
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.folder / f"{key}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not _locks(lock):
                if self._closed.wait(0.1):
                    raise ShuttingDown("the server is being closed.")
            yield lock
        finally:
            os.close(lock)

    def _make(
        self, place: Path, lines: Sequence[str], python: str, on_progress: OnProgress, lock: int
    ) -> None:
        until = time.monotonic() + self._build_s
        runner = _pip_for_others()  # not `pip --python`: its child pip would outlive this process
        make = ["-m", "venv", *(["--without-pip"] if runner else []), str(place)]
        self._run(python, make, "making the environment failed", lines, on_progress, until, lock)
        interpreter = str(place / "bin" / "python")
        wheel = wheel_into(place / "wheels")
        (place / "requirements.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
        pip = [runner] if runner else ["-m", "pip"]
        pip += ["install", "--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        pip += [
            *self._pip_args,
            str(wheel),
            "-r",
            str(place / "requirements.txt"),
        ]
        self._run(interpreter, pip, "pip install failed", lines, on_progress, until, lock)

    def _run(
        self,
        python: str,
        words: Sequence[str],
        failed: str,
        lines: Sequence[str],
        on_progress: OnProgress,
        until: float,
        lock: int,
    ) -> None:
        """Run `python words` in an environment without packages of this one."""
        command = parent_death.command([python, "-P", *words], str(self.folder), _NICE)
        outcome = run_once(
            self._processes,
            "pip",
            StartCommand(command, self._environment(), (lock,), joins=True),
            until - time.monotonic(),
            self._closed.is_set,
            partial(_tell, on_progress),
        )
        if self._closed.is_set():
            raise ShuttingDown("the server is being closed.")
        if outcome.code == 0:
            return
        late = f" It was given server.build_s ({self._build_s:g} s)." if outcome.late else ""
        quoted = " ".join(f"'{line}'" for line in lines)
        written = [line.rstrip() for line in outcome.lines if line.strip()]
        output = "\n".join(f"  {line}" for line in written[-_TAIL_LINES:])
        raise DeployFailed(
            f"{failed}: {outcome.detail}.{late} The last lines:\n{output}\n",
            hint=(
                f"By hand: {Path(python).name} -m venv try && try/bin/pip install {quoted}   An"
                " index of your own: server.pip_args, PIP_INDEX_URL."
            ),
        )

    def _environment(self) -> dict[str, str]:
        ours = child_environment(self._env_pass, patterns=OF_PIP)
        for name in ("PYTHONPATH", "PYTHONHOME", "PYTHONSAFEPATH"):
            ours.pop(name, None)
        return {**ours, "PYTHONUNBUFFERED": "1"}

    # -- interpreters

    def _python(self, wanted: str) -> tuple[str, str]:
        """Return the interpreter for "", "3.12" or a path, and an id of it."""
        if wanted not in self._pythons:
            self._pythons[wanted] = self._find_installer(wanted)
        return self._pythons[wanted]

    def _find_installer(self, wanted: str) -> tuple[str, str]:
        path = wanted or sys.executable
        if wanted and os.sep not in wanted:
            path = shutil.which(f"python{wanted}") or ""
        command = (
            "import sys; print(sys.version_info[:2] >= (3, 11), *sys.version_info[:3],"
            " sys.base_prefix)"
        )
        outcome = None
        if path:
            asks = StartCommand([path, "-I", "-c", command], self._environment())
            outcome = run_once(self._processes, "version of Python", asks, _ANSWER_S)
            if not outcome.started and outcome.late:
                raise Overloaded(f"Python {wanted!r} is not asked: {outcome.detail}.")
        if outcome is None or outcome.code != 0 or not outcome.lines:
            hint = (
                f"Install it (apt-get install python{wanted} python{wanted}-venv), or give the path"
                " of an interpreter."
            )
            raise InvalidInput(f"no Python {wanted!r} runs here.", hint=hint)
        recent, _, version = outcome.lines[-1].partition(" ")
        if recent != "True":
            raise InvalidInput(
                f"Python {wanted!r} is older than 3.11.",
                hint="clipper-container needs 3.11 or newer.",
            )
        return path, version

    # -- removing unused environments

    def sweep(self, wanted: Iterable[tuple[Sequence[str], str]]) -> int:
        """Remove the environments that no (lines, python) in `wanted` needs, and unfinished
        ones; return the count.
        """
        if not self.folder.is_dir():
            return 0
        keys = set()
        for lines, python in wanted:
            with contextlib.suppress(InvalidInput):
                keys.add(self.key(lines, python))
        gone = 0
        for place in sorted(self.folder.iterdir()):
            if place.is_dir() and not (place.name in keys and (place / _MARK).exists()):
                gone += self._remove(place)
        return gone

    def _remove(self, place: Path) -> bool:
        lock = os.open(
            self.folder / f"{place.name}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
        )
        try:
            if not _locks(lock):  # a build is running
                return False
            (place / _MARK).unlink(missing_ok=True)
            shutil.rmtree(place, ignore_errors=True)
            return True
        finally:
            os.close(lock)


def _tell(on_progress: OnProgress, line: str) -> None:
    if text := line.rstrip():
        on_progress(text[:200])


def _pip_for_others() -> str:
    """Return the file by which other interpreters run this pip; "" if pip is missing or too old."""
    # not importlib.util.find_spec(): setuptools' hook there would replace the imported distutils
    found = importlib.machinery.PathFinder.find_spec("pip")
    runner = Path(found.origin).with_name("__pip-runner__.py") if found and found.origin else None
    return str(runner) if runner and runner.exists() else ""


def _locks(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _put(path: Path, text: str) -> None:
    """Write a file atomically, after everything before it."""
    fresh = path.with_name(f".{path.name}")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    fresh.rename(path)
