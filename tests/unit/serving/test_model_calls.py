"""Which models may call which, by the catalog: what is listed, circles, and long chains."""

from types import MappingProxyType

import pytest

from clipper.catalog.view import View
from clipper.errors import CallsExceeded, CircularCall, InvalidInput, UnlistedCall
from clipper.serving.query.model_calls import CallGraph, parse_target
from clipper.types import Application, InputType, Model, VersionedModel

DEPTH_MAX = 4


def view_of(apps: dict[str, list[str]], **calls: list[str]) -> View:
    """Return a catalog of models by what they call, and applications by their models."""
    versions = {
        name: (Model(name, 1, InputType.parse("f64"), calls=tuple(targets)),)
        for name, targets in calls.items()
    }
    applications = {
        name: Application(name, tuple(VersionedModel(model, None) for model in models))
        for name, models in apps.items()
    }
    nothing: MappingProxyType[str, str] = MappingProxyType({})
    return View(0, MappingProxyType(versions), MappingProxyType(applications), nothing)


def check(view: View, caller: str, target: str) -> None:
    CallGraph(DEPTH_MAX).check(view, view.versions[caller][0], target)


def test_only_what_is_listed() -> None:
    view = view_of({"app": ["b"]}, a=["model:b", "app:app"], b=[])
    check(view, "a", "model:b")
    check(view, "a", "app:app")
    for target in ("model:a", "app:b", "model:c"):
        with pytest.raises(UnlistedCall, match="may not call"):
            check(view, "a", target)


def test_circles_also_through_applications() -> None:
    view = view_of({"app": ["c"]}, a=["model:b"], b=["app:app"], c=["model:a"], d=["model:d"])
    for caller, target in (("a", "model:b"), ("b", "app:app"), ("c", "model:a"), ("d", "model:d")):
        with pytest.raises(CircularCall, match="in a circle"):
            check(view, caller, target)


def test_a_diamond_is_no_circle() -> None:
    view = view_of({}, a=["model:b", "model:c"], b=["model:d"], c=["model:d"], d=[])
    check(view, "a", "model:b")
    check(view, "a", "model:c")


@pytest.mark.parametrize("length", range(1, 8))
def test_the_length_of_a_chain(length: int) -> None:
    chain = {f"m{i}": [f"model:m{i + 1}"] for i in range(length)} | {f"m{length}": []}
    view = view_of({}, **chain)
    if length <= DEPTH_MAX:
        check(view, "m0", "model:m1")
        return
    with pytest.raises(CallsExceeded, match="call_depth_max"):
        check(view, "m0", "model:m1")


def test_a_change_of_the_catalog_is_seen() -> None:
    graph = CallGraph(DEPTH_MAX)
    before = view_of({}, a=["model:b"], b=[])
    graph.check(before, before.versions["a"][0], "model:b")
    after = view_of({}, a=["model:b"], b=["model:a"])
    with pytest.raises(CircularCall):
        graph.check(after, after.versions["a"][0], "model:b")


@pytest.mark.parametrize("text", ["", "a", "model:", "mesh:a", "app", "model:" + "x" * 300])
def test_what_is_no_target(text: str) -> None:
    with pytest.raises(InvalidInput, match="cannot be called"):
        parse_target(text)
