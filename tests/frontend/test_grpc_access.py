"""Access over gRPC: TLS, clients' certificates, keys, and the token of management."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

import clipper
from clipper.credentials.credential_file import line_of, new_key
from tests.frontend.certificates import Authority
from tests.frontend.conftest import PATIENCE_S, total
from tests.frontend.test_grpc import APPLICATIONS, HEALTH, INFERENCE, Client, numbers, start
from tests.memory_container import wait_until

ANSWER = {"application": "total", "input": numbers(1, 2, 3)}


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


@contextlib.contextmanager
def serving(**more: Any) -> Iterator[clipper.ClipperServer]:
    with start(**more) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        yield server


@contextlib.contextmanager
def calling(server: clipper.ClipperServer, *words: Any, **more: Any) -> Iterator[Client]:
    client = Client(server.grpc_address, *words, **more)
    yield client
    client.channel.close()


def credentials(ca: str, shown: tuple[str, str] | None = None) -> Any:
    cert, key = (Path(file).read_bytes() for file in shown) if shown else (None, None)
    return grpc.ssl_channel_credentials(Path(ca).read_bytes(), key, cert)


def answered(client: Client) -> float:
    return float(client(APPLICATIONS, "Predict", **ANSWER).output.number)


def code_of(client: Client) -> Any:
    return client.refused(APPLICATIONS, "Predict", **ANSWER).code()


def test_tls_of_its_own_or_of_http(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("shared")
    certificate = authority.sign("own")
    other_authority = Authority(tmp_path, "stranger")
    for settings in (
        {"grpc": "127.0.0.1:0", "http": {"tls_cert": cert, "tls_key": key}},
        {"grpc": {"address": "127.0.0.1:0", "tls_cert": certificate[0], "tls_key": certificate[1]}},
    ):
        with serving(**settings) as server:
            with calling(server, credentials(authority.ca)) as client:
                assert answered(client) == 6
            for wrong in (credentials(other_authority.ca), None):
                with calling(server, wrong) as client:
                    assert code_of(client) is grpc.StatusCode.UNAVAILABLE
    off = {
        "grpc": {"address": "127.0.0.1:0", "tls_cert": "off"},
        "http": {"tls_cert": cert, "tls_key": key},
    }
    with serving(**off) as server, calling(server) as client:
        assert answered(client) == 6


def test_clients_show_certificates(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.sign("mutual")
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    with serving(grpc={"address": "127.0.0.1:0", **tls}) as server:
        with calling(server, credentials(authority.ca, authority.sign("ann"))) as client:
            assert answered(client) == 6
        for shown in (
            None,
            Authority(tmp_path, "stranger").sign("eve"),
            authority.sign("late", days=-1),
        ):
            with calling(server, credentials(authority.ca, shown)) as client:
                assert code_of(client) is grpc.StatusCode.UNAVAILABLE


def test_a_new_certificate_is_taken_up(authority: Authority, tmp_path: Path) -> None:
    cert, key = str(tmp_path / "live.crt"), str(tmp_path / "live.key")
    shutil.copy(authority.sign("first", hosts=("elsewhere",))[0], cert)
    shutil.copy(authority.folder / "first.key", key)
    with serving(grpc={"address": "127.0.0.1:0", "tls_cert": cert, "tls_key": key}) as server:
        name = {"grpc.ssl_target_name_override": "here"}
        with calling(server, credentials(authority.ca), **name) as client:
            assert code_of(client) is grpc.StatusCode.UNAVAILABLE
        second = authority.sign("second", hosts=("here",))
        shutil.copy(second[1], key)
        shutil.copy(second[0], cert)
        wait_until(lambda: is_answered(server, credentials(authority.ca), **name))


def is_answered(server: clipper.ClipperServer, secured: Any, **more: Any) -> bool:
    with calling(server, secured, **more) as client:
        try:
            return answered(client) == 6
        except grpc.RpcError:
            return False


def test_keys(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "api-keys"
    file.write_text(line_of("ann", key) + "\n")
    with serving(http={"api_keys_file": str(file)}) as server:
        with calling(server, metadata=[("authorization", f"Bearer {key}")]) as client:
            assert answered(client) == 6
            request = client.method(APPLICATIONS, "PredictStream")
            assert len(list(request(iter([]), metadata=client.metadata))) == 0
        for metadata in ([], [("authorization", "Bearer ck_wrong")]):
            with calling(server, metadata=metadata) as client:
                error = client.refused(APPLICATIONS, "Predict", **ANSWER)
                assert error.code() is grpc.StatusCode.UNAUTHENTICATED
                assert "clipper key NAME" in error.details()
                with pytest.raises(grpc.RpcError, match="UNAUTHENTICATED"):
                    list(client.method(APPLICATIONS, "PredictStream")(iter([]), timeout=PATIENCE_S))
                assert client(HEALTH, "Check").status == 1, "probes need none"


def test_the_token_loads_and_unloads() -> None:
    with serving(http={"token": "secret"}) as server:
        with calling(server, metadata=[("authorization", "Bearer secret")]) as client:
            client(INFERENCE, "RepositoryModelUnload", model_name="sum")
            assert not client(INFERENCE, "ModelReady", name="sum").ready
            client(INFERENCE, "RepositoryModelLoad", model_name="sum")
            assert client(INFERENCE, "ModelReady", name="sum").ready
            unknown = client.refused(INFERENCE, "RepositoryModelLoad", model_name="sun")
            assert "did you mean 'sum'?" in unknown.details()
        for metadata in ([], [("authorization", "Bearer wrong")]):
            with calling(server, metadata=metadata) as client:
                error = client.refused(INFERENCE, "RepositoryModelUnload", model_name="sum")
                assert error.code() is grpc.StatusCode.PERMISSION_DENIED
                assert client(INFERENCE, "ModelReady", name="sum").ready
