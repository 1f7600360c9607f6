"""Calls of gRPC at the address of HTTP: one port, one TLS, and connections with both."""

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
import grpc

import clipper
from clipper.credentials.credential_file import line_of, new_key
from clipper.errors import ConfigError
from clipper.frontend.protocols import message
from tests.frontend.certificates import Authority
from tests.frontend.conftest import QUICK, ask
from tests.frontend.test_grpc import HEALTH, Client
from tests.frontend.test_grpc_access import answered, calling, code_of, credentials, serving
from tests.processes import free_ports

BODY = b'{"input": [1, 2, 3]}'


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path, "authority")


def shared(**more: Any) -> Any:
    return serving(**({"http": "127.0.0.1:0", "grpc": "http"} | more))


def test_http_and_grpc_answer_at_one_address() -> None:
    with shared() as server, calling(server) as client:
        assert server.grpc_address == server.http_address
        results = []

        def query() -> None:
            for _ in range(20):
                reply = ask(server.http_address, "POST", "/api/total/predict", BODY)
                results.append(reply.json["output"])

        thread = threading.Thread(target=query)
        thread.start()
        calls = [answered(client) for _ in range(20)]
        thread.join()
        assert results == [6.0] * 20
        assert calls == [6.0] * 20


def test_the_same_address_given_twice_is_one() -> None:
    both = f"127.0.0.1:{free_ports(1)[0]}"
    with serving(http=both, grpc=both) as server, calling(server) as client:
        assert (server.http_address, server.grpc_address) == (both, both)
        assert answered(client) == 6


def test_over_tls_with_certificates_of_clients(authority: Authority) -> None:
    cert, key = authority.sign("server")
    tls = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.ca}
    with shared(http={"address": "127.0.0.1:0", **tls}) as server:
        with calling(server, credentials(authority.ca, authority.sign("ann"))) as client:
            assert answered(client) == 6
        with calling(server, credentials(authority.ca)) as client:
            assert code_of(client) is grpc.StatusCode.UNAVAILABLE


def test_keys_hold_for_calls(tmp_path: Path) -> None:
    key, file = new_key(), tmp_path / "api-keys"
    file.write_text(line_of("ann", key) + "\n")
    with shared(http={"address": "127.0.0.1:0", "api_keys_file": str(file)}) as server:
        with calling(server, metadata=[("authorization", f"Bearer {key}")]) as client:
            assert answered(client) == 6
        with calling(server) as client:
            assert code_of(client) is grpc.StatusCode.UNAUTHENTICATED


def test_a_stream_of_calls_ends_when_the_server_closes() -> None:
    with shared() as server, calling(server) as client:
        statuses = client.method(HEALTH, "Watch")(message("grpc.health.v1.HealthCheckRequest")())
        first = next(statuses)
        closing = threading.Thread(target=server.close)
        closing.start()
        rest = list(statuses)
        closing.join(60)
        assert not closing.is_alive()
        assert first.status == 1
        assert all(one.status == 2 for one in rest)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"grpc": "http"}, "grpc.address"),
        ({"http": "127.0.0.1:0", "grpc": {"address": "http", "tls_cert": "off"}}, "grpc.tls_cert"),
    ],
)
def test_what_does_not_go_with_one_address_is_refused(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        clipper.start(**settings, **QUICK)


WITHOUT_GRPCIO = """
import sys
sys.modules["grpc"] = None
import clipper
with clipper.start(http="127.0.0.1:0", grpc="http") as server:
    server.deploy("sum", lambda rows: [sum(row) for row in rows], input="f64[3]")
    server.app("total", models=["sum"], slo_ms=5000)
    print(server.grpc_address, flush=True)
    sys.stdin.readline()
"""


def test_calls_are_served_without_grpcio() -> None:
    words = [sys.executable, "-c", WITHOUT_GRPCIO]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as one:
        try:
            assert one.stdout is not None
            client = Client(one.stdout.readline().strip())
            assert answered(client) == 6
            client.channel.close()
        finally:
            one.communicate("\n", timeout=60)
    assert one.returncode == 0
