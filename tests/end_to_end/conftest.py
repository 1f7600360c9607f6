"""A server for each module of tests, with short pauses before restarts; models are removed after
their test."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

import clipper
from clipper_core.engine.model import Model
from tests.frontend.conftest import QUICK, patient_queries

__all__ = ["patient_queries"]


@pytest.fixture(scope="module")
def server() -> Iterator[clipper.ClipperServer]:
    # loading a framework takes long on a busy machine
    with clipper.start(load_s=600.0, **QUICK) as started:
        started._learning.states.start_writing()  # its thread stays too
        started.deploy("warm", lambda xs: xs, input="f64[2]", cache=False)
        while not any(thread.name == "clipper-callbacks" for thread in threading.enumerate()):
            future = started.model("warm").predict(
                np.zeros(2)
            )  # may be done before the next line: then no thread is needed
            future.add_done_callback(lambda _: None)  # starts the callback thread, which stays
            future.result(60)
        yield started


@pytest.fixture(scope="session")
def names() -> Iterator[str]:
    """Yield names that no test had before."""
    return (f"m{i}" for i in itertools.count())


@contextmanager
def deploying(
    server: clipper.ClipperServer, names: Iterator[str]
) -> Iterator[Callable[..., Model]]:
    """Yield a function that deploys a model under a new name; retire all of them at the end."""
    made: list[str] = []

    def do(model: Any, **settings: Any) -> Model:
        name = settings.pop("name", None) or next(names)
        handle = server.deploy(name, model, **settings)
        made.append(handle.name)
        return handle

    yield do
    for name in reversed(made):
        if any(str(model.id) == name for model in server.catalog.models()):
            server.retire(name, force=True)


@pytest.fixture
def deploy(server: clipper.ClipperServer, names: Iterator[str]) -> Iterator[Callable[..., Model]]:
    """Deploys a model under a new name and retires it after the test. `handle.name` is `NAME:1`."""
    with deploying(server, names) as do:
        yield do


@pytest.fixture(scope="module")
def deploy_for_all(
    server: clipper.ClipperServer, names: Iterator[str]
) -> Iterator[Callable[..., Model]]:
    """Yield the same function for all tests of a module, which leave the models as they are: a
    container costs half a second of CPU."""
    with deploying(server, names) as do:
        yield do


@pytest.fixture
def app(
    server: clipper.ClipperServer, names: Iterator[str]
) -> Iterator[Callable[..., clipper.ApplicationHandle]]:
    """Yield a function that makes an application of a new name; unregister it after the test."""
    made: list[str] = []

    def do(*models: Any, **settings: Any) -> clipper.ApplicationHandle:
        name = next(names)
        handle = server.app(
            name, models=[getattr(model, "name", model) for model in models], **settings
        )
        made.append(name)
        return handle

    yield do
    for name in made:
        server.catalog.unregister_application(name)
