"""An engine for the tests of images, with a base image of this machine, and a server that uses
it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import clipper
from tests.images.base_image import SETTINGS, base_tar
from tests.images.engines import (
    BASE,
    PACKAGES,
    PATIENCE_S,
    QUICK,
    Engine,
    clear,
    commands,
    reach,
    unmount,
    wait_for,
)


@pytest.fixture(scope="session", params=os.environ.get("CLIPPER_ENGINES", "docker").split(","))
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    if os.getuid() != 0:
        pytest.skip("only root can run an engine of its own")
    folder, environment = tmp_path_factory.mktemp(request.param), reach()
    start, words = commands(request.param, folder, environment)
    if not start[0] or not words[0]:
        pytest.skip(f"no {request.param}: python tools/fetch.py docker")
    with (
        (folder / "log").open("wb") as log,
        subprocess.Popen(start, env=environment, stdout=log, stderr=log) as process,
    ):
        try:
            wait_for(process, [*words, "version"], environment, folder / "log")
            (folder / "base.tar").write_bytes(base_tar(PACKAGES))
            changes = [word for line in SETTINGS for word in ("--change", line)]
            bring = [*words, "import", *changes, str(folder / "base.tar"), BASE]
            subprocess.run(bring, env=environment, check=True, capture_output=True)
            settings = {
                "socket": f"unix://{folder}/engine.sock",
                "base": BASE,
                "build_network": "none",
            }
            yield Engine(request.param, settings, tuple(words), environment)
        finally:
            clear(words, environment)
            process.terminate()
            process.wait(PATIENCE_S)
            unmount(folder)
            shutil.rmtree(folder)


@pytest.fixture(scope="module")
def server(engine: Engine) -> Iterator[clipper.ClipperServer]:
    with clipper.start(
        deployer=engine.kind, docker=engine.settings, load_s=PATIENCE_S, **QUICK
    ) as started:
        yield started


@pytest.fixture(autouse=True)
def unchanged_path() -> Iterator[None]:
    """Remove from sys.path what an export puts there: the folder of a file."""
    before = [*sys.path]
    yield
    sys.path[:] = before
