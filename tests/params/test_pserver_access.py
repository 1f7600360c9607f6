"""Access to a shard by gRPC: TLS, workers' certificates, keys, and files that change while it
serves."""

import queue
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")

import grpc

from clipper.credentials.credential_file import line_of, new_key
from clipper.deploy.kubernetes.helm import shard_values
from clipper.errors import ConfigError, InvalidInput
from clipper.frontend.params_grpc.server import ShardGrpc
from clipper.params.local.local_set import LocalSet
from clipper.settings.params import ParamsSettings
from clipper_container.params.connection import addresses_in
from tests.frontend.certificates import Authority
from tests.params.conftest import TOKEN, Shards, until
from tests.params.document import Shard
from tests.params.test_pserver import ON, Fronts
from tests.params.test_pserver import fronts as fronts
from tests.processes import free_ports


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("certificates"))


def credentials(ca: str, shown: tuple[str, str] | None = None) -> Any:
    cert, key = (Path(file).read_bytes() for file in shown) if shown else (None, None)
    return grpc.ssl_channel_credentials(Path(ca).read_bytes(), key, cert)


def outcome(address: str, credentials: Any = None, token: str = TOKEN, **more: Any) -> str:
    """Return the outcome of a call: "answered", or the code of its error."""
    shard = Shard(address, token, credentials, **more)
    try:
        answered = not shard.pull_variable().model_init_status
        return "answered" if answered else "answered, of a model"
    except grpc.RpcError as error:
        return str(error.code().name)
    finally:
        shard.close()


def up(fronts: Fronts, **settings: Any) -> str:
    fronts.up(1, **settings)
    return fronts.address(0)


def test_clients_connect_over_tls_with_the_right_authority_and_token(
    fronts: Fronts, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.sign("shard")
    address = up(fronts, grpc_tls_cert=cert, grpc_tls_key=key)
    assert outcome(address, credentials(authority.ca)) == "answered"
    assert outcome(address, credentials(authority.ca), "another token") == "UNAUTHENTICATED"
    for wrong in (credentials(Authority(tmp_path, "stranger").ca), None):
        assert outcome(address, wrong) == "UNAVAILABLE"


def test_workers_need_a_client_certificate(
    fronts: Fronts, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.sign("mutual")
    address = up(fronts, grpc_tls_cert=cert, grpc_tls_key=key, grpc_tls_client_ca=authority.ca)
    assert outcome(address, credentials(authority.ca, authority.sign("worker"))) == "answered"
    assert (
        outcome(address, credentials(authority.ca, authority.sign("worker")), "")
        == "UNAUTHENTICATED"
    ), "and a token"
    for shown in (
        None,
        Authority(tmp_path, "stranger").sign("eve"),
        authority.sign("late", days=-1),
    ):
        assert outcome(address, credentials(authority.ca, shown)) == "UNAVAILABLE"


def test_a_renewed_certificate_is_loaded(
    fronts: Fronts, authority: Authority, tmp_path: Path
) -> None:
    cert, key = str(tmp_path / "live.crt"), str(tmp_path / "live.key")
    shutil.copy(authority.sign("first", hosts=("elsewhere",))[0], cert)
    shutil.copy(authority.folder / "first.key", key)
    address = up(fronts, grpc_tls_cert=cert, grpc_tls_key=key)
    name: Any = {"grpc.ssl_target_name_override": "here"}
    assert outcome(address, credentials(authority.ca), **name) == "UNAVAILABLE"
    second = authority.sign("second", hosts=("here",))
    shutil.copy(second[1], key)
    shutil.copy(second[0], cert)
    front: ShardGrpc = fronts._fronts[0]
    until(lambda: front._access.certificates["grpc"][0].pem.cert == Path(second[0]).read_bytes())
    assert outcome(address, credentials(authority.ca), **name) == "answered"


def test_a_changed_keys_file_takes_effect(fronts: Fronts, tmp_path: Path) -> None:
    first, second, file = new_key(), new_key(), tmp_path / "keys"
    file.write_text(line_of("ann", first) + "\n")
    address = up(fronts, grpc_keys_file=str(file))
    assert [outcome(address, token=token) for token in (first, TOKEN, second, "")] == [
        "answered", "answered", "UNAUTHENTICATED", "UNAUTHENTICATED",
    ]  # fmt: skip
    file.write_text(line_of("bob", second) + "\n# a line more\n")
    until(lambda: outcome(address, token=second) == "answered")
    assert outcome(address, token=first) == "UNAUTHENTICATED"


def test_keys_have_roles(fronts: Fronts, tmp_path: Path) -> None:
    file, keys = tmp_path / "keys", {role: new_key() for role in ("read", "train", "manage", "")}
    file.write_text("".join(line_of("ann", key, role) + "\n" for role, key in keys.items()))
    address = up(fronts, grpc_keys_file=str(file))
    calls = {"read": "pull_variable", "train": "push_model", "manage": "get_replica"}
    order = tuple(calls)
    for role, key in keys.items():  # a line without a role may do all
        shard = Shard(address, key)
        for needed, name in calls.items():
            try:
                getattr(shard, name)()
                code, text = "answered", ""
            except grpc.RpcError as error:
                code, text = error.code().name, str(error.details())
            is_refused = order.index(role or "manage") < order.index(needed)
            assert (code == "PERMISSION_DENIED") == is_refused, (role, name, code)
            assert not is_refused or f"role '{needed}'" in text
        shard.close()


def test_invalid_files_are_reported_at_the_start(
    shards: Shards, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.sign("one")
    other = authority.sign("two")[1]
    wrong: list[tuple[dict[str, str], str]] = [
        (
            {"grpc_tls_cert": cert, "grpc_tls_key": other},
            "params.grpc_tls_cert = .* do not go together",
        ),
        (
            {"grpc_tls_cert": str(tmp_path / "none"), "grpc_tls_key": key},
            "params.grpc_tls_cert = .* cannot be read",
        ),
        ({"grpc_keys_file": str(tmp_path / "none")}, "params.grpc_keys_file = .* cannot be read"),
    ]
    shards.up(1)
    for settings, says in wrong:
        found = ParamsSettings(folder=str(tmp_path / "set"), **ON, **settings)
        shards.servers[0].shard.config = msgspec.structs.replace(
            shards.servers[0].shard.config, settings=found
        )
        with pytest.raises(ConfigError, match=says):
            ShardGrpc(shards.servers[0].shard)
        with pytest.raises(ConfigError, match=says):
            LocalSet(found)
    with pytest.raises(InvalidInput, match="neither certificates nor keys"):
        shard_values(ParamsSettings(**ON, grpc_tls_cert=cert, grpc_tls_key=key))


def test_relative_paths_of_a_set_start_at_its_working_folder(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cert, key = authority.sign("relative")
    monkeypatch.chdir(authority.folder)
    files = {"grpc_tls_cert": Path(cert).name, "grpc_tls_key": Path(key).name}
    address = f"127.0.0.1:{free_ports(1)[0]}"
    local = LocalSet(
        ParamsSettings(folder=str(tmp_path / "set"), snapshot_s=0.0, grpc=address, **files)
    ).start()
    try:
        local.wait_ready(60.0)
        monkeypatch.chdir(tmp_path)
        token = addresses_in(tmp_path / "set")[1]
        # it listens there a little later
        until(lambda: outcome(address, credentials(authority.ca), token) == "answered")
        assert outcome(address, None, token) == "UNAVAILABLE"
    finally:
        local.stop(snapshot=False)
    assert local.settings.grpc_tls_cert == cert


def test_a_call_without_a_token_is_refused_before_its_message(fronts: Fronts) -> None:
    address, never = up(fronts), queue.Queue[bytes]()
    with grpc.insecure_channel(address) as channel:
        for shown in ((), (("authorization", "Bearer wrong"),)):
            call = channel.stream_unary("/PServer/pull_dense_parameters")
            with pytest.raises(grpc.RpcError) as refused:
                call(iter(never.get, b""), timeout=10, metadata=shown)
            never.put(b"")  # ends the thread of the client
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
