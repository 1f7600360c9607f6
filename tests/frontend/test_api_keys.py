"""API keys of clients: over HTTP, their file, and the command that makes one."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main
from clipper.credentials.credential_file import line_of, new_key
from clipper.errors import ConfigError, NotAllowed
from clipper.frontend.auth.api_keys import ApiKeys
from clipper.settings.http import HttpSettings, TlsFiles, unauthenticated_listeners
from tests.frontend.conftest import PATIENCE_S, QUICK, ask, total, warm_workers

QUERY_BODY = {"input": [1, 2, 3]}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("keys") / "api-keys"


@pytest.fixture(scope="module")
def key(keys: Path) -> str:
    made = new_key()
    keys.write_text(f"# who may ask\n\n{line_of('ann', made)}\n")
    return made


@pytest.fixture(scope="module")
def guarded(keys: Path, key: str) -> Iterator[clipper.ClipperServer]:
    http = {
        "address": "127.0.0.1:0",
        "token": "secret",
        "api_keys_file": str(keys),
        "metrics": True,
    }
    with clipper.start(http=http, **QUICK) as server:
        server.deploy("sum", total, input="f64[3]")
        server.app("total", models=["sum"], slo_ms=5000)
        warm_workers(server)
        yield server


def bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def test_a_client_with_a_key_may_query(guarded: clipper.ClipperServer, key: str) -> None:
    for shown in (bearing(key), {"Authorization": f"bearer  {key}"}, bearing("secret")):
        assert (
            ask(guarded.http_address, "POST", "/api/total/predict", QUERY_BODY, shown).json[
                "output"
            ]
            == 6
        )


@pytest.mark.parametrize(
    "shown", [{}, bearing(""), bearing("ck_wrong"), {"Authorization": "Basic x"}, bearing("é")]
)
@pytest.mark.parametrize(
    "path", ["/api/total/predict", "/v2/models/total/infer", "/total/predict", "/nothing"]
)
def test_a_client_without_a_key_is_rejected_with_the_next_step(
    guarded: clipper.ClipperServer, shown: dict[str, str], path: str
) -> None:
    reply = ask(guarded.http_address, "POST", path, QUERY_BODY, shown)
    assert (reply.status, reply.headers["www-authenticate"]) == (401, "Bearer")
    assert "clipper key NAME" in reply.json["hint"]


def test_reads_need_a_key_except_probes(guarded: clipper.ClipperServer, key: str) -> None:
    for path in ("/", "/api", "/v2", "/metrics"):
        assert ask(guarded.http_address, "GET", path).status == 401
        assert ask(guarded.http_address, "GET", path, None, bearing(key)).status == 200
    for path in ("/livez", "/readyz", "/healthz", "/v2/health/live", "/v2/health/ready"):
        assert ask(guarded.http_address, "GET", path).status == 200


def test_the_file_may_change(guarded: clipper.ClipperServer, keys: Path, key: str) -> None:
    another = new_key()
    keys.write_text("what is this\n")
    access: Any = guarded._endpoints.frontends
    access._access.check()
    assert ask(guarded.http_address, "GET", "/api", None, bearing(key)).status == 200, (
        "what is not in order is not taken"
    )
    keys.write_text(f"{line_of('ann', key)}\n{line_of('bob', another)}\n")
    until = time.monotonic() + PATIENCE_S
    while (
        ask(guarded.http_address, "GET", "/api", None, bearing(another)).status != 200
        and time.monotonic() < until
    ):
        threading.Event().wait(0.01)
    assert ask(guarded.http_address, "GET", "/api", None, bearing(another)).status == 200


def test_keys_are_named(tmp_path: Path) -> None:
    file, keys = tmp_path / "k", [new_key() for _ in range(100)]
    file.write_text("".join(f"{line_of(f'n{i}', key)}\n" for i, key in enumerate(keys)))
    known = ApiKeys(str(file))
    assert [known.check(f"Bearer {key}".encode()) for key in keys] == [f"n{i}" for i in range(100)]
    assert not any(key in file.read_text() for key in keys)
    for wrong in (b"", b"Bearer", b"Bearer ", b"Bearer " + keys[0][:-1].encode(), keys[0].encode()):
        with pytest.raises(NotAllowed):
            known.check(wrong)


@pytest.mark.parametrize(
    "line",
    ["ann", "ann sha256:", "ann sha256:zz", "ann md5:" + 64 * "0", "ann x sha256:" + 64 * "0"],
)
def test_a_line_that_is_none(tmp_path: Path, line: str) -> None:
    file = tmp_path / "k"
    file.write_text(f"# one\n{line}\n")
    with pytest.raises(ConfigError, match=r"k:2: a line is `NAME sha256:HEX`"):
        ApiKeys(str(file))


def test_a_file_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"http\.api_keys_file = '/nothing' cannot be read"):
        clipper.start(http={"address": "127.0.0.1:0", "api_keys_file": "/nothing"})


# -- the shell


def test_the_shell_makes_one(tmp_path: Path) -> None:
    file = tmp_path / "api-keys"
    done = [CliRunner().invoke(main, ["key", name, "--file", str(file)]) for name in ("ann", "bob")]
    made = [each.stdout.strip() for each in done]
    assert [ApiKeys(str(file)).check(f"Bearer {key}".encode()) for key in made] == ["ann", "bob"]
    assert file.stat().st_mode & 0o777 == 0o600
    assert CliRunner().invoke(main, ["key", "a b", "--file", str(file)]).exit_code == 1


@pytest.mark.parametrize("word", ["http", "grpc"])
def test_up_refuses_queries_of_other_hosts_without_keys(
    word: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["up", f"--{word}", "0.0.0.0:0"])
    assert done.exit_code == 1
    assert (
        f"{word}.address = '0.0.0.0:0': any host that reaches this address could send queries."
        in done.stderr
    )
    assert "--insecure" in done.stderr


def test_what_is_open_to_all() -> None:
    mutual = TlsFiles("c", "k", "ca")
    assert [
        key for key, _ in unauthenticated_listeners(HttpSettings("0.0.0.0:1"), ("[::]:1", None))
    ] == ["http.address", "grpc.address"]
    assert [
        key for key, _ in unauthenticated_listeners(HttpSettings("0.0.0.0:1"), ("[::]:1", mutual))
    ] == ["http.address"]
    assert not list(unauthenticated_listeners(HttpSettings("127.0.0.1:1"), ("localhost:1", None)))
    assert not list(
        unauthenticated_listeners(HttpSettings("0.0.0.0:1", api_keys_file="k"), ("[::]:1", None))
    )
    http = HttpSettings("0.0.0.0:1", tls_cert="c", tls_key="k", tls_client_ca="ca")
    assert not list(unauthenticated_listeners(http, ("", None)))
