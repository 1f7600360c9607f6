"""The words of the live view of the demo."""

import pytest

pytest.importorskip("rich", reason="pip install rich")

from clipper_demo.live import _state
from clipper_demo.report import ModelFigures


@pytest.mark.parametrize(
    ("replicas", "wanted", "text"),
    [
        (("ready",), 1, "ready"),
        (("ready", "stopped"), 2, "1 of 2"),
        (("ready", "failed"), 2, "1 failed"),
        (("ready", "suspect", "suspect"), 3, "2 not responding"),
    ],
)
def test_the_state_of_a_model_names_what_is_not_ready(
    replicas: tuple[str, ...], wanted: int, text: str
) -> None:
    state = _state(ModelFigures("m", replicas, 0.0, 0.0, 0.0, 0.0, 0, 0.0, wanted))
    assert state.plain == text
