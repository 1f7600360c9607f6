"""Ensemble calls to models of two engines at once: arrivals by both loops, hits, late starts, and
callers that cancel, drop and decide."""

import gc
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from clipper_core.engine.model import predict_ensemble
from clipper_core.results.decider import Decider, Rule, Step
from clipper_core.results.future import Future, MailboxReader
from clipper_core.runtime.status import Status
from tests.stress.node import together
from tests.stress.test_peer_threads import Pair, row, some_models

SUBMITTERS = 4
QUERIES = 1500

DECIDERS = [
    Decider([Step(Rule.ALL)]),
    Decider([Step(Rule.FIRST)]),
    Decider([Step(Rule.QUORUM)]),
    Decider([Step(Rule.CASCADE, confidence_min=0.9)]),
    Decider([Step(Rule.HEDGED, extra=1.0)]),
    Decider([Step(Rule.TIED)]),
    Decider([Step(Rule.QUORUM, 2_000), Step(Rule.BEST, 200_000), Step(Rule.FIRST)]),
]


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    made = Pair(tmp_path)
    yield made
    made.close()
    gc.collect()
    assert [engine.completion.ensemble_calls_held for engine in made.engines] == [0, 0]


def ask(pair: Pair, rng: random.Random, serial: int) -> Future:
    models = some_models(pair, rng)
    starts = tuple(rng.choice([0, 0, -1, 300]) for _ in models)
    return predict_ensemble(
        models, rng.choice(DECIDERS), row(serial), starts_us=starts, learn=rng.random() < 0.5
    )


def is_right(future: Future, serial: int) -> bool:
    """Check that every prediction used is right and had arrived when the decider ruled."""
    verdict = future.verdict
    assert verdict is not None
    _, used, arrived = verdict
    values = np.array(future.result(0)).reshape(-1, 2).tolist()
    ended = [future.status(i) for i in range(len(future)) if arrived >> i & 1]
    return (
        used & ~arrived == 0
        and values == [[2.0 * serial, 2.0]] * used.bit_count()
        and set(ended) <= {Status.OK}
    )


def test_threads_that_block_cancel_drop_and_rule(pair: Pair, stress: int) -> None:
    answered_by = [0] * SUBMITTERS

    def run(which: int) -> None:
        rng = random.Random(which)
        for lap in range(QUERIES * stress // 50):
            serials = [(which * 10**6 + lap * 50 + i) % 3_000 for i in range(rng.randint(1, 50))]
            futures = [(serial, ask(pair, rng, serial)) for serial in serials]
            rng.shuffle(futures)
            for serial, future in futures[: len(futures) // 2]:
                fate = rng.random()
                if fate < 0.3:
                    future.cancel()
                elif fate < 0.5:
                    ruled = future.rule(
                        5, sum(1 << i for i in range(len(future)) if future.status(i) is Status.OK)
                    )
                    assert not ruled or (future.verdict or [0])[0] == 5
                elif fate < 0.7:
                    assert future.wait(30)
                    assert future.cancelled() or is_right(future, serial)
            del futures[: len(futures) // 4]
            for serial, future in futures:
                assert future.wait(30)
                assert future.cancelled() or is_right(future, serial)
                answered_by[which] += not future.cancelled()
            del future

    together(*(lambda i=i: run(i) for i in range(SUBMITTERS)))
    assert all(answered_by)


def test_a_mailbox_is_notified_of_verdicts(pair: Pair, stress: int) -> None:
    rng = random.Random(7)
    mailbox = MailboxReader(pair.engines[0].completion)
    home = (pair.models[b"a0"], pair.models[b"b1"], pair.models[b"c0"], pair.models[b"d1"])
    for lap in range(4 * stress):
        futures = [
            predict_ensemble(home, rng.choice(DECIDERS), row(lap * 500 + i), learn=i % 2 == 0)
            for i in range(500)
        ]
        waiting = {i for i, future in enumerate(futures) if mailbox.add(future, i)}
        while waiting:
            waiting -= {i for _, i in mailbox.drain()}
            threading.Event().wait(0.0005)
        assert all(is_right(future, lap * 500 + i) for i, future in enumerate(futures))
        del futures
