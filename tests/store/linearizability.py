"""Decides whether the calls of a store's clients and their results are possible with one copy of
each key.

A history is linearizable if every operation can be given a moment between its start and its end
such that the answers are those of one register that executes the operations in the order of their
moments (Herlihy and Wing, "Linearizability: a correctness condition for concurrent objects", 1990).
An operation whose outcome is unknown, since the store was killed under it, may take effect at any
time after its start, or never. The search is that of Wing and Gong (1993) with the memory of Lowe
(2017): a set of operations that was tried with a value is not tried again. Keys are independent, so
that each is checked alone.
"""

import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

Value = bytes | None  # None: the key does not exist


@dataclass(frozen=True)
class Operation:
    """One call of one client.

    kind: "get"; "put" of `value`; or "swap", `value` in place of `expected`. result: what get
    returned, whether swap took place; not used for put. is_known: False if the call ended with an
    error after which either may be true. start_s, end_s: seconds of one clock.
    """

    client: int
    key: str
    kind: str
    value: Value = None
    expected: Value = None
    result: Value | bool = None
    is_known: bool = True
    start_s: float = 0.0
    end_s: float = math.inf


class History:
    """A collection of operations. Threads: any."""

    def __init__(self) -> None:
        self.operations: list[Operation] = []
        self._lock = threading.Lock()

    def call(
        self,
        client: int,
        key: str,
        kind: str,
        function: Callable[[], Value | bool],
        unknown: tuple[type[Exception], ...],
        value: Value = None,
        expected: Value = None,
    ) -> Value | bool:
        """Run a call and record it. unknown: errors after which its effect is not known; these are
        recorded and raised again. A read that failed says nothing and is left out.
        """
        start_s = time.monotonic()
        try:
            result = function()
        except unknown:
            if kind != "get":
                self._add(Operation(client, key, kind, value, expected, None, False, start_s))
            raise
        end_s = time.monotonic()
        self._add(Operation(client, key, kind, value, expected, result, True, start_s, end_s))
        return result

    def _add(self, operation: Operation) -> None:
        with self._lock:
            self.operations.append(operation)


def violations(operations: Iterable[Operation]) -> list[str]:
    """Return the keys whose histories are not linearizable."""
    by_key: dict[str, list[Operation]] = defaultdict(list)
    for operation in operations:
        by_key[operation.key].append(operation)
    return sorted(key for key, those in by_key.items() if not is_linearizable(those))


def is_linearizable(operations: list[Operation]) -> bool:
    """Return whether there is an order of moments for the operations of one key, which did not
    exist at first.
    """
    ordered = sorted(operations, key=lambda operation: operation.start_s)
    known = sum(1 << i for i, operation in enumerate(ordered) if operation.is_known)
    tried: set[tuple[int, Value]] = set()
    waiting: list[tuple[int, Value]] = [(0, None)]  # which took place, and the value after them
    while waiting:
        state = waiting.pop()
        if state in tried:
            continue
        tried.add(state)
        done, value = state
        if done & known == known:
            return True
        left = [i for i in range(len(ordered)) if not done >> i & 1]
        first_end_s = min(ordered[i].end_s for i in left)
        for i in left:
            if ordered[i].start_s > first_end_s:
                break  # another one ended before this one started
            fits, after = _execute(ordered[i], value)
            if fits:
                waiting.append((done | 1 << i, after))
    return False


def _execute(operation: Operation, value: Value) -> tuple[bool, Value]:
    """Return whether the answer is that of a register with this value, and the value after it."""
    if operation.kind == "get":
        return operation.result == value, value
    if operation.kind == "put":
        return True, operation.value
    takes_place = value == operation.expected
    fits = not operation.is_known or operation.result == takes_place
    return fits, operation.value if takes_place else value
