"""`clipper config check` refuses what `clipper up` refuses, and names the line."""

import socket
from pathlib import Path

import pytest

from clipper.config import load
from clipper.errors import AddressInUse, ClipperError, ConfigError
from clipper.manage.checking import check_declared, check_start

GOOD = """\
[models.m]
target = "ours_to_check:f"
inputs = { age = "f64" }
[models.elsewhere]
[apps.a]
models = ["m", "elsewhere"]
policy = "exp3(eta=0.1)"
decider = "majority within 5 ms, else first"
slo_ms = 50
roles = ["elsewhere = shadow"]
"""


CODE = """\
raise RuntimeError("it is not to be run")

def f(rows):
    return rows
"""


def checked(folder: Path, text: str) -> list[str]:
    path = folder / "clipper.toml"
    path.write_text(text)
    (folder / "ours_to_check.py").write_text(CODE)
    return check_declared(load(path, {}), str(folder))


def test_a_good_file_is_good_and_nothing_is_run(tmp_path: Path) -> None:
    assert checked(tmp_path, GOOD) == []


@pytest.mark.parametrize(
    ("before", "after", "line", "message"),
    [
        ("exp3(eta=0.1)", "exp33", 7, "no policy 'exp33' - did you mean 'exp3'?"),
        ("eta=0.1", "etta=0.1", 7, "has no setting 'etta'"),
        ("majority within 5 ms", "majoritty within 5 ms", 8, "majoritty"),
        ("within 5 ms", "within 500 ms", 8, "no step after it decides"),
        ('["m", "elsewhere"]', '["m", "elsewere"]', 6, "elsewere"),
        ('["elsewhere = shadow"]', '["m = shadow", "elsewhere = shadow"]', 10, ""),
        ("ours_to_check:f", "our_to_check:f", 2, "(there is ours_to_check.py)"),
        ("ours_to_check:f", "ours_to_check:ff", 2, "has no 'ff' - did you mean 'f'?"),
        ("ours_to_check:f", "absent.onnx", 2, "cannot read"),
        ("ours_to_check:f", "no model", 2, "names no model"),
        ('target = "ours_to_check:f"', 'command = ["./absent"]', 2, "there is no program"),
        ('inputs = { age = "f64" }', 'inputs = { age = "g64" }', 3, "g64"),
        ("inputs = {", 'input = "f64"\ninputs = {', 2, "give one of the two"),
        ("slo_ms = 50", 'slo_ms = 50\nmissing = "men"', 10, "expected one of 'mean'"),
        (
            "[models.m]",
            '[http]\naddress = "127.0.0.1:80"\nadmin = "127.0.0.1:80"\n[models.m]',
            3,
            "http.address is the same address",
        ),
    ],
)
def test_what_a_server_refuses_is_refused(
    tmp_path: Path, before: str, after: str, line: int, message: str
) -> None:
    assert before in GOOD
    with pytest.raises(ClipperError) as caught:
        checked(tmp_path, GOOD.replace(before, after))
    assert message in str(caught.value)
    assert "clipper.toml:" in str(caught.value)


def test_what_only_the_state_knows_is_a_note(tmp_path: Path) -> None:
    text = GOOD.replace('["m", "elsewhere"]', '["m", "elsewhere", "older"]')
    (note,) = checked(tmp_path, f'[server]\nstate = "state"\n{text}')
    assert "'older'" in note
    assert checked(tmp_path, f"[mesh]\nenabled = true\n{text}") == []


def test_an_address_that_is_taken_is_named_with_its_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for section, key in (("http", "address"), ("http", "admin"), ("grpc", "address")):
            path = tmp_path / "clipper.toml"
            path.write_text(f'[{section}]\n{key} = "127.0.0.1:{port}"\n')
            with pytest.raises(AddressInUse) as caught:
                check_start(load(path, {}))
            message = f":2: cannot listen on {section}.{key} = '127.0.0.1:{port}': it is taken"
            assert message in str(caught.value)
    assert check_start(load(path, {})) == []


def test_a_store_and_addresses_that_cannot_be_are_named(tmp_path: Path) -> None:
    path = tmp_path / "clipper.toml"
    for text, message in (
        ('[server]\nstate = "mongo://x"', ":2: no store for state='mongo://x'"),
        ('[server]\naddress = "unix:/nowhere/x.sock"', ":2: "),
        ('[tracing]\nendpoint = "no url"', ":2: "),
        ('[influx]\nurl = "no url"', ":2: "),
    ):
        path.write_text(f"{text}\n")
        with pytest.raises(ConfigError) as caught:
            check_start(load(path, {}))
        assert message in str(caught.value)
    path.write_text(f'[server]\naddress = "unix:{tmp_path}/x.sock"\n')
    assert check_start(load(path, {})) == []
    assert not (tmp_path / "x.sock").exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('tls_cert = "absent.pem"\ntls_key = "absent.key"', "absent"),
        ('api_keys_file = "absent"', "http.api_keys_file"),
        ('admin = "127.0.0.1:0"\ntokens_file = "absent"', "http.tokens_file"),
    ],
)
def test_a_file_of_a_listener_that_cannot_be_read_is_named(
    tmp_path: Path, line: str, message: str
) -> None:
    path = tmp_path / "clipper.toml"
    path.write_text(f'[http]\naddress = "127.0.0.1:0"\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        check_start(load(path, {}))
