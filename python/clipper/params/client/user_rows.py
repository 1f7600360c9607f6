"""Contexts of queries: the row of the query's user, pulled from a table when the query arrives.

The caller waits for the row, so the wait is short. If a shard does not answer within ANSWER_S, the
query has no context, and so have all others within PAUSE_S, without a wait. A policy treats such a
query as one whose features are all 0.
"""

import logging
import threading
import time
from pathlib import Path

import numpy as np

from clipper.errors import ClipperError, DoesNotFit, InvalidInput
from clipper.params.client.client import Client
from clipper.selection.policies.contextual import FEATURES_MAX, features_of
from clipper.serving.feedback.online_learning import session_of

_log = logging.getLogger(__name__)
ANSWER_S = 0.05
PAUSE_S = 0.5
Features = tuple[float, ...]


class UserRows:
    """The rows of one table by user; the id is `session_of(user)`. Threads: any."""

    def __init__(
        self, folder: Path, table: str, *, answer_s: float = ANSWER_S, pause_s: float = PAUSE_S
    ) -> None:
        self.table = table
        self._answer_s, self._pause_s = answer_s, pause_s
        self._client = Client(folder, patience_s=0.0, answer_s=answer_s)
        self._lock = threading.Lock()
        self._again_s = 0.0
        self.pulled = self.away = self.unusable = 0

    def __call__(self, user: str) -> Features | None:
        """Return the features of a user's query; None if they are not available."""
        if not self._lock.acquire(timeout=self._answer_s):
            self.away += 1
            return None
        try:
            return self._row(user)
        finally:
            self._lock.release()

    def _row(self, user: str) -> Features | None:
        if time.monotonic() < self._again_s:
            self.away += 1
            return None
        try:
            found = features_of(
                self._client.pull(self.table, np.array([session_of(user)], np.uint64))[0]
            )
        except InvalidInput as error:  # the row's values are out of range
            self.unusable += 1
            self._log(self.unusable, user, error)
            return None
        except ClipperError as error:
            self.away += 1
            self._again_s = time.monotonic() + self._pause_s
            self._log(self.away, user, error)
            return None
        self.pulled += 1
        return found

    def _log(self, count: int, user: str, error: ClipperError) -> None:
        if count & (count - 1) == 0:
            _log.warning(
                "user %.40r is queried without a context (%d times so far): %s",
                user,
                count,
                error,
            )

    def stats(self) -> dict[str, object]:
        """Return counts of queries: `pulled` with a row, `away` and `unusable` without one.

        away: the shard did not answer. unusable: no policy can use the row.
        """
        return {
            "table": self.table,
            "pulled": self.pulled,
            "away": self.away,
            "unusable": self.unusable,
        }

    def close(self) -> None:
        """Close the connections."""
        with self._lock:
            self._client.close()


def check_context_table(name: str, table: str, client: Client) -> None:
    """Check that rows of a table can be contexts. Raises UnknownTable, DoesNotFit, ShardAway."""
    dim = client.spec(table).dim
    if dim > FEATURES_MAX:
        why = (
            f"application {name!r}: rows of table {table!r} have {dim} numbers; a context has"
            f" {FEATURES_MAX} at most."
        )
        raise DoesNotFit(why, hint="Make a table of fewer.")
