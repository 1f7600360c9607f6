"""What a user holds of an application."""

from collections.abc import Callable
from typing import Any

from clipper.errors import InvalidInput
from clipper.serving.processor import Question, predict
from clipper_core.future import Future


class ApplicationHandle:
    """An application by name; it follows every change of its record. Threads: any."""

    __slots__ = ("_question", "_slo_ms_max", "name")

    def __init__(self, name: str, question: Callable[[str], Question], slo_ms_max: float) -> None:
        self.name = name
        self._question = question
        self._slo_ms_max = slo_ms_max

    def predict(self, x: Any, user: str | None = None, slo_ms: float | None = None, salt: int = 0) -> Future:
        """Schedule one query; -> the Future of an `Answer`, at once.

        x: one input of the application's type.  user: whose selection state applies.  slo_ms: instead of the
        application's; the answer is there by then, from the models or the default.  salt: another cache entry.
        Raises InvalidInput (type, shape, SLO), UnknownApplication, and UnknownModel when no model is linked; the future
        never raises for a model's failure.
        """
        question = self._question(self.name)
        slo_us = question.slo_us if slo_ms is None else slo_in_us(slo_ms, self._slo_ms_max)
        return predict(question, x, user, slo_us, salt)

    def __repr__(self) -> str:
        question = self._question(self.name)
        models = ", ".join(map(str, question.models))
        return f"<Application {self.name}: {models} by {question.policy.name}, SLO {question.slo_us / 1000:g} ms>"


def slo_in_us(slo_ms: float, slo_ms_max: float) -> int:
    if isinstance(slo_ms, str) or not 0 < slo_ms <= slo_ms_max:
        raise InvalidInput(
            f"slo_ms={slo_ms!r}: it must lie above 0 and at most at {slo_ms_max:g} ms.", hint="See limits.slo_ms_max."
        )
    return max(1, round(slo_ms * 1000))
