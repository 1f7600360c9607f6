"""Tests of clipper_core.params.optimizer, compared with the same rules in doubles, written as in
their papers."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clipper_core.params.optimizer import Optimizer
from clipper_core.runtime.status import StatusError

NAMES = list(Optimizer.SETTINGS)


class Twin:
    """A reference model of an optimizer: one weight after the other, in doubles."""

    def __init__(self, optimizer: Optimizer, weights: np.ndarray[Any, Any]) -> None:
        self.o, self.s = optimizer, optimizer.settings
        self.w = weights.astype(np.float64)
        self.state = optimizer.state(weights.size).astype(np.float64)
        self.t = 0

    def step(self, gradient: np.ndarray[Any, Any], scale: float = 1.0) -> None:
        self.t += 1
        s, rate = self.s, self.s["rate"] * scale
        g = np.clip(gradient.astype(np.float64), -s["clip_value"], s["clip_value"])
        norm = math.sqrt((g * g).sum())
        if norm > s["clip_norm"]:
            g *= s["clip_norm"] / norm
        if self.o.name != "ftrl":
            g += s["l2"] * self.w
        RULES[self.o.name](self, g, rate)


def sgd(twin: Twin, g: Any, rate: float) -> None:
    twin.w -= rate * g


def momentum(twin: Twin, g: Any, rate: float) -> None:
    v = twin.state[0] = twin.s["momentum"] * twin.state[0] + g
    twin.w -= rate * v


def nesterov(twin: Twin, g: Any, rate: float) -> None:
    v = twin.state[0] = twin.s["momentum"] * twin.state[0] + g
    twin.w -= rate * (g + twin.s["momentum"] * v)


def adagrad(twin: Twin, g: Any, rate: float) -> None:
    twin.state[0] += g * g
    twin.w -= rate * g / (np.sqrt(twin.state[0]) + twin.s["eps"])


def adam(twin: Twin, g: Any, rate: float) -> None:
    s = twin.s
    m = twin.state[0] = s["beta1"] * twin.state[0] + (1 - s["beta1"]) * g
    v = twin.state[1] = s["beta2"] * twin.state[1] + (1 - s["beta2"]) * g * g
    if twin.o.name == "amsgrad":
        v = twin.state[2] = np.maximum(twin.state[2], v)
    twin.w -= (
        rate
        * (m / (1 - s["beta1"] ** twin.t))
        / (np.sqrt(v / (1 - s["beta2"] ** twin.t)) + s["eps"])
    )


def ftrl(twin: Twin, g: Any, rate: float) -> None:
    s, n = twin.s, twin.state[0]
    sigma = (np.sqrt(n + g * g) - np.sqrt(n)) / rate
    twin.state[1] += g - sigma * twin.w
    n = twin.state[0] = n + g * g
    z = twin.state[1]
    pulled = -(z - np.sign(z) * s["l1"]) / ((s["beta"] + np.sqrt(n)) / rate + s["l2"])
    twin.w = np.where(np.abs(z) <= s["l1"], 0.0, pulled)


def adamw(twin: Twin, g: Any, rate: float) -> None:
    twin.w -= rate * twin.s["decay"] * twin.w
    adam(twin, g, rate)


def rmsprop(twin: Twin, g: Any, rate: float) -> None:
    s = twin.s
    v = twin.state[0] = s["alpha"] * twin.state[0] + (1 - s["alpha"]) * g * g
    twin.w -= rate * g / (np.sqrt(v) + s["eps"])


def lion(twin: Twin, g: Any, rate: float) -> None:
    s, m = twin.s, twin.state[0]
    twin.w -= rate * (np.sign(s["beta1"] * m + (1 - s["beta1"]) * g) + s["decay"] * twin.w)
    twin.state[0] = s["beta2"] * m + (1 - s["beta2"]) * g


def rowwise_adagrad(twin: Twin, g: Any, rate: float) -> None:
    twin.state[0, 0] += (g * g).mean()
    twin.w -= rate * g / (np.sqrt(twin.state[0, 0]) + twin.s["eps"])


RULES: dict[str, Callable[[Twin, Any, float], None]] = {
    "sgd": sgd,
    "momentum": momentum,
    "nesterov": nesterov,
    "adagrad": adagrad,
    "adam": adam,
    "amsgrad": adam,
    "ftrl": ftrl,
    "adamw": adamw,
    "rmsprop": rmsprop,
    "lion": lion,
    "rowwise_adagrad": rowwise_adagrad,
}


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n=st.integers(1, 40),
    l2=st.sampled_from([0.0, 0.01]),
    clips=st.sampled_from(
        [{}, {"clip_value": 0.3}, {"clip_norm": 0.5}, {"clip_value": 0.6, "clip_norm": 0.9}]
    ),
)
def test_steps_are_those_of_the_papers(
    name: str, seed: int, n: int, l2: float, clips: dict[str, float]
) -> None:
    draw = np.random.default_rng(seed)
    more = {key: 0.1 for key in ("start", "decay") if key in Optimizer.SETTINGS[name]}
    optimizer = Optimizer(name, l2=l2, **clips, **more)
    w = draw.standard_normal(n).astype(np.float32)
    state, twin = optimizer.state(n), Twin(optimizer, w)
    for t in range(1, 20):
        g = draw.standard_normal(n).astype(np.float32) * (draw.random() < 0.9)
        scale = draw.choice([1.0, 0.5])
        optimizer.step(w, state, g, t, scale)
        twin.step(g, scale)
    np.testing.assert_allclose(w, twin.w, rtol=2e-4, atol=2e-5)
    np.testing.assert_allclose(state, twin.state, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", NAMES)
def test_a_million_random_steps_leave_numbers(name: str) -> None:
    draw = np.random.default_rng(7)
    optimizer = Optimizer(name)
    w, state = np.zeros(10_000, np.float32), optimizer.state(10_000)
    for t in range(1, 101):
        scale = 10.0 ** draw.uniform(-20, 6, 10_000)
        optimizer.step(w, state, (draw.standard_normal(10_000) * scale).astype(np.float32), t)
    assert np.isfinite(w).all()
    assert np.isfinite(state).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "key",
    ["plain", "rate 1e30", "rate 1e-38", "l2 1e20", "clip_norm 1", "clip_value 1e30", "eps 0"],
)
def test_numbers_stay_finite_whatever_comes(name: str, key: str) -> None:
    setting, _, value = key.partition(" ")
    more = {setting: float(value)} if setting in Optimizer.SETTINGS[name] else {}
    largest = np.finfo(np.float32).max
    draw, optimizer = np.random.default_rng(8), Optimizer(name, **more)
    w, state = draw.standard_normal(500).astype(np.float32), optimizer.state(500)
    extremes = np.array([largest, -largest, 1e-45, -1e-45, 1e20, -1e20, 0.0, 1.0], np.float32)
    for t in range(1, 200):
        optimizer.step(
            w, state, draw.choice(extremes, 500), t, float(draw.choice([1.0, 1e-30, 1e30]))
        )
        assert np.isfinite(w).all()
        assert np.isfinite(state).all(), "a replica would refuse it"


@pytest.mark.parametrize("name", NAMES)
def test_a_zero_gradient_at_the_start_changes_nothing(name: str) -> None:
    optimizer = Optimizer(name)
    w = np.zeros(9, np.float32)
    optimizer.step(w, optimizer.state(9), np.zeros(9, np.float32))
    assert not w.any()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_gradient_that_is_no_number_changes_nothing(bad: float) -> None:
    optimizer = Optimizer("adam")
    w, state = np.ones(33, np.float32), optimizer.state(33)
    for place in (0, 16, 32):
        g = np.ones(33, np.float32)
        g[place] = bad
        with pytest.raises(StatusError, match="NaN or infinity"):
            optimizer.step(w, state, g)
    assert (w == 1.0).all()
    assert not state.any()


def test_arguments_are_checked() -> None:
    for name, wrong, message in [
        ("sdg", {}, "no optimizer 'sdg'"),
        ("sgd", {"momentum": 0.9}, "no setting 'momentum'"),
        ("adam", {"beta1": 1.0}, "out of its range"),
        ("adam", {"rate": 0.0}, "out of its range"),
        ("adam", {"rate": float("nan")}, "out of its range"),
        ("adagrad", {"start": -1.0}, "out of its range"),
        ("sgd", {"clip_norm": 0.0}, "out of its range"),
    ]:
        with pytest.raises(StatusError, match=message):
            Optimizer(name, **wrong)
    optimizer = Optimizer("momentum")
    w, state, g = np.zeros(4, np.float32), optimizer.state(4), np.zeros(4, np.float32)
    for bad in [
        (w.astype(float), state, g),
        (w, state[:, :3], g),
        (w, state, g[::2]),
        (w, np.zeros((2, 4), np.float32), g),
    ]:
        with pytest.raises(StatusError, match="expected contiguous f32"):
            optimizer.step(*bad)  # type: ignore[arg-type]
    for number, scale in [(0, 1.0), (1, 0.0), (1, float("inf"))]:
        with pytest.raises(StatusError, match="a step has a number"):
            optimizer.step(w, state, g, number, scale)


@pytest.mark.parametrize(
    ("name", "kind", "more", "theirs"),
    [
        ("adamw", "AdamW", {"decay": 0.1}, {"weight_decay": 0.1}),
        ("adamw", "AdamW", {"rate": 0.05, "beta1": 0.5}, {"lr": 0.05, "betas": (0.5, 0.999)}),
        ("rmsprop", "RMSprop", {}, {}),
        ("rmsprop", "RMSprop", {"alpha": 0.8, "l2": 0.1}, {"alpha": 0.8, "weight_decay": 0.1}),
        ("adagrad", "Adagrad", {}, {}),
        ("adam", "Adam", {"l2": 0.1}, {"weight_decay": 0.1}),
    ],
)
def test_steps_are_those_of_torch(
    name: str, kind: str, more: dict[str, float], theirs: dict[str, Any]
) -> None:
    torch = pytest.importorskip("torch", reason="no torch: python tools/fetch.py torch")
    draw = np.random.default_rng(4)
    w = draw.standard_normal(50).astype(np.float32)
    optimizer, weights = Optimizer(name, **more), torch.nn.Parameter(torch.from_numpy(w.copy()))
    state, steps = optimizer.state(50), getattr(torch.optim, kind)([weights], **theirs)
    for t in range(1, 40):
        g = draw.standard_normal(50).astype(np.float32)
        optimizer.step(w, state, g, t)
        weights.grad = torch.from_numpy(g)
        steps.step()
    np.testing.assert_allclose(w, weights.detach().numpy(), rtol=2e-5, atol=2e-6)


def test_repr_slots_and_initial_state() -> None:
    assert repr(Optimizer("adagrad", rate=0.05)) == "Optimizer('adagrad', rate=0.05)"
    assert Optimizer("amsgrad").slots == ("mean", "squares", "largest")
    assert Optimizer("ftrl", start=0.1).state(2).tolist() == pytest.approx(
        np.array([[0.1, 0.1], [0, 0]])
    )
