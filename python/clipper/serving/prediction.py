"""Queries to any application or model of a server: single ones, arrays, and collectors."""

import weakref

from clipper.serving.application import array_slo_in_us, request_id, slo_in_us
from clipper.serving.arrays import predict_array
from clipper.serving.collector import Collector
from clipper.serving.processor import predict
from clipper.serving.questions import Questions
from clipper.types import Answer, Answers, PredictionRequest
from clipper_core.results.future import Future


class Prediction:
    """Schedules queries. Threads: any."""

    def __init__(self, questions: Questions, slo_ms_max: float) -> None:
        self._questions, self._slo_ms_max = questions, slo_ms_max
        self._collectors: weakref.WeakSet[Collector] = weakref.WeakSet()

    def schedule(self, request: PredictionRequest) -> "Future[Answer]":
        """Schedule one query; return its future at once.

        Raises UnknownApplication, UnknownModel, InvalidInput.
        """
        question = self._questions.asked(request)
        slo_us = question.slo_us
        if request.slo_ms is not None:
            slo_us = slo_in_us(request.slo_ms, self._slo_ms_max)
        id = request_id(request.id) if request.id else ""
        return predict(
            question, request.input, request.user, slo_us, request.salt, request.context, id
        )

    def schedule_array(self, request: PredictionRequest) -> "Future[Answers]":
        """Schedule the rows of request.input; return one future for all. Raises as schedule()."""
        slo_us = array_slo_in_us(request.slo_ms, self._slo_ms_max)
        question = self._questions.asked(request)
        return predict_array(question, request.input, request.user, slo_us, request.salt)

    def collector(self, capacity: int) -> Collector:
        """Return a collector of at most `capacity` queries in progress. Raises InvalidInput."""
        collector = Collector(self.schedule, capacity)
        self._collectors.add(collector)
        return collector

    def close(self) -> None:
        """Close the collectors, whose waiting threads return."""
        for collector in list(self._collectors):
            collector.close()
