"""A catalog that version 0.1.0 made, with learned states and a mesh, opens and behaves the same: a
folder of state, a dump of Redis, the content of an etcd."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import clipper
from tests.archives import unpack
from tests.end_to_end.older.make import PATIENCE_S, told
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.store.etcd_server import EtcdServer

OLDER = Path(__file__).parent / "older"


@pytest.fixture(params=["sqlite", "redis", "etcd"])
def older(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """Yield the store with a catalog of version 0.1.0. Its folder is `folder`."""
    with tarfile.open(OLDER / f"{request.param}.tar.xz") as archive:
        unpack(archive, tmp_path)
    if request.param == "sqlite":
        yield str(tmp_path / "folder")
    elif request.param == "redis":
        # the last of equal options holds
        server = RedisServer(tmp_path, "--appendonly", "no", "--dbfilename", "dump.rdb")
        yield server.url
        server.kill()
    else:
        etcd = EtcdServer(tmp_path)
        etcd.start()
        yield etcd.url
        etcd.kill()


def started(older: str, tmp_path: Path) -> clipper.ClipperServer:
    server = clipper.start(state=older, folder=str(tmp_path / "folder"), mesh=True, warmup=False)
    server.wait_ready(PATIENCE_S)
    return server


def compare(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what servers of two versions say."""
    for part in ("models", "applications", "verbs"):
        assert found[part] == expected[part], part
    for name, shares in expected["shares"].items():
        assert found["shares"][name] == pytest.approx(shares, abs=1e-6), name
    for name, answers in expected["answers"].items():
        for new, (output, confidence) in zip(found["answers"][name], answers, strict=True):
            if isinstance(output, str):
                assert new[0] == output, name
                assert new[1] == pytest.approx(confidence, abs=1e-6), name
            else:
                assert new[0] == pytest.approx(output, abs=1e-6), name


@pytest.mark.slow
def test_a_catalog_of_the_version_before_behaves_the_same(older: str, tmp_path: Path) -> None:
    expected = json.loads((tmp_path / "expected.json").read_text())
    with started(older, tmp_path) as server:
        compare(told(server), expected)
        assert server.mesh.vmodel_status("best").active == "m1"
        assert server.model("best").predict([2.5]).result(PATIENCE_S) == 2.5
        # and it goes on: learning, versions, names
        before = server.app("learns").shares("odd")
        for i in range(20):
            answer = server.app("learns").predict(f"nEw{i}", user="odd").result(PATIENCE_S)
            server.app("learns").feedback(answer, label=f"new{i}")
        assert server.app("learns").shares("odd") != before
        server.manage.promote("a:2")
        one = server.app("one")
        wait_until(lambda: one.predict("Wd").result(PATIENCE_S).output == "wd", "a:2", PATIENCE_S)
        server.retire("a:1")
        server.mesh.set_vmodel("best", "m2", sync=True)
        assert server.model("best").predict([3.5]).result(PATIENCE_S) == 3.5
        learned = server.app("learns").shares("odd")
    with started(older, tmp_path) as server:
        assert server.app("learns").shares("odd") == pytest.approx(learned, abs=1e-6)
        assert server.app("one").predict("Wd").result(PATIENCE_S).output == "wd"
        assert "a:1" not in server.stats()["models"]
        assert server.mesh.vmodel_status("best").active == "m2"
