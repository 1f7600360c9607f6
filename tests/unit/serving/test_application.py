"""ApplicationHandle: the methods of an application that users call."""

import math

import pytest

from clipper.errors import InvalidInput, UnknownApplication
from clipper.selection import create_policy
from clipper.serving.feedback.states import States
from clipper.serving.query.application import ApplicationHandle, slo_in_us
from clipper.serving.query.processor import ResolvedApplication
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel
from clipper_core.application.application import ApplicationTable


def test_an_slo_in_microseconds():
    assert slo_in_us(20, 60_000) == 20_000
    assert slo_in_us(0.5, 60_000) == 500
    assert slo_in_us(1e-9, 60_000) == 1
    assert slo_in_us(60_000, 60_000) == 60_000_000


@pytest.mark.parametrize("slo_ms", [0, -1, math.nan, math.inf, 60_000.1, "20"])
def test_an_slo_that_is_none(slo_ms):
    with pytest.raises(
        InvalidInput, match=r"slo_ms=.*above 0 and at most at 60000 ms\. See limits\.slo_ms_max"
    ):
        slo_in_us(slo_ms, 60_000)


def test_it_follows_its_record():
    models = (VersionedModel("m", 1),)
    policy = create_policy("single")
    states = States(MemoryStore(), Journal(None), "node", 100, 1.0)
    known = {
        "a": ResolvedApplication(
            "a", models, {}, policy, states.learner("a", "single", policy, models), 20_000
        )
    }

    def find(name):
        try:
            return known[name]
        except KeyError:
            raise UnknownApplication.named(name, known) from None

    handle = ApplicationHandle("a", find, ApplicationTable(), 60_000)
    assert repr(handle) == "<Application a: m:1 by single, SLO 20 ms>"
    known["b"] = known.pop("a")
    with pytest.raises(UnknownApplication, match=r"did you mean|Applications: b"):
        handle.predict(1.0)
