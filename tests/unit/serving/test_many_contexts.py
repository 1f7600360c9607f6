"""Many contexts: written in batches, evicted one by one, and bounded."""

import random
from collections import OrderedDict

import numpy as np
import pytest

from clipper.errors import Overloaded
from clipper.serving.feedback.stored_state import PREFIX
from clipper.store.memory import MemoryStore
from clipper.store.store import Put
from tests.unit.serving.test_states import KL, A, B, Broken, Server, observation


class Counted(MemoryStore):
    """A store that counts the transactions that write."""

    writes = 0

    def txn(self, compares, then, orelse=()):
        self.writes += any(isinstance(op, Put) for op in then)
        return super().txn(compares, then, orelse)


def test_many_states_are_written_in_few_transactions() -> None:
    store, draw = Counted(), random.Random(16)
    server = Server(store, None)
    learner = server.learner("exp4")
    for i in range(500):
        server.observe(learner, f"u{i}", observation(draw))
    server.states.flush()
    assert not server.states.dirty
    assert len(store.range(PREFIX)[0]) == 502, "and the list of the sets of models"
    assert store.writes <= 501 / 64 + 3
    server.states.close()


def test_states_that_others_changed_do_not_keep_the_rest_of_a_batch_from_being_written() -> None:
    store, draw = Counted(), random.Random(17)
    ours, theirs = Server(store, None, "a"), Server(store, None, "b")
    for i in range(50):
        ours.learner(KL).state(f"u{i}")
    for server in (theirs, ours):
        for i in range(0, 50, 1 if server is ours else 5):
            server.observe(server.learner(KL), f"u{i}", observation(draw))
    theirs.states.flush()
    ours.states.flush()
    changed = [user for _, user in ours.states.dirty if user]
    assert sorted(changed) == sorted(f"u{i}" for i in range(0, 50, 5)), (
        "merged, to be written in the next round"
    )
    ours.states.flush()
    assert not ours.states.dirty
    later = Server(store, None, "c").learner(KL)
    assert [later.state(f"u{i}").seen for i in range(10)] == [2, 1, 1, 1, 1, 2, 1, 1, 1, 1]
    assert later.state(None).seen == 60
    for server in (ours, theirs):
        server.states.close()


def test_a_full_memory_forgets_those_that_were_not_used_lately_and_not_the_rest() -> None:
    """Contexts follow a Zipf law over more than fit into memory: they are found there as often as
    by LRU."""
    store, draw, size = MemoryStore(), random.Random(18), 100
    server = Server(store, None, contexts_max=size)
    learner = server.learner("exp4")
    weights = [1 / (i + 1) for i in range(500)]
    recent, hits, by_lru = OrderedDict[str, None](), 0, 0
    for turn, user in enumerate(draw.choices([f"u{i}" for i in range(500)], weights, k=20_000)):
        if turn >= 2_000:
            hits += learner.known(user) is not None
            by_lru += user in recent
        learner.state(user)
        recent[user] = None
        recent.move_to_end(user)
        if len(recent) > size:
            recent.popitem(last=False)
        assert len(learner) <= size + 5
    assert hits >= 0.95 * by_lru
    assert len(learner) >= size - 1
    server.states.close()


def test_a_new_context_scans_few_others_when_all_wait_to_be_written() -> None:
    draw, reads = random.Random(19), 0
    server = Server(MemoryStore(), None, contexts_max=200)
    learner = server.learner("exp4")
    for i in range(300):
        server.observe(learner, f"u{i}", observation(draw))
    assert len(learner) == 301, "all of them wait to be written: none is forgotten"
    known = learner.known

    class ReadCounter(type(learner)):  # type: ignore[misc]
        __slots__ = ()

        def known(self, user: str):
            nonlocal reads
            reads += 1
            return known(user)

    learner.__class__ = ReadCounter
    learner.state("one more")
    assert reads <= 70
    server.states.close()


def test_contexts_that_wait_to_be_written_are_bounded() -> None:
    store, draw = Broken(), random.Random(20)
    server = Server(store, None, contexts_max=50)
    learner = server.learner("exp4")
    store.broken = True
    for i in range(100):
        server.observe(learner, f"u{i}", observation(draw))
    before = server.journal.last
    with pytest.raises(Overloaded, match="100 contexts wait"):
        server.observe(learner, "one more", observation(draw))
    assert server.journal.last == before, "what was refused is not written down"
    assert np.array_equal(
        learner.state("another").rows, learner.policy.init((A, B), learner.state(None)).rows
    )
    assert len(learner) == 101
    server.observe(learner, "u7", observation(draw))
    store.broken = False
    server.states.flush()
    server.observe(learner, "one more", observation(draw))
    assert learner.state("one more").seen == 1
    server.states.close()
