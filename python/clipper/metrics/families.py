"""The table of all metrics. The table in docs/monitoring.md is generated from it; the dashboard and
the alerts are checked against it.

Names follow the conventions of Prometheus: base units, `_total` for counters, one meaning per name.
The edges of latencies are those of OpenTelemetry, so that shared dashboards fit, and five smaller
ones. A value counts as below an edge only if its whole bucket of the core's histogram does. So the
share within an SLO is never overstated, and understated by at most the values within 12.5 % of the
edge. The edges of batch sizes are ends of the core's buckets and exact.
"""

from dataclasses import dataclass
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
    scale: factor from the histogram's own unit to the unit of the name.
    adds: the values of several series may be summed; others are omitted from `_other`.
    """

    name: str
    kind: Kind
    labels: tuple[str, ...]
    help: str
    edges: tuple[float, ...] = ()
    scale: float = 1.0
    adds: bool = True


def _level(name: str, labels: tuple[str, ...], help: str) -> Family:
    return Family(name, "gauge", labels, help, adds=False)


def _latency(name: str, labels: tuple[str, ...], help: str) -> Family:
    return Family(name, "histogram", labels, help, LATENCY_S, 1e-6)


def _slow(name: str, help: str) -> Family:
    """Create a histogram for durations of up to one hour."""
    return Family(name, "histogram", (), help, LOADS_S, 1e-6)


def _alias(name: str, kind: Kind, help: str) -> Family:
    if kind != "histogram":
        return Family(f"modelmesh_{name}", kind, (), help, adds=False)
    bytes = name.endswith("_bytes")
    return Family(
        f"modelmesh_{name}", kind, (), help, SIZES if bytes else LOADS_MS, 1.0 if bytes else 1e-3
    )


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
    Family("clipper_queries_total", "counter", _APP, "Single queries scheduled."),
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
    ),
    _level("clipper_slo_seconds", _APP, "The latency objective of the application."),
    Family("clipper_feedback_total", "counter", _APP, "Weight of the feedback that was applied."),
    _level(
        "clipper_accuracy_ratio",
        _APP,
        "Mean rightness of the answers by feedback, 0 to 1, since the start.",
    ),
    # models within applications
    Family(
        "clipper_predictions_used_total",
        "counter",
        _BOTH,
        "Answers that used a model's prediction.",
    ),
    Family(
        "clipper_predictions_missing_total",
        "counter",
        (*_BOTH, "reason"),
        "Predictions that were missing in an answer, by how their tasks ended.",
    ),
    Family(
        "clipper_model_feedback_total",
        "counter",
        _BOTH,
        "Weight of the feedback that rated a model.",
    ),
    _level(
        "clipper_model_accuracy_ratio",
        _BOTH,
        "Mean rightness of a model by feedback, 0 to 1, since the start.",
    ),
    _level(
        "clipper_model_agreement_ratio", _BOTH, "Mean agreement of a model with the answer, 0 to 1."
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
    ),
    Family("clipper_cache_hits_total", "counter", _MODEL, "Tasks that the cache answered at once."),
    Family(
        "clipper_cache_joined_total",
        "counter",
        _MODEL,
        "Tasks answered by the evaluation of an equal input in flight.",
    ),
    Family("clipper_cache_misses_total", "counter", _MODEL, "Rows evaluated by a container."),
    Family("clipper_batches_total", "counter", _MODEL, "Batches sent to containers."),
    Family("clipper_batch_rows", "histogram", _MODEL, "Rows in a batch.", BATCH_ROWS),
    Family(
        "clipper_batch_cost_total",
        "counter",
        _MODEL,
        "Cost of the rows sent in batches, of a model whose batches have a cost.",
    ),
    Family(
        "clipper_batch_cost_padded_total",
        "counter",
        _MODEL,
        "Cost of these batches with padding; the share of padding is 1 - cost / this.",
    ),
    _level(
        "clipper_batch_rows_limit",
        _MODEL,
        "Largest batch that a container of the model currently gets.",
    ),
    Family("clipper_queue_rows", "gauge", _MODEL, "Rows waiting in the queues."),
    _level(
        "clipper_queue_wait_seconds",
        _MODEL,
        "Expected wait of a new task for a free container.",
    ),
    Family("clipper_replicas_wanted", "gauge", _MODEL, "Containers that should run."),
    Family("clipper_replicas_ready", "gauge", _MODEL, "Containers that are connected."),
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
    ),
    Family(
        "clipper_cache_followed",
        "gauge",
        _MODEL,
        "Cached predictions whose rows are followed, of a model with `reads`.",
    ),
    Family(
        "clipper_cache_followed_rows",
        "gauge",
        _MODEL,
        "Rows that the followed predictions were made of.",
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
    ),
    # the server
    Family("clipper_cache_bytes", "gauge", _NONE, "Memory of the prediction cache."),
    Family("clipper_cache_entries", "gauge", _NONE, "Predictions in the cache."),
    Family(
        "clipper_cache_evictions_total", "counter", _NONE, "Predictions evicted from the cache."
    ),
    Family("clipper_queue_bytes", "gauge", _NONE, "Memory of the rows waiting in the queues."),
    Family(
        "clipper_tasks_issued_total",
        "counter",
        _NONE,
        "Tasks of all models that missed the cache.",
    ),
    Family("clipper_tasks_answered_total", "counter", _NONE, "Issued tasks that have ended."),
    Family("clipper_loop_steps_total", "counter", _NONE, "Iterations of the event loops."),
    Family(
        "clipper_loop_late_seconds_max", "gauge", _NONE, "Longest delay of an event loop's wake-up."
    ),
    Family("clipper_feedback_waiting", "gauge", _NONE, "Answers remembered for feedback."),
    Family("clipper_journal_bytes", "gauge", _NONE, "Size of the feedback journal."),
    Family(
        "clipper_journal_records_total",
        "counter",
        _NONE,
        "Number of the newest record of the journal.",
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
    _level("clipper_mesh_hit_ratio", _NONE, "Share of hits since the start."),
    Family(
        "clipper_mesh_loads_total",
        "counter",
        ("outcome",),
        "Finished loads: `ok`, failed because of the `artifact`, in the `load` itself or for lack "
        "of something on the `host`, or `refused` for lack of room.",
    ),
    _slow(
        "clipper_mesh_load_wait_seconds", "Time from the request for a model to its loaded copy."
    ),
    _slow("clipper_mesh_load_queue_seconds", "Part of the load wait that was spent in the queue."),
    _slow("clipper_mesh_load_seconds", "Part of the load wait that was spent loading."),
    Family(
        "clipper_mesh_unloads_total",
        "counter",
        _NONE,
        "Copies unloaded, to make room or because they were unused.",
    ),
    _slow(
        "clipper_mesh_eviction_age_seconds",
        "Time since the last use of models when they were unloaded.",
    ),
    Family(
        "clipper_mesh_model_bytes",
        "histogram",
        _NONE,
        "Measured sizes of loaded models.",
        SIZES,
    ),
    Family("clipper_mesh_capacity_bytes", "gauge", _NONE, "Memory for models."),
    Family(
        "clipper_mesh_used_bytes",
        "gauge",
        _NONE,
        "Memory of loaded and loading models.",
    ),
    Family("clipper_mesh_models_held", "gauge", _NONE, "Copies loaded in this node."),
    Family("clipper_mesh_loads_running", "gauge", _NONE, "Models loading in this node."),
    Family("clipper_mesh_loads_waiting", "gauge", _NONE, "Loads in the queue."),
    _level(
        "clipper_mesh_lru_age_seconds",
        _NONE,
        "Time since the last use of the least recently used model; 0 without models.",
    ),
    _level("clipper_mesh_models_registered", _NONE, "Models registered in the mesh."),
    _level("clipper_mesh_vmodels", _NONE, "V-models registered in the mesh."),
    _level("clipper_mesh_nodes", _NONE, "Live nodes, this one included."),
    _level("clipper_mesh_is_leader", _NONE, "1 if this node is the leader."),
    _level(
        "clipper_mesh_stale_for_seconds",
        _NONE,
        "Age of this node's copy of the registry; grows while the store is unreachable.",
    ),
    # the same under the names of model-mesh, for its dashboards: milliseconds, and gauges where it
    # has them
    _alias("cache_miss_milliseconds", "histogram", "As clipper_mesh_load_wait_seconds."),
    _alias("loading_queue_delay_milliseconds", "histogram", "As clipper_mesh_load_queue_seconds."),
    _alias("loadmodel_milliseconds", "histogram", "As clipper_mesh_load_seconds."),
    _alias("age_at_eviction_milliseconds", "histogram", "As clipper_mesh_eviction_age_seconds."),
    _alias("loadmodel_failure", "gauge", "Loads that failed since the start."),
    _alias("loaded_model_size_bytes", "histogram", "As clipper_mesh_model_bytes."),
    _alias("models_loaded_total", "gauge", "Models with a loaded copy in any node."),
    _alias("models_with_failure_total", "gauge", "Models whose last loads failed."),
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
    _alias("instance_capacity_bytes", "gauge", "As clipper_mesh_capacity_bytes."),
    _alias("instance_used_bytes", "gauge", "As clipper_mesh_used_bytes."),
    _alias("instance_used_bps", "gauge", "Used share of the capacity, in basis points."),
    _alias("instance_models_total", "gauge", "As clipper_mesh_models_held."),
    # parameters, of each shard of a set
    Family(
        "clipper_params_shard_up",
        "gauge",
        _SHARD,
        "1 if the shard answers; 0 if not, and its other metrics are missing.",
    ),
    Family(
        "clipper_params_shard_ready", "gauge", _SHARD, "1 if the shard serves, 0 while it recovers."
    ),
    Family(
        "clipper_params_shard_exposed",
        "gauge",
        _SHARD,
        "1 if no replica has a full copy, so that a crash may lose acknowledged pushes.",
    ),
    _level("clipper_params_epoch", _SHARD, "Number of starts of the shard."),
    _level("clipper_params_version", _SHARD, "Version of the model in the shard."),
    Family(
        "clipper_params_bytes",
        "gauge",
        _SHARD,
        "Memory of tables and variables, optimizer states included.",
    ),
    Family(
        "clipper_params_resident_bytes", "gauge", _SHARD, "Resident memory of the shard's process."
    ),
    Family("clipper_params_variables", "gauge", _SHARD, "Dense variables."),
    Family("clipper_params_connections", "gauge", _SHARD, "Connected workers, models and shards."),
    Family(
        "clipper_params_shared_bytes",
        "gauge",
        _SHARD,
        "Shared memory for rows of workers and models on the shard's host.",
    ),
    Family("clipper_params_rows", "gauge", _TABLE_OF, "Rows of a table."),
    Family("clipper_params_table_bytes", "gauge", _TABLE_OF, "Memory of a table."),
    Family("clipper_params_pulls_total", "counter", _SHARD, "Answered pulls of rows."),
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
    ),
    Family(
        "clipper_params_pushes_repeated_total",
        "counter",
        _SHARD,
        "Repeated pushes of rows, which changed nothing.",
    ),
    Family(
        "clipper_params_pushed_rows_total",
        "counter",
        _TABLE_OF,
        "Rows changed by pushes, each counted once per push.",
    ),
    Family(
        "clipper_params_admitted_rows_total",
        "counter",
        _TABLE_OF,
        "Rows created for new ids.",
    ),
    Family(
        "clipper_params_unadmitted_rows_total",
        "counter",
        _TABLE_OF,
        "Pushed ids that have been pushed too rarely to get a row.",
    ),
    Family(
        "clipper_params_refused_rows_total",
        "counter",
        _TABLE_OF,
        "Pushed ids refused because the table is full.",
    ),
    Family("clipper_params_evicted_rows_total", "counter", _TABLE_OF, "Rows evicted to make room."),
    Family(
        "clipper_params_expired_rows_total",
        "counter",
        _TABLE_OF,
        "Rows deleted after expire_s without use.",
    ),
    Family(
        "clipper_params_refused_total",
        "counter",
        (*_SHARD, "reason"),
        "Requests refused: `too_stale`, `not_ready`, `bad_input`, `call_failed`, ...",
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
    _level("clipper_params_snapshot_seconds", _SHARD, "Duration of the last snapshot."),
    Family("clipper_params_snapshot_bytes", "gauge", _SHARD, "Size of the last snapshot."),
    Family("clipper_params_log_bytes", "gauge", _SHARD, "Size of the log on disk."),
    Family("clipper_params_log_syncs_total", "counter", _SHARD, "Syncs of the log on disk."),
    Family("clipper_params_log_pushes_total", "counter", _SHARD, "Pushes in those syncs."),
    _level(
        "clipper_params_recovery_seconds",
        _SHARD,
        "Duration of the recovery at the shard's start.",
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
    # TLS
    Family(
        "clipper_tls_handshakes_total",
        "counter",
        ("listener", "outcome"),
        "TLS handshakes: `ok`, or the reason of the failure (`failed`, `plain`, `slow`, "
        "`gone`, `full`).",
    ),
    Family(
        "clipper_tls_certificate_ends_seconds",
        "gauge",
        ("listener",),
        "Expiry of the certificate, seconds since the epoch.",
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
