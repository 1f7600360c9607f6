"""TLS between workers and shards, and between shards: with real sockets and certificates."""

import socket
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clipper.errors import ClipperError, ConfigError, InvalidInput, ShardAway
from clipper.params import Client, TableSpec
from clipper.params.local.local_set import LocalSet
from clipper.params.shard import tls_relay
from clipper.params.shard.server import ShardServer, folder_of
from clipper.params.shard.shard import ShardConfig
from clipper.settings.params import ParamsSettings
from clipper_container.errors import TlsFailed
from clipper_container.tables import Tables
from tests.frontend.certificates import Authority
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_streams import assert_copied, streams
from tests.processes import free_ports

SGD: Any = {"optimizer": "sgd", "optimizer_settings": {"rate": 1.0}, "initializer": "zeros"}
Up = Callable[..., tuple[str, ...]]


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


class TlsShards(Shards):
    """A set whose shards listen with TLS, each at a port of 127.0.0.1."""

    def up(self, shards: int, *, query: str = "", **settings: Any) -> "TlsShards":
        self.settings = ParamsSettings(
            shards=shards, **{"snapshot_s": 0.0, "recover_s": 1.0, **settings}
        )
        text = query or f"ca={self.settings.tls_ca}"
        self.addresses = tuple(f"tls:127.0.0.1:{free_ports(1)[0]}?{text}" for _ in range(shards))
        for shard in range(shards):
            self.begin(shard)
        for server in self.servers.values():
            assert server.ready.wait(60)
        return self


@pytest.fixture
def tls_shards(tmp_path: Path) -> Iterator[TlsShards]:
    made = TlsShards(tmp_path)
    yield made
    made.close()


def files_of(authority: Authority, name: str = "shard", **more: Any) -> dict[str, str]:
    cert, key = authority.sign(name, **more)
    return {"tls_cert": cert, "tls_key": key, "tls_ca": authority.ca}


def plain(address: str, scheme: str = "tcp") -> str:
    return address.replace("tls:", f"{scheme}:").partition("?")[0]


def test_rows_are_trained_and_copied_over_tls(tls_shards: TlsShards, authority: Authority) -> None:
    shards = tls_shards.up(2, replicas=1, **files_of(authority))
    until(lambda: streams(shards))
    client = shards.client()
    client.create(TableSpec("t", 64, **SGD))
    ids = np.arange(3000)  # three records of TLS and more, both ways
    for _ in range(2):
        client.push("t", ids, -ones((3000, 64)))
    assert_copied(shards)  # before a pull, which marks rows on the primary alone
    assert (client.pull("t", ids) == 2).all()
    client.push_model({"w": ones(3)}, optimizer="sgd")
    client.push_gradients({"w": ones(3)}, {"t": (ids, -ones((3000, 64)))})
    assert (client.pull("t", ids) == 3).all()
    with Tables(shards.addresses, token=TOKEN) as tables:
        assert (tables.pull("t", ids) == 3).all()
        tables.push("t", [1], -ones((1, 64)))
        assert (tables.pull("t", [1]) == 4).all()
    shards.wait_for_copies()
    shards.lose(0)
    assert shards.begin(0).ready.wait(60)
    assert (client.pull("t", ids[2:]) == 3).all()


@pytest.mark.parametrize("wrong", ["other authority", "expired", "other host", "no certificate"])
def test_invalid_certificates_are_refused_at_once(
    tls_shards: TlsShards, authority: Authority, tmp_path: Path, wrong: str
) -> None:
    other = Authority(tmp_path, "other")
    ca, files = authority.ca, files_of(authority)
    if wrong == "other authority":
        ca = other.ca
    elif wrong == "expired":
        files = files_of(authority, "old", days=-1)
    elif wrong == "other host":
        files = files_of(authority, "elsewhere", hosts=("example.org",))
    else:
        files["tls_client_ca"] = authority.ca
    shards = tls_shards.up(1, query=f"ca={ca}", **files)
    start = time.monotonic()
    with pytest.raises(TlsFailed) as raised:
        shards.client().create(TableSpec("t", 2))
    assert time.monotonic() - start < 15  # it does not wait as for a shard that is away
    assert "ca=FILE" in str(raised.value)
    if wrong == "no certificate":
        cert, key = authority.sign("worker")
        strange = other.sign("stranger")
        mine = f"{shards.addresses[0]}&cert={cert}&key={key}"
        with Client([mine], token=TOKEN) as client:
            client.create(TableSpec("t", 2))
        theirs = f"{shards.addresses[0]}&cert={strange[0]}&key={strange[1]}"
        with pytest.raises(TlsFailed), Client([theirs], token=TOKEN) as client:
            client.create(TableSpec("t", 2))


def test_a_client_without_tls_gets_the_reason(tls_shards: TlsShards, authority: Authority) -> None:
    shards = tls_shards.up(1, **files_of(authority))
    with (
        Client([plain(shards.addresses[0])], token=TOKEN, patience_s=20.0) as client,
        pytest.raises(TlsFailed, match="speaks TLS"),
    ):
        client.create(TableSpec("t", 2))
    with Client([shards.addresses[0]], token="wrong") as client, pytest.raises(ClipperError):
        client.create(TableSpec("t", 2))
    shards.client().create(TableSpec("t", 2))


def test_a_client_with_tls_gets_an_error_that_the_shard_has_none(
    shards: Shards, authority: Authority
) -> None:
    port = free_ports(1)[0]
    shards.addresses = (f"tcp:127.0.0.1:{port}",)
    place = ShardConfig(
        0,
        shards.addresses,
        ParamsSettings(shards=1, snapshot_s=0.0),
        TOKEN,
        folder_of(shards.root, 0),
    )
    shards.servers[0] = ShardServer(place).start()
    assert shards.servers[0].ready.wait(60)
    address = f"tls:127.0.0.1:{port}?ca={authority.ca}"
    with (
        Client([address], token=TOKEN, patience_s=0.2) as client,
        pytest.raises(ShardAway, match=r"TLS handshake"),
    ):
        client.create(TableSpec("t", 2))
    shards.client().create(TableSpec("t", 2))


def test_handshakes_are_bounded_in_time_and_number(
    tls_shards: TlsShards, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls_relay, "HANDSHAKE_S", 0.3)
    shards = tls_shards.up(1, connections_max=16, **files_of(authority))
    host, _, port = plain(shards.addresses[0]).removeprefix("tcp:").rpartition(":")
    lines = [socket.create_connection((host, int(port)), 60) for _ in range(7)]
    try:
        for line in lines[:3]:  # 4 may wait; each more closes the oldest
            assert line.recv(1) == b""
        shards.client().create(TableSpec("t", 2))
        for line in lines[3:]:  # after their time
            assert line.recv(1) == b""
        monkeypatch.setattr(tls_relay, "HANDSHAKE_S", 60.0)
    finally:
        for line in lines:
            line.close()
    with socket.create_connection((host, int(port)), 10) as line:
        line.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert line.recv(1) == b""
    context = ssl.create_default_context(cafile=authority.ca)
    with (  # of whom the shard hears nothing: its own limit
        socket.create_connection((host, int(port)), 10) as line,
        context.wrap_socket(line, server_hostname=host) as other_client,
    ):
        other_client.sendall(b"nothing that is a message of ours " * 4)
        assert other_client.recv(1) == b""


def test_a_set_of_processes_with_tls(authority: Authority, tmp_path: Path) -> None:
    files = files_of(authority)
    base = {"folder": str(tmp_path / "set"), "shards": 1, **files}
    with pytest.raises(ConfigError, match=r"params\.address"):
        LocalSet(ParamsSettings(**base))
    with pytest.raises(ConfigError, match=r"params\.tls_cert"):
        LocalSet(ParamsSettings(**{**base, "tls_cert": str(tmp_path / "none")}))
    at = f"127.0.0.1:{free_ports(1)[0]}"
    served = LocalSet(ParamsSettings(**base, address=at, tls_client_ca=authority.ca)).start()
    try:
        served.wait_ready()
        with Client(tmp_path / "set") as client:
            client.create(TableSpec("t", 2, **SGD))
            client.push("t", [1], -ones((1, 2)))
            assert client.pull("t", [1]).tolist() == [[1, 1]]
    finally:
        served.stop()


def test_invalid_addresses_are_refused(authority: Authority) -> None:
    for address, match in (
        ("tls:127.0.0.1:1?cafile=a", "cafile"),
        ("tls:127.0.0.1:1?ca=/nowhere", "nowhere"),
        ("tls:127.0.0.1", "tcp:"),
    ):
        with Client([address], patience_s=0.1) as client, pytest.raises(InvalidInput, match=match):
            client.create(TableSpec("t", 2))
