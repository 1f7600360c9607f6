"""The folder of one server: its lock, the files of its models, and a private place for sockets."""

import contextlib
import fcntl
import os
import resource
import shutil
import tempfile
from pathlib import Path
from typing import Final

from clipper.errors import AlreadyExists, ClipperError, ConfigError

FILE_BYTES_MIN: Final = 1 << 20  # of a database, a journal or a log


class StateDir:
    """`state` names a folder, `sqlite:FILE` (then its folder), or none (memory, a URL); `folder`
    goes before it. With neither all is temporary.

    folder: None when all is temporary.  models: where packed models are kept.  environments: those
    of models.  run: a fresh private folder for sockets, removed at the end.  is_apart: whether
    `state` lies in another folder, which others may use.
    """

    def __init__(self, state: str, folder: str = "") -> None:
        self._lock = -1
        _check_file_size()
        self.run = _private_folder()
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

    @property
    def packed_models(self) -> int:
        """The number of files of models that the folder has from before."""
        try:
            return sum(not one.name.startswith(".") for one in self.models.iterdir())
        except OSError:
            return 0

    def close(self) -> None:
        """Remove the run folder and release the locks. Idempotent."""
        shutil.rmtree(self.run, ignore_errors=True)
        if self._alive >= 0:
            os.close(self._alive)
            self._alive = -1
        if self._lock >= 0:
            # a fork that still holds the descriptor must not keep the lock
            fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = -1


def _check_file_size() -> None:
    """Raise ConfigError if this process may only write files that are too small for a server."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < FILE_BYTES_MIN:
        raise ConfigError(
            f"this process may write files of {limit} bytes, and this server needs"
            f" {FILE_BYTES_MIN}.",
            hint="Raise the limit: ulimit -f unlimited.",
        )


def _private_folder() -> Path:
    """Create the folder of a server's sockets; remove those of servers that were killed. Raises
    ConfigError."""
    try:
        sweep()
        return Path(tempfile.mkdtemp(prefix="clipper-"))
    except OSError as error:
        raise ConfigError(
            f"no folder for temporary files can be used: {error.strerror or error}.",
            hint="Set TMPDIR to a folder that this user may write, with room in it.",
        ) from None


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
        return is_locked(run / "alive")
    except PermissionError:
        return True
    except OSError:
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
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)  # it has learned states and models
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
    holder = ""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        holder = (folder / "lock").read_text()[:32].strip()
    holder = f"process {holder}" if holder else "another server"
    taken = f"the state folder {folder} is in use by {holder}."
    try:
        fd = lock_file(folder / "lock", AlreadyExists(taken, hint="Stop it, or choose another."))
    except OSError as error:
        raise _unusable(folder, error) from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
    return fd


# -- locks on files, which end with the process that holds them, however that ends


def write_private(path: Path, data: bytes) -> None:
    """Write a file that only its owner can read. Whoever reads it meanwhile gets what it was, or
    what it becomes. Raises OSError.
    """
    fresh = path.with_name(f"{path.name}.new")
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
    with open(os.open(fresh, flags, 0o600), "wb") as file:
        file.write(data)
    fresh.replace(path)


def lock_file(path: Path, taken: ClipperError) -> int:
    """Lock a file, which is created if necessary, and return its descriptor: to close it ends the
    lock. Raises `taken` if another process holds the lock; OSError.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if isinstance(error, BlockingIOError):
            raise taken from None
        raise
    return fd


def is_locked(path: Path) -> bool:
    """Return whether a process holds the lock of a file. Raises OSError if it cannot be opened."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False
