"""Every public function refuses a keyword that it has not, and names the one that was meant."""

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import clipper
from clipper.errors import ClipperError, UnknownKeyword
from clipper.manage.client import Client
from clipper.manage.mesh.client import MeshClient
from clipper.manage.operations import Operations
from clipper.mesh.node.node import MeshNode
from clipper.options import keywords_of, only_known
from clipper.params import Client as ParamsClient
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.collector import Collector
from clipper_container import tables

CLASSES = (
    clipper.ClipperServer,
    ApplicationHandle,
    Collector,
    Client,
    MeshClient,
    MeshNode,
    Operations,
    ParamsClient,
)
# `**` keywords: checked by what takes them, which has a test below, or by the server's answer.
CHECKED_ELSEWHERE = {
    "Client.alter",  # of tables; the shard refuses
    "Client.call",
    "Client.call_all",
    "Client.deploy",
    "Client.feedback",
    "Client.predict",
    "Client.predict_plainly",
    "Client.set_application",
    "ApplicationHandle.feedback",
    "Operations.deploy",
    "ApplicationHandle.predict",
    "ClipperServer.app",
    "ClipperServer.deploy",
    "ClipperServer.models_from",
    "ClipperServer.stream",
}


def methods() -> Iterator[tuple[str, Callable[..., object]]]:
    for kind in CLASSES:
        for name, method in inspect.getmembers(kind, inspect.isfunction):
            if not name.startswith("_"):
                yield f"{kind.__name__}.{name}", method


METHODS = dict(methods())


@pytest.mark.parametrize("name", METHODS)
def test_an_unknown_keyword_is_refused_with_the_one_that_was_meant(name: str) -> None:
    method = METHODS[name]
    parameters = inspect.signature(method).parameters.values()
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        assert name in CHECKED_ELSEWHERE
        return
    needed = [
        one for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL
    ]
    for word in keywords_of(method):
        given: dict[str, Any] = {f"{word}x": 1}
        with pytest.raises(UnknownKeyword) as caught:
            method(*map(str, needed), **given)
        assert isinstance(caught.value, TypeError)
        assert f"'{word}x'" in str(caught.value)
        assert "did you mean" in str(caught.value) or len(word) < 3


def test_keywords_of_options_are_refused() -> None:
    with clipper.start(http="127.0.0.1:0", admin="127.0.0.1:0") as server:
        remote = clipper.connect(f"http://{server.admin_address}")
        server.deploy("m", lambda rows: rows[:, 0], input="f64[2]")
        server.app("a", ["m"], slo_ms=10_000)
        slips: dict[str, Callable[[], object]] = {
            "replicas": lambda: server.deploy("x", len, replica=2),  # type: ignore[call-arg]
            "memory_mib": lambda: server.manage.deploy("x", "a:b", memory=2),  # type: ignore[call-arg]
            "slo_ms": lambda: server.app("a", slo=3),  # type: ignore[call-arg]
            "user": lambda: server.app("a").predict([1.0, 2.0], usr="x"),  # type: ignore[call-arg]
            "group": lambda: server.stream("a", "redis://x", grop="x"),  # type: ignore[call-arg]
            "keep": lambda: server.models_from("redis://x", kep=1),  # type: ignore[call-arg]
        }
        far: dict[str, Callable[[], object]] = {
            "replicas": lambda: remote.deploy("x", "a:b", replica=2),  # type: ignore[call-arg]
            "slo_ms": lambda: remote.set_application("a", slo=3),  # type: ignore[call-arg]
            "user": lambda: remote.predict("a", [1.0, 2.0], usr="x"),
            "label": lambda: remote.feedback("a", "id", lable=1),
            "stages": lambda: remote.rollout("a", "m:1", stage=3),  # type: ignore[call-arg]
        }
        for calls in (slips, far):
            for meant, call in calls.items():
                with pytest.raises(ClipperError, match=f"did you mean '{meant}'"):
                    call()
        assert server.app("a").predict([1.0, 2.0]).result(20).output == 1.0
        assert [one["name"] for one in server.manage.ps()] == ["m"]


def test_compiled_functions_name_the_keyword_that_was_meant() -> None:
    with clipper.start(http="") as server:
        model: Any = server.deploy("m", lambda rows: rows[:, 0], input="f64[2]")
        future: Any = model.predict([1.0, 2.0], slo_ms=10_000)
        slips: dict[str, Callable[[], object]] = {
            "slo_ms": lambda: model.predict([1.0, 2.0], slo=1),
            "salt": lambda: model.predict([1.0, 2.0], **{"slo_ms": 10, "sallt": 1}),
            "rows": lambda: model.predict_many(row=[[1.0, 2.0]]),
            "timeout": lambda: future.result(timeot=3),
        }
        for meant, call in slips.items():
            with pytest.raises(UnknownKeyword, match=f"did you mean '{meant}'"):
                call()
        with pytest.raises(UnknownKeyword, match="Its keywords: timeout"):
            future.wait(**{"a b": 1})
        assert future.result(timeout=20) == 1.0


def test_settings_of_a_table_are_refused() -> None:
    with pytest.raises(UnknownKeyword, match="did you mean 'optimizer'"):
        tables.Tables.create(object(), "t", 4, optimiser="sgd")  # type: ignore[arg-type]


def test_what_is_wrapped_is_as_it_was() -> None:
    def add(one: int, /, other: int = 2, *more: int, last: int = 3) -> int:
        """Add numbers."""
        return one + other + sum(more) + last

    wrapped = only_known(add)
    assert inspect.signature(wrapped) == inspect.signature(add)
    assert (wrapped(1), wrapped(1, 1, 1, last=1)) == (6, 4)
    assert keywords_of(wrapped) == ("other", "last")
    with pytest.raises(UnknownKeyword, match=r"add\(\) has no keyword 'one'"):
        wrapped(1, one=1)  # type: ignore[call-arg]
