"""Cost of counting for an answer: `finish` with an application's statistics and means, beside
`finish` without.

pytest bench/micro/bench_tally.py --benchmark-columns=min,median,iqr
"""

from typing import Any

import msgspec
import pytest

from clipper.selection import Plan, create_policy
from clipper.serving.feedback.states import States
from clipper.serving.query.processor import QueryContext, ResolvedApplication, RolloutState, finish
from clipper.serving.query.stats import ApplicationCounters
from clipper.store.journal import Journal
from clipper.store.memory import MemoryStore
from clipper.types import VersionedModel
from clipper_core.runtime.status import Status

OPERATIONS = 2_000
OUTPUTS: dict[str, list[float]] = {
    "one label": [7],
    "three labels": [7, 7, 8],
    "three numbers": [1.0, 2.0, 3.0],
}


class Ended:
    """A future whose tasks have ended well."""

    def __init__(self, asked: ResolvedApplication, outputs: list[Any]) -> None:
        self.extra = QueryContext(asked, Plan(asked.models), asked.learner.state(None))
        self.outputs, self.latency_us, self.id = outputs, 100, 1

    def status(self, i: int = 0) -> Status:
        return Status.OK

    def output(self, i: int = 0) -> Any:
        return self.outputs[i]

    def confidence(self, i: int = 0) -> None:
        return None

    def heard(self, i: int = 0) -> tuple[Any, None]:
        return self.outputs[i], None


def resolved(models: tuple[VersionedModel, ...]) -> ResolvedApplication:
    policy = create_policy("ensemble")
    states = States(MemoryStore(), Journal(None), "node", 100, 1.0)
    return ResolvedApplication(
        "app", models, {}, policy, states.learner("app", "ensemble", policy, models), 1000
    )


@pytest.mark.parametrize("counted", [False, True], ids=["anchor", "counted"])
@pytest.mark.parametrize("kind", OUTPUTS)
def test_finish(benchmark: Any, kind: str, counted: bool) -> None:
    outputs = OUTPUTS[kind]
    models = tuple(VersionedModel(f"m{i}", 1) for i in range(len(outputs)))
    asked = resolved(models)
    if counted:
        counters = ApplicationCounters()
        asked = msgspec.structs.replace(
            asked,
            rollout=RolloutState(counters.for_models(models, None)),
            means=counters.means,
        )
    future: Any = Ended(asked, outputs)

    def run() -> None:
        for _ in range(OPERATIONS):
            finish(future)

    benchmark.group = kind
    benchmark.pedantic(run, rounds=30, warmup_rounds=3)
    if benchmark.stats is not None:
        benchmark.extra_info["ns_per_operation"] = round(
            benchmark.stats.stats.min / OPERATIONS * 1e9, 1
        )
