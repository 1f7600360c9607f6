import random
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

# A test asserts no time, and has the same examples each time; `--hypothesis-profile=default` draws
# others.
settings.register_profile(
    "repeatable", derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("repeatable")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed the generators that all share, before the fixtures: a test draws the same numbers,
    whichever ran before it."""
    random.seed(0)
    # scikit-learn draws from it
    np.random.seed(0)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)
