"""The folder of one server: its lock, the files of its models, and a private place for sockets."""

import contextlib
import fcntl
import os
import shutil
import tempfile
from pathlib import Path

from clipper.errors import AlreadyExists, ConfigError


class StateDir:
    """`state` names a folder, `sqlite:FILE` (then its folder), or none (memory, a URL); `folder`
    goes before it. With neither all is temporary.

    folder: None when all is temporary.  models: where packed models are kept.  environments: those
    of models.  run: a fresh private folder for sockets, removed at the end.  is_apart: whether
    `state` lies in another folder, which others may use.
    """

    def __init__(self, state: str, folder: str = "") -> None:
        self._lock = -1
        sweep()
        self.run = Path(tempfile.mkdtemp(prefix="clipper-"))
        self._alive = _marked(self.run)
        of_state = _folder_of(state)
        self.folder = place = Path(folder).absolute() if folder else of_state
        self.is_apart = of_state is not None and place != of_state
        try:
            if place is not None:
                _make(place)
                self._lock = _locked(place)
        except BaseException:
            self.close()
            raise
        self.models = (place or self.run) / "models"
        self.environments = (place or self.run) / "environments"

    def close(self) -> None:
        """Remove the run folder and release the locks. Idempotent."""
        shutil.rmtree(self.run, ignore_errors=True)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        if self._lock >= 0:
            fcntl.flock(
                self._lock, fcntl.LOCK_UN
            )  # a fork that still holds the descriptor must not keep the lock
            os.close(self._lock)
            self._lock = -1


def _marked(run: Path) -> int:
    """Lock a file in the folder of a running server and return its descriptor. The lock ends with
    the process, however that ends. The file is locked before it has its name, so that no other
    process finds it unlocked while it is being made."""
    fd = os.open(run / "alive.new", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.flock(fd, fcntl.LOCK_EX)
    os.rename(run / "alive.new", run / "alive")
    return fd


def is_alive(run: Path) -> bool:
    """Return whether the server with this private folder is alive, as far as this host's files
    tell.
    """
    try:
        fd = os.open(run / "alive", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except PermissionError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def sweep() -> int:
    """Remove the folders of this user's servers that were killed. Return how many there were."""
    found = 0
    for mark in Path(tempfile.gettempdir()).glob("clipper-*/alive"):
        with contextlib.suppress(OSError):
            fd = os.open(mark, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.getuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(mark.parent, ignore_errors=True)
                    found += 1
            finally:
                os.close(fd)
    return found


def _folder_of(state: str) -> Path | None:
    kind, colon, rest = state.partition(":")
    if state in ("", "memory") or (kind != "sqlite" and rest.startswith("//")):
        return None
    if kind == "sqlite" and colon:
        return Path(rest.removeprefix("//")).absolute().parent
    return Path(state).absolute()


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from None


def _unusable(folder: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"cannot use the state folder {folder}: {error.strerror}.",
        hint="Choose another with state=.",
    )


def _locked(folder: Path) -> int:
    """Lock the folder for one server and return the descriptor: two servers would start every
    container twice."""
    try:
        fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise _unusable(folder, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = ""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            holder = os.pread(fd, 32, 0).decode().strip()
        os.close(fd)
        holder_name = f"process {holder}" if holder else "another server"
        raise AlreadyExists(
            f"the state folder {folder} is in use by {holder_name}.",
            hint="Stop it, or choose another.",
        ) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd
