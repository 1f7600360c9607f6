"""The latest decisions of this node about its models, with reasons."""

import logging
from collections import OrderedDict, deque
from typing import Final

from clipper.mesh.registry import now_ms
from clipper.mesh.reports import Decision

DECISIONS_MAX: Final = 32  # kept for each model
MODELS_MAX: Final = 2048
_log = logging.getLogger(__name__)


class DecisionLog:
    """The latest decisions about the models that had one most recently.

    Threads: `note` on the event loop; `of` any.
    """

    def __init__(self) -> None:
        self._models: OrderedDict[str, deque[Decision]] = OrderedDict()

    def note(self, id: str, what: str, why: str = "") -> None:
        """Add a decision about a model."""
        decisions = self._models.setdefault(id, deque(maxlen=DECISIONS_MAX))
        decisions.append(Decision(now_ms(), what, why))
        self._models.move_to_end(id)
        if len(self._models) > MODELS_MAX:
            self._models.popitem(last=False)
        _log.debug("model %s: %s, %s", id, what, why)

    def of(self, id: str) -> tuple[Decision, ...]:
        """Return the decisions about a model, newest last."""
        return tuple(self._models.get(id, ()))
