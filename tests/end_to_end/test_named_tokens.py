"""Each manager has a token, and the history has the name of the token, whatever the client
reports."""

from pathlib import Path

import pytest
from click.testing import CliRunner

import clipper
from clipper import errors
from clipper.cli import main
from clipper.credentials.credential_file import line_of, new_key


def test_the_history_has_the_tokens_name(tmp_path: Path) -> None:
    ann, bob = new_key(), new_key()
    file = tmp_path / "admin-tokens"
    file.write_text(f"{line_of('ann', ann)}\n")
    made = CliRunner().invoke(main, ["key", "carl", "--file", str(file)])
    carl = made.stdout.split()[0]
    http = {"admin": "127.0.0.1:0", "token": "shared", "tokens_file": str(file)}
    with clipper.start(http=http) as server:
        url = f"http://{server.admin_address}"
        for token in ("", "wrong", bob):
            with pytest.raises(errors.NotAllowed, match="a token that is known here"):
                clipper.connect(url, token).models()
        clipper.connect(url, ann).set_application("one", slo_ms=20)
        clipper.connect(url, carl).set_application("two", slo_ms=20)
        clipper.connect(url, "shared").set_application("three", slo_ms=20)
        actors = [entry["actor"] for entry in server.manage.history()]
        assert actors[:2] == ["ann", "carl"]
        assert "@" in actors[2], "of the token that all share, what the client says"
        file.write_text(f"{line_of('bob', bob)}\n")
        server._endpoints.frontends._access.check()  # type: ignore[union-attr]
        with pytest.raises(errors.NotAllowed):
            clipper.connect(url, ann).models()
        clipper.connect(url, bob).remove_application("one")
        assert server.manage.history(1)[0]["actor"] == "bob"


def test_a_file_of_tokens_is_enough_beyond_loopback(tmp_path: Path) -> None:
    file = tmp_path / "admin-tokens"
    file.write_text(f"{line_of('ann', new_key())}\n")
    with (
        clipper.start(http={"admin": "0.0.0.0:0", "tokens_file": str(file)}) as server,
        pytest.raises(errors.NotAllowed),
    ):
        clipper.connect(f"http://127.0.0.1:{server.admin_address.rpartition(':')[2]}", "").models()
    with pytest.raises(errors.ConfigError, match=r"http.tokens_file = .*cannot be read"):
        clipper.start(http={"admin": "127.0.0.1:0", "tokens_file": str(tmp_path / "none")})
    with pytest.raises(errors.ConfigError, match=r"Set http\.token, or http\.tokens_file"):
        clipper.start(http={"admin": "0.0.0.0:0"})
