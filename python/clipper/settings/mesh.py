"""Settings of the mesh: `[mesh]`, or `clipper.start(mesh=True)`."""

from typing import Annotated

import msgspec

from clipper.settings.setting import about


class MeshSettings(msgspec.Struct, frozen=True):
    """Settings of a mesh node, which loads models on demand: docs/mesh.md."""

    enabled: Annotated[bool, about("serve models of the mesh on this node")] = False
    name: Annotated[str, about("name of this node, fixed across restarts; empty: generated")] = ""
    peers: Annotated[
        str,
        about(
            "address for other nodes, `unix:/path` or `tcp:host:port`; empty: a socket in "
            "its folder"
        ),
    ] = ""
    advertise: Annotated[
        str,
        about(
            "host by which other nodes reach its TCP listeners; empty: the host they are bound to"
        ),
    ] = ""
    labels: Annotated[
        tuple[str, ...],
        about("properties of this node, for models that require or prefer them, as `gpu`"),
    ] = ()
    zone: Annotated[str, about("availability zone; copies of a model are spread over zones")] = ""
    capacity_mib: Annotated[
        int,
        about(
            "memory for loaded models; 0: half of what this process may use",
            "MiB",
            ge=0,
            le=1 << 30,
        ),
    ] = 0
    hosts: Annotated[
        int,
        about(
            "processes that hold this node's models; a model's id selects its process",
            "processes",
            ge=1,
            le=64,
        ),
    ] = 1
    host_silence_s: Annotated[
        float,
        about(
            "time without an answer after which a process that holds models is replaced",
            "s",
            ge=0.5,
            le=3600,
        ),
    ] = 10.0
    models_max: Annotated[
        int, about("registered models; more are refused", "models", ge=1, le=1 << 24)
    ] = 1 << 20
    loaded_max: Annotated[
        int,
        about(
            "models loaded in this node; above it the least valuable ones are unloaded",
            "models",
            ge=1,
            le=60_000,
        ),
    ] = 10_000
    loading_max: Annotated[
        int, about("concurrent loads in this node; 0: the limit of its runtime", ge=0, le=256)
    ] = 0
    queue_max: Annotated[
        int, about("loads waiting in this node; more are refused", "loads", ge=1, le=1 << 20)
    ] = 10_000
    load_wait_ms: Annotated[
        float,
        about(
            "longest wait for other loads; a query without a deadline whose model would begin to "
            "load later is refused",
            "ms",
            ge=1,
            le=86_400_000,
        ),
    ] = 2000.0
    load_s: Annotated[float, about("timeout of one load", "s", ge=0.1, le=86_400)] = 30.0
    tries: Annotated[
        int,
        about("instances that try to load a model before the load fails", "instances", ge=1, le=16),
    ] = 3
    failure_s: Annotated[
        float,
        about(
            "time after which a failed load is forgotten and may be tried again",
            "s",
            ge=0.1,
            le=86_400,
        ),
    ] = 600.0
    lease_s: Annotated[
        float,
        about("time without a sign of life after which a node counts as dead", "s", ge=0.5, le=600),
    ] = 3.0
    enter_s: Annotated[
        float,
        about(
            "time that a starting node waits for an unreachable store before it exits; 0: "
            "it exits at once",
            "s",
            ge=0,
            le=2_592_000,
        ),
    ] = 3600.0
    deadline_ms: Annotated[
        float,
        about(
            "deadline of a query without its own; plus load_s while its model is not loaded",
            "ms",
            ge=1,
            le=86_400_000,
        ),
    ] = 1000.0
    rate_per_copy: Annotated[
        int,
        about(
            "queries per minute of one copy, above which another copy is loaded", ge=10, le=1 << 30
        ),
    ] = 2000
    rate_s: Annotated[
        float, about("interval between measurements of the rates", "s", ge=0.05, le=3600)
    ] = 10.0
    janitor_s: Annotated[
        float,
        about(
            "interval at which this node compares its models with the registry",
            "s",
            ge=0.05,
            le=86_400,
        ),
    ] = 360.0
    reaper_s: Annotated[
        float, about("interval of the leader's clean-up", "s", ge=0.05, le=86_400)
    ] = 420.0
    publish_s: Annotated[
        float,
        about("shortest interval between publications of this node's record", "s", ge=0.05, le=60),
    ] = 2.0
    drain_s: Annotated[
        float,
        about("time to move models to other nodes before this node stops", "s", ge=0, le=3600),
    ] = 30.0
    constraints: Annotated[
        str,
        about(
            "JSON file, type -> {required, preferred} labels; reloaded when it changes; empty: none"
        ),
    ] = ""
    data_plane: Annotated[
        str,
        about(
            "JSON file of further gRPC methods that models serve, and where their ids are; "
            "reloaded when it changes"
        ),
    ] = ""
    runtimes: Annotated[
        tuple[str, ...],
        about(
            "further runtimes that load models, `module:Class`, as "
            "`clipper_container.adapters.oip:Oip`"
        ),
    ] = ()
