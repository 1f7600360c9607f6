"""`clipper up --on ray` before any Ray is there: what is refused, and what the servers get."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from clipper.cli import main
from clipper.cli.servers.up_on_ray import Placed, plan_of
from clipper.config import load
from clipper.deploy.ray.servers import TOKEN


@pytest.mark.parametrize(
    ("file", "words", "why"),
    [
        ("", ["--http", "127.0.0.1:0"], "is not a store that several servers share"),
        ('[server]\nstate = "here"\n', ["--http", "127.0.0.1:0"], "is not a store that several"),
        ('[server]\nstate = "redis://a/0"\n', [], "http.address is empty"),
        (
            '[server]\nstate = "redis://a/0"\n[http]\nadmin = "127.0.0.1:0"\n',
            ["--http", "127.0.0.1:0"],
            "without a token that all servers share",
        ),
        (
            '[server]\nstate = "redis://a/0"\n'
            '[http]\ntls_cert = "a"\ntls_key = "b"\ntls_client_ca = "c"\n',
            ["--http", "127.0.0.1:0"],
            "http.tls_client_ca is set",
        ),
        ("", ["--runtime-env", "none.json"], "cannot read none.json"),
        ("", ["--runtime-env", "list.json"], "must contain a JSON object"),
        ("", ["--http", "0.0.0.0:0"], "any host that reaches this address"),
    ],
)
def test_what_cannot_be_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, words: list[str], why: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clipper.toml").write_text(file)
    (tmp_path / "list.json").write_text("[]")
    result = CliRunner().invoke(main, ["up", "clipper.toml", "--on", "ray", *words])
    assert result.exit_code != 0
    assert why in result.output


def test_each_store_has_servers_of_its_own_and_the_settings_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLIPPER_SERVER__DRAIN_S", "3")
    placed = Placed("local", 2, 4, 0.5, 0.0, {}, 60.0)
    plans = [
        plan_of(
            tmp_path / "clipper.toml",
            load(None, state=f"redis://host/{number}", grpc="127.0.0.1:0"),
            placed,
            insecure=True,
        )
        for number in (0, 0, 1)
    ]
    assert plans[0].namespace == plans[1].namespace != plans[2].namespace
    assert plans[0].words == (f"{tmp_path}/clipper.toml", "--insecure")
    assert plans[0].ports == ("http", "admin", "grpc")
    assert plans[0].environment["CLIPPER_SERVER__DRAIN_S"] == "3"
    assert plans[0].environment["CLIPPER_SERVER__STATE"] == "redis://host/0"
    assert len(plans[0].environment[TOKEN]) > 20
    assert plans[0].drain_s > 3
