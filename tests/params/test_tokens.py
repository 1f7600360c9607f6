"""Tokens of worker groups: what each role may do, and the error if it may not."""

import os
import select
from pathlib import Path

import pytest
from click.testing import CliRunner

from clipper.cli.servers.key import key
from clipper.errors import ConfigError, Forbidden
from clipper.params import Client, TableSpec
from clipper.params.tokens import ROLES, TokenFile, digest_of
from clipper_container.tables import Tables
from tests.params.conftest import TOKEN, Shards, ones, until
from tests.params.test_streams import streams
from tests.params.test_table_changes import SGD


def made(path: Path, role: str) -> str:
    """Return the token of a role, written to a file."""
    found = CliRunner().invoke(key, [f"{role}ers", "--role", role, "--file", str(path)])
    assert found.exit_code == 0, found.output
    return found.output.splitlines()[0]


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_each_role_has_its_permissions(
    shards: Shards, tmp_path: Path, mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    tokens = {role: made(file, role) for role in ROLES}
    # the copies are kept by the token of the set
    shards.up(2, tokens_file=str(file), mode=mode, replicas=1 if mode == "async" else 0)
    read, train, manage = (shards.client(token=tokens[role]) for role in ROLES)
    with pytest.raises(Forbidden, match="'train'"):
        read.create(TableSpec("t", 2, **SGD))
    train.create(TableSpec("t", 2, **SGD))
    if mode == "async":
        until(lambda: streams(shards))
        train.push("t", [1, 2, 3], -ones((3, 2)))
    else:
        train.push_gradients(rows={"t": ([1, 2, 3], -ones((3, 2)))})
    container = Tables(shards.addresses, token=tokens["read"])
    for act in (
        lambda: read.push("t", [1, 2], ones((2, 2))),
        lambda: read.push_gradients(rows={"t": ([1, 2], ones((2, 2)))}),
        lambda: read.push_model({"w": ones(3)}),
        lambda: container.push("t", [1, 2], ones((2, 2))),
    ):
        with pytest.raises(Forbidden, match="train"):
            act()
    container.close()
    for worker in (read, train):
        for act in (
            lambda worker=worker: worker.drop("t"),
            lambda worker=worker: worker.erase("t", [1, 2]),
            lambda worker=worker: worker.alter("t", evicts=True),
            lambda worker=worker: worker.write("t", [1, 2], ones((2, 2))),
            lambda worker=worker: worker.call(0, "snapshot"),
            lambda worker=worker: worker.call(0, "synchronize", known=9),
            lambda worker=worker: worker.call(0, "replica", epoch=9),
        ):
            with pytest.raises(Forbidden, match="'manage'"):
                act()
    for worker in (read, train, manage):
        assert worker.pull("t", [1, 2, 3, 4]).tolist() == [[1, 1]] * 3 + [[0, 0]]
        assert sum(len(ids) for ids, _ in worker.walk("t")) == 3
    assert manage.drop("t") == 3
    with pytest.raises(Forbidden, match="token"):
        shards.client(token="another").spec("t")
    assert not any(token in caplog.text for token in (*tokens.values(), "another"))


def test_changed_file_is_read_and_a_broken_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token = made(path, "read")
    tokens = TokenFile("of the set", str(path))
    other = made(path, "manage")
    assert tokens.refresh()

    def role(one: object) -> str:
        return tokens.role(digest_of(one))

    assert [role(one) for one in (token, other, "of the set", "x", "", None)] == [
        *("read", "manage", "manage"),
        *("", "", ""),
    ]
    assert token not in path.read_text()
    path.write_text("# none\n")
    assert tokens.refresh()
    assert role(token) == ""
    for line in ("ann sha256:00", "ann root sha256:" + "0" * 64, "ann read " + "0" * 64):
        path.write_text(line)
        os.utime(path, ns=(1, 1))
        assert not tokens.refresh()
        assert role(token) == ""
        assert role("of the set") == "manage"
        with pytest.raises(ConfigError, match="NAME ROLE"):
            TokenFile("", str(path))
    with pytest.raises(ConfigError, match="cannot be read"):
        TokenFile("", str(tmp_path / "nothing"))


def test_deleted_token_closes_its_open_connections(shards: Shards, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    deleted, demoted = made(file, "train"), made(file, "manage")
    shards.up(2, tokens_file=str(file), replicas=1)
    one, other, owner = (shards.client(token=token) for token in (deleted, demoted, TOKEN))
    owner.create(TableSpec("t", 2, **SGD))
    until(lambda: streams(shards))
    for client in (one, other, owner):
        client.push("t", [1, 2], -ones((2, 2)))
    lines = file.read_text().splitlines()
    file.write_text(lines[1].replace(" manage ", " read ") + "\n")

    def refused(client: Client, match: str) -> bool:
        """Return whether a push is refused with this text. Each shard reads the file a few times a
        second."""
        try:
            client.push("t", [1, 2], 0 * ones((2, 2)))
        except Forbidden as error:
            return match in str(error)
        return False

    connection = one.connections[0]
    until(lambda: select.select([connection.fileno()], [], [], 0)[0] != [])  # it was closed
    until(lambda: refused(one, "token is missing or wrong"))
    until(lambda: refused(other, "'train'"))
    with pytest.raises(Forbidden):
        one.pull("t", [1])
    assert other.pull("t", [1, 2]).tolist() == [[3, 3]] * 2
    owner.push("t", [1], -ones((1, 2)))
    assert other.pull("t", [1]).tolist() == [[4, 4]]
