"""trip: how long is one query on its way when nothing else is, beside a bare ping-pong in C on the
same transport?"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import clipper
from bench.harness import Goal, Row, Sample, absent, awaited_ns, interleave, per_call_ns, row
from bench.system.anchors.bare import NO_COMPILER, Bare, bare
from bench.system.anchors.floor import PingPong
from bench.system.anchors.reference import Reference, distinct
from bench.system.engine.effort import Effort, micro
from bench.system.engine.servers import servers

# transport: what it is called, the goal in us, the bare program's word
ROUTES = {
    "unix": ("unix socket", 17, "unix"),
    "tcp": ("TCP", 18, "tcp"),
    "shm": ("shared memory, spinning", 4, "spin"),
    "shm futex": ("shared memory, futex", 9, "futex"),
}
AWAITED_US, TIMES_BARE = 28, 3.5
WAKES = (
    "wakes across cores: the caller, the loop, the container and the caller again each sleep until"
    " woken, where the bare pair has two wakes, often on one core"
)
LED = (
    "two wakes across cores, the container's and the caller's, which runs the loop's turns itself;"
    " the bare pair has as many, often on one core, and no Python between them"
)


def rows(effort: Effort) -> list[Row]:
    trips, n = distinct(effort.of(1000, 20))(), effort.of(1000, 20)
    with (
        closing(PingPong()) as ping,
        servers(tuple(ROUTES), ("cold",)) as (running, missing),
        Reference(cache_entries=0) as reference,
        bare() as program,
    ):
        cases: dict[str, Callable[[], float]] = {
            "python": lambda: ping(n),
            "reference": lambda: per_call_ns(reference.predict, trips),
        }
        for transport, server in running.items():
            cases[transport] = blocked(server, trips)
            cases[f"{transport} awaited"] = awaited(server, trips)
            cases |= (
                {f"bare {transport}": bare_ns(program, ROUTES[transport][2], n)} if program else {}
            )
        found = {
            name: micro(sample) for name, sample in interleave(cases, effort.repetitions).items()
        }
    result = [
        one for transport in ROUTES for one in rows_of(transport, found, missing.get(transport, ""))
    ]
    return result + awaited_rows(found)


def blocked(server: clipper.ClipperServer, trips: list[Any]) -> Callable[[], float]:
    predict = server.model("cold").predict
    return lambda: per_call_ns(predict, trips)


def awaited(server: clipper.ClipperServer, trips: list[Any]) -> Callable[[], float]:
    predict = server.model("cold").predict

    async def one(x: Any) -> Any:
        return await predict(x)

    return lambda: awaited_ns(one, trips)


def bare_ns(program: Bare, word: str, n: int) -> Callable[[], float]:
    return lambda: program.measure(word, n)


def rows_of(transport: str, found: dict[str, Sample], missing: str) -> list[Row]:
    where, most_us, word = ROUTES[transport]
    name, bare_name = f"RTT, {where}", f"RTT, {where}, of bare C"
    anchor = f"bare C ping-pong, {word}"
    goals = Goal("value_at_most", most_us), Goal("at_most", TIMES_BARE)
    if missing:
        return [
            absent(name, "us", missing, goal=goals[0]),
            absent(bare_name, "us", missing, anchor, goals[1]),
        ]
    result = [row(name, found[transport], "us", goal=goals[0], bounded_by=LED)]
    if f"bare {transport}" not in found:
        return [*result, absent(bare_name, "us", NO_COMPILER, anchor, goals[1])]
    return [
        *result,
        row(
            bare_name,
            found[transport],
            "us",
            anchor,
            found[f"bare {transport}"],
            goals[1],
            bounded_by=LED,
        ),
    ]


def awaited_rows(found: dict[str, Sample]) -> list[Row]:
    name, goals = (
        "RTT, awaited on uvloop",
        (Goal("value_at_most", AWAITED_US), Goal("at_most", TIMES_BARE)),
    )
    bounded = f"{WAKES}; and the event loop adds a turn of its own"
    anchor, trip = "bare C ping-pong, unix", found["unix awaited"]
    result = [row(name, trip, "us", goal=goals[0], note="over the unix socket", bounded_by=bounded)]
    if "bare unix" in found:
        result += [
            row(
                f"{name}, of bare C",
                trip,
                "us",
                anchor,
                found["bare unix"],
                goals[1],
                bounded_by=bounded,
            )
        ]
    else:
        result += [absent(f"{name}, of bare C", "us", NO_COMPILER, anchor, goals[1])]
    if "shm awaited" in found:
        result += [
            row(
                f"{name}, shared memory",
                found["shm awaited"],
                "us",
                goal=goals[0],
                bounded_by=bounded,
            )
        ]
    return [
        *result,
        row(
            "RTT, unix socket, of the reference",
            found["unix"],
            "us",
            "reference",
            found["reference"],
        ),
        row(
            "RTT, unix socket, of bare Python",
            found["unix"],
            "us",
            "bare Python ping-pong, unix",
            found["python"],
        ),
    ]
