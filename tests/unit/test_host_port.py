"""Addresses that are put together of a host and a port."""

import pytest

from clipper.cli.measurement.bench import _seen_from
from clipper.host_port import join_host_port
from clipper.mesh.tasks.registration import advertised


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("h", "h:80"),
        ("10.0.0.7", "10.0.0.7:80"),
        ("fd00::7", "[fd00::7]:80"),
        ("[fd00::7]", "[fd00::7]:80"),
    ],
)
def test_an_ipv6_address_has_brackets(host: str, address: str) -> None:
    assert join_host_port(host, 80) == address
    assert advertised("tcp:[::]:80", host) == f"tcp:{address}"
    assert _seen_from(host, "http://[::]:80") == f"http://{address}"


def test_addresses_that_have_their_host_stay() -> None:
    assert advertised("tcp:[::1]:80", "") == "tcp:[::1]:80"
    assert advertised("unix:/a", "h") == "unix:/a"
    assert _seen_from("h", "a:80") == "a:80"
