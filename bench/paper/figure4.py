"""Figure 4: what adaptive batching gains over none, for a linear SVM on digits with p99 at most 20 ms."""

import collections
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from sklearn.datasets import load_digits
from sklearn.svm import LinearSVC

import clipper
from bench.harness import Goal, Row, Sample, interleave, row

SLO_MS = 20.0
STATIC_SIZES = (1, 8, 64, 256, 512, 1024)
WINDOWS = (1, 8, 64, 256, 1024, 2048, 4096)


def linear_svm() -> Any:
    """A linear SVM on half of scikit-learn's digits, as f64[64] in 0..1."""
    x, y = load_digits(return_X_y=True)
    return LinearSVC().fit(x[:900] / 16, y[:900])


def batchings() -> dict[str, dict[str, Any]]:
    static = {f"static {n}": {"mode": "static", "size_max": n} for n in STATIC_SIZES}
    return {**static, "aimd": {"mode": "aimd", "size_max": 4096}, "fit": {"mode": "fit", "size_max": 4096}}


def rate_within_slo(predict: Callable[[Any], clipper.Future], n: int, window: int) -> float:
    """Answers a second with `window` queries outstanding; 0 when one failed or p99 is above the SLO."""
    rows = np.random.default_rng(window).random((n, 64))
    waiting: collections.deque[clipper.Future] = collections.deque()
    latencies, failures = [], 0
    begun = time.perf_counter()
    for x in rows:
        if len(waiting) == window:
            failures += heard(waiting.popleft(), latencies)
        waiting.append(predict(x))
    while waiting:
        failures += heard(waiting.popleft(), latencies)
    rate = n / (time.perf_counter() - begun)
    return 0.0 if failures > n // 1000 or np.quantile(latencies, 0.99) > SLO_MS * 1000 else rate


def heard(future: clipper.Future, latencies: list[int]) -> int:
    """1 when the query has no prediction."""
    future.wait()
    latencies.append(future.latency_us)
    return int(future.status().name != "OK")


def best(predict: Callable[[Any], clipper.Future], windows: tuple[int, ...], n: int) -> float:
    """The greatest rate over all numbers of queries outstanding."""
    return max(rate_within_slo(predict, min(n, 40 * window + 200), window) for window in windows)


def main(quick: bool) -> list[Row]:
    n = 2000 if quick else 20000
    windows = (1, 64, 1024) if quick else WINDOWS
    model = linear_svm()
    chosen = {k: v for k, v in batchings().items() if not quick or k in ("static 1", "static 512", "aimd")}
    with clipper.start() as server:
        cases = {}
        for name, batching in chosen.items():
            handle = server.deploy(name.replace(" ", "-"), model.predict, batching=batching, cache=False)
            cases[name] = bind(handle, windows, n)
        found = interleave(cases, repetitions=1 if quick else 3)
    return rows(found)


def bind(handle: Any, windows: tuple[int, ...], n: int) -> Callable[[], float]:
    return lambda: best(lambda x: handle.predict(x, slo_ms=SLO_MS), windows, n)


def rows(found: dict[str, Sample]) -> list[Row]:
    single = found["static 1"]
    statics = {name: sample for name, sample in found.items() if name.startswith("static")}
    champion = max(statics, key=lambda name: statics[name].median)
    unit, unbatched = "predictions/s", "no batching"
    aimd, ten = found["aimd"], Goal("at_least", 10)
    result.append(row("linear SVM, AIMD against no batching", aimd, unit, unbatched, single, ten))
    result.append(
        row("linear SVM, AIMD against the best static size", found["aimd"], unit, champion, statics[champion],
            Goal("at_least", 0.9))
    )  # fmt: skip
    return result
