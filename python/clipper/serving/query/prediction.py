"""Queries to any application or model of a server: single ones, arrays, and collectors."""

import weakref

from clipper.serving.query.application import array_slo_in_us, request_id, slo_in_us
from clipper.serving.query.arrays import predict_array
from clipper.serving.query.collector import Collector
from clipper.serving.query.processor import predict
from clipper.serving.query.resolver import ApplicationResolver
from clipper.types import Answer, Answers, PredictionRequest
from clipper_core.results.future import Future


class Prediction:
    """Schedules queries. Threads: any."""

    def __init__(self, resolver: ApplicationResolver, slo_ms_max: float) -> None:
        self._resolver, self._slo_ms_max = resolver, slo_ms_max
        self._collectors: weakref.WeakSet[Collector] = weakref.WeakSet()

    def schedule(self, request: PredictionRequest) -> "Future[Answer]":
        """Schedule one query; return its future at once.

        Raises UnknownApplication, UnknownModel, InvalidInput.
        """
        future = self._resolver.table.schedule(request)
        if future is not None:
            return future
        resolved = self._resolver.request(request)
        slo_us = resolved.slo_us
        if request.slo_ms is not None:
            slo_us = slo_in_us(request.slo_ms, self._slo_ms_max)
        id = request_id(request.id) if request.id else ""
        return predict(
            resolved,
            request.input,
            request.user,
            slo_us,
            request.salt,
            request.context,
            id,
            request.outputs,
            resolved.band(request.priority),
        )

    def schedule_array(self, request: PredictionRequest) -> "Future[Answers]":
        """Schedule the rows of request.input; return one future for all. Raises as schedule()."""
        slo_us = array_slo_in_us(request.slo_ms, self._slo_ms_max)
        resolved = self._resolver.request(request)
        band, user = resolved.band(request.priority), request.user
        return predict_array(
            resolved, request.input, user, slo_us, request.salt, request.outputs, band
        )

    def collector(self, capacity: int) -> Collector:
        """Return a collector of at most `capacity` queries in progress. Raises InvalidInput."""
        collector = Collector(self.schedule, capacity)
        self._collectors.add(collector)
        return collector

    def close(self) -> None:
        """Close the collectors, whose waiting threads return."""
        for collector in list(self._collectors):
            collector.close()
