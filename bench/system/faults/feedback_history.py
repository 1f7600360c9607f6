"""History of feedback that clients sent, and a check of it.

The promise: feedback about an answer counts once, however often it is sent, and what was
acknowledged survives a kill. Feedback without a response counts at most once; refused feedback, and
feedback about an answer that the server does not know, never.
"""

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Literal

Reply = Literal["counted", "duplicate", "unknown", "lost"]


@dataclass
class Sent:
    """Feedback that was sent once. reply: "lost": there was no response."""

    started_s: float
    ended_s: float = float("inf")
    reply: Reply = "lost"


@dataclass
class FeedbackHistory:
    """Records the feedback that was sent, by its label, which no other has. Threads: any."""

    sent: dict[int, list[Sent]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def send(self, label: int, send: Callable[[], Reply]) -> Reply:
        """Send feedback, and note when, and what the response was, if there was one."""
        one = Sent(time.monotonic())
        with self._lock:
            self.sent.setdefault(label, []).append(one)
        one.reply = send()
        one.ended_s = time.monotonic()
        return one.reply

    def count(self, reply: Reply) -> int:
        """Return how often there was this response."""
        with self._lock:
            return sum(one.reply == reply for those in self.sent.values() for one in those)

    def errors(self, counted: Mapping[int, int]) -> list[str]:
        """Return what cannot be, in words. counted: how often each label is in the journal."""
        found = [
            f"feedback {label} counts, and nobody has sent it"
            for label in counted.keys() - self.sent.keys()
        ]
        for label, those in self.sent.items():
            replies, times = [one.reply for one in those], counted.get(label, 0)
            acknowledged = {"counted", "duplicate"} & {*replies}
            possible = acknowledged or "lost" in replies
            if times > 1 or (acknowledged and not times) or (times and not possible):
                found.append(f"feedback {label} counts {times} times; responses: {replies}")
            if replies.count("counted") > 1:
                found.append(f"feedback {label} was acknowledged as new {replies}")
            for one in those:
                others = [
                    other
                    for other in those
                    if other is not one
                    and other.reply in ("counted", "duplicate", "lost")
                    and other.started_s < one.ended_s
                ]
                if one.reply == "duplicate" and not others:
                    found.append(f"feedback {label} was called a duplicate, and is the first")
        return found
