"""Estimates how much users differ, from the losses of some of them, and so how much what all users
taught counts for a new one.

The estimate is the credibility of Bühlmann and Straub 1970 ("Glaubwürdigkeit für Schadensätze"):
the shared state counts as many observations as the variance of a loss within a user is larger than
the variance of the mean loss between users. Both are estimated by moments, the second one by pairs
of observations of the same user and model: where users are equal, the two have no covariance, even
if a policy chose the model by what it had learned.

The users are a sample of bounded size: those whose hash ends in a number of zero bits, which grows
by one when there are too many (adaptive sampling, Flajolet 1990). So which users count depends
neither on time nor on the order in which they came, and the samples of two servers can be added.
"""

import math
import zlib
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

PRIOR_COUNTS: Final = 30.0  # observations that the shared state counts as, until users are known
PRIOR_COUNTS_MIN: Final = 1.0
PRIOR_COUNTS_MAX: Final = 300.0
USERS_MAX: Final = 64  # in the sample
EACH_MAX: Final = 256  # observations of one of them
MODELS_MAX: Final = 128  # of a state that learns them, so that they take at most 256 KiB
PAIRS: Final = 1000.0  # of observations of one user and model, that outweigh PRIOR_COUNTS


class UserDifferences(msgspec.Struct, frozen=True, array_like=True):
    """A sample of users, and what it says; immutable, stored with the shared state.

    zeros: bits at the end of a sampled user's hash that are 0.
    prior_counts: observations that the shared state counts as for a new user.
    users: by hash, the number of observations; then by model the number of losses, their sum, and
    the sum of their squares.
    """

    zeros: int = 0
    prior_counts: float = PRIOR_COUNTS
    users: dict[int, tuple[float, ...]] = {}

    def wants(self, user: str) -> bool:
        """Return whether the next observation of this user is to be added."""
        key = zlib.crc32(user.encode())
        return not key % (1 << self.zeros) and self.users.get(key, (0.0,))[0] < EACH_MAX

    def with_losses(self, user: str, losses: Sequence[float | None]) -> "UserDifferences":
        """Add an observation of a user: the loss of each model, None where it is not known.

        The estimate changes when a user's number of observations is a power of two.
        """
        key = zlib.crc32(user.encode())
        row = list(self.users.get(key, (0.0,) * (1 + 3 * len(losses))))
        row[0] += 1.0
        for i, loss in enumerate(losses):
            if loss is not None:
                for power in range(3):
                    row[1 + 3 * i + power] += loss**power
        changed = self._of(self.zeros, {**self.users, key: tuple(row)})
        if math.frexp(row[0])[0] == 0.5:
            changed = msgspec.structs.replace(changed, prior_counts=prior_counts(changed.users))
        return changed

    def merged(self, base: "UserDifferences", other: "UserDifferences") -> "UserDifferences":
        """Add what two servers counted since `base`."""
        users = {
            key: tuple(
                np.maximum(
                    np.add(self.users.get(key, 0.0), other.users.get(key, 0.0))
                    - base.users.get(key, 0.0),
                    0.0,
                ).tolist()
            )
            for key in dict.fromkeys((*self.users, *other.users))
        }
        changed = self._of(max(self.zeros, other.zeros), users)
        return msgspec.structs.replace(changed, prior_counts=prior_counts(changed.users))

    def is_valid(self, k: int) -> bool:
        """Return whether stored numbers can be of users of `k` models."""
        return (
            0 <= self.zeros <= 32
            and PRIOR_COUNTS_MIN <= self.prior_counts <= PRIOR_COUNTS_MAX
            and len(self.users) <= USERS_MAX
            and all(len(row) == 1 + 3 * k and min(row) >= 0 for row in self.users.values())
            and bool(np.isfinite([*self.users.values()]).all())
        )

    def _of(self, zeros: int, users: dict[int, tuple[float, ...]]) -> "UserDifferences":
        while True:
            users = {key: row for key, row in users.items() if not key % (1 << zeros)}
            if len(users) <= USERS_MAX:
                return UserDifferences(zeros, self.prior_counts, users)
            zeros += 1


def prior_counts(users: dict[int, tuple[float, ...]]) -> float:
    """Return the variance within users divided by that between users, PRIOR_COUNTS_MIN to
    PRIOR_COUNTS_MAX; PRIOR_COUNTS without pairs of observations."""
    if not users:
        return PRIOR_COUNTS
    counts = np.array([row[1:] for row in users.values()]).reshape(len(users), -1, 3)
    n, lost, squares = counts[..., 0], counts[..., 1], counts[..., 2]
    mean = lost.sum(axis=0) / np.maximum(n.sum(axis=0), 1.0)
    spread = squares - 2 * mean * lost + mean * mean * n  # sum of squared distances from the mean
    variance = float(spread.sum()) / max(float(n.sum()), 1.0)
    products = float(((lost - mean * n) ** 2 - spread).sum())  # over ordered pairs
    pairs = float((n * n - n).sum())
    if variance < 1e-12:
        return PRIOR_COUNTS
    between = (products + PAIRS * variance / (1 + PRIOR_COUNTS)) / (pairs + PAIRS)
    found = variance / max(between, variance / (1 + PRIOR_COUNTS_MAX)) - 1
    return min(max(found, PRIOR_COUNTS_MIN), PRIOR_COUNTS_MAX)
