"""Types of `server.stats()`, by part: docs/monitoring.md describes the members.

Counts are since the start of the server. Members that are not listed here come from policies,
observers and feedback.
"""

from collections.abc import Sequence
from typing import NotRequired, TypedDict, final

from clipper.metrics.samples import Stats
from clipper_core.runtime.histogram import Snapshot


class MeanStats(TypedDict):
    """A mean and the weight of its values; no mean without values."""

    n: float
    mean: NotRequired[float]


class AnswerStats(TypedDict):
    """Answers of an application: with a prediction (`ok`), and defaults by their reason."""

    ok: int
    default: dict[str, int]
    feedback: MeanStats


class LinkStats(TypedDict):
    """A model within an application. missing: predictions by the status of their tasks. observer:
    outcomes of the queries that an observer was sent."""

    role: str
    used: int
    wins: int
    in_time: int
    late: int
    failed: int
    missing: dict[str, int]
    agreement: MeanStats
    feedback: MeanStats
    observer: NotRequired[dict[str, int]]


class QueryStats(TypedDict):
    """An application. decided_by: answers by the step of the decider. agreement: of each pair of
    models."""

    policy: str
    decider: str
    slo_ms: float
    since_us: int
    queries: int
    duration_us: dict[str, float | None]
    latency_us: Snapshot
    decided_by: dict[str, int]
    answers: AnswerStats
    models: dict[str, LinkStats]
    agreement: dict[str, dict[str, float]]
    extra_load_share: float
    observers: NotRequired[Stats]
    canaries: NotRequired[Stats]
    decoys: NotRequired[Stats]
    context: NotRequired[Stats]


class FollowedStats(TypedDict):
    """Cached predictions whose rows are followed. forgotten: predictions by the reason."""

    predictions: int
    rows: int
    uncached: int
    forgotten: dict[str, int]
    tolerance: float


class ReplicaStats(TypedDict, total=False):
    """Statistics of a replica. feedback_sent, feedback_dropped: rows of feedback; learned, failed:
    by its container, of those sent.

    Those of its batches are absent until it is connected, those of its process if it was started
    elsewhere. detail: why it is in its state. again_s: seconds until its next start. start:
    "forked", or "plain: " and why.
    """

    number: int
    pid: int
    state: str
    detail: str
    again_s: float
    start: str
    restart_count: int
    limit: int
    limit_cost: float | None
    row_cost: float | None
    batches: int
    misses: int
    in_flight: int
    suspect: bool
    ejected: bool
    ejections: int
    failures: int
    accuracy: float | None
    feedback_sent: int
    feedback_dropped: int
    learned: int
    failed: int
    profile: list[list[int]]


class ModelStats(TypedDict, total=False):
    """Statistics of a version of a model. ended: queries by how they ended. streams: queries in
    parts, and first_part_us: the time until the first one. warmup_error: why the
    warm-up of a container failed, or empty. instead: the version that gets its queries here until
    it is up, or empty."""

    engine: int
    replicas: list[ReplicaStats]
    wanted: int
    has: int
    stage: str
    output: str
    warmup_error: str
    instead: str
    queued: int
    delay_us: int
    hits: int
    joined: int
    evaluated: int
    batches: int
    retried: int
    streams: int
    parts: int
    first_part_us: Snapshot
    cost: float | None
    cost_padded: float | None
    ended: dict[str, int]
    accuracy: float | None
    feedback_dropped: int
    since_us: int
    latency_us: Snapshot
    batch_rows: Snapshot
    duration_us: dict[str, float]
    followed: FollowedStats


class CacheStats(TypedDict):
    """The prediction cache."""

    bytes: int
    entries: int
    evictions: int


class LoopStats(TypedDict):
    """The event loops. late_us_max: longest delay of a wake-up."""

    steps: int
    late_us_max: int


class FeedbackStats(TypedDict):
    """The journal, and the answers that await feedback."""

    waiting: int
    journal_bytes: int
    journal_records: int


class StoreStats(TypedDict):
    """The connection to a remote store. copy_age_s: age of the copy that is used meanwhile.
    refused: why what the store has is not taken in; "" if it is."""

    name: str
    connected: bool
    tries: int
    copy_age_s: float | None
    away_s: float
    refused: str


class FollowerStats(TypedDict):
    """A follower of a shard. on: it is connected. waited: pushes wait for it. whole: it has a
    complete copy. silent_s: since its last message. behind: pushes; behind_s: seconds."""

    shard: int
    on: bool
    waited: bool
    whole: bool
    silent_s: float
    behind: int
    behind_s: float


class ShardCopyStats(TypedDict):
    """The copy of another shard's rows that a shard holds."""

    shard: int
    whole: bool
    epoch: int
    version: int
    rows: int


class LagStats(TypedDict):
    """Ages of gradients in versions: [lower bound, count] of each bucket, and their sum."""

    buckets: list[tuple[int, int]]
    sum: int


class RecoveryStats(TypedDict):
    """Recovery of a shard: the time that it took, and its source."""

    seconds: float
    source: str


class SnapshotStats(TypedDict, total=False):
    """Snapshots of a shard since it started; empty if it takes none. last: number of the newest,
    at_us, nbytes: its time and size. seconds: that it took."""

    taken: int
    failed: int
    last: int
    at_us: int
    nbytes: int
    seconds: float
    error: str


class LogStats(TypedDict, total=False):
    """The log on disk of a shard since it started; empty if it writes none."""

    records: int
    pushes: int
    nbytes: int
    seconds: float
    error: str


@final
class ShardStats(TypedDict):
    """A parameter shard. tables, server: counts by name. refused: requests by reason. ended: why
    it ends; empty while it serves. degraded: its threads that have failed, and why."""

    shard: int
    shards: int
    pid: int
    ready: bool
    state_lost: bool
    ended: str
    degraded: list[str]
    exposed: bool
    seconds: float
    initialized: bool
    variables: int
    nbytes: int
    resident_bytes: int
    tables: dict[str, dict[str, int]]
    server: dict[str, int]
    model_pushes: int
    refused: dict[str, int]
    lags: LagStats
    recovery: RecoveryStats
    followers: list[FollowerStats]
    replicas: list[ShardCopyStats]
    replica_reads: dict[str, int]
    snapshots: SnapshotStats
    log: LogStats


@final
class AbsentShard(TypedDict):
    """A shard that does not answer, and why."""

    shard: int
    away: str


ShardReading = ShardStats | AbsentShard


class MeshStats(TypedDict, total=False):
    """A mesh node; only instance and awaits before it has joined. awaits: what it waits for, or "".

    models_registered, vmodels, instances: of the mesh. models_loaded, loading, queued, lru_ms: as
    the node's record has them. models_queried: models that this node routes queries to. misses:
    searches for a copy. stale_s: since the store last answered. fenced: the node has no live lease.
    other_history: why the content of the store is not used; "" if it is. loaded_somewhere, failing:
    models of the mesh, counted by its leader only.

    Counts since it joined: hit_ratio: None before the first query. loads: successful ones;
    load_failures: for the model or its host; refusals: without room, or too late.
    """

    instance: str
    awaits: str
    instances: int
    models_registered: int
    vmodels: int
    models_loaded: int
    models_queried: int
    capacity_bytes: int
    used_bytes: int
    lru_ms: int
    loading: int
    queued: int
    misses: int
    leader: bool
    loaded_somewhere: int
    failing: int
    stale_s: float
    fenced: bool
    stopping: bool
    other_history: str
    queries_hit: int
    queries_missed: int
    hit_ratio: float | None
    loads: int
    load_failures: int
    refusals: int
    evictions: int
    load_outcomes: dict[str, int]
    load_wait_us: Snapshot
    load_queue_us: Snapshot
    load_us: Snapshot
    eviction_age_us: Snapshot
    model_bytes: Snapshot


class ServerStats(TypedDict):
    """All statistics of a server. issued, answered: tasks. mesh, params, store: of servers that
    have one. shards: only for the dashboard."""

    models: dict[str, ModelStats]
    applications: dict[str, QueryStats]
    cache: CacheStats
    loop: LoopStats
    feedback: FeedbackStats
    issued: int
    answered: int
    queue_bytes: int
    mesh: NotRequired[MeshStats]
    params: NotRequired[Stats]
    store: NotRequired[StoreStats]
    shards: NotRequired[Sequence[ShardReading]]
