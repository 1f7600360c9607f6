"""The address that containers connect to, and the errors when there is none."""

import os
import socket

import pytest

from clipper.errors import AddressInUse, ConfigError
from clipper.serving.models.address import listen


def shut(listener):
    os.close(listener.fd)
    listener.remove()


def dial(connect):
    kind, _, rest = connect.partition(":")
    client = socket.socket(socket.AF_UNIX if kind == "unix" else socket.AF_INET)
    client.connect(
        rest if kind == "unix" else (rest.rpartition(":")[0], int(rest.rpartition(":")[2]))
    )
    client.close()


@pytest.mark.parametrize("address", ["unix", "unix:{}/mine", "tcp://127.0.0.1:0", "127.0.0.1:0"])
def test_published_addresses_can_be_dialled(tmp_path, address):
    listener = listen(address.format(tmp_path), tmp_path)
    dial(listener.connect)
    assert not os.get_blocking(listener.fd)
    assert not os.get_inheritable(listener.fd)
    shut(listener)
    assert list(tmp_path.iterdir()) == []


def test_a_unix_socket_is_its_owners(tmp_path):
    listener = listen("unix", tmp_path)
    assert os.stat(listener.path).st_mode & 0o777 == 0o600
    shut(listener)


def test_a_relative_path_is_made_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    listener = listen("unix:s", tmp_path)
    assert listener.connect == f"unix:{tmp_path}/s"
    shut(listener)


def test_what_a_dead_server_left_is_taken_over(tmp_path):
    listener = listen("unix", tmp_path)
    os.close(listener.fd)  # killed: the file stays
    again = listen("unix", tmp_path)
    dial(again.connect)
    shut(again)


def test_what_is_no_socket_is_left_alone(tmp_path):
    (tmp_path / "notes").write_text("precious")
    for path in (tmp_path / "notes", tmp_path):
        with pytest.raises(ConfigError, match=f"cannot listen on {path}: .*not a socket"):
            listen(f"unix:{path}", tmp_path)
    assert (tmp_path / "notes").read_text() == "precious"


def test_a_live_socket_is_not_taken(tmp_path):
    listener = listen("unix", tmp_path)
    dial(listener.connect)
    with pytest.raises(AddressInUse, match=rf"is taken by process {os.getpid()} \(.+\)\. Stop it"):
        listen("unix", tmp_path)
    assert os.path.exists(listener.path)
    shut(listener)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]"])
def test_a_port_is_not_taken(tmp_path, host):
    try:
        listener = listen(f"tcp://{host}:0", tmp_path)
    except ConfigError:
        pytest.skip(f"no {host} on this machine")
    assert listener.connect.startswith(f"tcp:{host}:")
    port = listener.connect.rpartition(":")[2]
    with pytest.raises(
        AddressInUse, match=rf"{port} is taken by process {os.getpid()} \(.+\)\. Use another port"
    ):
        listen(f"tcp://{host}:{port}", tmp_path)
    shut(listener)
    shut(listen(f"tcp://{host}:{port}", tmp_path))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("tcp://127.0.0.1:99999", "99999"),
        ("tcp://127.0.0.1:port", "port"),
        ("tcp://198.51.100.1:0", "assign"),
        ("unix:{}/none/s", "No such file"),
        ("unix:{}/" + "x" * 120, "more than 107 bytes"),
    ],
)
def test_an_address_that_is_none(tmp_path, address, why):
    fds = len(os.listdir("/proc/self/fd"))
    with pytest.raises(ConfigError, match=why):
        listen(address.format(tmp_path), tmp_path)
    assert len(os.listdir("/proc/self/fd")) == fds
