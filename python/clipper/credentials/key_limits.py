"""Limits of a key: how many requests its owner may make, to which applications, and what they get
of a model that cannot serve all in time.

In the file of the keys they are words of the key's line: `rate=500/s share=30% priority=1
apps=digits,fraud groups=web`.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from clipper.errors import InvalidInput
from clipper.types import check_name

RATE_MAX: Final = 1_000_000  # requests a second
WINDOW_REQUESTS_MAX: Final = 1_000_000_000
APPLICATIONS_MAX: Final = 64
GROUPS_MAX: Final = 16
PRIORITIES: Final = (1, 2, 3)
_WORDS: Final = ("rate", "share", "priority", "apps", "groups")
_SHARE: Final = re.compile(r"([1-9][0-9]?)%")
_SECONDS: Final = {"s": 1, "min": 60, "h": 3600}
_RATE: Final = re.compile(r"([0-9]{1,10})/(s|min|h)")
_GROUP: Final = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECOND_NS: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """The limits of a key.

    requests: that may be made to each application in a window, and at once; 0: any number.
    window_s: its length, seconds. applications: that may be queried; none: all. groups: of which
    its owner is a member; they are shown only. share: of a model that cannot serve all in time,
    percent; 0: of what is left, with all keys that have none. priority: 1, the highest, to 3; 0:
    that of the application.
    """

    requests: int = 0
    window_s: int = 1
    applications: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    share: int = 0
    priority: int = 0

    @classmethod
    def of(
        cls,
        rate: str = "",
        apps: Sequence[str] = (),
        groups: Sequence[str] = (),
        share: str = "",
        priority: str = "",
    ) -> "KeyLimits":
        """Return the limits that are written so: `500/s`, `30/min`, names, `30%`, `1`. Raises:
        InvalidInput."""
        requests, window_s = _parse_rate(rate) if rate else (0, 1)
        if len(apps) > APPLICATIONS_MAX or len(groups) > GROUPS_MAX:
            raise InvalidInput(
                f"a key has at most {APPLICATIONS_MAX} applications and {GROUPS_MAX} groups."
            )
        for name in apps:
            check_name(name, "application")
        for name in groups:
            if not _GROUP.fullmatch(name):
                raise InvalidInput(f"{name[:80]!r} is no name of a group: letters, digits and ._-")
        found = _SHARE.fullmatch(share)
        if share and found is None:
            raise InvalidInput(f"{share[:80]!r} is no share: write 1% to 99%.")
        if priority and priority not in map(str, PRIORITIES):
            raise InvalidInput(f"{priority[:80]!r} is no priority: it is 1, the highest, to 3.")
        percent = int(found[1]) if found is not None else 0
        return cls(requests, window_s, tuple(apps), tuple(groups), percent, int(priority or 0))

    @classmethod
    def parse(cls, words: Iterable[str]) -> "KeyLimits":
        """Return the limits of the words of a line. Raises: InvalidInput."""
        given: dict[str, str] = {}
        for word in words:
            name, _, text = word.partition("=")
            if name not in _WORDS or not text or name in given:
                raise InvalidInput(
                    f"{word[:80]!r} is no limit of a key.",
                    hint="Write rate=500/s, share=30%, priority=1, apps=A,B or groups=A,B.",
                )
            given[name] = text
        apps, groups = (
            given[name].split(",") if name in given else [] for name in ("apps", "groups")
        )
        share, priority = given.get("share", ""), given.get("priority", "")
        return cls.of(given.get("rate", ""), apps, groups, share, priority)

    @property
    def words(self) -> list[str]:
        """The words that `parse` takes."""
        found = [f"rate={self.rate}"] if self.requests else []
        found += [f"share={self.share}%"] if self.share else []
        found += [f"priority={self.priority}"] if self.priority else []
        found += [f"apps={','.join(self.applications)}"] if self.applications else []
        return [*found, f"groups={','.join(self.groups)}"] if self.groups else found

    @property
    def rate(self) -> str:
        """The rate as it is written; empty if there is none."""
        units = {seconds: unit for unit, seconds in _SECONDS.items()}
        return f"{self.requests}/{units[self.window_s]}" if self.requests else ""

    @property
    def interval_ns(self) -> int:
        """The nanoseconds between requests; 0 if there is no limit."""
        return self.window_s * _SECOND_NS // self.requests if self.requests else 0

    @property
    def ahead_ns(self) -> int:
        """The time by which a request may be made too early, in nanoseconds."""
        return max(self.requests - 1, 0) * self.interval_ns

    @property
    def policy(self) -> str:
        """The value of RateLimit-Policy."""
        return f'"key";q={self.requests};w={self.window_s}'


def _parse_rate(text: str) -> tuple[int, int]:
    """Return the requests and the window of a rate. Raises: InvalidInput."""
    found = _RATE.fullmatch(text)
    if found is not None:
        requests, window_s = int(found[1]), _SECONDS[found[2]]
        if 0 < requests <= min(RATE_MAX * window_s, WINDOW_REQUESTS_MAX):
            return requests, window_s
    raise InvalidInput(
        f"{text[:80]!r} is no rate of requests: write 500/s, 30/min or 1000/h, up to {RATE_MAX}/s."
    )
