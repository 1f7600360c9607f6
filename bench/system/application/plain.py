"""A plain Python program that does what an application does, as a competent user would write it:
an LRU dictionary for each model, a Future, and numpy to count votes."""

from collections import OrderedDict
from concurrent.futures import Future
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray


class PlainApplication:
    """Models with known outputs, behind `predict(x) -> Future`. x: f64[n]. Threads: any.

    known: the outputs of each model, by the bytes of x.
    """

    def __init__(self, models: int) -> None:
        self.known: list[OrderedDict[bytes, int]] = [OrderedDict() for _ in range(models)]
        self._lock = Lock()

    def learn(self, x: NDArray[np.float64], output: int) -> None:
        """Keep an output of all models."""
        for known in self.known:
            known[x.tobytes()] = output

    def predict(self, x: NDArray[np.float64]) -> "Future[Any]":
        """Return the future of the output on which most models agree. Raises KeyError for an x
        that no model knows."""
        future: Future[Any] = Future()
        key = x.tobytes()
        votes = []
        with self._lock:
            for known in self.known:
                votes.append(known[key])
                known.move_to_end(key)
        if len(votes) > 1:
            labels, counts = np.unique(votes, return_counts=True)
            future.set_result(labels[counts.argmax()])
        else:
            future.set_result(votes[0])
        return future
