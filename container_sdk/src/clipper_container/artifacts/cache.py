"""The cache of pulled models on disk, shared by all processes of a host that name its folder.

    objects/SHA256/NAME   a complete file or folder, never changed
    used/SHA256           its lock, held shared while it is in use; its time is its last use
    urls/KEY.json         what a URL last gave: ETag and SHA-256
    pulling/KEY/          files of an unfinished pull; pulling/KEY.lock is held by who pulls

KEY is a hash of the URL. An object appears by one rename, when its content has been checked. Locks
are flock(2), so a killed process leaves none.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

CHECK_S = 0.1  # between looks at a lock that another process holds


@dataclass(slots=True)
class CachedArtifact:
    """A pulled model. path: its file or folder. sha256: of the file; of a folder: of its files'
    SHA-256 and paths. etag: as the source gave it, "" if none. size_bytes: of all files.

    It stays in the cache until `close()`.
    """

    path: Path
    sha256: str
    etag: str
    size_bytes: int
    lock: int = -1

    def close(self) -> None:
        """Allow the cache to remove it."""
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> CachedArtifact:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ArtifactCache:
    """A folder of pulled models; the least recently used go first, none that is in use.

    Threads and processes: any. Raises: OSError when the folder cannot be written.
    """

    def __init__(self, folder: Path, bytes_max: int) -> None:
        self.folder, self.bytes_max = folder, bytes_max
        for name in ("objects", "used", "urls", "pulling"):
            (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)

    # -- complete objects

    def find(self, sha256: str, etag: str = "") -> CachedArtifact | None:
        """Return an object that is in the cache, and keep it there; None if it is not."""
        if not sha256 or not (self.folder / "objects" / sha256).is_dir():
            return None
        lock = self._locked(self.folder / "used" / sha256, fcntl.LOCK_SH)
        try:
            names = sorted((self.folder / "objects" / sha256).iterdir())
        except FileNotFoundError:
            names = []
        if not names:
            os.close(lock)
            return None
        os.utime(lock)
        return CachedArtifact(names[0], sha256, etag, size_of(names[0]), lock)

    def add(self, complete: Path, name: str, sha256: str, etag: str) -> CachedArtifact:
        """Move a complete file or folder into the cache, under a name."""
        lock = self._locked(self.folder / "used" / sha256, fcntl.LOCK_SH)
        place = self.folder / "objects" / sha256
        try:
            place.mkdir(exist_ok=True, mode=0o700)
            if not any(place.iterdir()):
                os.replace(complete, place / name)
                _sync(place)
            os.utime(lock)
            found = next(place.iterdir())
            return CachedArtifact(found, sha256, etag, size_of(found), lock)
        except BaseException:
            os.close(lock)
            raise

    # -- what URLs gave

    def known(self, url: str) -> dict[str, str]:
        """Return what a URL last gave: {"etag": ..., "sha256": ...}; empty if it is unknown."""
        try:
            found = json.loads((self.folder / "urls" / f"{key_of(url)}.json").read_text())
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) and found.get("url") == url else {}

    def note(self, url: str, etag: str, sha256: str) -> None:
        """Record what a URL gave."""
        text = json.dumps({"url": url, "etag": etag, "sha256": sha256})
        handle, temporary = tempfile.mkstemp(dir=self.folder / "urls", suffix=".tmp")
        with os.fdopen(handle, "w") as file:
            file.write(text)
        os.replace(temporary, self.folder / "urls" / f"{key_of(url)}.json")

    # -- pulling

    @contextlib.contextmanager
    def pulling(self, url: str, wait: Callable[[], object]) -> Iterator[Path]:
        """Hold the lock of a URL; yield the folder for its files, which may hold files of a pull
        that was killed.

        wait: called while another process pulls it; may raise.
        """
        place = self.folder / "pulling" / key_of(url)
        path = place.with_suffix(".lock")
        while (lock := self._try_lock(path, fcntl.LOCK_EX)) < 0:
            wait()
            time.sleep(CHECK_S)
        try:
            place.mkdir(exist_ok=True, mode=0o700)
            yield place
        finally:
            os.close(lock)

    def make_room(self, wanted: int, keep: Path) -> int:
        """Remove the least recently used objects and unfinished pulls until `wanted` bytes fit;
        return how many bytes are missing then. keep: folder of the pull that needs the room.
        """
        with os.fdopen(self._locked(self.folder / "lock", fcntl.LOCK_EX)):
            entries = []
            for place in (self.folder / "objects").iterdir():
                used = self.folder / "used" / place.name
                entries.append((_mtime(used), size_of(place), place, used))
            for place in (self.folder / "pulling").iterdir():
                if place.is_dir() and place != keep:
                    lock = place.with_suffix(".lock")
                    entries.append((_mtime(place), size_of(place), place, lock))
            total = sum(size for _, size, _, _ in entries) + wanted
            for _, size, place, lock_path in sorted(entries, key=lambda entry: entry[0]):
                if total <= self.bytes_max:
                    break
                if self._removed(place, lock_path):
                    total -= size
            return max(0, total - self.bytes_max)

    def _removed(self, place: Path, lock_path: Path) -> bool:
        lock = self._try_lock(lock_path, fcntl.LOCK_EX)
        if lock < 0:
            return False
        try:
            gone = Path(tempfile.mkdtemp(dir=self.folder, prefix=".gone-"))
            os.replace(place, gone / place.name)
            shutil.rmtree(gone, ignore_errors=True)
            lock_path.unlink(missing_ok=True)
        finally:
            os.close(lock)
        return True

    # -- locks

    def _locked(self, path: Path, how: int) -> int:
        """Wait for a lock that is held for moments only; return its descriptor."""
        while (lock := self._try_lock(path, how)) < 0:
            time.sleep(CHECK_S / 10)
        return lock

    @staticmethod
    def _try_lock(path: Path, how: int) -> int:
        """Return the descriptor of the locked file, -1 if another holds it."""
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how | fcntl.LOCK_NB)
            # removed by who held it before: another process makes a new one
            there = os.stat(path).st_ino == os.fstat(lock).st_ino
        except (BlockingIOError, FileNotFoundError):
            there = False
        if not there:
            os.close(lock)
            return -1
        return lock


def key_of(url: str) -> str:
    """Return the name of a URL's files in the cache."""
    return hashlib.sha256(url.encode()).hexdigest()[:32]


def size_of(place: Path) -> int:
    """Return the bytes of a file, or of all files of a folder."""
    if place.is_file():
        return place.stat().st_size
    found = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.stat(os.path.join(folder, name)).st_size
    return found


def digest_of(place: Path) -> str:
    """Return the SHA-256 of a file; of a folder, the SHA-256 of the lines that `sha256sum` prints
    for its files, sorted by path.
    """
    if place.is_file():
        with place.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    files = sorted(
        path.relative_to(place).as_posix() for path in place.rglob("*") if path.is_file()
    )
    lines = "".join(f"{digest_of(place / name)}  {name}\n" for name in files)
    return hashlib.sha256(lines.encode()).hexdigest()


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
