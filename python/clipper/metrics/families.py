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
        "clipper_answer_duration_seconds", _APP, "From the call to the answer, defaults included."
    ),
    _level("clipper_slo_seconds", _APP, "The latency objective of the application."),
    Family("clipper_feedback_total", "counter", _APP, "Weight of the feedback that was looked at."),
    _level(
        "clipper_accuracy_ratio",
        _APP,
        "How right the answers were, 0 to 1, by feedback, since the start.",
    ),
    # models within applications
    Family(
        "clipper_predictions_used_total", "counter", _BOTH, "Answers that a model had a part in."
    ),
    Family(
        "clipper_predictions_missing_total",
        "counter",
        (*_BOTH, "reason"),
        "Predictions that an answer went without, by how their tasks ended.",
    ),
    Family(
        "clipper_model_feedback_total",
        "counter",
        _BOTH,
        "Weight of the feedback that a model was judged by.",
    ),
    _level(
        "clipper_model_accuracy_ratio",
        _BOTH,
        "How right a model was, 0 to 1, by feedback, since the start.",
    ),
    _level(
        "clipper_model_agreement_ratio", _BOTH, "How far a model agreed with the answer, 0 to 1."
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
        "Queries beside the answer, by what became of them.",
    ),
    _level(
        "clipper_canary_drift_psi",
        _BOTH,
        "Population stability index of a canary's scores: above 0.25 is much.",
    ),
    # models
    Family(
        "clipper_tasks_total",
        "counter",
        (*_MODEL, "outcome"),
        "Tasks that the cache did not answer at once, by how they ended; refused and dropped "
        "ones too.",
    ),
    _latency(
        "clipper_task_duration_seconds",
        _MODEL,
        "Of tasks that ended well and that the cache did not answer at once.",
    ),
    Family("clipper_cache_hits_total", "counter", _MODEL, "Tasks that the cache answered at once."),
    Family(
        "clipper_cache_joined_total",
        "counter",
        _MODEL,
        "Tasks answered by another's evaluation of the same input.",
    ),
    Family("clipper_cache_misses_total", "counter", _MODEL, "Rows that a container answered."),
    Family("clipper_batches_total", "counter", _MODEL, "Batches sent to containers."),
    Family("clipper_batch_rows", "histogram", _MODEL, "Rows in a batch.", BATCH_ROWS),
    _level("clipper_batch_rows_limit", _MODEL, "The largest batch a container of it gets now."),
    Family("clipper_queue_rows", "gauge", _MODEL, "Rows that wait."),
    _level(
        "clipper_queue_wait_seconds",
        _MODEL,
        "How long a new task is expected to wait for a free container.",
    ),
    Family("clipper_replicas_wanted", "gauge", _MODEL, "Containers that should run."),
    Family("clipper_replicas_ready", "gauge", _MODEL, "Containers that are connected."),
    Family(
        "clipper_replicas_ejected",
        "gauge",
        _MODEL,
        "Containers that get only probes, as their model kept failing.",
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
        "Tasks tried once more, on another container where there is one.",
    ),
    Family(
        "clipper_container_restarts_total",
        "counter",
        (*_MODEL, "replica"),
        "Times a container was started again.",
    ),
    Family(
        "clipper_container_memory_bytes",
        "gauge",
        _MODEL,
        "Resident memory of its containers on this host.",
    ),
    _level(
        "clipper_model_own_accuracy_ratio",
        _MODEL,
        "How right a model that learns says it is, 0 to 1.",
    ),
    Family(
        "clipper_cache_followed",
        "gauge",
        _MODEL,
        "Cached predictions whose rows are followed, of a model with `reads`.",
    ),
    Family("clipper_cache_followed_rows", "gauge", _MODEL, "Rows that these were made of."),
    Family(
        "clipper_cache_forgotten_total",
        "counter",
        (*_MODEL, "reason"),
        "Of them, forgotten: a row had `moved`, or may have (`unsure`, `lost`), or others "
        "took their `room`.",
    ),
    Family(
        "clipper_cache_unfollowed_total",
        "counter",
        _MODEL,
        "Queries not cached, since their rows could not be followed.",
    ),
    # the server
    Family("clipper_cache_bytes", "gauge", _NONE, "Memory of the prediction cache."),
    Family("clipper_cache_entries", "gauge", _NONE, "Predictions in the cache."),
    Family(
        "clipper_cache_evictions_total", "counter", _NONE, "Predictions that gave way to others."
    ),
    Family("clipper_queue_bytes", "gauge", _NONE, "Memory of rows that wait."),
    Family(
        "clipper_tasks_issued_total",
        "counter",
        _NONE,
        "Tasks that the cache did not answer at once, of all models.",
    ),
    Family("clipper_tasks_answered_total", "counter", _NONE, "Those of them that have ended."),
    Family("clipper_loop_steps_total", "counter", _NONE, "Turns of the loops."),
    Family("clipper_loop_late_seconds_max", "gauge", _NONE, "The longest a loop overslept."),
    Family("clipper_feedback_waiting", "gauge", _NONE, "Answers that feedback may still come for."),
    Family("clipper_journal_bytes", "gauge", _NONE, "Size of the journal of feedback."),
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
        "From a request read to its response handed to the kernel.",
    ),
    Family("clipper_http_connections", "gauge", ("listener",), "Clients connected."),
    # gRPC
    Family(
        "clipper_grpc_requests_total",
        "counter",
        (*_RPC, "code"),
        "Calls that have ended, streams as a whole.",
    ),
    _latency(
        "clipper_grpc_request_duration_seconds",
        _RPC,
        "From a call read to its response handed over; not of streams.",
    ),
    Family("clipper_grpc_stream_messages_total", "counter", _RPC, "Responses sent in streams."),
    Family("clipper_grpc_calls", "gauge", _NONE, "Calls under way, streams included."),
    # the mesh, as this node has it
    Family(
        "clipper_mesh_queries_total",
        "counter",
        ("outcome",),
        "Queries of its models that came in here: `hit`, a copy served them at once, or "
        "`miss`, they waited for one.",
    ),
    _level("clipper_mesh_hit_ratio", _NONE, "Share of hits since the start."),
    Family(
        "clipper_mesh_loads_total",
        "counter",
        ("outcome",),
        "Loads that ended: `ok`, `artifact` or `host` (whose the fault was), or `refused` "
        "for want of room.",
    ),
    _slow("clipper_mesh_load_wait_seconds", "From a model wanted here to its copy loaded."),
    _slow("clipper_mesh_load_queue_seconds", "Part of that in which the load waited for its turn."),
    _slow("clipper_mesh_load_seconds", "Part of that in which the host loaded it."),
    Family(
        "clipper_mesh_unloads_total",
        "counter",
        _NONE,
        "Copies given up, to make room or for want of use.",
    ),
    _slow(
        "clipper_mesh_eviction_age_seconds",
        "How long models had not been used when they were given up.",
    ),
    Family(
        "clipper_mesh_model_bytes",
        "histogram",
        _NONE,
        "Sizes of models as loaded, measured.",
        SIZES,
    ),
    Family("clipper_mesh_capacity_bytes", "gauge", _NONE, "Memory for models."),
    Family(
        "clipper_mesh_used_bytes",
        "gauge",
        _NONE,
        "Memory of those that are loaded, and of those that load.",
    ),
    Family("clipper_mesh_models_held", "gauge", _NONE, "Copies loaded here."),
    Family("clipper_mesh_loads_running", "gauge", _NONE, "Models that load here now."),
    Family("clipper_mesh_loads_waiting", "gauge", _NONE, "Loads that wait for their turn."),
    _level(
        "clipper_mesh_lru_age_seconds",
        _NONE,
        "How long the least recently used model here was not used; 0: it is empty.",
    ),
    _level(
        "clipper_mesh_models_registered", _NONE, "Models that the mesh knows, whoever holds them."
    ),
    _level("clipper_mesh_vmodels", _NONE, "V-models alike."),
    _level("clipper_mesh_nodes", _NONE, "Nodes that live, this one included."),
    _level("clipper_mesh_is_leader", _NONE, "1: this node does what one does for all."),
    _level(
        "clipper_mesh_stale_for_seconds",
        _NONE,
        "Age of what is known of the registry: grows while the store is away.",
    ),
    # the same under the names of model-mesh, for its dashboards: milliseconds, and gauges where it
    # has them
    _alias("cache_miss_milliseconds", "histogram", "As clipper_mesh_load_wait_seconds."),
    _alias("loading_queue_delay_milliseconds", "histogram", "As clipper_mesh_load_queue_seconds."),
    _alias("loadmodel_milliseconds", "histogram", "As clipper_mesh_load_seconds."),
    _alias("age_at_eviction_milliseconds", "histogram", "As clipper_mesh_eviction_age_seconds."),
    _alias("loadmodel_failure", "gauge", "Loads that failed since the start."),
    _alias("loaded_model_size_bytes", "histogram", "As clipper_mesh_model_bytes."),
    _alias("models_loaded_total", "gauge", "Models that are loaded somewhere."),
    _alias("models_with_failure_total", "gauge", "Models whose last loads failed."),
    _alias("models_managed_total", "gauge", "As clipper_mesh_models_registered; of the leader."),
    _alias(
        "instance_lru_seconds",
        "gauge",
        "When the least recently used model here was used, since the epoch.",
    ),
    _alias("instance_lru_age_seconds", "gauge", "As clipper_mesh_lru_age_seconds."),
    _alias("instance_capacity_bytes", "gauge", "As clipper_mesh_capacity_bytes."),
    _alias("instance_used_bytes", "gauge", "As clipper_mesh_used_bytes."),
    _alias("instance_used_bps", "gauge", "Used of the capacity, in hundredths of a per cent."),
    _alias("instance_models_total", "gauge", "As clipper_mesh_models_held."),
    # parameters, of each shard of a set
    Family(
        "clipper_params_shard_up",
        "gauge",
        _SHARD,
        "1: it answers; 0: it is away, and there are no other figures of it.",
    ),
    Family("clipper_params_shard_ready", "gauge", _SHARD, "1: it serves; 0: it recovers."),
    Family(
        "clipper_params_shard_exposed",
        "gauge",
        _SHARD,
        "1: a replica has no whole copy: the shard's death may lose acknowledged pushes.",
    ),
    _level("clipper_params_epoch", _SHARD, "How often it began: grows by one with each life."),
    _level("clipper_params_version", _SHARD, "Version of the model there."),
    Family(
        "clipper_params_bytes",
        "gauge",
        _SHARD,
        "Memory of tables and variables, optimizers' state included.",
    ),
    Family("clipper_params_resident_bytes", "gauge", _SHARD, "Resident memory of its process."),
    Family("clipper_params_variables", "gauge", _SHARD, "Dense variables."),
    Family("clipper_params_connections", "gauge", _SHARD, "Workers, models and shards connected."),
    Family(
        "clipper_params_shared_bytes",
        "gauge",
        _SHARD,
        "Memory of workers and models on its host that rows are written to.",
    ),
    Family("clipper_params_rows", "gauge", _TABLE_OF, "Rows of a table."),
    Family("clipper_params_table_bytes", "gauge", _TABLE_OF, "Memory of a table."),
    Family("clipper_params_pulls_total", "counter", _SHARD, "Pulls of rows answered."),
    Family(
        "clipper_params_pulled_rows_total",
        "counter",
        (*_TABLE_OF, "outcome"),
        "Rows asked for: `hit`, or `miss`, of an id that nobody has trained.",
    ),
    Family(
        "clipper_params_pushes_total",
        "counter",
        _SHARD,
        "Pushes applied, or taken for a step: of rows, and of the model.",
    ),
    Family(
        "clipper_params_pushes_repeated_total",
        "counter",
        _SHARD,
        "Pushes of rows that came again, and changed nothing.",
    ),
    Family(
        "clipper_params_pushed_rows_total",
        "counter",
        _TABLE_OF,
        "Rows that pushes changed, each once a push.",
    ),
    Family(
        "clipper_params_admitted_rows_total",
        "counter",
        _TABLE_OF,
        "Rows made for ids that had none.",
    ),
    Family(
        "clipper_params_unadmitted_rows_total",
        "counter",
        _TABLE_OF,
        "Ids that were pushed too seldom to have a row yet.",
    ),
    Family(
        "clipper_params_refused_rows_total",
        "counter",
        _TABLE_OF,
        "Ids pushed for which the table had no room.",
    ),
    Family(
        "clipper_params_evicted_rows_total", "counter", _TABLE_OF, "Rows that gave way to others."
    ),
    Family(
        "clipper_params_expired_rows_total",
        "counter",
        _TABLE_OF,
        "Rows that nobody had used for expire_s.",
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
        "How many versions behind the gradients were, of pushes that say their version; "
        "refused ones too.",
        VERSIONS,
    ),
    Family(
        "clipper_params_replica_whole", "gauge", _COPY, "1: the replica in shard `replica` has all."
    ),
    _level(
        "clipper_params_replica_lag_pushes", _COPY, "Changes that the replica has not said it has."
    ),
    _level("clipper_params_replica_lag_seconds", _COPY, "How old the oldest of them is."),
    Family(
        "clipper_params_snapshots_total",
        "counter",
        (*_SHARD, "outcome"),
        "Snapshots: `ok` or `failed`.",
    ),
    _level(
        "clipper_params_snapshot_age_seconds",
        _SHARD,
        "Since the last that there is of it, also of lives before this one.",
    ),
    _level("clipper_params_snapshot_seconds", _SHARD, "How long the last one took."),
    Family("clipper_params_snapshot_bytes", "gauge", _SHARD, "Its size."),
    _level(
        "clipper_params_recovery_seconds",
        _SHARD,
        "How long it took this life to read what there was before it served.",
    ),
    # traces
    Family(
        "clipper_traced_requests_total",
        "counter",
        ("outcome",),
        "Requests whose spans were made: `exported`, `refused` by the collector, or `dropped`.",
    ),
    Family(
        "clipper_traced_requests_waiting", "gauge", _NONE, "Those whose spans are not sent yet."
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
        "Clients that came: `ok`, or why not (`failed`, `plain`, `slow`, `gone`, `full`).",
    ),
    Family(
        "clipper_tls_certificate_ends_seconds",
        "gauge",
        ("listener",),
        "When the certificate ends, since the epoch.",
    ),
    # the process
    Family("clipper_build_info", "info", ("version", "python"), "What runs here: always 1."),
    Family(
        "clipper_scrape_duration_seconds",
        "gauge",
        _NONE,
        "How long the collection before this one took.",
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
        "process_start_time_seconds", "gauge", _NONE, "When the process started, since the epoch."
    ),
    Family("process_open_fds", "gauge", _NONE, "Open file descriptors."),
    Family("process_max_fds", "gauge", _NONE, "How many it may open."),
    Family("process_threads", "gauge", _NONE, "Its threads."),
)

FAMILIES: Final[dict[str, Family]] = {family.name: family for family in _TABLE}
