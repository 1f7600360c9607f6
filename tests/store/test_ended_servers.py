"""Names of servers that have ended leave the states, whatever the store is, and they may return."""

import random
from pathlib import Path

from clipper.serving.feedback.ended_servers import EndedServers
from clipper.serving.feedback.presence import NAMES
from clipper.serving.feedback.states import States
from clipper.serving.feedback.stored_state import LEFT_OUT, SHARED, unsealed
from clipper.store import Store
from clipper.store.journal import Journal
from tests.memory_container import wait_until
from tests.store.test_shared_states import TEXT, Connect, connect, seen
from tests.unit.serving.test_states import Server, observation

__all__ = ["connect"]
ENDED_S = 100.0
PODS = 4


class Sharing(Server):
    """A server that follows the store, and writes on request. now_s: the time, changed by the
    test."""

    def __init__(self, store: Store, folder: Path, node: str, now_s: list[float]) -> None:
        self.journal = Journal(folder / node)
        ended = EndedServers(store, node, ENDED_S, lambda: now_s[0])
        self.states = States(
            store, self.journal, node, 1000, write_s=3600, follows=True, ended=ended
        )
        self.states.replay(self.read)

    def send_feedback(self, draw: random.Random) -> None:
        self.observe(self.learner(TEXT), "u", observation(draw))


def test_names_of_ended_servers_leave_the_states_and_each_may_return(
    connect: Connect, tmp_path: Path
) -> None:
    """Half of the pods end in good order, half are killed, with an observation that only their
    journal has."""
    draw, store, now_s = random.Random(1), connect(), [0.0]
    store.put(NAMES + "stays", b"")
    stays = Sharing(connect(), tmp_path, "stays", now_s)
    for number in range(PODS):
        pod = Sharing(connect(), tmp_path, f"pod-{number}", now_s)
        pod.send_feedback(draw)
        wait_until(lambda pod=pod: pod.states.flush() or not pod.states.dirty, "written", 20)
        pod.send_feedback(draw)
        if number % 2:
            pod.states.stop_writing("it is killed")
            pod.kill()
        pod.states.close()
    learner = stays.learner(TEXT)
    counted = 2 * PODS - PODS // 2

    def has(count: int) -> bool:
        """Return whether it knows of so many observations; it may have begun without what the store
        has, which it asks for again with its next write."""
        stays.states.flush()
        return seen(learner) == seen(learner, "u") == count

    wait_until(lambda: has(counted), "all is there")

    def named() -> set[str]:
        records = [store.get(learner.key(user)) for user in (SHARED, "u")]
        found = {name for one in records if one for name in unsealed(one.value).applied}
        return found - {LEFT_OUT}

    stays.states._sync.leave_out_ended()
    assert len(named()) == PODS, "nobody has been gone for long"
    now_s[0] += ENDED_S
    stays.states._sync.leave_out_ended()
    assert named() == set()
    stays.send_feedback(draw)
    wait_until(lambda: stays.states.flush() or named() == {"stays"}, "it is written", 20)
    for number in range(PODS):
        Sharing(connect(), tmp_path, f"pod-{number}", now_s).states.close()
    wait_until(lambda: has(2 * PODS + 1), "all is there")
    assert named() == {"stays"} | {f"pod-{number}" for number in range(1, PODS, 2)}
    stays.states.close()
