"""Models whose reads are declared in a file, over HTTP and from a shell: columns by table, and no
function."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click.testing
import pytest

import clipper
from clipper.cli import main
from clipper.errors import DoesNotFit, InvalidInput
from tests.params.conftest import until

TABLES = {"taste": {"dim": 2, "initializer": "constant", "initializer_settings": {"value": 1.0}}}
MODEL = f"""
from clipper_container import Model


class Taste(Model):
    input = "i64[2]"
    tables = {TABLES!r}

    def predict_batch(self, inputs):
        return self.tables.pull("taste", inputs.ravel()).reshape(len(inputs), 4).sum(axis=1)
"""
FILE = """
[server]
params = "set"
drain_s = 1
[models.declared]
target = "tasty:Taste"
reads = { taste = [0, 1] }
tolerance = 0.25
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "tasty.py").write_text(MODEL)
    (tmp_path / "clipper.toml").write_text(FILE)
    return tmp_path


@pytest.fixture
def server(here: Path) -> Iterator[clipper.ClipperServer]:
    with clipper.start("clipper.toml", http={"admin": "127.0.0.1:0"}) as started:
        yield started


def followed(server: clipper.ClipperServer, model: str) -> tuple[int, float]:
    """Return how many predictions of it, and how far their rows may move."""
    found: dict[str, Any] = server.stats()["models"][model]["followed"]
    return found["predictions"], found["tolerance"]


def test_reads_are_declared_by_shell_python_http_and_file(
    server: clipper.ClipperServer, here: Path
) -> None:
    url = f"http://{server.admin_address}"
    words = (
        "deploy",
        "shelled",
        "tasty:Taste",
        "--reads",
        "taste=0,1",
        "--tolerance",
        "0.5",
        "--url",
        url,
        "-o",
        "json",
    )
    for dry in ((), ("--dry-run",)):
        done = click.testing.CliRunner().invoke(main, [*words, *dry])
        assert done.exit_code == 0, done.output
        assert json.loads(done.stdout)["dry_run"] == bool(dry)
    client = clipper.connect(url)
    client.deploy(
        "asked", "tasty:Taste", reads={"taste": [0], "nowhere": 1}, tolerance=1, code=[str(here)]
    )
    (shelled,) = client.models("shelled")
    assert (shelled["reads"], shelled["tolerance"]) == ({"taste": [0, 1]}, 0.5)
    (deployed,) = client.models("asked")
    assert deployed["reads"] == {"taste": [0], "nowhere": [1]}
    until(lambda: getattr(server._parameters.watching, "knows", False))
    until(lambda: server.stats()["models"]["declared:1"]["has"])
    for name, tolerance in (("declared", 0.25), ("shelled", 0.5), ("asked", 1.0)):
        assert [server.model(name).predict([1, 2], slo_ms=30_000).result() for _ in range(3)] == [
            4.0
        ] * 3
        assert followed(server, f"{name}:1") == (1, tolerance)
        assert server.stats()["models"][f"{name}:1"]["evaluated"] == 1


@pytest.mark.parametrize("dry", [True, False])
def test_invalid_reads_are_refused_by_a_dry_run_too(
    server: clipper.ClipperServer, dry: bool
) -> None:
    client = clipper.connect(f"http://{server.admin_address}")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"reads": "os:getcwd"}, "reads"),  # a function of the server's: not from a socket
        ({"reads": {"taste": [-1]}}, "reads"),
        ({"reads": {"taste": []}}, "reads is"),
        ({"reads": {"taste": [2]}, "input": "i64[2]"}, "reads column 2"),
        ({"reads": {"taste": 0}, "tolerance": -1.0}, "`tolerance`: Expected `float` >= 0"),
        ({"tolerance": 1.0}, "does not declare what it reads"),
    ]
    for settings, message in wrong:
        with pytest.raises(InvalidInput, match=message):
            client.deploy("wrong", "tasty:Taste", dry_run=dry, **settings)
    assert "wrong" not in server.catalog.view.versions
    for words in ("taste", "taste=", "=1", "taste=a,b", "taste=-1"):
        done = click.testing.CliRunner().invoke(
            main, ["deploy", "wrong", "tasty:Taste", "--reads", words]
        )
        assert done.exit_code == 2
        assert "is not TABLE=COLUMNS" in done.stderr


def test_a_server_without_tables_refuses_reads_in_a_dry_run_too(here: Path) -> None:
    with (
        clipper.start(http={"admin": "127.0.0.1:0"}) as server,
        pytest.raises(DoesNotFit, match="this server has none"),
    ):
        clipper.connect(f"http://{server.admin_address}").deploy(
            "wrong", "tasty:Taste", dry_run=True, reads={"taste": 0}
        )
