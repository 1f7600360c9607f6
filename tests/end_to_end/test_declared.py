"""Models of a configuration file are found beside it, from any folder; `start` waits until they
run, or reports why they do not."""

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

import clipper
import clipper_container
import clipper_core
from clipper.cli import main
from clipper.errors import ConfigError, DeployFailed, PackagingError

DECLARED = """
[models.sums]
target = "shop_of_declared:total"
input = "f64[3]"
[apps.total]
models = ["sums"]
slo_ms = 20000
default = -1
"""
TOTAL = "def total(rows):\n    return rows.sum(axis=1)\n"


def declared(folder: Path, code: str = TOTAL, toml: str = DECLARED) -> Path:
    folder.mkdir()
    (folder / "shop_of_declared.py").write_text(code)
    (folder / "clipper.toml").write_text(toml)
    return folder / "clipper.toml"


@pytest.mark.slow
def test_start_waits_for_declared_models_which_are_found_beside_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    declared(tmp_path / "shop")
    with clipper.start("shop/clipper.toml") as server:
        assert server.stats()["models"]["sums:1"]["has"] == 1
        answer = server.app("total").predict([1.0, 2.0, 3.0]).result(20)
        assert (answer.output, answer.is_default) == (6.0, False)
        copy, home = server.catalog.view.model("sums").code
        assert home == str(tmp_path / "shop")
        assert [path.name for path in Path(copy).glob("*.py")] == ["shop_of_declared.py"]
        server.wait_ready(timeout=20)


NAMED = """
[models.homes]
target = "shop_of_declared:price"
input = '{"rooms": "i64", "city": "str"}'
output = '{"price": "f64", "label": "str"}'
[apps.homes]
models = ["homes"]
slo_ms = 20000
"""
PRICE = """
def price(homes):
    return {"price": homes["rooms"] * 1.5, "label": [city.upper() for city in homes["city"]]}
"""


@pytest.mark.slow
def test_a_declared_model_takes_and_gives_named_tensors(tmp_path: Path) -> None:
    with clipper.start(str(declared(tmp_path / "shop", PRICE, NAMED))) as server:
        answer = server.app("homes").predict({"city": "Bern", "rooms": 4}).result(20)
        assert answer.output == {"price": 6.0, "label": "BERN"}
    path = declared(tmp_path / "bad", PRICE, NAMED.replace("f64", "f65"))
    with pytest.raises(ConfigError, match=r"tensor 'price': 'f65' is not a type"):
        clipper.start(str(path))


FAILING = (
    "import os, sys\nprint('no weights at here.bin\\x1b[31m', file=sys.stderr, flush=True)\n"
    "os._exit(3)\n"
)


@pytest.mark.slow
def test_start_names_the_declared_model_that_does_not_run_and_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "clipper")
    file = declared(tmp_path / "shop", FAILING)
    with pytest.raises(DeployFailed) as raised:
        clipper.start(file, server={"restarts_max": 1, "restart_ms_min": 1})
    message = str(raised.value)
    assert "sums:1" in message
    assert "exit 3" in message
    assert "no weights at here.bin" in message
    told = [record.getMessage() for record in caplog.records]
    deaths = [line for line in told if " exited: " in line]
    assert deaths
    assert all("Its last line: no weights at here.bin\\x1b[31m" in line for line in deaths)


@pytest.mark.slow
def test_wait_ready_names_the_model_that_is_not_ready(tmp_path: Path) -> None:
    file = declared(
        tmp_path / "shop", "print('still loading', flush=True)\nimport time\ntime.sleep(600)\n"
    )
    with (
        clipper.start(file, wait=False) as server,
        pytest.raises(DeployFailed, match="model 'sums:1' did not connect within"),
    ):
        server.wait_ready(timeout=0.5)


def test_a_declared_model_that_cannot_be_packed_is_named_with_its_line(tmp_path: Path) -> None:
    file = declared(tmp_path / "shop", toml=DECLARED.replace("shop_of_declared:total", "no-model"))
    with pytest.raises(
        PackagingError, match=r"clipper\.toml:\d+: model 'sums': 'no-model' names no model"
    ):
        clipper.start(file)


def test_files_are_found_beside_the_file_that_names_them(tmp_path: Path) -> None:
    toml = (
        '[models.m]\ntarget = "m.onnx"\ncode = ["lib"]\nrequirements = ["-r needs.txt", "numpy"]\n'
    )
    file = declared(tmp_path / "shop", toml=toml)
    for name in ("m.onnx", "needs.txt"):
        (file.parent / name).touch()
    model = clipper.load_config(file).models["m"]
    assert model.target == str(file.parent / "m.onnx")
    assert model.code == (str(file.parent / "lib"),)
    assert model.requirements == (f"-r {file.parent / 'needs.txt'}", "numpy")


def test_an_export_holds_the_module_and_is_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = declared(tmp_path / "shop")
    done = CliRunner().invoke(main, ["export", "compose", "out", "--from", "shop/clipper.toml"])
    assert done.exit_code == 0, done.output
    assert list((tmp_path / "out").rglob("shop_of_declared.py"))
    (file.parent / "shop_of_declared.py").unlink()
    done = CliRunner().invoke(main, ["export", "compose", "gone", "--from", "shop/clipper.toml"])
    assert done.exit_code == 1
    assert "model 'sums:1': the module 'shop_of_declared'" in done.stderr
    assert "--code FOLDER" in done.stderr


def test_a_file_of_this_folder_can_be_deployed_from_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "m.onnx").write_bytes(b"no model")
    done = CliRunner().invoke(main, ["deploy", "m", "./m.onnx", "--url", "http://127.0.0.1:1"])
    assert done.exit_code == 1
    assert done.stderr.startswith("error: ")
    assert CliRunner().invoke(main, ["deploy", "m"]).exit_code == 2  # a command line that is wrong


SYMLINKED = """
import sys
sys.path[:0] = [{folder!r}]
import threading_in_a_library
from clipper.deploy.packages import package
package._installed_places.cache_clear()
def total(rows):
    return threading_in_a_library.summed(rows)
packed = package.pack(total, "m", 1, {out!r})
print(packed.kind)
"""


@pytest.mark.slow
def test_a_package_whose_files_are_links_counts_as_installed(tmp_path: Path) -> None:
    """uv, Nix and Bazel install files as links."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    place = next((tmp_path / "venv" / "lib").glob("python*")) / "site-packages"
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "library.py").write_text(
        "import threading\nlock = threading.Lock()\ndef summed(rows):\n    with lock:\n       "
        " return rows.sum()\n"
    )
    (place / "threading_in_a_library.py").symlink_to(tmp_path / "cache" / "library.py")
    ours = [
        str(Path(module.__file__ or "").parent.parent)
        for module in (clipper, clipper_core, clipper_container)
    ]
    (place / "rest.pth").write_text(
        "\n".join([*ours, *(path for path in sys.path if path and Path(path).is_dir())])
    )
    script = SYMLINKED.format(folder=str(place), out=str(tmp_path / "out"))
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    python = tmp_path / "venv" / "bin" / "python"
    done = subprocess.run([python, "-c", script], env=env, capture_output=True, text=True)
    assert done.stdout == "function\n", done.stderr
