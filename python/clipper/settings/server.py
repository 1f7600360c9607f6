"""What can be set of a server, of feedback, of models and applications."""

from typing import Annotated, Any, Literal

import msgspec

from clipper.setting import about
from clipper.types import Batching

Column = Annotated[int, msgspec.Meta(ge=0)]
_KIB, _MIB, _GIB = 1 << 10, 1 << 20, 1 << 30


class ServerSettings(msgspec.Struct, frozen=True):
    state: Annotated[
        str,
        about(
            "where the catalog is kept: a folder, `sqlite:FILE`, `redis://HOST:PORT/DB`,"
            " `etcd://HOST:PORT`; empty: in memory"
        ),
    ] = ""
    require_store: Annotated[
        bool,
        about(
            "refuse to start while the store of `state` is away, instead of waiting for it, or"
            " serving from a copy"
        ),
    ] = False
    folder: Annotated[
        str,
        about(
            "where packed models and the journal are kept; empty for the folder of `state`, if it"
            " is one"
        ),
    ] = ""
    address: Annotated[
        str,
        about(
            "where containers dial in: `unix` (a socket of its own), `unix:PATH` or"
            " `tcp://HOST:PORT`"
        ),
    ] = "unix"
    token: Annotated[
        str, about("what containers must know to be let in; made up at each start when empty")
    ] = ""
    token_file: Annotated[str, about("the file that holds the token, instead of `token`")] = ""
    insecure: Annotated[
        bool, about("let containers of other hosts dial in without a configured token")
    ] = False
    deployer: Annotated[
        Literal["process", "docker", "podman"],
        about("what runs the containers of models that do not say"),
    ] = "process"
    params: Annotated[
        str,
        about(
            "folder of the set of shards whose tables models use; begun by [params] if none runs"
            " there; empty: no tables"
        ),
    ] = ""
    engines: Annotated[
        int,
        about(
            "loop threads, each with a share of the models and of the cache; at most one a core",
            "engines",
            ge=1,
            le=64,
        ),
    ] = 1
    model_threads: Annotated[
        int,
        about("threads of each container; 0 for its share of the cores", "threads", ge=0, le=1024),
    ] = 0
    cache_policy: Annotated[
        Literal["clock", "sieve"],
        about(
            "who leaves a full cache: `clock`, or `sieve` (more hits when the same inputs stay"
            " popular, fewer when not)"
        ),
    ] = "clock"
    compression: Annotated[
        Literal["auto", "none", "full"],
        about(
            "of strings on their way to a container: LZ4, quick, over TCP only; not at all; or as"
            " small as it gets"
        ),
    ] = "auto"
    shared_memory: Annotated[
        bool,
        about(
            "containers of this host read large rows where they lie instead of over their socket"
        ),
    ] = True
    heartbeat_ms: Annotated[
        int,
        about(
            "silence after which a container is asked whether it lives; three and it is lost",
            "ms",
            ge=10,
            le=60_000,
        ),
    ] = 500
    warmup: Annotated[
        bool,
        about(
            "containers run made-up rows before they are ready, unless their model says otherwise"
        ),
    ] = True
    eject_after: Annotated[
        int,
        about(
            "batches in a row that a replica's model fails before its queries go to the other "
            "replicas for a while; 0: never",
            "batches",
            ge=0,
            le=1000,
        ),
    ] = 3
    load_s: Annotated[
        float, about("time a container has from its start to its HELLO", "s", ge=0.1, le=3600)
    ] = 60.0
    build_s: Annotated[
        float,
        about("time that building the environment of a model's own may take", "s", ge=1, le=86_400),
    ] = 900.0
    pip_args: Annotated[
        tuple[str, ...],
        about(
            'for pip, when it builds one, as `["--no-index", "--find-links", "/wheels"]`; PIP_*'
            " hold, too"
        ),
    ] = ()
    no_pickle: Annotated[
        bool,
        about(
            "refuse to deploy what is code: functions, estimators, pickles; only files that are"
            " data, and modules"
        ),
    ] = False
    drain_s: Annotated[
        float, about("time that queries in flight have when the server closes", "s", ge=0, le=3600)
    ] = 5.0
    restart_ms_min: Annotated[
        int,
        about(
            "first pause before a dead container is started again; it doubles",
            "ms",
            ge=1,
            le=60_000,
        ),
    ] = 100
    restart_ms_max: Annotated[int, about("longest such pause", "ms", ge=1, le=3_600_000)] = 10_000
    restarts_max: Annotated[
        int,
        about("deaths within `restart_window_s` after which a container stays down", ge=0, le=1000),
    ] = 3
    restart_window_s: Annotated[
        float, about("the time over which deaths are counted", "s", ge=1, le=86_400)
    ] = 30.0
    stop_grace_s: Annotated[
        float,
        about(
            "time that a container has from SIGTERM to SIGKILL when it is stopped",
            "s",
            ge=0,
            le=3600,
        ),
    ] = 5.0
    stuck_s: Annotated[
        float,
        about(
            "a container this long overdue with a batch is restarted, though it is heard",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 60.0
    scale_look_ms: Annotated[
        int, about("how often replicas are counted and watched", "ms", ge=10, le=60_000)
    ] = 100
    scale_up_after_ms: Annotated[
        int,
        about(
            "pressure for this long starts another replica, within a model's bounds",
            "ms",
            ge=0,
            le=3_600_000,
        ),
    ] = 1000
    scale_down_after_ms: Annotated[
        int,
        about("calm for this long stops one, within a model's bounds", "ms", ge=0, le=86_400_000),
    ] = 30_000
    scale_delay_share: Annotated[
        float,
        about(
            "pressure: the wait for a free replica takes more of the SLO", "share", ge=0.01, le=1
        ),
    ] = 0.3
    scale_busy_share: Annotated[
        float,
        about(
            "calm: one replica less, and each would still be at work for at most this",
            "share",
            ge=0.05,
            le=1,
        ),
    ] = 0.7

    log_format: Annotated[
        Literal["text", "json"],
        about("of what the server logs: as `logging` is set up, or JSON objects on stderr"),
    ] = "text"

    def __repr__(self) -> str:
        items = msgspec.structs.asdict(self).items()
        shown = (
            f"{key}={'***' if key == 'token' and value else repr(value)}" for key, value in items
        )
        return f"ServerSettings({', '.join(shown)})"


class LimitSettings(msgspec.Struct, frozen=True):
    cache_bytes_max: Annotated[
        int, about("memory of the prediction cache", "bytes", ge=64 * _KIB, le=1 << 40)
    ] = 64 * _MIB
    queue_rows_max: Annotated[
        int,
        about("rows waiting in one lane of a model; more are refused", "rows", ge=16, le=1 << 20),
    ] = 8192
    queue_bytes_max: Annotated[
        int,
        about(
            "memory of one lane of a model; arrays have lanes of their own",
            "bytes",
            ge=64 * _KIB,
            le=1 << 36,
        ),
    ] = 64 * _MIB
    tasks_max: Annotated[
        int, about("tasks without an answer yet, over all models", "tasks", ge=256, le=1 << 24)
    ] = 1 << 16
    batch_size_max: Annotated[
        int, about("rows in one batch, whatever a model's settings say", "rows", ge=1, le=65_536)
    ] = 4096
    input_bytes_max: Annotated[int, about("one input", "bytes", ge=64, le=_GIB)] = 4 * _MIB
    output_bytes_max: Annotated[int, about("one output", "bytes", ge=64, le=_GIB)] = 16 * _MIB
    frame_bytes_max: Annotated[
        int,
        about(
            "one frame from a container; more closes the connection",
            "bytes",
            ge=4 * _KIB,
            le=2 * _GIB,
        ),
    ] = 64 * _MIB
    connections_max: Annotated[
        int, about("containers connected at once", "connections", ge=1, le=65_536)
    ] = 1024
    models_max: Annotated[int, about("model versions being served", "models", ge=1, le=1 << 20)] = (
        4096
    )
    replicas_max: Annotated[
        int, about("containers of one model version", "replicas", ge=1, le=1024)
    ] = 64
    slo_ms_max: Annotated[
        float, about("longest time an application or query may ask for", "ms", ge=1, le=86_400_000)
    ] = 60_000.0
    state_bytes_max: Annotated[
        int, about("the file of the catalog; 0 for no bound", "bytes", ge=0, le=1 << 40)
    ] = _GIB
    followed_max: Annotated[
        int,
        about(
            "cached predictions of a model that reads tables, whose rows are followed",
            "predictions",
            ge=1,
            le=1 << 24,
        ),
    ] = 1 << 16
    log_lines_max: Annotated[
        int, about("last lines kept of each container's output", "lines", ge=1, le=100_000)
    ] = 200


class FeedbackSettings(msgspec.Struct, frozen=True):
    journal: Annotated[
        Literal["os", "fsync", "memory"],
        about(
            "what acknowledged feedback survives: a kill of the process, a power cut, or nothing"
        ),
    ] = "os"
    journal_bytes_max: Annotated[
        int, about("journal on disk; feedback beyond it is refused", "bytes", ge=_MIB, le=1 << 40)
    ] = _GIB
    write_ms: Annotated[
        int, about("states that changed are written to the store this often", "ms", ge=1, le=60_000)
    ] = 100
    window: Annotated[
        int, about("answers remembered for feedback by their id", "answers", ge=1, le=1 << 24)
    ] = 1 << 16
    window_s: Annotated[float, about("how long each is remembered", "s", ge=0.1, le=86_400)] = 600.0
    window_bytes_max: Annotated[
        int,
        about(
            "memory for those answers; beyond it the oldest are forgotten",
            "bytes",
            ge=_MIB,
            le=1 << 40,
        ),
    ] = 256 * _MIB
    teach_rows_max: Annotated[
        int,
        about(
            "feedback that waits for the containers of a model; beyond it, it is dropped",
            "rows",
            ge=1,
            le=1 << 24,
        ),
    ] = 4096
    inputs_bytes_max: Annotated[
        int,
        about(
            "inputs kept for models that learn, until feedback comes by id",
            "bytes",
            ge=0,
            le=1 << 40,
        ),
    ] = 64 * _MIB
    contexts_max: Annotated[
        int,
        about(
            "users (or sessions, or regions) whose states are kept in memory",
            "contexts",
            ge=16,
            le=1 << 24,
        ),
    ] = 100_000


class ModelSettings(msgspec.Struct, frozen=True):
    target: Annotated[
        str,
        about(
            "what to run: `module:function` or a file; empty: its containers are started elsewhere"
        ),
    ] = ""
    code: Annotated[
        tuple[str, ...],
        about(
            "folders or files that it imports, beside what lies in the file's own folder; relative"
            " to that folder"
        ),
    ] = ()
    version: Annotated[int, about("its number; 0 for the next", ge=0, le=(1 << 31) - 1)] = 0
    replicas: Annotated[int, about("containers to start", "replicas", ge=0, le=1024)] = 1
    replicas_max: Annotated[
        int,
        about(
            "start up to so many when `replicas` are too few; 0 for no more than those",
            "replicas",
            ge=0,
            le=1024,
        ),
    ] = 0
    input: Annotated[
        str, about("type of one input, such as `f64[64]`; empty to ask the container")
    ] = ""
    batching: Annotated[
        Batching, about("a mode, or a table of the keys of [batching] that differ")
    ] = Batching()
    cache: Annotated[bool, about("keep this model's predictions in the cache")] = True
    reads: Annotated[
        dict[str, Column | tuple[Column, ...]],
        about(
            "rows a prediction is made of: columns of the input by table; it is cached until they"
            " move"
        ),
    ] = {}
    tolerance: Annotated[
        float,
        about(
            "how far a row it reads may move before a prediction is forgotten, of its norm",
            "share",
            ge=0,
            le=1_000_000,
        ),
    ] = 0.0
    retry_singly: Annotated[bool, about("when a batch fails, try its rows one by one")] = False
    warmup: Annotated[
        bool | list[Any] | None,
        about(
            "rows that a container runs before it is ready; true: made-up ones of the input's type,"
            " false: none"
        ),
    ] = None
    requirements: Annotated[
        tuple[str, ...],
        about(
            'for pip: it runs in an environment of its own, with these; `["-r requirements.txt"]`:'
            " of a file"
        ),
    ] = ()
    python: Annotated[
        str,
        about("of that environment: `3.12`, or the path of an interpreter; empty for the server's"),
    ] = ""
    deployer: Annotated[
        Literal["", "process", "docker", "podman"],
        about("what runs its containers; empty for that of [server]"),
    ] = ""
    memory_mib: Annotated[
        int,
        about("memory of each of its Docker containers; 0 for no limit", "MiB", ge=0, le=1 << 30),
    ] = 0
    cpus: Annotated[
        float,
        about("cores of each of its Docker containers; 0 for no limit", "cores", ge=0, le=4096),
    ] = 0.0
    gpus: Annotated[
        str,
        about("of each of its Docker containers: `all`, a number, or ids as `0,2`; empty for none"),
    ] = ""


class ApplicationSettings(msgspec.Struct, frozen=True):
    models: Annotated[
        tuple[str, ...], about("the models to ask: `svm` (the latest) or `svm:3`")
    ] = ()
    slo_ms: Annotated[
        float, about("time from a query to its answer", "ms", ge=0.1, le=86_400_000)
    ] = 20.0
    default: Annotated[Any, about("the answer when no model is heard in time")] = None
    input: Annotated[str, about("type of one input; empty for that of the first model")] = ""
    policy: Annotated[str, about("selection policy, as `stacking` or `exp3(eta=0.05)`")] = (
        "ensemble"
    )
    confidence_min: Annotated[
        float, about("a less sure answer is replaced by the default", "share", ge=0, le=1)
    ] = 0.0
    roles: Annotated[
        tuple[str, ...], about("what models do that are no primaries, each as `svm:2 = shadow`")
    ] = ()
    missing: Annotated[
        Literal["mean", "skip"],
        about("a number missing at the deadline: its model's mean, or none"),
    ] = "mean"
    decider: Annotated[
        str, about("when to answer, as `majority within 12 ms, else floor(fast)`")
    ] = "all"
    coverage: Annotated[
        float | None,
        about(
            "share of the answers whose set of labels, or interval, holds the truth",
            "share",
            ge=0.5,
            le=0.999,
        ),
    ] = None
    context_table: Annotated[
        str,
        about(
            "of [server] params: the row of its user is the context of a query that brings none;"
            " empty: there is none"
        ),
    ] = ""
