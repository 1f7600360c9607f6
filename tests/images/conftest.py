"""An engine for the tests of images, with a base image of this machine, and a server that uses
it."""

import os
import sys
from collections.abc import Iterator

import pytest

import clipper
from tests.images.engines import PATIENCE_S, QUICK, Engine, NoEngine, running


@pytest.fixture(scope="session", params=os.environ.get("CLIPPER_ENGINES", "docker").split(","))
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    try:
        with running(request.param) as found:
            yield found
    except NoEngine as error:
        pytest.skip(str(error))


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
