"""Streams of a running server, started and stopped by commands, over HTTP and by the client."""

import json
from collections.abc import Iterator
from typing import Any

import click.testing
import pytest

import clipper
from clipper.cli import main
from clipper.errors import (
    AlreadyExists,
    ConfigError,
    InvalidInput,
    UnknownApplication,
    UnknownStream,
)
from clipper.manage.client import Client
from tests.memory_container import wait_until
from tests.store.conftest import RedisServer
from tests.streams.conftest import World

redis = pytest.importorskip("redis")


@pytest.fixture(scope="module")
def managed(redis_server: RedisServer) -> Iterator[clipper.ClipperServer]:
    url = redis_server.url
    declared = {"app": "sums", "url": url, "source": "declared.in", "answers": "declared.out"}
    with clipper.start(
        admin="127.0.0.1:0",
        warmup=False,
        drain_s=1.0,
        apps={"sums": {"models": ["total"], "slo_ms": 30_000, "default": -1}},
        models={"total": {"target": "tests.streams.conftest:total", "input": "f64[3]"}},
        streams={"kept": declared},
        model_streams={"live": {"url": url, "stream": "declared.models"}},
    ) as started:
        yield started


@pytest.fixture
def there(managed: clipper.ClipperServer) -> Client:
    return clipper.connect(f"http://{managed.admin_address}")


def shell(server: clipper.ClipperServer, *words: str, code: int = 0) -> str:
    line = [*words, "--url", f"http://{server.admin_address}"]
    result = click.testing.CliRunner().invoke(main, line, prog_name="clipper")
    assert result.exit_code == code, result.output
    return result.stdout if code == 0 else result.stderr


@pytest.fixture
def sums(managed: clipper.ClipperServer, redis_server: RedisServer, client: Any, fresh: Any) -> Any:
    return World(managed, redis_server.url, client, fresh())


def test_a_stream_from_its_creation_to_its_end(
    managed: clipper.ClipperServer, there: Client, sums: World
) -> None:
    words = ("--app", "sums", "--redis", sums.url, "--source", sums.source)
    create = ("stream", "create", "nightly", *words, "--answers", sums.answers)
    before = there.history()
    assert shell(managed, *create, "--dry-run").startswith("dry run: sums answers the records of")
    assert there.history() == before
    with pytest.raises(UnknownStream, match="no stream 'nightly'"):
        there.streams.get("nightly")

    said = shell(managed, *create)
    assert said.splitlines() == [
        f"sums answers the records of {sums.source} until the stream nightly is stopped or the"
        " server ends",
        "  stream nightly is new",
    ]
    sums.add(input="[1, 2, 3]")
    sums.wait(1)
    assert sums.outputs() == [6.0]
    wait_until(lambda: there.streams.get("nightly")["stats"]["answered"] == 1)
    assert json.loads(shell(managed, "stream", "show", "nightly", "-o", "json")) == {
        **there.streams.get("nightly")
    }
    shown = shell(managed, "stream", "show", "nightly")
    assert "nightly, a stream of records" in shown
    assert f'source            "{sums.source}"' in shown
    rows = shell(managed, "stream", "ls").splitlines()
    assert [row.split()[:2] for row in rows] == [
        ["STREAM", "KIND"],
        ["kept", "records"],
        ["live", "models"],
        ["nightly", "records"],
    ]

    assert shell(managed, "stream", "stop", "nightly", "--dry-run").startswith("dry run: stopped")
    assert len(there.streams.list()) == 3
    assert shell(managed, "stream", "stop", "nightly").splitlines() == [
        "stopped stream nightly",
        "  stream nightly is gone",
    ]
    sums.add(input="[1, 2, 4]")
    assert sums.client.xlen(sums.answers) == 1
    assert [row["verb"] for row in there.history()[-2:]] == ["stream create", "stream stop"]
    assert "no stream 'nightly'" in shell(managed, "stream", "stop", "nightly", code=1)


def test_a_stream_of_the_file_can_be_stopped_and_comes_back_with_the_next_start(
    managed: clipper.ClipperServer, there: Client
) -> None:
    change = there.streams.stop("kept", dry_run=True)
    assert "remove [streams.kept]" in change["warning"]
    assert "remove [model_streams.live]" in there.streams.stop("live", dry_run=True)["warning"]


def test_a_stream_of_models_by_a_command(
    managed: clipper.ClipperServer, there: Client, redis_server: RedisServer
) -> None:
    words = ("--redis", redis_server.url, "--stream", "more.models", "--keep", "3")
    create = ("stream", "create-models", "more", *words)
    said = json.loads(shell(managed, *create, "-o", "json"))
    assert said["message"].startswith("models of more.models are deployed until")
    row = there.streams.get("more")
    assert (row["kind"], row["settings"]["keep"]) == ("models", 3)
    there.streams.stop("more")


def test_what_cannot_be_a_stream_is_refused_and_changes_nothing(there: Client, sums: World) -> None:
    names: Any = {"source": sums.source, "answers": sums.answers}
    before = there.streams.list()
    with pytest.raises(AlreadyExists, match="a stream 'kept' runs already"):
        there.streams.create("kept", app="sums", url=sums.url, **names)
    with pytest.raises(UnknownApplication):
        there.streams.create("x", app="smus", url=sums.url, **names)
    with pytest.raises(ConfigError, match="names no Redis server"):
        there.streams.create("x", app="sums", **names, dry_run=True)
    with pytest.raises(InvalidInput, match="`in_flight_max`: "):
        there.streams.create("x", app="sums", url=sums.url, in_flight_max=0, **names)
    with pytest.raises(InvalidInput, match="stream name"):
        there.streams.create("a b", app="sums", url=sums.url, **names)
    with pytest.raises(InvalidInput, match="three streams"):
        there.streams.create("x", app="sums", url=sums.url, source="a", answers="a", dry_run=True)
    assert [row["name"] for row in there.streams.list()] == [row["name"] for row in before]


def test_passwords_are_shown_nowhere(there: Client, sums: World) -> None:
    secret = "redis://ann:s3cret@127.0.0.1:9/0"
    with pytest.raises(ConfigError) as refused:
        there.streams.create("x", app="sums", url="http://ann:s3cret@127.0.0.1/0")
    there.streams.create("away", app="sums", url=secret)
    there.streams.stop("away")
    shown = [str(refused.value), json.dumps(there.history()[-2:])]
    assert not [text for text in shown if "s3cret" in text]


def test_handles_have_names_of_their_own(
    managed: clipper.ClipperServer, there: Client, sums: World
) -> None:
    with sums.stream(), sums.stream():
        assert {"sums", "sums-2"} <= {row["name"] for row in there.streams.list()}
    assert {row["name"] for row in there.streams.list()} == {"kept", "live"}
    with sums.stream():
        assert "sums" in {row["name"] for row in there.streams.list()}


def test_two_streams_of_a_file_have_different_names() -> None:
    with pytest.raises(ConfigError, match=r"\[streams.a\] has this name"):
        clipper.config.load(
            env={},
            streams={"a": {"app": "x", "url": "redis://h"}},
            model_streams={"a": {"url": "redis://h"}},
        )
