"""Clients by others work with our server, and the table in README.md lists what they did."""

from collections.abc import Iterator

import pytest

import clipper
from tests.clients.addresses import Addresses, serving
from tests.clients.works_with import BEGIN, CLIENTS, END, README, lacking
from tests.frontend.conftest import warm_workers


@pytest.fixture(scope="module")
def at() -> Iterator[Addresses]:
    pytest.importorskip("grpc", reason="pip install 'clipper-serving[grpc]'")
    with serving(prepare) as addresses:
        yield addresses


def prepare(server: clipper.ClipperServer) -> None:
    warm_workers(server)
    server._learning.states.start_writing()  # its thread stays


@pytest.mark.parametrize("name", CLIENTS)
def test_a_client_works_at_the_level_that_the_readme_states(name: str, at: Addresses) -> None:
    if missing := lacking(name):
        pytest.skip(f"no {missing}: python tools/fetch.py tests")
    done = list(CLIENTS[name](at))
    text = README.read_text()
    told = text[text.index(BEGIN) : text.index(END)]
    (row,) = [line for line in told.splitlines() if line.startswith(f"| {name} |")]
    assert row.endswith(f"| {', '.join(done)} |"), "python -m tests.clients.works_with --write"
