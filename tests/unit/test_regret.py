"""Every rule keeps its bound, on streams short enough for every day; `python -m bench regret` plays
200 seeds of long ones."""

import numpy as np
import pytest

from bench.learning.regret import TRIALS, regret

ROUNDS, SEEDS = 4000, range(4)


@pytest.mark.parametrize("name", TRIALS)
def test_a_rule_keeps_its_bound(name):
    """A theorem's bound holds for the mean over chance: here of a few seeds, with the margin that
    it leaves."""
    found = [regret(name, ROUNDS, seed) for seed in SEEDS]
    assert np.mean(found) <= TRIALS[name].bound(ROUNDS)
