"""History of records and answers of Redis Streams, and a check of it.

The promise: a record that Redis has acknowledged is answered exactly once, with the right output; a
record whose acknowledgement was lost, at most once. No answer comes before its record, or to no
record, and an answer that was read stays where it was.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple


@dataclass
class Asked:
    """A record, by its number. entry: its entry, once it was acknowledged."""

    started_s: float
    entry: str = ""


class Heard(NamedTuple):
    """An answer, or a refusal, as a reader got it. at: its own entry. entry: the record's."""

    at: str
    number: int
    entry: str
    output: str
    ended_s: float
    is_refused: bool = False


@dataclass
class StreamHistory:
    """Records what producers have added, and what a reader has received. Threads: any."""

    asked: dict[int, Asked] = field(default_factory=dict)
    heard: list[Heard] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def ask(self, number: int, add: Callable[[], str]) -> None:
        """Add a record; note when, and its entry if the call returns it."""
        one = Asked(time.monotonic())
        with self._lock:
            self.asked[number] = one
        one.entry = add()

    def hear(
        self, at: str, number: int, entry: str, output: str, *, is_refused: bool = False
    ) -> None:
        """Note an answer, or a refusal."""
        with self._lock:
            self.heard.append(Heard(at, number, entry, output, time.monotonic(), is_refused))

    def is_answered(self) -> bool:
        """Return whether each acknowledged record has been heard of."""
        with self._lock:
            known = {one.number for one in self.heard}
            return all(number in known for number, one in self.asked.items() if one.entry)

    def errors(self, output_of: Callable[[int], str], kept: list[str]) -> list[str]:
        """Return what cannot be, in words.

        output_of: the right output of a record. kept: the entries of all answers, read at the end.
        """
        found, answers = [], dict[int, list[Heard]]()
        for one in self.heard:
            answers.setdefault(one.number, []).append(one)
        for number in answers.keys() - self.asked.keys():
            found.append(f"record {number} is answered, and nobody has added it")
        for number, asked in self.asked.items():
            those = answers.get(number, [])
            if len(those) > 1 or (asked.entry and not those):
                state = "acknowledged" if asked.entry else "not acknowledged"
                found.append(f"record {number} was {state}, and has {len(those)} answers")
            for one in those:
                if one.is_refused or one.output != output_of(number):
                    what = "is refused" if one.is_refused else f"has the answer {one.output}"
                    found.append(f"record {number} {what}, not {output_of(number)}")
                if one.ended_s < asked.started_s:
                    found.append(f"record {number} was answered before it was added")
                if asked.entry and one.entry != asked.entry:
                    found.append(f"record {number} is {asked.entry}; its answer says {one.entry}")
        read = [one.at for one in self.heard if not one.is_refused]
        if read != kept:
            found.append(
                f"{len(read)} answers were read, and {len(kept)} are kept; the first that differs:"
                f" {next((a for a, b in zip(read, kept, strict=False) if a != b), 'the last')}"
            )
        return found
