"""A model is trained through three shards, one of which is killed: as if it had not been."""

from pathlib import Path

import numpy as np
import pytest

from bench.system.params import training


@pytest.mark.slow
def test_a_kill_during_training_changes_no_parameter(tmp_path: Path) -> None:
    undisturbed, killed = (
        training.train(tmp_path / str(kills), workers=1, steps=24, kills=kills)
        for kills in (False, True)
    )
    assert (undisturbed.kills, killed.kills) == (0, 1)
    assert np.array_equal(undisturbed.rows, killed.rows), "each push counts once, whatever dies"
    assert undisturbed.bias == killed.bias
    assert undisturbed.loss == killed.loss < np.log(2), "it has learned"
