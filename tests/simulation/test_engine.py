"""Whole runs of the engine on a virtual clock, by seed: all kinds of faults occur, and the
guarantees hold.

A failing seed is in the test's name; `python -m pytest
"tests/simulation/test_engine.py::test_name[seed]"` plays it again.
"""

from collections import Counter
from random import Random
from typing import Any

import pytest

from clipper_core.runtime.status import Status
from tests.simulation.world import FAULTS, FAULTS_V1, HEARTBEAT_MS, TICK_US, Container, Kin, World
from tests.sizes import sized

ROWS: list[tuple[str, tuple[int, ...]]] = [
    ("f64", (4,)),
    ("f32", (2, 3)),
    ("i32", (-1,)),
    ("f64", (-1,)),
    ("str", ()),
    ("bytes", ()),
]
SLOS_US = [700, 3_000, 20_000, 33_000, 100_000, 250_000]


def a_zoo(world: World, rng: Random, *, lane_rows: int = 256) -> list[Kin]:
    """Create a few models of different input types, some of them cached."""
    return [
        world.model(
            f"m{i}",
            *rng.choice(ROWS),
            cached=rng.random() < 0.6,
            lane_rows=lane_rows,
            output="f64",
            output_shape=(),
        )
        for i in range(rng.randint(2, 4))
    ]


def add_containers(world: World, rng: Random, kin: Kin, *, fault_share: float) -> None:
    protocol = 1 if rng.random() < 0.25 and kin.dtype != "f32" else 2
    Container(
        world,
        kin,
        protocol=protocol,
        a_us=rng.choice([50, 300, 3_000]),
        b_us=rng.choice([1, 10, 200]),
        faults=FAULTS_V1 if protocol == 1 else rng.sample(FAULTS, rng.randint(1, len(FAULTS))),
        fault_share=fault_share,
        checked=True,
        comes_back=rng.random() < 0.9,
        hello_after_us=rng.choice([0, 0, 5_000, 300_000, 600_000]),
        latency_us=rng.choice([10, 100, 1_000]),
        chunk_max=rng.choice([1, 17, 300, 1 << 20]),
        mode=rng.randint(0, 3),
        size_max=rng.choice([1, 3, 16, 4096]),
        delay_us=rng.choice([0, 0, 500, 2_000]),
    )


def submit_queries(
    world: World, rng: Random, zoo: list[Kin], until_us: int, *, gap_us: int, keys: int
) -> None:
    """Send queries as clients do: bursts and lone queries, many keys or few, some cancelled."""
    while world.now_us < until_us:
        for _ in range(rng.choice([1, 1, 1, 12])):
            kin = rng.choice(zoo)
            wanted: Any = (
                rng.randrange(keys)
                if rng.random() < 0.9
                else [rng.randrange(keys) for _ in range(rng.randint(1, 40))]
            )
            query = world.submit(kin, wanted, rng.choice(SLOS_US), salt=rng.choice([0, 0, 0, 1]))
            if rng.random() < 0.1:
                world.after(
                    rng.randrange(query.deadline_us - world.now_us),
                    lambda future=query.future: future.cancel(),
                )  # type: ignore[misc]
        world.pass_us(rng.randint(1, 2 * gap_us))


@pytest.mark.parametrize("seed", range(sized(60, 300)))
def test_queries_are_answered_once_under_random_faults(seed: int) -> None:
    rng = Random(seed)
    world = World(
        seed, frame_bytes_max=rng.choice([4096, 1 << 20]), connections_max=rng.choice([3, 64])
    )
    zoo = a_zoo(world, rng, lane_rows=rng.choice([32, 256]))
    for kin in zoo[: rng.randint(1, len(zoo))]:
        for _ in range(rng.randint(1, 3)):
            add_containers(world, rng, kin, fault_share=rng.choice([0.02, 0.2, 0.6]))
    gap_us = rng.choice([100, 500, 3_000])
    submit_queries(world, rng, zoo, gap_us * 100, gap_us=gap_us, keys=rng.choice([10, 200, 5_000]))
    world.pass_us(300_000)
    world.check()
    world.check_rest()


@pytest.mark.parametrize("seed", range(sized(25, 100)))
def test_arrays_and_queries_are_answered_once_under_random_faults(seed: int) -> None:
    """Arrays of up to thousands of rows and single queries are sent to faulty models; a small queue
    refuses what does not fit."""
    rng = Random(seed)
    world = World(seed, frame_bytes_max=rng.choice([4096, 1 << 20]))
    kin = world.model(
        "m", cached=rng.random() < 0.5, lane_rows=256, lane_bytes_max=1 << rng.choice([16, 24])
    )
    for _ in range(rng.randint(1, 3)):
        add_containers(world, rng, kin, fault_share=rng.choice([0, 0.05, 0.4]))
    keys = rng.choice([50, 100_000])
    for _ in range(rng.choice([10, 40])):
        n = rng.choice([1, 1, 40, 300, 3_000])
        wanted: Any = [rng.randrange(keys) for _ in range(n)] if n > 1 else rng.randrange(keys)
        query = world.submit(kin, wanted, rng.choice(SLOS_US))
        if rng.random() < 0.1:
            world.after(
                rng.randrange(query.deadline_us - world.now_us),
                lambda future=query.future: future.cancel(),
            )  # type: ignore[misc]
        world.pass_us(rng.randint(1, 4_000))
    world.pass_us(500_000)
    world.check()
    world.check_rest()


@pytest.mark.parametrize("seed", range(1, 9))
def test_an_array_too_large_for_its_deadline_is_answered_in_part(seed: int) -> None:
    """All rows have one deadline: those that the container can evaluate by then are answered, the
    rest are dropped, and none is late."""
    world = World(seed)
    kin = world.model("m", cached=False)
    Container(world, kin, a_us=500, b_us=10)
    world.pass_us(1_000)
    query = world.submit(kin, list(range(20_000)), 50_000)
    world.pass_us(60_000)
    ended = world.check()
    assert query.future.done()
    assert ended[Status.OK] >= 0.7 * 50_000 / 10, ended
    assert set(ended) <= {Status.OK, Status.DROPPED, Status.DEADLINE}


def test_random_faults_cause_each_status() -> None:
    """The faults of the tests above occur; otherwise those tests would show nothing."""
    ended: Counter[Status] = Counter()
    for seed in range(25):
        rng = Random(seed)
        world = World(seed)
        kin = world.model("m", lane_rows=64, cached=False, output="f64", output_shape=())
        Container(world, kin, faults=FAULTS, fault_share=0.5)
        submit_queries(world, rng, [kin], 100_000, gap_us=1_000, keys=1_000)
        world.pass_us(300_000)
        ended += world.check()
    assert {
        Status.OK,
        Status.MODEL_ERROR,
        Status.BAD_OUTPUT,
        Status.REPLICA_LOST,
        Status.DEADLINE,
    } <= set(ended)
    assert ended[Status.OK] > 300


@pytest.mark.parametrize("seed", range(20))
def test_equal_queries_cost_one_evaluation(seed: int) -> None:
    """Queries are joined in flight or found in the cache, whatever their SLOs: each key is
    evaluated once, and every query is answered."""
    rng = Random(seed)
    world = World(seed)
    kin = world.model("m", cached=True)
    for _ in range(rng.randint(1, 3)):
        Container(world, kin, a_us=rng.choice([100, 2_000]), b_us=5)
    world.pass_us(1_000)
    for _ in range(150):
        for _ in range(rng.choice([1, 5])):
            world.submit(kin, rng.randrange(40), rng.choice([50_000, 70_000, 400_000]))
        world.pass_us(rng.randint(1, 600))
    world.pass_us(500_000)
    assert set(world.check()) == {Status.OK}
    assert set(world.evaluations.values()) == {1}
    snapshot = world.snapshot(kin)
    assert snapshot["evaluated"] == len(world.evaluations)
    assert snapshot["hits"] + snapshot["joined"] + snapshot["evaluated"] == len(world.queries)


def test_a_salt_makes_another_key() -> None:
    world = World(1)
    kin = world.model("m")
    Container(world, kin)
    world.pass_us(1_000)
    for salt in (0, 1, 2, 1, 0):
        world.submit(kin, 7, 50_000, salt)
    world.pass_us(60_000)
    assert set(world.check()) == {Status.OK}
    assert world.evaluations[0, 7] == 3


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("fault", ["die_before", "die_half", "huge", "future_id", "flip_header"])
def test_a_lost_row_is_sent_once_more_and_no_more(seed: int, fault: str) -> None:
    rng = Random(seed)
    world = World(seed)
    kin = world.model("m", cached=False, lane_rows=256)
    for _ in range(2):
        Container(world, kin, faults=[fault], fault_share=0.5)
    world.pass_us(1_000)
    for k in range(80):
        world.submit(kin, k, rng.choice([100_000, 150_000, 400_000]))
        world.pass_us(rng.randint(1, 400))
    world.pass_us(500_000)
    ended = world.check()
    sent = Counter(world.evaluations.values())
    assert set(sent) <= {1, 2, 3}, "one of these before it was begun, behind another batch"
    assert sent[2]
    assert ended[Status.OK]
    assert set(ended) <= {
        Status.OK,
        Status.REPLICA_LOST,
        Status.DROPPED,
        Status.DEADLINE,
        Status.NO_REPLICA,
    }
    world.check_rest()


@pytest.mark.parametrize("seed", range(10))
def test_a_row_that_kills_containers_is_sent_at_most_twice(seed: int) -> None:
    """Equal queries that arrive while the row waits for its retry do not reset its tries."""
    world = World(seed)
    kin = world.model("m", cached=True)
    container = Container(world, kin, faults=["die_before"], fault_share=1)
    world.pass_us(1_000)
    for slo_us in (400_000, 200_000, 100_000, 60_000):
        world.submit(kin, 7, slo_us)
        world.run(world.now_us + (60 if container.conn else 1))
    assert not container.conn
    world.pass_us(500_000)
    assert world.evaluations[0, 7] == 2
    assert set(world.check()) == {Status.REPLICA_LOST}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_three_times_the_capacity_costs_no_goodput(seed: int, mode: int) -> None:
    """Early drop: rows are answered in time up to the capacity of the container, and nearly no row
    is evaluated too late."""
    a_us, b_us, slo_us = 1_000.0, 50.0, 20_000
    world = World(seed)
    kin = world.model("m", cached=False, lane_rows=4096)
    container = Container(world, kin, a_us=a_us, b_us=b_us, latency_us=20, mode=mode)
    best = (slo_us / 2 - a_us) / b_us  # rows of a batch that takes half the SLO
    capacity = best / (slo_us / 2)  # rows a us
    world.pass_us(1_000)
    rng, k = Random(seed), 0
    warm_us, end_us = 250_000, 500_000
    due = float(world.now_us)
    while due < end_us:
        world.run(int(due))
        world.submit(kin, k, slo_us)
        k += 1
        due += rng.expovariate(3 * capacity)
    world.pass_us(50_000)
    world.check()
    late = [q for q in world.queries if warm_us <= q.deadline_us - slo_us < end_us]
    good = sum(q.future.status() == Status.OK for q in late)
    assert good >= 0.9 * capacity * (end_us - warm_us), (
        f"goodput {good / (capacity * (end_us - warm_us)):.2f} of capacity"
    )
    sent = sum(container.batches)
    answered = sum(q.future.status() == Status.OK for q in world.queries)
    assert answered >= 0.95 * sent, f"{sent - answered} of {sent} rows were sent in vain"


@pytest.mark.parametrize("mode", [1, 2])
def test_batches_are_sized_for_the_slo_of_the_query(mode: int) -> None:
    """The size follows the SLO of the query, not the bound of its SLO class, 32.8 ms here."""
    world = World(10)
    kin = world.model("m", cached=False, lane_rows=4096)
    container = Container(world, kin, a_us=1_000, b_us=100, latency_us=5, mode=mode)
    world.pass_us(1_000)
    for k in range(10_000):
        world.submit(kin, k, 20_000)
        world.pass_us(50)
    world.pass_us(50_000)
    world.check()
    replica = world.engine.replica(container.conn)
    assert replica is not None
    assert 70 <= replica["limit"] <= 95, (
        "half of 20 ms; half of the class's bound would be 150 rows"
    )


@pytest.mark.parametrize("seed", range(6))
def test_unequal_replicas_share_rows_by_their_speed(seed: int) -> None:
    """A replica that is ten times slower gets fewer rows, and no row is dropped by it that the fast
    one could answer in time."""
    world = World(seed)
    kin = world.model("m", cached=False)
    fast = Container(world, kin, a_us=1_000, b_us=20)
    slow = Container(world, kin, a_us=25_000, b_us=200)
    world.pass_us(1_000)
    rng = Random(seed)
    for k in range(2_000):
        world.submit(kin, k, 20_000)
        world.pass_us(rng.randint(1, 400))
    world.pass_us(100_000)
    ended = world.check()
    assert ended[Status.OK] >= 0.97 * len(world.queries), ended
    assert sum(fast.batches) > 20 * sum(slow.batches)
    assert slow.batches, "it is tried now and then"


@pytest.mark.parametrize("seed", range(6))
def test_equal_replicas_share_equally(seed: int) -> None:
    world = World(seed)
    kin = world.model("m", cached=False)
    pair = [Container(world, kin, a_us=500, b_us=200) for _ in range(2)]
    rng = Random(seed)
    world.pass_us(1_000)
    for k in range(1_000):
        world.submit(kin, k, 20_000)
        world.pass_us(rng.randint(1, 400))
    world.pass_us(50_000)
    assert set(world.check()) == {Status.OK}
    assert abs(sum(pair[0].batches) - sum(pair[1].batches)) < 200


def test_a_popular_row_does_not_wait_for_a_hung_container_forever() -> None:
    """The container sends heartbeats but no answer. Equal queries keep joining its row; the other
    container answers them."""
    world = World(1)
    kin = world.model("m", cached=True)
    Container(world, kin, faults=["stuck"], fault_share=1)
    world.pass_us(1_000)
    world.submit(kin, 7, 10_000)
    world.pass_us(2_000)
    Container(world, kin)
    for _ in range(30):
        world.submit(kin, 7, 60_000)
        world.pass_us(3_000)
    world.pass_us(100_000)
    ended = world.check()
    assert ended == {Status.DEADLINE: 1, Status.OK: 30}


def test_a_hung_container_gets_nothing_until_it_answers() -> None:
    """Heartbeats, which the container goes on sending, do not count as an answer to its batch."""
    world = World(2)
    kin = world.model("m", cached=False)
    hung = Container(world, kin, faults=["stuck"], fault_share=1)
    world.pass_us(1_000)
    world.submit(kin, 0, 5_000)
    world.pass_us(40_000)
    hung.faults = []
    k = 1
    while world.now_us < hung.free_us - 5_000:
        world.submit(kin, k, 5_000)
        world.pass_us(500)
        k += 1
    assert k > 10
    assert hung.batches == [1]
    world.pass_us(10_000)
    assert set(world.check()) == {Status.DEADLINE}
    late = [world.submit(kin, k + i, 5_000) for i in range(3)]
    world.pass_us(10_000)
    assert [query.future.status() for query in late] == [Status.OK] * 3, (
        "it has answered: it is trusted again"
    )


def test_a_container_without_heartbeats_is_closed_after_three_intervals() -> None:
    world = World(3)
    kin = world.model("m", cached=False)
    container = Container(world, kin, comes_back=False)
    world.pass_us(1_000_000)
    assert container.conn
    assert 12 <= world.frames["HEARTBEAT"] <= 20
    container.hung_until_us = 1 << 60
    world.pass_us(int(2.6 * HEARTBEAT_MS * 1000))
    assert world.engine.replica(container.conn)["suspect"]  # type: ignore[index]
    world.submit(kin, 1, 5_000)
    world.pass_us(2 * HEARTBEAT_MS * 1000)
    assert not container.conn
    assert not container.batches
    assert set(world.check()) == {Status.DEADLINE}


def test_a_silent_container_is_closed_though_its_row_is_popular() -> None:
    world = World(4)
    kin = world.model("m", cached=True)
    container = Container(world, kin, faults=["hang"], fault_share=1, comes_back=False)
    world.pass_us(1_000)
    container.rng.choice = lambda options: options[-1]  # type: ignore[method-assign,assignment]
    for _ in range(100):
        world.submit(kin, 7, 100_000)
        world.pass_us(3_000)
    assert not container.conn
    world.pass_us(200_000)
    world.check()


def test_a_connection_without_hello_is_closed() -> None:
    world = World(5, connections_max=2)
    kin = world.model("m")
    late = Container(world, kin, hello_after_us=10_000_000, comes_back=False)
    world.pass_us(390_000)
    assert late.conn
    world.pass_us(50_000)
    assert not late.conn


def test_connections_max_refuses_a_container_until_another_leaves() -> None:
    world = World(6, connections_max=2)
    kin = world.model("m")
    crowd = [Container(world, kin, comes_back=i < 2) for i in range(3)]
    world.pass_us(10_000)
    assert [bool(c.conn) for c in crowd] == [True, True, False]
    crowd[0].comes_back = False
    crowd[0].close()
    crowd[2].dial()
    world.submit(kin, 1, 50_000)
    world.pass_us(60_000)
    assert crowd[2].welcomed
    assert set(world.check()) == {Status.OK}


@pytest.mark.parametrize("seed", range(20))
def test_draining_loses_nothing(seed: int) -> None:
    rng = Random(seed)
    world = World(seed)
    kin = world.model("m", cached=False)
    first = Container(world, kin, a_us=2_000, comes_back=False, protocol=rng.choice([1, 2]))
    Container(world, kin, a_us=2_000)
    world.pass_us(1_000)
    leave = rng.randrange(150)
    for k in range(200):
        if k == leave:
            world.engine.drain(first.conn)
        world.submit(kin, k, 60_000)
        world.pass_us(rng.randint(1, 300))
    world.pass_us(100_000)
    assert not first.conn
    assert set(world.check()) == {Status.OK}
    assert set(world.evaluations.values()) == {1}


def test_a_query_without_replicas_ends_as_no_replica_at_its_deadline() -> None:
    world = World(7)
    kin, other = world.model("m"), world.model("n")
    Container(world, other)
    queries = [world.submit(kin, k, slo) for k, slo in enumerate([100, 5_000, 30_000])]
    for query in queries:
        world.run(query.deadline_us - 1)
        assert not query.future.done()
        world.run(query.deadline_us + TICK_US)
        assert query.future.status() == Status.NO_REPLICA


@pytest.mark.parametrize("mode", [0, 1, 2, 3])
@pytest.mark.parametrize("delay_us", [0, 2_000])
def test_all_batching_modes_answer_with_any_delay(mode: int, delay_us: int) -> None:
    """All modes answer all queries; a delay makes batches larger and ends before the deadline."""
    world = World(8)
    kin = world.model("m", cached=False)
    container = Container(
        world, kin, a_us=100, b_us=1, latency_us=5, mode=mode, size_max=64, delay_us=delay_us
    )
    world.pass_us(1_000)
    for k in range(1_000):
        world.submit(kin, k, 20_000)
        world.pass_us(100)
    world.pass_us(50_000)
    assert set(world.check()) == {Status.OK}
    assert max(container.batches) <= 64
    held = max(query.future.latency_us for query in world.queries[500:])
    if delay_us == 0:
        assert held < 1_500
    elif mode == 3:
        assert sum(container.batches) / len(container.batches) > 10
        assert held >= delay_us


@pytest.mark.parametrize("protocol", [1, 2])
@pytest.mark.parametrize(("dtype", "shape"), [row for row in ROWS if row[0] != "f32"])
def test_both_protocols_carry_all_rows(protocol: int, dtype: str, shape: tuple[int, ...]) -> None:
    world = World(9)
    kin = world.model("m", dtype, shape, cached=False)
    container = Container(world, kin, protocol=protocol, chunk_max=3, comes_back=False)
    world.pass_us(10_000)
    for k in range(200):
        world.submit(kin, k if k % 10 else list(range(k, k + 30)), 500_000)
        world.pass_us(100)
    world.pass_us(600_000)
    assert set(world.check()) == {Status.OK}
    assert container.conn, "one connection served them all"


@pytest.mark.parametrize("seed", range(10))
def test_a_full_socket_holds_its_rows_and_no_more(seed: int) -> None:
    """A container does not read: its rows stay in their cells until its connection closes, and then
    all cells are free again."""
    rng = Random(seed)
    world = World(seed)
    kin = world.model("m", rng.choice(["f64", "str"]), cached=rng.random() < 0.5, lane_rows=64)
    stuck = Container(world, kin, comes_back=False)
    world.pass_us(1_000)
    stuck.blocked = True
    for k in range(100):
        world.submit(kin, k, rng.choice([2_000, 30_000]))
        world.pass_us(rng.randint(1, 1_000))
    world.pass_us(100_000)
    assert world.engine.wants_close(stuck.conn)
    stuck.blocked = False
    world.pass_us(30_000)
    assert not stuck.conn
    world.check()
    world.check_rest()


@pytest.mark.parametrize("seed", range(10))
def test_finishing_the_engine_answers_all_queries(seed: int) -> None:
    """finish() is called while queries wait and batches are in flight."""
    rng = Random(seed)
    world = World(seed)
    zoo = a_zoo(world, rng)
    for kin in zoo:
        add_containers(world, rng, kin, fault_share=0.2)
    submit_queries(world, rng, zoo, 30_000, gap_us=300, keys=50)
    world.engine.finish()
    assert all(query.future.done() for query in world.queries)
    snapshot = world.engine.snapshot()
    assert snapshot["issued"] == snapshot["answered"]
    assert snapshot["queue_bytes"] == 0
