"""Models are made of functions, of objects that only look like a model, and of models."""

from typing import Any

import numpy as np
import pytest

from clipper_container.model import BorrowedModel, FunctionModel, Model, as_model


class Bare:
    def predict_batch(self, inputs: Any) -> Any:
        return inputs * 2


class Whole:
    input, output, batch_max, sessions, fork = "f64[2]", "i64", 7, True, False

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def load(self) -> None:
        self.calls.append(("load",))

    def predict_batch(self, inputs: Any, *sessions: Any) -> Any:
        self.calls.append(("predict", inputs, *sessions))
        return [len(inputs)]

    def correct(self, *words: Any) -> None:
        self.calls.append(("correct", *words))

    def accuracy(self) -> float:
        return 0.25


def properties_of(model: Model) -> tuple[Any, ...]:
    return model.input, model.output, model.batch_max, model.sessions, model.fork


def test_all_methods_of_an_object_with_the_methods_of_a_model_are_used() -> None:
    inner = Whole()
    model = as_model(inner)
    assert type(model) is BorrowedModel
    assert properties_of(model) == ("f64[2]", "i64", 7, True, False)
    model.load()
    assert model.predict_batch([1, 2], 8, 9) == [2]
    model.correct([1], [2], [3])
    assert inner.calls == [("load",), ("predict", [1, 2], 8, 9), ("correct", [1], [2], [3])]
    assert (model.accuracy(), model.corrects) == (0.25, True)


def test_an_object_with_nothing_but_predictions_has_defaults() -> None:
    model = as_model(Bare())
    assert type(model) is BorrowedModel
    assert properties_of(model) == ("any", "any", 0, False, True)
    model.load()
    assert model.predict_batch(np.ones(2)).tolist() == [2.0, 2.0]
    assert (model.accuracy(), model.corrects) == (None, False)
    bare: Any = Bare()
    bare.accuracy = 0.5
    assert as_model(bare).accuracy() is None, "it is no method"


def test_attributes_of_a_function_are_those_of_its_model() -> None:
    def plain(inputs: Any) -> Any:
        return inputs

    def describe_more(inputs: Any, sessions: Any) -> Any:
        return [inputs, sessions]

    more: Any = describe_more
    more.input, more.output, more.batch_max, more.sessions, more.fork = "str", "i64", 3, 1, 0
    first, second = as_model(plain), as_model(more)
    assert type(first) is type(second) is FunctionModel
    assert properties_of(first) == ("any", "any", 0, False, True)
    assert properties_of(second) == ("str", "i64", 3, True, False)
    assert first.predict_batch([4]) == [4]
    assert second.predict_batch([4], [5]) == [[4], [5]]
    assert (first.accuracy(), first.corrects) == (None, False)
    with pytest.raises(TypeError):
        as_model(3)


def test_a_model_that_learns_declares_it() -> None:
    class Still(Model):
        def predict_batch(self, inputs: Any, *sessions: Any) -> Any:
            return inputs

    class Learner(Still):
        def correct(self, inputs: Any, labels: Any, sessions: Any) -> None:
            pass

    assert [as_model(kind()).corrects for kind in (Still, Learner)] == [False, True]
    still = Still()
    assert as_model(still) is still
