"""`clipper export openapi`: of the server that runs, and of none."""

import json

import pytest
from click.testing import CliRunner

import clipper
from clipper.cli import main


@pytest.mark.parametrize(
    ("words", "path"), [([], "/api/{application}/predict"), (["--management"], "/admin/models")]
)
def test_without_a_server_it_is_what_every_server_has(words: list[str], path: str) -> None:
    printed = CliRunner().invoke(main, ["export", "openapi", "--plain", *words])
    assert printed.exit_code == 0, printed.output
    found = json.loads(printed.output)
    assert found["openapi"] == "3.1.0"
    assert path in found["paths"]
    pytest.importorskip("openapi_spec_validator").validate(found)


def test_of_a_server_it_has_the_applications() -> None:
    with clipper.start(admin="127.0.0.1:0") as server:
        server.app("digits", models=[])
        url = f"http://{server.admin_address}"
        printed = CliRunner().invoke(main, ["export", "openapi", "--url", url])
        assert "/api/digits/predict" in json.loads(printed.output)["paths"]
        printed = CliRunner().invoke(main, ["export", "openapi", "--url", url, "--management"])
        assert "/admin/models" in json.loads(printed.output)["paths"]
