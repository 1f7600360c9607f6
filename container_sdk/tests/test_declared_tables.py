"""Tables that a model declares: the declarations, what the model gets, and errors."""

import json
import types
from typing import Any

import pytest

from clipper_container import Model, tables
from clipper_container.loading.errors import LoadError
from clipper_container.loading.runtimes import _loaded
from clipper_container.model import as_model
from clipper_container.runtime import ArtifactError
from clipper_container.worker.declared_tables import DECLARED_ENV, TABLES_ENV, declared, give_tables

USERS = {"users": {"dim": 4, "optimizer": "sgd"}}


class Learns(Model):
    tables = USERS

    def predict_batch(self, inputs):
        return inputs


class Borrowed:
    """A model with `tables` that does not derive from clipper_container.Model."""

    tables = USERS

    def predict_batch(self, inputs):
        return inputs


class Other:
    """A model whose attribute `tables` is no declaration of tables."""

    tables = ("walnut", "oak")

    def predict_batch(self, inputs):
        return inputs


class Fake:
    """Tables that record the calls that they get."""

    def __init__(self, place):
        self.place, self.made = place, {}

    def create(self, name, dim, **spec):
        self.made[name] = {"dim": dim, **spec}


@pytest.fixture
def place(monkeypatch):
    monkeypatch.setattr(tables, "Tables", Fake)
    monkeypatch.setenv(TABLES_ENV, "/somewhere")
    monkeypatch.delenv(DECLARED_ENV, raising=False)
    return "/somewhere"


@pytest.mark.parametrize("kind", [Learns, Borrowed])
def test_a_model_has_its_tables_before_it_loads(place, kind):
    model: Any = as_model(kind)
    assert give_tables(model) == USERS
    given = model.tables if kind is Learns else model.inner.tables
    assert (given.place, given.made) == (place, USERS)
    assert kind.tables == USERS, "the class says what it said"


def test_tables_given_by_the_server_are_added(place, monkeypatch):
    monkeypatch.setenv(DECLARED_ENV, json.dumps({"items": {"dim": 2}, "users": {"dim": 8}}))
    model = as_model(Learns)
    give_tables(model)
    assert model.tables.made == {"users": {"dim": 8}, "items": {"dim": 2}}


@pytest.mark.parametrize(
    "thing", [Other, lambda inputs: inputs, types.SimpleNamespace(predict_batch=None, predict=len)]
)
def test_one_that_declares_none_is_left_alone(place, thing):
    model = as_model(thing)
    assert give_tables(model) == {}
    assert Other.tables == ("walnut", "oak")


def test_without_a_server_that_has_tables_it_does_not_load(monkeypatch):
    monkeypatch.delenv(TABLES_ENV, raising=False)
    with pytest.raises(
        LoadError, match=r"declares parameter tables \('users'\).*clipper\.start\(params="
    ):
        give_tables(as_model(Learns))


def test_an_invalid_declaration_is_rejected(place, monkeypatch):
    for wrong in ({"users": 4}, {"users": {}}, {"users": {"optimizer": "sgd"}}):
        model = as_model(Learns)
        model.tables = wrong
        with pytest.raises(LoadError, match=r"a mapping with .dim. is needed"):
            give_tables(model)
    monkeypatch.setenv(DECLARED_ENV, "{")
    with pytest.raises(LoadError, match="is not JSON"):
        declared(as_model(Learns))


def test_a_host_refuses_it(monkeypatch):
    monkeypatch.delenv(DECLARED_ENV, raising=False)
    with pytest.raises(ArtifactError, match=r"declares parameter tables \(users\)"):
        _loaded(Learns)
