"""The data behind `clipper top`: readings of the last minutes, and whether the server is
reachable.
"""

import time
from collections import deque
from collections.abc import Mapping
from typing import Any

from clipper.manage.rows import ProcessRow
from clipper.metrics.samples import Stats

ROWS_MAX = 300
_OUTCOMES = ("ok", "default", "refused", "error")


class ServerReadings:
    """Readings of a server.

    about: the server's description. rows: one per second, oldest first
    (manage/dashboard/seconds.py). models: as `ps`. lost_s: since when the server is unreachable, 0
    if it is reachable. restarts: restarts seen.

    Threads: one writes; any reads, one field at a time.
    """

    def __init__(self) -> None:
        self.about: Stats = {}
        self.rows: deque[Stats] = deque(maxlen=ROWS_MAX)
        self.models: list[ProcessRow] = []
        self.lost_s = 0.0
        self.why = ""
        self.restarts = 0
        self.readings = 0

    def take(self, name: str, data: Any) -> None:
        """Apply an event of the server's stream."""
        if name == "about":
            was, self.about = self.about, data
            if was and was.get("pid") != data.get("pid"):
                self.restarts += 1
                self.rows.clear()
        elif name == "past":
            known = self.rows[-1]["t"] if self.rows else 0
            self.rows.extend(row for row in data if row["t"] > known)
        elif name == "row":
            self.rows.append(data)
        self.lost_s, self.why = 0.0, ""
        self.readings += name == "now"

    def lose(self, why: str) -> None:
        """Record that the server is unreachable."""
        self.why = why
        self.lost_s = self.lost_s or time.monotonic()

    # -- figures

    def applications(self) -> list[Stats]:
        """Return for each application name, slo_ms, per_s, outcomes per second, p50_ms, p99_ms
        and met of the last reading, and the histories `rates` and `p99s`.
        """
        records = {record["name"]: record for record in self.about.get("applications", [])}
        rows = list(self.rows)
        return [self._application(name, record, rows) for name, record in records.items()]

    def _application(
        self, name: str, record: Mapping[str, object], rows: list[Stats]
    ) -> dict[str, object]:
        mine = [(row.get("apps", {}).get(name, {}), row["dt"]) for row in rows]
        now, dt = mine[-1] if mine else ({}, 1.0)
        us = now.get("us", [])
        return {
            "name": name,
            "slo_ms": record["slo_ms"],
            "per_s": now.get("q", 0) / dt,
            **{kind: now.get(kind, 0) / dt for kind in _OUTCOMES},
            "p50_ms": us[0] / 1000 if us else None,
            "p99_ms": us[2] / 1000 if us else None,
            "rates": [one.get("q", 0) / seconds for one, seconds in mine],
            "p99s": [one["us"][2] / 1000 if "us" in one else 0.0 for one, _ in mine],
        }

    def model_rows(self) -> list[Stats]:
        """Return rows as in `ps`, with rows_per_s, p50_ms and p99_ms of the last reading, and
        `rates`.
        """
        rows = list(self.rows)
        found: list[Stats] = []
        for model in list(self.models):
            id_ = f"{model['name']}:{model['version']}"
            mine = [(row.get("models", {}).get(id_, {}), row["dt"]) for row in rows]
            now, dt = mine[-1] if mine else ({}, 1.0)
            us = now.get("us", [])
            found.append(
                {
                    **model,
                    "rows_per_s": now.get("rows", 0) / dt,
                    "p50_ms": us[0] / 1000 if us else None,
                    "p99_ms": us[1] / 1000 if us else None,
                    "rates": [one.get("rows", 0) / seconds for one, seconds in mine],
                }
            )
        return found
