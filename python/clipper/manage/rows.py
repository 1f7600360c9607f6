"""Types of the rows that operations of management return, as JSON has them.

Times end in `_us`: microseconds, of the wall clock for records. The types of statistics are in
clipper.metrics.stats.
"""

from typing import NotRequired, TypedDict


class ServerRow(TypedDict):
    """A server: where queries come in over HTTP (a URL) and gRPC, or empty; its state's URL; a
    warning if its store is away or has another content."""

    version: str
    pid: int
    http: str
    grpc: str
    state: str
    store: str


class ApplicationRow(TypedDict):
    """The record of an application; see `ClipperServer.app`."""

    name: str
    models: list[str]
    input: str
    policy: str
    decider: str
    missing: str
    slo_ms: float
    default: object
    confidence_min: float
    coverage: float | None
    context_table: str
    output: str
    priority: int
    roles: dict[str, str]
    created_us: int


class ModelRow(TypedDict):
    """A version in service: the most used members of its record, and how many replicas it has."""

    name: str
    version: int
    input: str
    output: str
    batching: dict[str, object]
    target: str
    code: list[str]
    replicas: int
    replicas_max: int
    source: dict[str, object] | None
    reads: dict[str, list[int]]
    tolerance: float
    applications: list[str]
    latest: bool
    wanted: int
    has: int
    created_us: int


class ProcessRow(TypedDict):
    """A version in service as it runs: see `clipper.manage.overview.processes`."""

    name: str
    version: int
    latest: bool
    roles: dict[str, str]
    state: str
    ready: int
    wanted: int
    rss_bytes: int
    pss_bytes: int
    starts: dict[str, str]
    queued: int
    batch: int
    why: str
    error: str
    next: str


class StreamRow(TypedDict):
    """A running stream. kind: "records" or "models"; settings: without passwords."""

    name: str
    kind: str
    settings: dict[str, object]
    stats: dict[str, object]


class StageRow(TypedDict):
    """The stage of the deployment of a version, and its age."""

    version: int
    stage: str
    detail: str
    for_s: float


class ChangedRecord(TypedDict):
    """One record before and after a change; None if it did not exist."""

    key: str
    before: object
    after: object


class ChangeResult(TypedDict):
    """Result of a change, or of its dry run. message, warning: one line; the latter may be empty.
    changed: empty for no change."""

    verb: str
    message: str
    warning: str
    dry_run: bool
    changed: list[ChangedRecord]


class TableChangeResult(TypedDict):
    """Result of a change to tables, or of its dry run. message: one line. rows: how many it was
    about. changed: what the history has of it."""

    verb: str
    message: str
    dry_run: bool
    rows: int
    changed: list[ChangedRecord]


class HistoryRow(TypedDict):
    """A change in the history."""

    number: int
    time_us: int
    actor: str
    verb: str
    changed: list[ChangedRecord]


class SideRow(TypedDict):
    """Counts of one side of a rollout in its stage."""

    answers: int
    defaults: int
    feedbacks: float
    reward: float
    p50_us: float | None
    p99_us: float | None


class GuardRow(TypedDict):
    """The test of a guard of a rollout, and its outcome."""

    guard: str
    outcome: str
    reason: str


class RolloutRow(TypedDict):
    """A rollout: its record, the counts of its stage, and what it waits for if it is running."""

    application: str
    model: str
    control: str
    state: str
    reason: str
    stages: list[float]
    stage: int
    stage_us: int
    new: SideRow | None
    before: SideRow | None
    guards: list[GuardRow]
    waits: NotRequired[str]


class ReplicaLines(TypedDict):
    """Lines that a replica's container wrote; lost: lines that were written too fast."""

    replica: int
    lines: list[str]
    lost: int


class FollowedLines(TypedDict):
    """Lines of a model's containers since the previous call; after: for the next one."""

    model: str
    replicas: list[ReplicaLines]
    after: str
