"""Pulls a model into the cache: once for all processes of a host, checked, resumed when broken."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from clipper_container.artifacts.cache import ArtifactCache, CachedArtifact, digest_of
from clipper_container.artifacts.errors import ContentChanged, Interrupted, PullError
from clipper_container.artifacts.limits import PREFIX, PullLimits
from clipper_container.artifacts.source import (
    ArtifactSource,
    BucketSource,
    RemoteFile,
    fingerprint,
    mounted_path,
)
from clipper_container.artifacts.url import ArtifactUrl
from clipper_container.backoff import Backoff

_WAIT_S = (0.2, 10.0)  # before the second try; at most
_ABOUT = "about.json"
_Result = TypeVar("_Result")
Progress = Callable[[int, int], object]  # bytes so far, bytes in all (-1: unknown)


def pull(
    url: ArtifactUrl, limits: PullLimits, progress: Progress = lambda done, total: None
) -> CachedArtifact:
    """Return the model in the cache of `limits.folder`; transfer what is not there.

    With a sha256 in the URL, an object of the cache is used without a request. Else the ETag is
    requested from the source, and the content is transferred if that is new. progress: called in
    this thread at the start, with each chunk, and while another process pulls; may raise to give
    up.

    Raises: PullError; what `progress` raises.
    """
    if url.scheme == "pvc":
        path = mounted_path(url)
        if url.sha256 and (found := digest_of(path)) != url.sha256:
            raise _other_content(url, found)
        return CachedArtifact(path, url.sha256, "", 0)
    try:
        cache = ArtifactCache(limits.folder, limits.cache_mib << 20)
        if found_there := cache.find(url.sha256, url.etag):
            return found_there
        until = time.monotonic() + limits.pull_s

        def wait() -> None:
            progress(0, -1)
            if time.monotonic() >= until:
                raise _late(url, limits, "another process of this host still pulls it")

        with cache.pulling(url.plain, wait) as place:
            return _Pull(url, limits, cache, place, progress, until).run()
    except OSError as error:
        raise PullError(
            url.plain,
            f"the cache {limits.folder} cannot be written: {error.strerror or error}",
            f"Free space, or choose another folder: {PREFIX}FOLDER.",
            is_final=False,
        ) from None


def examine(url: ArtifactUrl, limits: PullLimits) -> str:
    """Return the ETag that the source has for a URL now, "" if it gives none. Raises: PullError."""
    if url.scheme == "pvc":
        return ""
    until = time.monotonic() + limits.pull_s
    return fingerprint(_Tries(url, limits, until).run(lambda: _listed(url, limits)))


def _advice(url: ArtifactUrl) -> str:
    """Return what to do where a source does not answer."""
    advice = "Is the address right, and the network there? Then try again."
    if url.scheme == "s3" and "AWS_ACCESS_KEY_ID" not in os.environ:
        return (
            "AWS_ACCESS_KEY_ID is not set here; a model host gets it from its server by"
            f' server.env_pass = ["AWS_*"]. {advice}'
        )
    return advice


class _Tries:
    """Repeats what can fail for a moment. A try that made progress does not count."""

    def __init__(self, url: ArtifactUrl, limits: PullLimits, until: float) -> None:
        self._url, self._limits, self._until = url, limits, until
        self.left = limits.tries

    def run(self, work: Callable[[], _Result]) -> _Result:
        """Return what the work returns. Raises: PullError after the last try."""
        backoff = Backoff(*_WAIT_S)
        while True:
            self.left -= 1
            try:
                return work()
            except (Interrupted, ContentChanged) as error:
                why = str(error)
            if self.left <= 0:
                raise PullError(
                    self._url.plain,
                    f"{why}, after {self._limits.tries} tries",
                    _advice(self._url),
                    is_final=False,
                )
            wait_s = backoff.next_s()
            if time.monotonic() + wait_s >= self._until:
                raise _late(self._url, self._limits, why)
            time.sleep(wait_s)


class _Pull:
    """One pull, under the lock of its URL."""

    def __init__(
        self,
        url: ArtifactUrl,
        limits: PullLimits,
        cache: ArtifactCache,
        place: Path,
        progress: Progress,
        until: float,
    ) -> None:
        self._url, self._limits, self._cache, self._place = url, limits, cache, place
        self._progress, self._until = progress, until
        self._tries = _Tries(url, limits, until)
        self._done = 0

    def run(self) -> CachedArtifact:
        """Return the model, from the cache if another process was first."""
        url = self._url
        if found := self._cache.find(url.sha256, url.etag):
            return found
        return self._tries.run(self._attempt)

    def _attempt(self) -> CachedArtifact:
        url, cache = self._url, self._cache
        files = _listed(url, self._limits)
        etag = fingerprint(files)
        if url.etag and etag != url.etag:
            raise PullError(
                url.plain,
                f"its content has changed: the ETag is {etag or 'not given'}, and {url.etag} was"
                " registered",
                "Register the new content under a new name or version.",
            )
        known = cache.known(url.plain)
        same = bool(etag) and known.get("etag") == etag and not url.sha256
        if found_there := cache.find(known["sha256"] if same else "", etag):
            return found_there
        total = -1 if any(file.size < 0 for file in files) else sum(file.size for file in files)
        if missing := cache.make_room(max(total, 0), self._place):
            raise PullError(
                url.plain,
                f"the cache {cache.folder} of {self._limits.cache_mib} MiB lacks {missing} bytes;"
                " what is in use stays",
                f"Raise artifacts.cache_mib ({PREFIX}CACHE_MIB).",
                is_final=False,
            )
        parts = self._parts(etag)
        single = len(files) == 1 and not files[0].path
        self._done = 0
        self._progress(0, total)
        for file in files:
            self._transfer(file, parts / (file.path or url.name), total)
        whole = parts / url.name if single else parts
        sha256 = digest_of(whole)
        if url.sha256 and sha256 != url.sha256:
            shutil.rmtree(parts, ignore_errors=True)
            raise _other_content(url, sha256)
        found = cache.add(whole, url.name, sha256, etag)
        cache.note(url.plain, etag, sha256)
        shutil.rmtree(self._place, ignore_errors=True)
        return found

    def _parts(self, etag: str) -> Path:
        """Return the folder of the files so far; empty unless they are of the same ETag."""
        parts, about = self._place / "parts", self._place / _ABOUT
        try:
            same = bool(etag) and json.loads(about.read_text()) == {"etag": etag}
        except (OSError, ValueError):
            same = False
        if not same:
            shutil.rmtree(parts, ignore_errors=True)
            about.write_text(json.dumps({"etag": etag}))
        parts.mkdir(exist_ok=True, mode=0o700)
        return parts

    def _transfer(self, file: RemoteFile, path: Path, total: int) -> None:
        """Transfer what is missing of a file."""
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        there = path.stat().st_size if path.exists() else 0
        if there > file.size:  # also if the size is unknown
            there = 0
        if there == file.size and there:
            self._done += there
            return
        begins, chunks = _source_of(self._url).read(file, there)
        most = self._limits.mib_max << 20
        with path.open("r+b" if begins else "wb") as out:
            out.seek(begins)
            out.truncate()
            self._done += begins
            for chunk in chunks:
                out.write(chunk)
                self._done += len(chunk)
                self._tries.left = self._limits.tries
                self._progress(self._done, total)
                if self._done > most:
                    raise _too_large(self._url, self._limits)
                if time.monotonic() >= self._until:
                    raise _late(self._url, self._limits, f"{self._done} bytes came")
            out.flush()
            os.fsync(out.fileno())
            if file.size >= 0 and out.tell() != file.size:
                raise Interrupted(f"the transfer ended after {out.tell()} of {file.size} bytes")


def _source_of(url: ArtifactUrl) -> ArtifactSource:
    if url.scheme in ("s3", "gs"):
        return BucketSource(url)
    # a tenth of the imports of a container that pulls nothing
    from clipper_container.artifacts.web import WebSource

    return WebSource(url)


def _listed(url: ArtifactUrl, limits: PullLimits) -> Sequence[RemoteFile]:
    """Return the files of a model, within the limits. Raises: PullError."""
    files = _source_of(url).files(limits.files_max)
    if len(files) > limits.files_max:
        raise PullError(
            url.plain,
            f"it has more than {limits.files_max} files",
            f"Raise {PREFIX}FILES_MAX, or name the folder of the model.",
        )
    for file in files:
        if any(part in ("", ".", "..") for part in file.path.split("/")) and file.path:
            raise PullError(url.plain, f"its file {file.path!r} would lie outside of its folder")
    if sum(file.size for file in files) > limits.mib_max << 20:
        raise _too_large(url, limits)
    return files


def _too_large(url: ArtifactUrl, limits: PullLimits) -> PullError:
    return PullError(
        url.plain,
        f"it has more than {limits.mib_max} MiB",
        f"Raise artifacts.mib_max ({PREFIX}MIB_MAX).",
    )


def _late(url: ArtifactUrl, limits: PullLimits, why: str) -> PullError:
    return PullError(
        url.plain,
        f"it took more than {limits.pull_s:g} s: {why}",
        f"Raise artifacts.pull_s ({PREFIX}PULL_S). What has come is kept for the next try.",
        is_final=False,
    )


def _other_content(url: ArtifactUrl, sha256: str) -> PullError:
    return PullError(
        url.plain,
        f"its content has the SHA-256 {sha256}, and not {url.sha256}",
        "If the new content is meant, name its sha256.",
    )
