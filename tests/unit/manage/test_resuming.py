"""A model of the catalog is started by one thread at a time."""

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from clipper.manage.deployment import Deployment
from clipper.types import ANY, Model


def test_an_imported_model_is_not_started_while_the_catalog_is_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[int, bool]] = []

    def scale_to(one: Any, model: Model, count: int) -> None:
        seen.append((count, one._changing.locked()))

    monkeypatch.setattr(Deployment, "_scale_to", scale_to)
    monkeypatch.setattr(Deployment, "_networked", False)
    deployment: Any = object.__new__(Deployment)
    deployment._changing = threading.Lock()
    deployment._followed = {}
    deployment._running = SimpleNamespace(ensure=lambda model: None)
    deployment._parameters = SimpleNamespace(served=None)
    model = Model("svm", 1, ANY, replicas=2)
    deployment.resume(model)
    assert seen == [(2, True)]
    assert deployment._followed == {model.id: model}
    assert not deployment._changing.locked()
