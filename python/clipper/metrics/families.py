"""The table of all metrics, each declared once: its name, its help, and where its value is.

`/metrics` reads the values at `read` in the statistics of the server, which `stats()` returns too,
and the rows of the dashboard and of `clipper top` have those with a `row`. The table in
docs/monitoring.md is generated from it; the dashboard and the alerts are checked against it.

Names follow the conventions of Prometheus: base units, `_total` for counters, one meaning per name.
The edges of latencies are those of OpenTelemetry, so that shared dashboards fit, and five smaller
ones. A value counts as below an edge only if its whole bucket of the core's histogram does. So the
share within an SLO is never overstated, and understated by at most the values within 12.5 % of the
edge. The edges of batch sizes are ends of the core's buckets and exact.
"""

from dataclasses import dataclass, replace
from typing import Final, Literal

Kind = Literal["counter", "gauge", "histogram", "info"]

LATENCY_S: Final = (
    0.0001,
    0.00025,
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.25,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
BATCH_ROWS: Final = (1.0, 2.0, 4.0, 8.0, 17.0, 35.0, 71.0, 143.0, 287.0, 575.0, 1151.0, 4607.0)

LOADS_S: Final = (
    0.0005,
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
    3600.0,
)
LOADS_MS: Final = (
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    25.0,
    50.0,
    100.0,
    250.0,
    500.0,
    1e3,
    2.5e3,
    5e3,
    1e4,
    3e4,
    6e4,
    3e5,
)
VERSIONS: Final = (0.0, 1.0, 2.0, 4.0, 8.0, 17.0, 35.0, 71.0, 143.0, 287.0, 1151.0, 4607.0)
SIZES: Final = tuple(float(1 << n) for n in range(12, 38, 2))  # 4 KiB to 64 GiB


@dataclass(frozen=True, slots=True, eq=False)
class Family:
    """One metric.

    edges: upper bounds of a histogram's buckets, in the unit of the name.
    scale: factor from the unit of the value that is read to the unit of the name.
    adds: the values of several series may be summed; others are omitted from `_other`.
    read: the part that it belongs to and the path of the value in that part's statistics, joined by
    dots ("model.hits"); a mapping there has the values of the last label. Empty: code adds it.
    row: its key in the rows of the dashboard, which have what a counter grew by and what a gauge
    is. Empty: they have it in another form, or not.
    renamed: its name in version 0.1, given too where old names are asked for. Empty: the same.
    old: it exists for users of version 0.1 or of model-mesh, and is given only where old names are
    asked for.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    edges: tuple[float, ...] = ()
    scale: float = 1.0
    adds: bool = True
    read: str = ""
    row: str = ""
    renamed: str = ""
    old: bool = False


def _level(
    name: str,
    labels: tuple[str, ...],
    help: str,
    read: str = "",
    scale: float = 1.0,
    row: str = "",
    renamed: str = "",
    old: bool = False,
) -> Family:
    """Create a gauge whose series may not be summed."""
    return Family(
        name,
        "gauge",
        labels,
        help,
        scale=scale,
        adds=False,
        read=read,
        row=row,
        renamed=renamed,
        old=old,
    )


def _latency(name: str, labels: tuple[str, ...], help: str, read: str = "") -> Family:
    return Family(name, "histogram", labels, help, LATENCY_S, 1e-6, read=read)


def _slow(name: str, help: str, read: str) -> Family:
    """Create a histogram for durations of up to one hour."""
    return Family(name, "histogram", (), help, LOADS_S, 1e-6, read=read)


def _alias(name: str, kind: Kind, help: str, read: str = "") -> Family:
    """Create a metric under its name in model-mesh: gauges, and histograms of bytes or
    milliseconds."""
    if kind != "histogram":
        return Family(f"modelmesh_{name}", kind, (), help, adds=False, read=read, old=True)
    bytes = name.endswith("_bytes")
    edges = SIZES if bytes else LOADS_MS
    scale = 1.0 if bytes else 1e-3
    return Family(f"modelmesh_{name}", kind, (), help, edges, scale, read=read, old=True)


_NONE: Final = ()
_APP: Final = ("application",)
_MODEL: Final = ("model", "version")
_BOTH: Final = ("application", "model", "version")
_RPC: Final = ("service", "method")
_SHARD: Final = ("shard",)
_TABLE_OF: Final = ("table", "shard")
_COPY: Final = ("shard", "replica")
_HTTP: Final = ("listener", "method", "route")

_TABLE: Final = (
    # applications
    Family(
        "clipper_queries_total",
        "counter",
        _APP,
        "Single queries scheduled.",
        read="application.queries",
        row="q",
    ),
    Family(
        "clipper_answers_total",
        "counter",
        (*_APP, "outcome"),
        "Answers taken from their futures: `ok`, or the default and why (`unsure`, "
        "`deadline`, `full`, ...).",
    ),
    _latency(
        "clipper_answer_duration_seconds",
        _APP,
        "Time from a query to its answer, defaults included.",
        read="application.latency_us",
    ),
    _level("clipper_slo_seconds", _APP, "The latency objective of the application."),
    Family(
        "clipper_feedback_total",
        "counter",
        _APP,
        "Weight of the feedback that was applied.",
        read="application.answers.feedback.n",
    ),
    Family(
        "clipper_feedback_right_total",
        "counter",
        _APP,
        "The part of that weight for which the answers were right.",
    ),
    _level(
        "clipper_accuracy_ratio",
        _APP,
        "As clipper_feedback_right_total / clipper_feedback_total.",
        read="application.answers.feedback.mean",
        old=True,
    ),
    # models within applications
    Family(
        "clipper_predictions_used_total",
        "counter",
        _BOTH,
        "Answers that used a model's prediction.",
        read="pair.used",
    ),
    Family(
        "clipper_predictions_missing_total",
        "counter",
        (*_BOTH, "reason"),
        "Predictions that were missing in an answer, by how their tasks ended.",
        read="pair.missing",
    ),
    Family(
        "clipper_model_feedback_total",
        "counter",
        _BOTH,
        "Weight of the feedback that rated a model.",
        read="pair.feedback.n",
    ),
    Family(
        "clipper_model_feedback_right_total",
        "counter",
        _BOTH,
        "The part of that weight for which the model was right.",
    ),
    _level(
        "clipper_model_accuracy_ratio",
        _BOTH,
        "As clipper_model_feedback_right_total / clipper_model_feedback_total.",
        read="pair.feedback.mean",
        old=True,
    ),
    Family(
        "clipper_model_compared_total",
        "counter",
        _BOTH,
        "Weight of the predictions of a model that were compared with the answer.",
        read="pair.agreement.n",
    ),
    Family(
        "clipper_model_agreed_total",
        "counter",
        _BOTH,
        "The part of that weight for which the model agreed with the answer.",
    ),
    _level(
        "clipper_model_agreement_ratio",
        _BOTH,
        "As clipper_model_agreed_total / clipper_model_compared_total.",
        read="pair.agreement.mean",
        old=True,
    ),
    _level(
        "clipper_selection_share",
        _BOTH,
        "A model's share of queries or of the answer, as the policy learned it.",
    ),
    Family(
        "clipper_observer_tasks_total",
        "counter",
        (*_BOTH, "outcome"),
        "Tasks of observers (shadow, canary), by outcome.",
    ),
    _level(
        "clipper_canary_drift_psi",
        _BOTH,
        "Population stability index of a canary's scores; above 0.25 is a large drift.",
    ),
    # models
    Family(
        "clipper_tasks_total",
        "counter",
        (*_MODEL, "outcome"),
        "Tasks that missed the cache, by how they ended, including refused and dropped ones.",
    ),
    _latency(
        "clipper_task_duration_seconds",
        _MODEL,
        "Duration of successful tasks that missed the cache.",
        read="model.latency_us",
    ),
    Family(
        "clipper_part_queries_total",
        "counter",
        _MODEL,
        "Queries for an answer in parts, of a model that gives parts.",
        read="model.streams",
    ),
    Family(
        "clipper_parts_total",
        "counter",
        _MODEL,
        "Parts that containers sent for these queries.",
        read="model.parts",
    ),
    _latency(
        "clipper_first_part_duration_seconds",
        _MODEL,
        "Time from such a query to its first part.",
        read="model.first_part_us",
    ),
    Family(
        "clipper_cache_hits_total",
        "counter",
        _MODEL,
        "Tasks that the cache answered at once.",
        read="model.hits",
        row="hits",
    ),
    Family(
        "clipper_cache_joined_total",
        "counter",
        _MODEL,
        "Tasks answered by the evaluation of an equal input in flight.",
        read="model.joined",
        row="joined",
    ),
    Family(
        "clipper_evaluated_rows_total",
        "counter",
        _MODEL,
        "Rows evaluated by a container.",
        read="model.evaluated",
        row="rows",
        renamed="clipper_cache_misses_total",
    ),
    Family(
        "clipper_batches_total",
        "counter",
        _MODEL,
        "Batches sent to containers.",
        read="model.batches",
    ),
    Family(
        "clipper_batch_rows",
        "histogram",
        _MODEL,
        "Rows in a batch.",
        BATCH_ROWS,
        read="model.batch_rows",
    ),
    Family(
        "clipper_batch_cost_total",
        "counter",
        _MODEL,
        "Cost of the rows sent in batches, of a model whose batches have a cost.",
        read="model.cost",
    ),
    Family(
        "clipper_batch_cost_padded_total",
        "counter",
        _MODEL,
        "Cost of these batches with padding; the share of padding is 1 - cost / this.",
        read="model.cost_padded",
    ),
    _level(
        "clipper_batch_rows_limit",
        _MODEL,
        "Largest batch that a container of the model currently gets.",
    ),
    Family(
        "clipper_queue_rows",
        "gauge",
        _MODEL,
        "Rows waiting in the queues.",
        read="model.queued",
        row="queue",
    ),
    _level(
        "clipper_queue_wait_seconds",
        _MODEL,
        "Expected wait of a new task for a free container.",
        read="model.delay_us",
        scale=1e-6,
    ),
    Family(
        "clipper_replicas_wanted",
        "gauge",
        _MODEL,
        "Containers that should run.",
        read="model.wanted",
    ),
    Family(
        "clipper_replicas_ready",
        "gauge",
        _MODEL,
        "Containers that are connected.",
        read="model.has",
        row="has",
    ),
    Family(
        "clipper_replicas_ejected",
        "gauge",
        _MODEL,
        "Containers that get only probes, because their model kept failing.",
    ),
    Family(
        "clipper_replica_failures_total",
        "counter",
        (*_MODEL, "replica"),
        "Batches that a container's model failed.",
    ),
    Family(
        "clipper_replica_ejections_total",
        "counter",
        (*_MODEL, "replica"),
        "Times a container was ejected for its failures.",
    ),
    Family(
        "clipper_tasks_retried_total",
        "counter",
        _MODEL,
        "Tasks retried, on another container if there is one.",
        read="model.retried",
    ),
    Family(
        "clipper_container_restarts_total",
        "counter",
        (*_MODEL, "replica"),
        "Restarts of a container.",
    ),
    Family(
        "clipper_container_memory_bytes",
        "gauge",
        _MODEL,
        "Resident memory of the model's containers on this host.",
    ),
    Family(
        "clipper_container_memory_proportional_bytes",
        "gauge",
        _MODEL,
        "The same, where a page that n processes share counts 1/n; at most a minute old.",
    ),
    _level(
        "clipper_containers_forked",
        _MODEL,
        "Containers that were forked from a fork server.",
    ),
    _level(
        "clipper_model_own_accuracy_ratio",
        _MODEL,
        "Accuracy that a model which learns reports of itself, 0 to 1.",
        read="model.accuracy",
    ),
    Family(
        "clipper_cache_followed",
        "gauge",
        _MODEL,
        "Cached predictions whose rows are followed, of a model with `reads`.",
        read="model.followed.predictions",
    ),
    Family(
        "clipper_cache_followed_rows",
        "gauge",
        _MODEL,
        "Rows that the followed predictions were made of.",
        read="model.followed.rows",
    ),
    Family(
        "clipper_cache_forgotten_total",
        "counter",
        (*_MODEL, "reason"),
        "Followed predictions dropped: a row had `moved`, or may have (`unsure`, `lost`), "
        "or for `room`.",
    ),
    Family(
        "clipper_cache_unfollowed_total",
        "counter",
        _MODEL,
        "Predictions not cached because their rows could not be followed.",
        read="model.followed.uncached",
    ),
    # the server
    Family(
        "clipper_cache_bytes",
        "gauge",
        _NONE,
        "Memory of the prediction cache.",
        read="server.cache.bytes",
    ),
    Family(
        "clipper_cache_entries",
        "gauge",
        _NONE,
        "Predictions in the cache.",
        read="server.cache.entries",
    ),
    Family(
        "clipper_cache_evictions_total",
        "counter",
        _NONE,
        "Predictions evicted from the cache.",
        read="server.cache.evictions",
    ),
    Family(
        "clipper_queue_bytes",
        "gauge",
        _NONE,
        "Memory of the rows waiting in the queues.",
        read="server.queue_bytes",
    ),
    Family(
        "clipper_tasks_issued_total",
        "counter",
        _NONE,
        "Tasks of all models that missed the cache.",
        read="server.issued",
    ),
    Family(
        "clipper_tasks_answered_total",
        "counter",
        _NONE,
        "Issued tasks that have ended.",
        read="server.answered",
    ),
    Family(
        "clipper_loop_steps_total",
        "counter",
        _NONE,
        "Iterations of the event loops.",
        read="server.loop.steps",
    ),
    Family(
        "clipper_loop_late_max_seconds",
        "gauge",
        _NONE,
        "Longest delay of an event loop's wake-up.",
        read="server.loop.late_us_max",
        scale=1e-6,
        renamed="clipper_loop_late_seconds_max",
    ),
    Family(
        "clipper_feedback_waiting",
        "gauge",
        _NONE,
        "Answers remembered for feedback.",
        read="server.feedback.waiting",
    ),
    Family(
        "clipper_journal_bytes",
        "gauge",
        _NONE,
        "Size of the feedback journal.",
        read="server.feedback.journal_bytes",
    ),
    Family(
        "clipper_journal_last_record",
        "gauge",
        _NONE,
        "Number of the newest record of the journal.",
        read="server.feedback.journal_records",
        renamed="clipper_journal_records_total",
    ),
    # HTTP
    Family("clipper_http_requests_total", "counter", (*_HTTP, "code"), "Requests answered."),
    _latency(
        "clipper_http_request_duration_seconds",
        _HTTP,
        "Time from a request read to its response written to the kernel.",
    ),
    Family("clipper_http_connections", "gauge", ("listener",), "Connected clients."),
    # gRPC
    Family(
        "clipper_grpc_requests_total",
        "counter",
        (*_RPC, "code"),
        "Finished calls; a stream counts as one.",
    ),
    _latency(
        "clipper_grpc_request_duration_seconds",
        _RPC,
        "Time from a call read to its response handed over, without streams.",
    ),
    Family("clipper_grpc_stream_messages_total", "counter", _RPC, "Responses sent in streams."),
    Family("clipper_grpc_calls", "gauge", _NONE, "Calls in progress, streams included."),
    # the mesh, as this node has it
    Family(
        "clipper_mesh_queries_total",
        "counter",
        ("outcome",),
        "Queries of mesh models at this node: `hit` (a loaded copy) or `miss` (waited for a load).",
    ),
    _level(
        "clipper_mesh_hit_ratio",
        _NONE,
        "Share of hits in clipper_mesh_queries_total since the start.",
        read="mesh.hit_ratio",
        old=True,
    ),
    Family(
        "clipper_mesh_loads_total",
        "counter",
        ("outcome",),
        "Finished loads: `ok`, failed because of the `artifact`, in the `load` itself or for lack "
        "of something on the `host`, or `refused` for lack of room.",
        read="mesh.load_outcomes",
    ),
    _slow(
        "clipper_mesh_load_wait_seconds",
        "Time from the request for a model to its loaded copy.",
        read="mesh.load_wait_us",
    ),
    _slow(
        "clipper_mesh_load_queue_seconds",
        "Part of the load wait that was spent in the queue.",
        read="mesh.load_queue_us",
    ),
    _slow(
        "clipper_mesh_load_seconds",
        "Part of the load wait that was spent loading.",
        read="mesh.load_us",
    ),
    Family(
        "clipper_mesh_unloads_total",
        "counter",
        _NONE,
        "Copies unloaded, to make room or because they were unused.",
        read="mesh.evictions",
    ),
    _slow(
        "clipper_mesh_eviction_age_seconds",
        "Time since the last use of models when they were unloaded.",
        read="mesh.eviction_age_us",
    ),
    Family(
        "clipper_mesh_model_bytes",
        "histogram",
        _NONE,
        "Measured sizes of loaded models.",
        SIZES,
        read="mesh.model_bytes",
    ),
    Family(
        "clipper_mesh_capacity_bytes",
        "gauge",
        _NONE,
        "Memory for models.",
        read="mesh.capacity_bytes",
    ),
    Family(
        "clipper_mesh_used_bytes",
        "gauge",
        _NONE,
        "Memory of loaded and loading models.",
        read="mesh.used_bytes",
    ),
    Family(
        "clipper_mesh_models_held",
        "gauge",
        _NONE,
        "Copies loaded in this node.",
        read="mesh.models_loaded",
    ),
    Family(
        "clipper_mesh_loads_running",
        "gauge",
        _NONE,
        "Models loading in this node.",
        read="mesh.loading",
    ),
    Family("clipper_mesh_loads_waiting", "gauge", _NONE, "Loads in the queue.", read="mesh.queued"),
    _level(
        "clipper_mesh_lru_age_seconds",
        _NONE,
        "Time since the last use of the least recently used model; 0 without models.",
    ),
    _level(
        "clipper_mesh_models_registered",
        _NONE,
        "Models registered in the mesh.",
        read="mesh.models_registered",
    ),
    _level("clipper_mesh_vmodels", _NONE, "V-models registered in the mesh.", read="mesh.vmodels"),
    _level("clipper_mesh_nodes", _NONE, "Live nodes, this one included.", read="mesh.instances"),
    _level("clipper_mesh_is_leader", _NONE, "1 if this node is the leader.", read="mesh.leader"),
    _level(
        "clipper_mesh_store_age_seconds",
        _NONE,
        "Age of this node's copy of the registry; grows while the store is unreachable.",
        read="mesh.stale_s",
        renamed="clipper_mesh_stale_for_seconds",
    ),
    # the same under the names of model-mesh, for its dashboards: milliseconds, and gauges where it
    # has them
    _alias(
        "cache_miss_milliseconds",
        "histogram",
        "As clipper_mesh_load_wait_seconds.",
        read="mesh.load_wait_us",
    ),
    _alias(
        "loading_queue_delay_milliseconds",
        "histogram",
        "As clipper_mesh_load_queue_seconds.",
        read="mesh.load_queue_us",
    ),
    _alias(
        "loadmodel_milliseconds", "histogram", "As clipper_mesh_load_seconds.", read="mesh.load_us"
    ),
    _alias(
        "age_at_eviction_milliseconds",
        "histogram",
        "As clipper_mesh_eviction_age_seconds.",
        read="mesh.eviction_age_us",
    ),
    _alias(
        "loadmodel_failure",
        "gauge",
        "Loads that failed since the start.",
        read="mesh.load_failures",
    ),
    _alias(
        "loaded_model_size_bytes",
        "histogram",
        "As clipper_mesh_model_bytes.",
        read="mesh.model_bytes",
    ),
    _alias(
        "models_loaded_total",
        "gauge",
        "Models with a loaded copy in any node.",
        read="mesh.loaded_somewhere",
    ),
    _alias(
        "models_with_failure_total", "gauge", "Models whose last loads failed.", read="mesh.failing"
    ),
    _alias(
        "models_managed_total",
        "gauge",
        "As clipper_mesh_models_registered; reported by the leader.",
    ),
    _alias(
        "instance_lru_seconds",
        "gauge",
        "Last use of the least recently used model, seconds since the epoch.",
    ),
    _alias("instance_lru_age_seconds", "gauge", "As clipper_mesh_lru_age_seconds."),
    _alias(
        "instance_capacity_bytes",
        "gauge",
        "As clipper_mesh_capacity_bytes.",
        read="mesh.capacity_bytes",
    ),
    _alias("instance_used_bytes", "gauge", "As clipper_mesh_used_bytes.", read="mesh.used_bytes"),
    _alias("instance_used_bps", "gauge", "Used share of the capacity, in basis points."),
    _alias(
        "instance_models_total", "gauge", "As clipper_mesh_models_held.", read="mesh.models_loaded"
    ),
    # parameters, of each shard of a set
    Family(
        "clipper_params_shard_up",
        "gauge",
        _SHARD,
        "1 if the shard answers; 0 if not, and its other metrics are missing.",
    ),
    Family(
        "clipper_params_shard_ready",
        "gauge",
        _SHARD,
        "1 if the shard serves, 0 while it recovers.",
        read="shard.ready",
    ),
    Family(
        "clipper_params_shard_exposed",
        "gauge",
        _SHARD,
        "1 if no replica has a full copy, so that a crash may lose acknowledged pushes.",
        read="shard.exposed",
    ),
    _level(
        "clipper_params_epoch", _SHARD, "Number of starts of the shard.", read="shard.server.epoch"
    ),
    _level(
        "clipper_params_version",
        _SHARD,
        "Version of the model in the shard.",
        read="shard.server.version",
    ),
    Family(
        "clipper_params_bytes",
        "gauge",
        _SHARD,
        "Memory of tables and variables, optimizer states included.",
        read="shard.nbytes",
    ),
    Family(
        "clipper_params_resident_bytes",
        "gauge",
        _SHARD,
        "Resident memory of the shard's process.",
        read="shard.resident_bytes",
    ),
    Family("clipper_params_variables", "gauge", _SHARD, "Dense variables.", read="shard.variables"),
    Family(
        "clipper_params_connections",
        "gauge",
        _SHARD,
        "Connected workers, models and shards.",
        read="shard.server.connections",
    ),
    Family(
        "clipper_params_shared_bytes",
        "gauge",
        _SHARD,
        "Shared memory for rows of workers and models on the shard's host.",
        read="shard.server.shared_bytes",
    ),
    Family("clipper_params_rows", "gauge", _TABLE_OF, "Rows of a table.", read="table.rows"),
    Family(
        "clipper_params_table_bytes", "gauge", _TABLE_OF, "Memory of a table.", read="table.nbytes"
    ),
    Family(
        "clipper_params_pulls_total",
        "counter",
        _SHARD,
        "Answered pulls of rows.",
        read="shard.server.pulls",
    ),
    Family(
        "clipper_params_pulled_rows_total",
        "counter",
        (*_TABLE_OF, "outcome"),
        "Pulled rows: `hit`, or `miss` for an id without a row.",
    ),
    Family(
        "clipper_params_pushes_total",
        "counter",
        _SHARD,
        "Pushes of rows and of the model that were applied or taken for a step.",
        read="shard.server.pushes",
    ),
    Family(
        "clipper_params_pushes_repeated_total",
        "counter",
        _SHARD,
        "Repeated pushes of rows, which changed nothing.",
        read="shard.server.repeated",
    ),
    Family(
        "clipper_params_pushed_rows_total",
        "counter",
        _TABLE_OF,
        "Rows changed by pushes, each counted once per push.",
        read="table.applied",
    ),
    Family(
        "clipper_params_admitted_rows_total",
        "counter",
        _TABLE_OF,
        "Rows created for new ids.",
        read="table.made",
    ),
    Family(
        "clipper_params_unadmitted_rows_total",
        "counter",
        _TABLE_OF,
        "Pushed ids that have been pushed too rarely to get a row.",
        read="table.unadmitted",
    ),
    Family(
        "clipper_params_refused_rows_total",
        "counter",
        _TABLE_OF,
        "Pushed ids refused because the table is full.",
        read="table.refused",
    ),
    Family(
        "clipper_params_evicted_rows_total",
        "counter",
        _TABLE_OF,
        "Rows evicted to make room.",
        read="table.evicted",
    ),
    Family(
        "clipper_params_expired_rows_total",
        "counter",
        _TABLE_OF,
        "Rows deleted after expire_s without use.",
        read="table.expired",
    ),
    Family(
        "clipper_params_refused_total",
        "counter",
        (*_SHARD, "reason"),
        "Requests refused: `too_stale`, `not_ready`, `bad_input`, `call_failed`, ...",
        read="shard.refused",
    ),
    Family(
        "clipper_params_push_lag_versions",
        "histogram",
        _SHARD,
        "Age of pushed gradients in versions, refused ones included.",
        VERSIONS,
    ),
    Family(
        "clipper_params_replica_whole",
        "gauge",
        _COPY,
        "1 if the replica in shard `replica` is complete.",
    ),
    _level(
        "clipper_params_replica_lag_pushes", _COPY, "Changes that the replica has not acknowledged."
    ),
    _level("clipper_params_replica_lag_seconds", _COPY, "Age of the oldest unacknowledged change."),
    Family(
        "clipper_params_snapshots_total",
        "counter",
        (*_SHARD, "outcome"),
        "Snapshots: `ok` or `failed`.",
    ),
    _level(
        "clipper_params_snapshot_age_seconds",
        _SHARD,
        "Age of the newest snapshot, also if an earlier process took it.",
    ),
    _level(
        "clipper_params_snapshot_last_duration_seconds",
        _SHARD,
        "Duration of the last snapshot.",
        renamed="clipper_params_snapshot_seconds",
    ),
    Family("clipper_params_snapshot_bytes", "gauge", _SHARD, "Size of the last snapshot."),
    Family(
        "clipper_params_log_bytes",
        "gauge",
        _SHARD,
        "Size of the log on disk.",
        read="shard.log.nbytes",
    ),
    Family(
        "clipper_params_log_syncs_total",
        "counter",
        _SHARD,
        "Syncs of the log on disk.",
        read="shard.log.records",
    ),
    Family(
        "clipper_params_log_pushes_total",
        "counter",
        _SHARD,
        "Pushes in those syncs.",
        read="shard.log.pushes",
    ),
    _level(
        "clipper_params_recovery_last_duration_seconds",
        _SHARD,
        "Duration of the recovery at the shard's start.",
        read="shard.recovery.seconds",
        renamed="clipper_params_recovery_seconds",
    ),
    # traces
    Family(
        "clipper_traced_requests_total",
        "counter",
        ("outcome",),
        "Traced requests: `exported`, `refused` by the collector, or `dropped`.",
    ),
    Family(
        "clipper_traced_requests_waiting",
        "gauge",
        _NONE,
        "Traced requests whose spans wait to be exported.",
    ),
    Family(
        "clipper_influx_pushes_total",
        "counter",
        ("outcome",),
        "Pushes of metrics: `exported`, `refused` or `dropped`.",
    ),
    # keys
    Family(
        "clipper_key_requests_total",
        "counter",
        ("key", "outcome"),
        "Requests of the keys with a name: `admitted`, `not_permitted` or `limited`.",
    ),
    # TLS
    Family(
        "clipper_tls_handshakes_total",
        "counter",
        ("listener", "outcome"),
        "TLS handshakes: `ok`, or the reason of the failure (`failed`, `plain`, `slow`, "
        "`gone`, `full`).",
    ),
    Family(
        "clipper_tls_certificate_expiry_timestamp_seconds",
        "gauge",
        ("listener",),
        "Expiry of the certificate, seconds since the epoch.",
        renamed="clipper_tls_certificate_ends_seconds",
    ),
    # the process
    Family(
        "clipper_build_info",
        "info",
        ("version", "python"),
        "Version and Python of the server; always 1.",
    ),
    Family(
        "clipper_scrape_duration_seconds",
        "gauge",
        _NONE,
        "Duration of the previous collection.",
    ),
    Family(
        "process_cpu_seconds_total",
        "counter",
        _NONE,
        "User and system time of the server's process, in seconds.",
    ),
    Family(
        "process_resident_memory_bytes", "gauge", _NONE, "Resident memory of the server's process."
    ),
    Family(
        "process_virtual_memory_bytes", "gauge", _NONE, "Virtual memory of the server's process."
    ),
    Family(
        "process_start_time_seconds",
        "gauge",
        _NONE,
        "Start of the process, seconds since the epoch.",
    ),
    Family("process_open_fds", "gauge", _NONE, "Open file descriptors."),
    Family("process_max_fds", "gauge", _NONE, "Limit of open file descriptors."),
    Family("process_threads", "gauge", _NONE, "Threads of the process."),
)

FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _TABLE}


def _parts() -> dict[str, tuple[tuple[Family, tuple[str, ...]], ...]]:
    """Return the families that are read, and the paths of their values, by part."""
    found: dict[str, list[tuple[Family, tuple[str, ...]]]] = {}
    for family in _TABLE:
        if family.read:
            part, *path = family.read.split(".")
            found.setdefault(part, []).append((family, tuple(path)))
    return {part: tuple(rows) for part, rows in found.items()}


def _under_old_name(family: Family) -> Family:
    """Return a renamed family as it was."""
    kind: Kind = "counter" if family.renamed.endswith("_total") else family.kind
    return replace(family, name=family.renamed, kind=kind, help=f"As {family.name}.", old=True)


BY_PART: Final = _parts()
OLD_NAMES: Final[dict[Family, Family]] = {
    family: _under_old_name(family) for family in _TABLE if family.renamed
}
