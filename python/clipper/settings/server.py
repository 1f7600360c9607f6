"""Settings of the server, its limits, feedback, models and applications."""

from typing import Annotated, Literal

import msgspec

from clipper.settings.redaction import redacted
from clipper.settings.setting import about

_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class ServerSettings(msgspec.Struct, frozen=True):
    """Settings of the server: `[server]`."""

    state: Annotated[
        str,
        about(
            "store of the catalog: a folder, `sqlite:FILE`, `redis://HOST:PORT/DB`, "
            "`etcd://HOST:PORT`; empty: in memory"
        ),
    ] = ""
    require_store: Annotated[
        bool,
        about(
            "refuse to start while the store is unreachable, instead of waiting or serving "
            "from a copy"
        ),
    ] = False
    folder: Annotated[
        str,
        about(
            "folder of packed models, the journal and, without `state`, what policies learned;"
            " empty: the folder of `state`, if it is one"
        ),
    ] = ""
    address: Annotated[
        str,
        about(
            "address for containers: `unix` (a generated socket), `unix:PATH` or `tcp://HOST:PORT`"
        ),
    ] = "unix"
    token: Annotated[
        str, about("token that containers must present; empty: generated at each start")
    ] = ""
    token_file: Annotated[str, about("file that contains the token, instead of `token`")] = ""
    insecure: Annotated[
        bool, about("accept containers of other hosts without a configured token")
    ] = False
    deployer: Annotated[
        Literal["process", "docker", "podman"],
        about("runs the containers of models without a deployer of their own"),
    ] = "process"
    params: Annotated[
        str,
        about(
            "folder of the shards whose tables models use; started by [params] if none "
            "runs; empty: no tables"
        ),
    ] = ""
    engines: Annotated[
        int,
        about(
            "event loop threads, each with a share of the models and of the cache; at most "
            "one per core",
            "engines",
            ge=1,
            le=64,
        ),
    ] = 1
    model_threads: Annotated[
        int,
        about("threads of each container; 0: its share of the cores", "threads", ge=0, le=1024),
    ] = 0
    cache_policy: Annotated[
        Literal["clock", "sieve"],
        about(
            "eviction from a full cache: `clock`, or `sieve` (more hits while the same "
            "inputs stay popular)"
        ),
    ] = "clock"
    compression: Annotated[
        Literal["auto", "none", "full"],
        about(
            "compression of strings to containers: `auto` (fast LZ4, TCP only), `none`, or "
            "`full` (smallest)"
        ),
    ] = "auto"
    shared_memory: Annotated[
        bool,
        about(
            "let containers of this host read large rows from shared memory instead of their socket"
        ),
    ] = True
    fork_server: Annotated[
        bool,
        about(
            "fork replicas that run as processes from one that has imported their frameworks; "
            "false: start each by itself"
        ),
    ] = True
    heartbeat_ms: Annotated[
        int,
        about(
            "silence after which a container gets a heartbeat; after three the connection "
            "counts as lost",
            "ms",
            ge=10,
            le=60_000,
        ),
    ] = 500
    warmup: Annotated[
        bool,
        about(
            "containers run generated rows before they are ready; a model's setting takes "
            "precedence"
        ),
    ] = True
    eject_after: Annotated[
        int,
        about(
            "consecutive failed batches after which a replica gets no queries for a while; "
            "0: never",
            "batches",
            ge=0,
            le=1000,
        ),
    ] = 3
    load_s: Annotated[
        float, about("timeout from the start of a container to its HELLO", "s", ge=0.1, le=3600)
    ] = 60.0
    build_s: Annotated[
        float,
        about("timeout for building a model's own environment", "s", ge=1, le=86_400),
    ] = 900.0
    pip_args: Annotated[
        tuple[str, ...],
        about(
            'arguments of pip for those builds, as `["--no-index", "--find-links", '
            '"/wheels"]`; PIP_* variables apply too'
        ),
    ] = ()
    no_pickle: Annotated[
        bool,
        about(
            "refuse to deploy code (functions, estimators, pickles); allow only data files "
            "and modules"
        ),
    ] = False
    commands: Annotated[
        tuple[str, ...],
        about(
            'programs that clients of management may start as containers, as `["java"]`; an '
            "interpreter or a shell here lets them run any code"
        ),
    ] = ()
    env_pass: Annotated[
        tuple[str, ...],
        about(
            "variables of the server's environment that models, model hosts and pip get too, "
            'as names or patterns: `["MODEL_*", "AWS_*"]`; by itself a process gets those that '
            "programs and numeric libraries read, and no secrets (docs/operating.md)"
        ),
    ] = ()
    drain_s: Annotated[
        float, about("time for queries in flight when the server closes", "s", ge=0, le=3600)
    ] = 5.0
    restart_ms_min: Annotated[
        int,
        about(
            "first pause before a failed container is restarted; it doubles each time",
            "ms",
            ge=1,
            le=60_000,
        ),
    ] = 100
    restart_ms_max: Annotated[int, about("longest such pause", "ms", ge=1, le=3_600_000)] = 10_000
    restarts_max: Annotated[
        int,
        about(
            "failures within `restart_window_s` after which a container is held: it is tried "
            "again after 30 s, doubling to 10 min; 0: it stays down after its first exit",
            ge=0,
            le=1000,
        ),
    ] = 3
    restart_window_s: Annotated[
        float, about("window over which failures are counted", "s", ge=1, le=86_400)
    ] = 30.0
    row_failure_s: Annotated[
        float,
        about(
            "time for which a row is refused that has ended the process of two containers in "
            "which it was the only one; 0: it is not refused",
            "s",
            ge=0,
            le=86_400,
        ),
    ] = 600.0
    stop_grace_s: Annotated[
        float,
        about(
            "time from SIGTERM to SIGKILL when a container is stopped",
            "s",
            ge=0,
            le=3600,
        ),
    ] = 5.0
    stuck_s: Annotated[
        float,
        about(
            "time by which a batch may be overdue before its container is restarted, even "
            "if it is alive",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 60.0
    scale_interval_ms: Annotated[
        int, about("interval of the autoscaler", "ms", ge=10, le=60_000)
    ] = 100
    scale_up_after_ms: Annotated[
        int,
        about(
            "duration of pressure that starts another replica, within a model's bounds",
            "ms",
            ge=0,
            le=3_600_000,
        ),
    ] = 1000
    scale_down_after_ms: Annotated[
        int,
        about(
            "duration of low load that stops a replica, within a model's bounds",
            "ms",
            ge=0,
            le=86_400_000,
        ),
    ] = 30_000
    scale_delay_share: Annotated[
        float,
        about(
            "pressure: the wait for a free replica exceeds this share of the SLO",
            "share",
            ge=0.01,
            le=1,
        ),
    ] = 0.3
    scale_busy_share: Annotated[
        float,
        about(
            "low load: with one replica less, each would be busy for at most this share of "
            "the time",
            "share",
            ge=0.05,
            le=1,
        ),
    ] = 0.7

    __repr__ = redacted


class LimitSettings(msgspec.Struct, frozen=True):
    """Bounds of what clients and containers can make grow: `[limits]`."""

    cache_bytes_max: Annotated[
        int, about("memory of the prediction cache", "bytes", ge=64 * _KIB, le=1 << 40)
    ] = 64 * _MIB
    queue_rows_max: Annotated[
        int,
        about("rows waiting in one queue of a model; more are refused", "rows", ge=16, le=1 << 20),
    ] = 8192
    queue_bytes_max: Annotated[
        int,
        about(
            "memory of one queue of a model; more is refused; arrays have queues of their own",
            "bytes",
            ge=64 * _KIB,
            le=1 << 36,
        ),
    ] = 64 * _MIB
    tasks_max: Annotated[
        int, about("unfinished tasks of all models; more are refused", "tasks", ge=256, le=1 << 24)
    ] = 1 << 16
    batch_size_max: Annotated[
        int, about("rows in one batch, for all models", "rows", ge=1, le=65_536)
    ] = 4096
    input_bytes_max: Annotated[int, about("size of one input", "bytes", ge=64, le=_GIB)] = 16 * _MIB
    output_bytes_max: Annotated[int, about("size of one output", "bytes", ge=64, le=_GIB)] = (
        16 * _MIB
    )
    parts_ahead_max: Annotated[
        int,
        about(
            "parts of one answer that have not been read; then its model waits for the reader",
            "parts",
            ge=1,
            le=65_536,
        ),
    ] = 32
    answer_bytes_max: Annotated[
        int,
        about(
            "size of all parts of one answer; it ends, incomplete, before it is larger",
            "bytes",
            ge=64,
            le=_GIB,
        ),
    ] = 16 * _MIB
    streams_max: Annotated[
        int,
        about(
            "answers in parts that one container makes at a time; more wait",
            "answers",
            ge=1,
            le=65_536,
        ),
    ] = 64
    calls_max: Annotated[
        int,
        about(
            "calls of other models and applications that one container has open; a further one"
            " fails",
            "calls",
            ge=1,
            le=65_536,
        ),
    ] = 1024
    call_depth_max: Annotated[
        int,
        about("models and applications in a chain of calls", "calls", ge=1, le=64),
    ] = 8
    frame_bytes_max: Annotated[
        int,
        about(
            "size of one frame from a container; a larger one closes the connection",
            "bytes",
            ge=4 * _KIB,
            le=2 * _GIB,
        ),
    ] = 64 * _MIB
    connections_max: Annotated[
        int, about("connected containers; more are refused", "connections", ge=1, le=65_536)
    ] = 1024
    models_max: Annotated[
        int, about("model versions that are served; more are refused", "models", ge=1, le=1 << 20)
    ] = 4096
    replicas_max: Annotated[
        int, about("containers of one model version; more are refused", "replicas", ge=1, le=1024)
    ] = 64
    slo_ms_max: Annotated[
        float,
        about(
            "longest SLO of an application or query; a longer one is refused",
            "ms",
            ge=1,
            le=86_400_000,
        ),
    ] = 60_000.0
    state_bytes_max: Annotated[
        int, about("size of the catalog's file; 0: no bound", "bytes", ge=0, le=1 << 40)
    ] = _GIB
    followed_max: Annotated[
        int,
        about(
            "cached predictions, of a model that reads tables, whose rows are followed",
            "predictions",
            ge=1,
            le=1 << 24,
        ),
    ] = 1 << 16
    log_lines_max: Annotated[
        int,
        about(
            "lines kept of each container's output; older ones are dropped",
            "lines",
            ge=1,
            le=100_000,
        ),
    ] = 200


class FeedbackSettings(msgspec.Struct, frozen=True):
    """Settings of feedback: `[feedback]`."""

    journal: Annotated[
        Literal["os", "fsync", "memory"],
        about(
            "durability of acknowledged feedback: survives a kill (`os`), a power cut "
            "(`fsync`), or nothing (`memory`)"
        ),
    ] = "os"
    journal_bytes_max: Annotated[
        int,
        about(
            "size of the journal on disk; further feedback is refused", "bytes", ge=_MIB, le=1 << 40
        ),
    ] = _GIB
    write_ms: Annotated[
        int,
        about(
            "longest pause between two writes of changed states to the store; each is a random one "
            "of half of it or more",
            "ms",
            ge=1,
            le=60_000,
        ),
    ] = 100
    ended_s: Annotated[
        float,
        about(
            "time after which a server that has ended is no longer named in the states of a store "
            "that servers share",
            "s",
            ge=10,
            le=31_536_000,
        ),
    ] = 3600.0
    window: Annotated[
        int,
        about(
            "answers remembered for feedback by id; beyond it the oldest are forgotten",
            "answers",
            ge=1,
            le=1 << 24,
        ),
    ] = 1 << 16
    window_s: Annotated[
        float, about("time for which an answer is remembered", "s", ge=0.1, le=86_400)
    ] = 600.0
    window_bytes_max: Annotated[
        int,
        about(
            "memory of those answers; beyond it the oldest are forgotten",
            "bytes",
            ge=_MIB,
            le=1 << 40,
        ),
    ] = 256 * _MIB
    records_ms: Annotated[
        int,
        about(
            "interval at which answers that feedback may come for are written to a Redis or etcd "
            "that servers share, so that feedback counts after this server was killed; 0: never",
            "ms",
            ge=0,
            le=60_000,
        ),
    ] = 200
    records_bytes_max: Annotated[
        int,
        about(
            "size of those records of this server, compressed; beyond it the oldest are deleted",
            "bytes",
            ge=1 << 16,
            le=1 << 40,
        ),
    ] = 64 * _MIB
    records_total_bytes_max: Annotated[
        int,
        about(
            "size of those records of all servers; beyond it each keeps an equal share",
            "bytes",
            ge=1 << 16,
            le=1 << 40,
        ),
    ] = _GIB
    pending_rows_max: Annotated[
        int,
        about(
            "feedback that waits for a model's containers; more is dropped",
            "rows",
            ge=1,
            le=1 << 24,
        ),
    ] = 4096
    inputs_bytes_max: Annotated[
        int,
        about(
            "memory of inputs kept for models that learn, until feedback arrives by id",
            "bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = 64 * _MIB
    contexts_max: Annotated[
        int,
        about(
            "users (or sessions, or regions) whose states are in memory; the least recently "
            "used leave it",
            "contexts",
            ge=16,
            le=1 << 24,
        ),
    ] = 100_000
