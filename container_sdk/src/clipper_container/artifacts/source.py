"""Sources of model files: the interface, object stores, and mounted volumes."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

from clipper_container.artifacts.errors import ContentChanged, Interrupted, PullError, shown
from clipper_container.artifacts.url import ArtifactUrl

if TYPE_CHECKING:
    from obstore import GetOptions, GetResult, ObjectMeta
    from obstore.store import ClientConfig, GCSConfig, GCSStore, RetryConfig, S3Config, S3Store

CONNECT_S = 10
_Answer = TypeVar("_Answer")
STALL_S = 30  # without a byte
CHUNK_BYTES = 1 << 20
_INSTALL = 'pip install "clipper-serving[artifacts]" (in a container: clipper-container[artifacts])'


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a model. path: below the model, "" for a single file. size: -1 if unknown. etag:
    changes with the content; "" if unknown.
    """

    path: str
    key: str
    size: int
    etag: str


class ArtifactSource(Protocol):
    """Lists and reads the files of one URL.

    Both methods raise PullError if it is final, Interrupted if it may work later, ContentChanged if
    a file is not as listed.
    """

    def files(self, most: int) -> Sequence[RemoteFile]:
        """Return the files; at most `most`, and one more if there are more."""

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Return where the bytes begin, at `offset` or at 0, and the bytes."""


def fingerprint(files: Sequence[RemoteFile]) -> str:
    """Return the ETag of a single file, or one of all files of a folder; "" if one has none."""
    if not all(file.etag for file in files):
        return ""
    if len(files) == 1 and not files[0].path:
        return files[0].etag.removeprefix("W/").strip('"')
    lines = "".join(f"{f.etag} {f.size} {f.path}\n" for f in sorted(files, key=lambda f: f.path))
    return hashlib.sha256(lines.encode()).hexdigest()


class BucketSource:
    """Reads `s3://` and `gs://` by obstore. Credentials and endpoint are in the environment."""

    def __init__(self, url: ArtifactUrl) -> None:
        self._url = url
        try:
            import obstore
            from obstore import exceptions
        except ImportError:
            what = f"{url.scheme}:// needs obstore, which is not installed"
            raise PullError(url.plain, what, f"Run: {_INSTALL}") from None
        self._obstore, self._exceptions = obstore, exceptions
        self._store = self._answered(self._opened)

    def files(self, most: int) -> Sequence[RemoteFile]:
        """Return the file of this key, or the files below it."""
        if not self._url.is_folder:
            try:
                return [self._remote("", self._answered(lambda: self._store.head(self._url.key)))]
            except FileNotFoundError:
                pass
        found = self._answered(lambda: self._listed(most))
        if not found:
            hint = "See what is there: aws s3 ls" if self._url.scheme == "s3" else "See: gsutil ls"
            parent = f"{self._url.scheme}://{self._url.place}/"
            raise PullError(self._url.plain, "there is no such file or folder", f"{hint} {parent}")
        return found

    def _listed(self, most: int) -> list[RemoteFile]:
        found: list[RemoteFile] = []
        for batch in self._store.list(self._url.key + "/"):
            for about in batch:
                path = about["path"].removeprefix(self._url.key).strip("/")
                if path and about["path"].startswith(self._url.key + "/"):
                    found.append(self._remote(path, about))
            if len(found) > most:
                break
        return found

    def _remote(self, path: str, about: ObjectMeta) -> RemoteFile:
        return RemoteFile(path, about["path"], about["size"], about["e_tag"] or "")

    def read(self, file: RemoteFile, offset: int) -> tuple[int, Iterator[bytes]]:
        """Read a file from `offset` on, if it still has its ETag."""
        options: GetOptions = {"if_match": file.etag} if file.etag else {}
        if offset:
            options["range"] = {"offset": offset}
        try:
            answer = self._answered(lambda: self._store.get(file.key, options=options))
        except FileNotFoundError:
            raise ContentChanged(f"{file.key} is not there any more") from None
        return offset, self._chunks(answer)

    def _chunks(self, answer: GetResult) -> Iterator[bytes]:
        chunks = iter(answer.stream(CHUNK_BYTES))
        while (chunk := self._answered(lambda: next(chunks, None))) is not None:
            yield bytes(chunk)

    def _opened(self) -> S3Store | GCSStore:
        from obstore.store import GCSStore, S3Store

        client: ClientConfig = {
            "connect_timeout": f"{CONNECT_S}s",
            "read_timeout": f"{STALL_S}s",
            "timeout": "86400s",
        }
        retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=CONNECT_S)}
        if self._url.scheme == "gs":
            # the emulator's variable of Google's own libraries
            base = os.environ.get("STORAGE_EMULATOR_HOST", "")
            google: GCSConfig = {"base_url": base, "skip_signature": True} if base else {}
            client["allow_http"] = base.startswith("http://")
            return GCSStore(
                self._url.place, client_options=client, retry_config=retry, config=google
            )
        names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
        endpoint = next(filter(None, map(os.environ.get, names)), "")
        client["allow_http"] = endpoint.startswith("http://")  # the user names it
        amazon: S3Config = {"endpoint": endpoint} if endpoint else {}
        return S3Store(self._url.place, client_options=client, retry_config=retry, config=amazon)

    def _answered(self, call: Callable[[], _Answer]) -> _Answer:
        """Return what a request returns; convert errors."""
        known = self._exceptions
        try:
            return call()
        except FileNotFoundError:
            raise
        except (known.PermissionDeniedError, known.UnauthenticatedError) as error:
            variables = (
                "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
                if self._url.scheme == "s3"
                else "GOOGLE_APPLICATION_CREDENTIALS"
            )
            raise PullError(
                self._url.plain,
                f"access is denied ({_status_of(error)})",
                f"Check {variables} where it is pulled.",
                is_final=False,
            ) from None
        except known.PreconditionError:
            raise ContentChanged(f"{self._url.plain} changed meanwhile") from None
        except (known.BaseError, OSError, ValueError) as error:
            raise Interrupted(shown(error)) from None


def _status_of(error: BaseException) -> str:
    text = shown(error)
    return text.partition("status code: ")[2] or text


def mounted_path(url: ArtifactUrl) -> Path:
    """Return the file or folder of `pvc://` in the mounted volume; nothing is copied by `pull`.
    Raises: PullError if it is not mounted here.
    """
    path = Path(url.mounted)
    if not path.exists():
        raise PullError(
            url.plain,
            f"{path} does not exist",
            "A claim is mounted in pods: clipper export k8s, or clipper export chart.",
        )
    return path
