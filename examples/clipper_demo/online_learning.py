"""Applications that learn during the demo: the same images to exp3, which queries one model, and
to stacking, which queries all. Every answer gets feedback, and the policies' shares are sampled.
"""

import time
from dataclasses import dataclass, field

import numpy as np

from clipper.component import State, Stop, Worker
from clipper.errors import ClipperError
from clipper.serving.query.application import ApplicationHandle
from clipper.serving.query.future_watcher import Future
from clipper.types import Answer
from clipper_demo.digits import Digits

SAMPLE_S = 0.25
RECENT_S = 5.0
_TICK_S = 0.05
_Query = tuple[int, list[Future]]  # a digit, and its answers


@dataclass(frozen=True, slots=True)
class LearningSample:
    """One moment. shares: by application, then by model; those of an application add up to 1.
    answers, errors: so far."""

    at_s: float
    shares: dict[str, dict[str, float]]
    answers: dict[str, int]
    errors: dict[str, int]


@dataclass(slots=True)
class LearningEvent:
    """An action of the user or its effect. model: name without version."""

    at_s: float
    text: str
    model: str
    mark: str  # one character, below the plot


@dataclass(slots=True)
class Story:
    """The samples and events to draw, in order. Threads: one writes; any reads."""

    applications: tuple[str, ...]
    models: tuple[str, ...]
    samples: list[LearningSample] = field(default_factory=list)
    events: list[LearningEvent] = field(default_factory=list)

    def recent_error(self, application: str) -> float:
        """Return the share of wrong answers over the last RECENT_S."""
        if not self.samples:
            return 0.0
        last = self.samples[-1]
        first = next(sample for sample in self.samples if sample.at_s >= last.at_s - RECENT_S)
        return _share(last, application, first if first is not last else None)

    def whole_error(self, application: str) -> float:
        """Return the share of wrong answers since the start."""
        return _share(self.samples[-1], application, None) if self.samples else 0.0


def _share(last: LearningSample, application: str, first: LearningSample | None) -> float:
    answers = last.answers[application] - (first.answers[application] if first else 0)
    errors = last.errors[application] - (first.errors[application] if first else 0)
    return errors / answers if answers else 0.0


class OnlineLearning:
    """Sends images to every application, sends feedback for each answer, and samples. rate: images
    per second.

    Threads: any, for public methods.
    """

    def __init__(
        self, applications: list[ApplicationHandle], models: list[str], digits: Digits, rate: float
    ) -> None:
        self.rate = rate
        self.story = Story(tuple(app.name for app in applications), tuple(models))
        self._applications = applications
        self._digits = digits
        self._random = np.random.default_rng(7)
        self._answers = dict.fromkeys(self.story.applications, 0)
        self._errors = dict.fromkeys(self.story.applications, 0)
        self._started = time.monotonic()
        self._worker = Worker("clipper-demo-lessons", self._run, once=True)

    def start(self) -> None:
        """Start sending."""
        self._started = time.monotonic()
        self._worker.start()

    def stop(self) -> None:
        """Stop sending; return after the last feedback. Raises ClipperError if an error ended it
        before."""
        self._worker.end()
        health = self._worker.health()
        if health.state is State.FAILED:
            raise ClipperError(f"the demo's applications have stopped to learn: {health.why}.")

    def happened(self, text: str, model: str, mark: str) -> None:
        """Record an event."""
        self.story.events.append(LearningEvent(time.monotonic() - self._started, text, model, mark))

    def favourite(self) -> str:
        """Return the model that the first application queries most."""
        shares = self._applications[0].shares()
        return max(shares, key=lambda model: shares[model]).partition(":")[0]

    def _run(self, stop: Stop) -> None:
        queries: list[_Query] = []
        due = 0.0
        self._sample()
        while not stop.wait(_TICK_S):
            self._log_feedback(queries)
            due += self.rate * _TICK_S
            queries = [self._query() for _ in range(int(due))]
            due -= int(due)
            if time.monotonic() - self._started >= self.story.samples[-1].at_s + SAMPLE_S:
                self._sample()
        self._log_feedback(queries)
        self._sample()

    def _query(self) -> _Query:
        """Send a held-out image with fresh noise to all applications."""
        at = int(self._random.integers(len(self._digits.held_x)))
        scan = self._digits.held_x[at] + self._random.normal(0, 0.5, 64)
        return int(self._digits.held_y[at]), [app.predict(scan) for app in self._applications]

    def _log_feedback(self, queries: list[_Query]) -> None:
        digits = [digit for digit, _ in queries]
        for at, app in enumerate(self._applications):
            answers: list[Answer] = [futures[at].result() for _, futures in queries]
            self._answers[app.name] += len(answers)
            self._errors[app.name] += sum(
                answer.output != digit for answer, digit in zip(answers, digits, strict=True)
            )
            app.feedback_many(answers, digits)

    def _sample(self) -> None:
        shares = {
            app.name: {model.partition(":")[0]: share for model, share in app.shares().items()}
            for app in self._applications
        }
        now = time.monotonic() - self._started
        sample = LearningSample(now, shares, self._answers.copy(), self._errors.copy())
        self.story.samples.append(sample)
