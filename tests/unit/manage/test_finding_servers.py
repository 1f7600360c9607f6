"""Which of the servers on this host a command is about."""

import functools
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest

from clipper import errors
from clipper.cli.server_command import Sought
from clipper.cli.servers.project import _of_this_folder
from clipper.manage import running as module
from clipper.manage.running import Running, running_at, the_one
from clipper.settings.ports import nearby, reachable

HERE, OTHER = "here", "other"
ADMINS = ("127.0.0.1:8002", "127.0.0.1:8012")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in (HERE, OTHER):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / HERE)
    return tmp_path


def servers(folder: Path) -> Iterator[Running]:
    """Yield a server of every kind: where it was started, whether with a file, on which state."""
    pids = itertools.count(1)
    for admin, place, state in itertools.product(ADMINS, (HERE, OTHER), ("", "a", "b")):
        at = folder / place
        known = str(at / state) if state else ""
        yield Running(f"http://{admin}", next(pids), state=known, folder=str(at))
        yield Running(f"http://{admin}", next(pids), state=known, file=str(at / "clipper.toml"))


def found(state: str, admin: str) -> Running | None:
    try:
        return the_one(state, admin, str(Path.cwd()))
    except errors.NoServer:
        return None


def test_no_command_reaches_a_server_that_its_folder_does_not_mean(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Commands are tried with all pairs of servers and all contents of ./clipper.toml."""
    every = list(servers(folder))
    here = str(folder / HERE)
    for pair in itertools.combinations(every, 2):
        monkeypatch.setattr(module, "running", functools.partial(list, pair))
        for state, admin in itertools.product(("", "a"), ("", ADMINS[0], "127.0.0.1:0")):
            chosen = found(state, admin)
            on_state = [one for one in pair if one.state == str(folder / HERE / "a")]
            in_folder = [one for one in pair if one.is_of(here)]
            at_admin = [one for one in pair if one.url == f"http://{admin}"]
            if state:
                meant = on_state or in_folder
            else:
                meant = (at_admin if admin == ADMINS[0] else []) or in_folder
            if len(meant) == 1:
                assert chosen == meant[0]
            elif chosen is not None:
                assert chosen in meant, "one of several is only taken if more is known of it"
                assert chosen.is_of(here) or chosen in at_admin


def test_the_only_server_is_meant_where_no_file_names_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only = Running("http://127.0.0.1:8002", 1, state="/a", folder=str(folder / OTHER))
    monkeypatch.setattr(module, "running", functools.partial(list, [only]))
    assert found("", "") == only
    assert found("a", "") is None
    assert found("", "127.0.0.1:8012") is None


def test_a_program_that_names_a_state_gets_no_other_server_of_its_folder(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = Running("http://127.0.0.1:8002", 1, folder=str(folder / HERE))
    monkeypatch.setattr(module, "running", functools.partial(list, [beside]))
    assert the_one() == beside
    with pytest.raises(errors.NoServer):
        the_one("a")
    with pytest.raises(errors.NoServer):
        the_one("", "127.0.0.1:8012")


def test_an_error_lists_the_servers_with_their_folders(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = [Running(f"http://127.0.0.1:80{n}2", n, state=f"/s{n}", folder=f"/f{n}") for n in (0, 1)]
    monkeypatch.setattr(module, "running", functools.partial(list, two))
    with pytest.raises(errors.NoServer) as raised:
        the_one()
    for n in (0, 1):
        line = f"  http://127.0.0.1:80{n}2 (process {n}, started in /f{n}, state /s{n})"
        assert line in raised.value.message.splitlines()
    assert "--url" in raised.value.hint


@pytest.mark.parametrize(
    ("url", "asked", "is_there"),
    [
        ("http://127.0.0.1:8002", "127.0.0.1:8002", True),
        ("http://127.0.0.1:8002", "http://localhost:8002/", True),
        ("http://127.0.0.1:8002", "http://127.0.0.1:8012", False),
        ("http://127.0.0.1:8002", "https://127.0.0.1:8002", False),
        ("http://0.0.0.0:8002", "127.0.0.1:8002", True),
        ("http://0.0.0.0:8002", "0.0.0.0:8002", True),
        # another machine may have a server at the same port
        ("http://0.0.0.0:8002", "http://10.0.0.7:8002", False),
        ("http://127.0.0.1:8002", "http://10.0.0.7:8002", False),
        ("http://10.0.0.7:8002", "10.0.0.7:8002", True),
        ("https://[::1]:8002", "https://localhost:8002", True),
        ("http://127.0.0.1:8002", "http://127.0.0.1", False),
        ("http://127.0.0.1:8002", "http://127.0.0.1:port", False),
    ],
)
def test_a_url_names_a_server_of_this_host_or_none(
    monkeypatch: pytest.MonkeyPatch, url: str, asked: str, is_there: bool
) -> None:
    one = Running(url, 1)
    monkeypatch.setattr(module, "running", functools.partial(list, [one]))
    assert running_at(asked) == (one if is_there else None)


def test_the_ports_of_servers_beside_each_other_do_not_meet() -> None:
    usual = [[*nearby(f"127.0.0.1:{port}")] for port in (8000, 8001, 8002)]
    assert all(len(set(each)) == len(each) == 100 for each in usual)
    assert len({*itertools.chain(*usual)}) == 300
    assert [row[1] for row in usual] == [f"127.0.0.1:80{n}" for n in (10, 11, 12)]
    assert [*nearby("[::1]:65530")] == ["[::1]:65530"]


def test_a_listener_on_all_addresses_is_queried_at_this_host() -> None:
    assert reachable("0.0.0.0:80") == "127.0.0.1:80"
    assert reachable("[::]:80") == "[::1]:80"
    assert reachable("10.0.0.7:80") == "10.0.0.7:80"


def test_down_ends_no_server_of_another_folder_but_names_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = str(folder / HERE)
    for one in servers(folder):
        monkeypatch.setattr(module, "running", functools.partial(list, [one]))
        if one.is_of(here):
            assert _of_this_folder(Sought("", "", here)) == one
            continue
        with pytest.raises(errors.NoServer) as caught:
            _of_this_folder(Sought("", "", here))
        assert "no server was started in this folder" in caught.value.message
        assert str(one) in caught.value.message
        assert f"clipper down --url {one.url}" in caught.value.hint
        assert _of_this_folder(Sought("", one.url.removeprefix("http://"), here)) == one
