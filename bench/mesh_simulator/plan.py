"""Plans of simulated worlds, and reports of what happened in them."""

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import Final

from clipper.settings.mesh import MeshSettings

START_MS: Final = 1_700_000_000_000
WAITS_MS: Final = (1, 10, 50, 100, 200, 500, 1000, 2000, 5000, 10_000)


@dataclass(frozen=True)
class Plan:
    """A simulated world.

    share: memory of the instances, as a share of the size of all models. rate_per_s: queries of the
    whole mesh. shared_mirror: all nodes read one mirror.
    """

    instances: int = 5
    models: int = 200
    share: float = 0.3
    rate_per_s: float = 100.0
    alpha: float = 1.0
    seconds: float = 60.0
    seed: int = 0
    deadline_ms: int = 10_000
    service_ms: float = 1.0
    hop_ms: int = 1
    commit_ms: int = 3
    lag_ms: int = 5
    loading_max: int = 4
    churn_ms: float = 500.0
    space_ms: int = 5000
    load_ms: tuple[float, float] = (40.0, 5.0)  # at least, and for each MB
    typical_bytes: int = 20_000_000
    pinned: int = 0
    upkeep: bool = True
    shared_mirror: bool = False
    settings: MeshSettings = field(default_factory=MeshSettings)

    @property
    def capacity_bytes(self) -> int:
        """Return the memory of one instance."""
        mean = self.typical_bytes * math.exp(0.5)
        return max(int(self.share * self.models * mean / self.instances), 20 * self.typical_bytes)


@dataclass
class Report:
    """Counts the queries and loads of one simulated run.

    waits: queries that waited for a load, by the upper bound of their wait in ms; the last entry
    counts the longer waits.
    """

    queries: int = 0
    hits: int = 0
    answered: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    counts: Counter[str] = field(default_factory=Counter)
    waits: list[int] = field(default_factory=lambda: [0] * (len(WAITS_MS) + 1))
    violations: list[str] = field(default_factory=list)
    events: int = 0

    @property
    def hit_ratio(self) -> float:
        """Return the share of the queries that found a loaded copy."""
        return self.hits / self.queries if self.queries else 0.0

    def wait_ms(self, share: float) -> float:
        """Return the upper bound of the wait of this share of the queries that waited."""
        seen, total = 0, sum(self.waits)
        for bound, count in zip((*WAITS_MS, math.inf), self.waits, strict=True):
            seen += count
            if seen >= share * total:
                return bound
        return math.inf
