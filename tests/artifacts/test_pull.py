"""Pulling models: each host transfers a model once, checks its content, and keeps its cache within
the limit."""

import dataclasses
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clipper_container.artifacts import ArtifactUrl, PullError, PullLimits, examine, pull
from clipper_container.artifacts.pull import _advice as advice
from tests.artifacts.conftest import SECRET, Puller, S3Server
from tests.processes import Program
from tests.threads import join

MIB = 1 << 20


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def test_a_file_is_pulled_once(s3: S3Server, pulls: Puller, limits: PullLimits) -> None:
    content = os.urandom(3 * MIB)
    s3.put("once/model.onnx", content)
    seen: list[tuple[int, int]] = []
    first = pulls("s3://models/once/model.onnx", progress=lambda *at: seen.append(at))
    assert first.path.name == "model.onnx"
    assert first.path.read_bytes() == content
    assert first.sha256 == sha256(content)
    assert seen[0] == (0, len(content))
    assert seen[-1] == (len(content), len(content))
    del seen[:]
    again = pulls("s3://models/once/model.onnx", progress=lambda *at: seen.append(at))
    assert (again.path, again.etag, seen) == (first.path, first.etag, [])
    s3.put("once/model.onnx", content[:-1])
    assert pulls("s3://models/once/model.onnx").sha256 == sha256(content[:-1])
    # what is pinned is in the cache, and needs no server
    os.environ["AWS_ENDPOINT_URL"] = "http://127.0.0.1:9"
    assert pulls(f"s3://models/once/model.onnx#sha256={sha256(content)}").path == first.path


def test_a_folder_is_pulled_whole(s3: S3Server, pulls: Puller) -> None:
    for name, content in {"MLmodel": b"flavors", "data/a b.bin": b"1" * 100, "e": b""}.items():
        s3.put(f"whole/model/{name}", content)
    s3.put("whole/model2/other", b"no part of it")
    found = pulls("s3://models/whole/model")
    there = {p.relative_to(found.path).as_posix() for p in found.path.rglob("*") if p.is_file()}
    assert there == {"MLmodel", "data/a b.bin", "e"}
    assert pulls("s3://models/whole/model/").sha256 == found.sha256
    as_a_shell = subprocess.run(
        ["sh", "-c", "find * -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum | sha256sum"],
        cwd=found.path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert as_a_shell.stdout.split()[0] == found.sha256
    s3.put("whole/model/data/a b.bin", b"2" * 100)
    assert pulls("s3://models/whole/model").sha256 != found.sha256


def test_other_content_than_was_meant(s3: S3Server, pulls: Puller, limits: PullLimits) -> None:
    s3.put("meant.onnx", b"what was meant")
    url = f"s3://models/meant.onnx#sha256={sha256(b'what was meant')}"
    pinned = f"s3://models/meant.onnx#etag={examine(ArtifactUrl.parse(url), limits)}"
    assert pulls(pinned).path.read_bytes() == b"what was meant"
    s3.put("meant.onnx", b"something else")
    elsewhere = dataclasses.replace(limits, folder=limits.folder / "elsewhere")
    for changed, words in ((url, "has the SHA-256"), (pinned, "has changed")):
        with pytest.raises(PullError, match=words) as caught:
            pulls(changed, elsewhere)
        assert caught.value.is_final
    assert not list((elsewhere.folder / "objects").iterdir())
    assert pulls(url).path.read_bytes() == b"what was meant"  # which the first cache has


def test_several_processes_transfer_it_once(
    s3: S3Server, tmp_path: Path, limits: PullLimits
) -> None:
    s3.put("shared.bin", os.urandom(8 * MIB))
    script = (
        "import sys; from clipper_container.artifacts import *\n"
        "most = []\n"
        "pull(ArtifactUrl.parse(sys.argv[1]), PullLimits.from_environment(),"
        " lambda done, total: most.append(done))\n"
        "print(max(most, default=0))"
    )
    words = [sys.executable, "-c", script, "s3://models/shared.bin"]
    running = [Program(*words, environment=limits.environment(), apart=True) for _ in range(3)]
    assert [program.wait() for program in running] == [0, 0, 0]
    assert sorted(int(program.output) for program in running) == [0, 0, 8 * MIB]


def test_a_killed_pull_is_resumed(s3: S3Server, pulls: Puller, limits: PullLimits) -> None:
    content = os.urandom(24 * MIB)
    s3.put("killed.bin", content)
    script = (
        "import sys, time; from clipper_container.artifacts import *\n"
        "def progress(done, total):\n"
        "    if done > total / 3: print('there', flush=True); time.sleep(60)\n"
        "pull(ArtifactUrl.parse(sys.argv[1]), PullLimits.from_environment(), progress)"
    )
    words = [sys.executable, "-c", script, "s3://models/killed.bin"]
    with Program(*words, environment=limits.environment()) as program:
        program.until("there\n")
    assert not list((limits.folder / "objects").iterdir())  # nothing unfinished is served
    steps: list[int] = []
    found = pulls("s3://models/killed.bin", progress=lambda done, total: steps.append(done))
    assert found.sha256 == sha256(content)
    assert steps[1] > len(content) / 3  # the first third came before the kill


def test_files_that_came_before_an_interruption_count_as_done(s3: S3Server, pulls: Puller) -> None:
    contents = {name: os.urandom(2 * MIB) for name in ("a", "b", "c")}
    for name, content in contents.items():
        s3.put(f"parts/model/{name}", content)
    total = 6 * MIB

    def give_up(done: int, total: int) -> None:
        if done > 3 * MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pulls("s3://models/parts/model", progress=give_up)
    steps: list[tuple[int, int]] = []
    found = pulls("s3://models/parts/model", progress=lambda *at: steps.append(at))
    assert {name: (found.path / name).read_bytes() for name in contents} == contents
    done = [at for at, _ in steps]
    assert (done, {of for _, of in steps}) == (sorted(done), {total})
    assert (done[0], done[-1]) == (0, total), "what came before is counted"


def test_what_a_killed_pull_left_of_older_content_is_not_used(
    s3: S3Server, pulls: Puller, limits: PullLimits
) -> None:
    s3.put("older.bin", b"1" * 4 * MIB)

    def give_up(done: int, total: int) -> None:
        if done > MIB:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pulls("s3://models/older.bin", progress=give_up)
    s3.put("older.bin", b"2" * 4 * MIB)
    assert pulls("s3://models/older.bin").path.read_bytes() == b"2" * 4 * MIB


def test_the_cache_keeps_its_limit(s3: S3Server, limits: PullLimits) -> None:
    small = dataclasses.replace(limits, cache_mib=3)
    for name in "abcd":
        s3.put(f"room/{name}.bin", name.encode() * MIB)

    def pulled(name: str) -> Path:
        with pull(ArtifactUrl.parse(f"s3://models/room/{name}.bin"), small) as found:
            return found.path

    paths = {name: pulled(name) for name in "abc"}
    time.sleep(0.02)
    pulled("a")  # is used again: b is the least recently used
    with pull(ArtifactUrl.parse("s3://models/room/d.bin"), small):
        assert not paths["b"].exists()
        assert paths["a"].exists()
        assert paths["c"].exists()
        with (
            pull(ArtifactUrl.parse("s3://models/room/a.bin"), small),
            pull(ArtifactUrl.parse("s3://models/room/c.bin"), small),
            pytest.raises(PullError, match="lacks 1048576 bytes; what is in use stays"),
        ):
            pulled("b")
        assert paths["a"].exists()
    pulled("b")


def test_limits(s3: S3Server, pulls: Puller, limits: PullLimits) -> None:
    s3.put("big/one.bin", b"1" * 2 * MIB)
    s3.put("big/two.bin", b"1")
    with pytest.raises(PullError, match=r"more than 1 MiB. Raise artifacts.mib_max"):
        pulls("s3://models/big/one.bin", dataclasses.replace(limits, mib_max=1))
    with pytest.raises(PullError, match="more than 1 files"):
        pulls("s3://models/big", dataclasses.replace(limits, files_max=1))
    with pytest.raises(PullError, match=r"took more than 0 s.*is kept for the next try"):
        pulls("s3://models/big/one.bin", dataclasses.replace(limits, pull_s=0.0))


def test_faults_are_named(
    s3: S3Server, pulls: Puller, limits: PullLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(PullError, match=r"no such file or folder. See what is there: aws s3 ls"):
        pulls("s3://models/none/model.onnx")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIANOBODY")
    with pytest.raises(PullError, match=r"access is denied.*Check AWS_ACCESS_KEY_ID") as denied:
        pulls("s3://models/ready")
    assert SECRET not in str(denied.value)
    assert not denied.value.is_final
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(PullError, match=r"after 2 tries. Is the address right"):
        pulls("s3://models/ready", dataclasses.replace(limits, tries=2))


def test_a_server_that_dies_in_the_middle(
    s3: S3Server, pulls: Puller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy cuts the connection after a part; the pull continues from there."""
    content = os.urandom(6 * MIB)
    s3.put("cut.bin", content)
    from tests.artifacts.cutting_proxy import CuttingProxy

    with CuttingProxy(int(s3.url.rpartition(":")[2]), cuts=3, after=MIB) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{proxy.port}")
        steps: list[int] = []
        found = pulls("s3://models/cut.bin", progress=lambda done, total: steps.append(done))
    assert found.sha256 == sha256(content)
    assert proxy.cut == 3
    assert proxy.passed < 2 * len(content)  # what had come was not asked for again


def test_of_google(gcs: Callable[[str, bytes], None], pulls: Puller) -> None:
    content = os.urandom(2 * MIB)
    gcs("svm/model.onnx", content)
    assert pulls("gs://models/svm/model.onnx").sha256 == sha256(content)
    assert pulls("gs://models/svm").path.name == "svm"
    with pytest.raises(PullError, match="no such file"):
        pulls("gs://models/none.onnx")


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("s3://models/../etc/passwd", "has an empty part"),
        ("s3://models/a%2e%2e/%2e%2e/b", "has an empty part"),
        ("s3://models", "names no file"),
        ("https://me:password@host/model.onnx", r"https://\*\*\*@host/model.onnx: it has a pass"),
        ("https://host/model.onnx?X-Amz-Signature=password", "a query"),
        ("http://host/model.onnx", "is not encrypted, so its content needs a sha256"),
        ("s3://models/a.onnx#sha256=123", "64 hexadecimal digits"),
        ("s3://models/a.onnx#md5=123", "is not sha256=HEX"),
        ("pvc://-/a.onnx", "not the name of a PersistentVolumeClaim"),
    ],
)
def test_urls_that_are_not_allowed(url: str, words: str) -> None:
    with pytest.raises(PullError, match=words) as caught:
        ArtifactUrl.parse(url)
    assert "password" not in str(caught.value).replace("it has a password", "")


def test_two_threads_pull_one_url(s3: S3Server, limits: PullLimits) -> None:
    s3.put("threads.bin", os.urandom(MIB))
    found: list[Path] = []
    url = ArtifactUrl.parse("s3://models/threads.bin")
    threads = [
        threading.Thread(target=lambda: found.append(pull(url, limits).path)) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        join(thread)
    assert len(found) == 4
    assert len(set(found)) == 1


def test_missing_credentials_are_named_with_the_setting_that_passes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    url = ArtifactUrl.parse("s3://models/m.onnx")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    assert "env_pass" not in advice(url)
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    assert 'server.env_pass = ["AWS_*"]' in advice(url)
