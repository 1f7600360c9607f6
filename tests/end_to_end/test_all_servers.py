"""One container that serves several servers: all that are listed, as they come and go."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import clipper
from clipper_container.model import as_model
from clipper_container.wire.transport import StopSwitch
from clipper_container.worker import all_servers
from clipper_container.worker.all_servers import AllServers
from clipper_container.worker.handshake import ContainerOptions, ContainerRejected
from tests.memory_container import wait_until
from tests.processes import Program, free_ports
from tests.threads import join

PATIENCE_S = 30.0
TOKEN = "token-of-all-servers"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_servers, "CHECK_S", 0.05)


def server(port: int = 0) -> clipper.ClipperServer:
    return clipper.start(address=f"tcp://127.0.0.1:{port}", token=TOKEN, drain_s=1.0)


def ready(one: clipper.ClipperServer, count: int = 1) -> bool:
    return bool(one.stats()["models"].get("m:1", {}).get("has", 0) == count)


@contextlib.contextmanager
def container(
    listed: list[str], *lookups: list[str], token: str = TOKEN
) -> Iterator[list[ContainerRejected]]:
    """Run a container of this process; return the list of errors that it raises. look_ups:
    addresses that are listed first."""
    stop, raised = StopSwitch(), list[ContainerRejected]()
    options = ContainerOptions(name="m", token=token, input="f64[2]")
    first = iter(lookups)
    one = AllServers(
        as_model(lambda rows: rows.sum(axis=1)),
        ",".join(listed) or "tcp:nowhere:1",
        options,
        stop,
        resolve=lambda _: next(first, list(listed)),
    )

    def run() -> None:
        try:
            one.run()
        except ContainerRejected as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield raised
    finally:
        stop.request()
        join(thread)
        stop.close()


def answers(one: clipper.ClipperServer) -> None:
    futures = [one.predict("m", [float(i), 1.0], slo_ms=20_000) for i in range(50)]
    assert [future.result(PATIENCE_S).output for future in futures] == [i + 1 for i in range(50)]


def test_servers_that_come_and_go_are_all_served() -> None:
    with server() as one, contextlib.ExitStack() as stack:
        listed = [one.address]
        with container(listed):
            wait_until(lambda: ready(one), "the first one is served", PATIENCE_S)
            other = stack.enter_context(server(free_ports(1)[0]))
            listed.append(other.address)
            wait_until(lambda: ready(other), "so is one that comes later", PATIENCE_S)
            threads = [threading.Thread(target=answers, args=(each,)) for each in (one, other)]
            for thread in threads:
                thread.start()
            for thread in threads:
                join(thread)
            answers(one)
            port = int(other.address.rpartition(":")[2])
            other.close()
            answers(one)
            again = stack.enter_context(server(port))
            wait_until(lambda: ready(again), "and one that is replaced", PATIENCE_S)
            answers(again)
            listed.pop()
            again.close()
            answers(one)


def test_a_container_that_every_server_rejects_ends_with_the_reason() -> None:
    with server() as one, server() as other:
        with container([one.address, other.address], token="another") as raised:
            wait_until(lambda: raised, "it ends", PATIENCE_S)
        assert "token is missing or wrong" in str(raised[0])


def test_a_rejection_by_a_server_that_left_the_name_does_not_end_the_container() -> None:
    with (
        clipper.start(address="tcp://127.0.0.1:0", token="another") as other_token,
        server() as accepting,
    ):
        with container([accepting.address], [other_token.address]) as raised:
            wait_until(lambda: ready(accepting), "the other one is served", PATIENCE_S)
            answers(accepting)
        assert not raised


def test_a_name_that_cannot_be_resolved_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    with server() as one, container([one.address], [], []):
        wait_until(lambda: ready(one), "it is served in the end", PATIENCE_S)
    assert capfd.readouterr().err.count(f"cannot resolve {one.address}; trying again") == 1


def test_one_process_serves_all_that_its_command_line_lists(tmp_path: Path) -> None:
    (tmp_path / "total.py").write_text("def total(rows):\n    return rows.sum(axis=1)\n")
    with server() as one, server() as other:
        words = [sys.executable, "-m", "clipper_container", "serve", "total:total"]
        words += ["--connect", f"{one.address},{other.address}", "--name", "m"]
        words += ["--input", "f64[2]"]
        env = {"CLIPPER_TOKEN": TOKEN, "PYTHONPATH": str(tmp_path)}
        with Program(*words, environment=env) as process:
            wait_until(lambda: ready(one) and ready(other), "both are served", PATIENCE_S)
            answers(one)
            answers(other)
            assert process.stop() == 0


def test_an_address_stands_for_all_that_its_name_resolves_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        "socket.getaddrinfo",
        lambda host, port, type: (
            [(2, 1, 6, "", (place, port)) for place in {"a": ["10.0.0.1", "10.0.0.2"]}[host]]
            if host == "a"
            else (_ for _ in ()).throw(OSError("no such host"))
        ),
    )
    found = all_servers.resolved(["tcp:a:7000", "tcp:b:7000", "unix:/run/c"])
    assert found == ["tcp:10.0.0.1:7000", "tcp:10.0.0.2:7000", "unix:/run/c"]
