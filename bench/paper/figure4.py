"""Figure 4: what adaptive batching gains over none, for a linear SVM on digits with p99 at most 20
ms.

Two measures. Throughput: queries one by one, a window of them outstanding, the greatest rate over
all windows at which p99 keeps the SLO. Goodput: an open loop that offers rows every millisecond at
a fixed rate, whatever becomes of them; what is answered in time, a second.
"""

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
OK = 1  # clipper_core.runtime.status.Status.OK
STATIC_SIZES = (1, 8, 64, 256, 512, 1024)
RATES = (100_000, 200_000, 400_000)
TICK_S = 0.001
WINDOWS = (1, 8, 64, 256, 1024, 2048, 4096)


def linear_svm() -> Any:
    """Return a linear SVM on half of scikit-learn's digits, as f64[64] in 0..1."""
    x, y = load_digits(return_X_y=True)
    return LinearSVC().fit(x[:900] / 16, y[:900])


def batchings() -> dict[str, dict[str, Any]]:
    static = {f"static {n}": {"mode": "static", "size_max": n} for n in STATIC_SIZES}
    return {
        **static,
        "aimd": {"mode": "aimd", "size_max": 4096},
        "fit": {"mode": "fit", "size_max": 4096},
    }


def rate_within_slo(predict: Callable[[Any], clipper.Future], n: int, window: int) -> float:
    """Return the answers per second with `window` queries outstanding; 0 if one failed or p99 is
    above the SLO."""
    rows = np.random.default_rng(window).random((n, 64))
    waiting: collections.deque[clipper.Future] = collections.deque()
    latencies: list[int] = []
    failures = 0
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
    """Return 1 if the query has no prediction."""
    future.wait()
    latencies.append(future.latency_us)
    return int(future.status().name != "OK")


def best(predict: Callable[[Any], clipper.Future], windows: tuple[int, ...], n: int) -> float:
    """Return the highest rate over all numbers of outstanding queries."""
    return max(rate_within_slo(predict, min(n, 40 * window + 200), window) for window in windows)


def goodput(handle: Any, rate: int, seconds: float) -> float:
    """Return the predictions in time per second when `rate` queries per second are offered."""
    rows = np.random.default_rng(rate).random((round(rate * TICK_S), 64))
    sent = []
    begun = time.perf_counter()
    for tick in range(round(seconds / TICK_S)):
        if (ahead := begun + tick * TICK_S - time.perf_counter()) > 0:
            time.sleep(ahead)
        sent.append(handle.predict_many(rows, slo_ms=SLO_MS))
    took = time.perf_counter() - begun
    return float(sum(in_time(future) for future in sent) / max(took, seconds))


def in_time(future: clipper.Future) -> int:
    future.wait()
    return int(np.sum(future.statuses() == OK))


def main(quick: bool) -> list[Row]:
    n = 2000 if quick else 20000
    windows = (1, 64, 1024) if quick else WINDOWS
    model = linear_svm()
    chosen = {
        k: v for k, v in batchings().items() if not quick or k in ("static 1", "static 512", "aimd")
    }
    with clipper.start() as server:
        cases = {}
        for name, batching in chosen.items():
            handle = server.deploy(
                name.replace(" ", "-"), model.predict, batching=batching, cache=False
            )
            cases[name] = bind(
                best, lambda x, handle=handle: handle.predict(x, slo_ms=SLO_MS), windows, n
            )
            for rate in () if name == "static 1" else RATES[:1] if quick else RATES:
                cases[f"{name} at {rate}"] = bind(goodput, handle, rate, 0.2 if quick else 0.5)
        found = interleave(cases, repetitions=1 if quick else 3)
    return rows(found)


def bind(measure: Callable[..., float], *args: Any) -> Callable[[], float]:
    return lambda: measure(*args)


def rows(found: dict[str, Sample]) -> list[Row]:
    single, aimd, unit = found["static 1"], found["aimd"], "predictions/s"
    through = {name: sample for name, sample in found.items() if " at " not in name}
    result = [
        row(f"linear SVM, p99 <= 20 ms, {name}", sample, unit, "no batching", single)
        for name, sample in through.items()
    ]
    result.append(
        row(
            "linear SVM, AIMD's throughput", aimd, unit, "no batching", single, Goal("at_least", 10)
        )
    )
    for rate in RATES:
        offered = {
            name.split(" at ")[0]: sample
            for name, sample in found.items()
            if name.endswith(f" at {rate}")
        }
        statics = [name for name in offered if name.startswith("static")]
        if statics:
            champion = max(statics, key=lambda name: offered[name].median)
            title = f"linear SVM, AIMD's goodput at {rate // 1000} k/s offered"
            best_static = offered[champion]
            result.append(
                row(
                    title,
                    offered["aimd"],
                    unit,
                    f"best: {champion}",
                    best_static,
                    Goal("at_least", 0.9),
                )
            )
    return result
