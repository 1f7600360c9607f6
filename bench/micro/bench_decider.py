"""The price of deciding: after every vote of a query, in the core; beside a majority counted in
Python after every vote."""

from collections import Counter

import pytest
from pytest_benchmark.fixture import BenchmarkFixture

from clipper_core.results.decider import Decider, Rule, Step, Vote, VoteState

LAPS = 10  # queries a round of the core's rows: short rounds, or they would be interrupted

SCHEDULES = {
    "majority": [Step(Rule.QUORUM)],
    "weighted": [Step(Rule.WEIGHTED, confidence_min=0.6)],
    "best": [Step(Rule.BEST)],
    "median": [Step(Rule.MEDIAN, tolerance=0.1)],
    "three steps": [Step(Rule.QUORUM, 12_000), Step(Rule.BEST, 18_000), Step(Rule.FLOOR, which=0)],
}


def votes_of(n: int) -> list[Vote]:
    return [Vote(VoteState.ARRIVED, i % 2, 0.5, 1.0, 0, i) for i in range(n)]


@pytest.mark.parametrize("n", [3, 8, 64])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ten_queries_in_the_core(benchmark: BenchmarkFixture, schedule: str, n: int) -> None:
    benchmark.group = f"decide after each of {n} votes"
    benchmark.extra_info["queries"] = LAPS
    benchmark(Decider(SCHEDULES[schedule]).replay, votes_of(n), LAPS)


@pytest.mark.parametrize("n", [3, 8, 64])
def test_one_query_plain_python(benchmark: BenchmarkFixture, n: int) -> None:
    benchmark.group = f"decide after each of {n} votes"
    votes = [i % 2 for i in range(n)]

    def query() -> int:
        counts: Counter[int] = Counter()
        for k, vote in enumerate(votes):
            counts[vote] += 1
            (_, top), *rest = counts.most_common(2)
            if top - (rest[0][1] if rest else 0) > n - k - 1:
                return k
        return n

    benchmark(query)
