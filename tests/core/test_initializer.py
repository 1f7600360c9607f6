"""Initial values of rows by clipper_core.params.optimizer."""

from statistics import NormalDist

import numpy as np
import pytest

from clipper_core.params.optimizer import Initializer
from clipper_core.runtime.status import StatusError

IDS = np.concatenate([np.arange(40_000), -np.arange(1, 2), [2**63 - 1, -(2**63)]])


@pytest.mark.parametrize("name", ["uniform", "normal", "truncated_normal", "glorot"])
def test_a_row_depends_on_key_and_id_alone(name: str) -> None:
    initializer = Initializer(name)
    rows = initializer.rows(5, IDS, 16)
    order = np.random.default_rng(0).permutation(len(IDS))
    assert (initializer.rows(5, IDS[order], 16) == rows[order]).all()
    assert (Initializer(name).rows(5, IDS[7:8], 16) == rows[7]).all()
    assert len({row.tobytes() for row in rows}) == len(IDS)
    assert (initializer.rows(6, IDS, 16) != rows).any(axis=1).all()


def test_what_is_drawn_never_changes() -> None:
    """Rows that were never updated are not stored, so a different draw would change the model."""
    drawn = [
        Initializer(name).rows(2**63 + 11, [-3, 0, 2**62], 3) for name in ("uniform", "normal")
    ]
    np.testing.assert_allclose(drawn, RECORDED, atol=6e-7)


RECORDED = [
    [
        [-0.037124, -0.049718, 0.047657],
        [0.017084, 0.044559, 0.049455],
        [-0.035651, -0.021497, -0.031554],
    ],
    [
        [-0.056613, -0.138372, 0.099377],
        [0.022112, 0.080177, 0.127304],
        [-0.053239, -0.028398, -0.044926],
    ],
]


@pytest.mark.parametrize(
    ("name", "settings", "mean", "std", "least", "most"),
    [
        ("uniform", {"low": -0.2, "high": 0.4}, 0.1, 0.6 / 12**0.5, -0.2, 0.4),
        ("normal", {"mean": 1.0, "std": 0.5}, 1.0, 0.5, -3.0, 5.0),
        ("truncated_normal", {"mean": 1.0, "std": 0.5}, 1.0, 0.5 * 0.8796, 0.0, 2.0),
        ("glorot", {}, 0.0, (6 / 16) ** 0.5 / 3**0.5, -((6 / 16) ** 0.5), (6 / 16) ** 0.5),
        ("glorot", {"fan_in": 92}, 0.0, 0.06**0.5 / 3**0.5, -(0.06**0.5), 0.06**0.5),
    ],
)
def test_what_is_drawn_has_its_distribution(
    name: str, settings: dict[str, float], mean: float, std: float, least: float, most: float
) -> None:
    rows = Initializer(name, **settings).rows(1, np.arange(40_000), 8)
    assert rows.mean() == pytest.approx(mean, abs=4 * std / rows.size**0.5)
    assert rows.std() == pytest.approx(std, rel=0.01)
    assert least <= rows.min()
    assert rows.max() <= most
    assert np.abs(np.corrcoef(rows.T) - np.eye(8)).max() < 0.025, "places of a row"
    assert abs(np.corrcoef(rows[:-1, 0], rows[1:, 0])[0, 1]) < 0.025, "ids next to each other"


def test_normal_rows_are_normal_in_their_tails() -> None:
    drawn = np.sort(Initializer("normal", std=1.0).rows(3, np.arange(100_000), 8), axis=None)
    for share in (0.0001, 0.001, 0.01, 0.2, 0.5, 0.9, 0.999, 0.9999):
        expected = NormalDist().inv_cdf(share)
        error = (share * (1 - share) / drawn.size) ** 0.5 / NormalDist().pdf(expected)
        assert np.quantile(drawn, share) == pytest.approx(expected, abs=5 * error + 1e-6)


def test_constants() -> None:
    assert not Initializer("zeros").rows(1, [1, 2], 3).any()
    assert (Initializer("constant", value=-0.5).rows(1, [1, 2], 3) == -0.5).all()
    assert repr(Initializer("constant", value=-0.5)) == "Initializer('constant', value=-0.5)"


def test_arguments_are_checked() -> None:
    for name, wrong, message in [
        ("ones", {}, "no initializer 'ones'"),
        ("zeros", {"value": 1.0}, "no setting 'value': none at all"),
        ("uniform", {"low": 1.0, "high": 0.0}, "low is at most high"),
        ("normal", {"std": -1.0}, "at least 0"),
        ("normal", {"std": float("inf")}, "no finite number"),
    ]:
        with pytest.raises(StatusError, match=message):
            Initializer(name, **wrong)
