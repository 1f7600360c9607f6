"""What can be set of the mesh: `[mesh]` of a file, or `clipper.start(mesh=True)`."""

from typing import Annotated

import msgspec

from clipper.setting import about


class MeshSettings(msgspec.Struct, frozen=True):
    """Many models, loaded when they are asked for: docs/mesh.md. Durations that come in seconds may
    be shortened for a test."""

    enabled: Annotated[bool, about("serve models of the mesh on this node")] = False
    name: Annotated[str, about("of this node, fixed across restarts; empty: made up")] = ""
    peers: Annotated[
        str,
        about(
            "where other nodes talk to this one, `unix:/path` or `tcp:host:port`; empty: a socket"
            " in its folder"
        ),
    ] = ""
    advertise: Annotated[
        str, about("host by which others reach its TCP listeners; empty: what they are bound to")
    ] = ""
    labels: Annotated[
        tuple[str, ...], about("what this node is, for models that require or prefer it: `gpu`")
    ] = ()
    zone: Annotated[str, about("copies of a model are spread over zones")] = ""
    capacity_mib: Annotated[
        int, about("memory for loaded models; 0: half of the machine's", "MiB", ge=0, le=1 << 30)
    ] = 0
    hosts: Annotated[
        int,
        about(
            "processes that hold this node's models, which are spread over them by id",
            "processes",
            ge=1,
            le=64,
        ),
    ] = 1
    host_silence_s: Annotated[
        float,
        about(
            "a process that holds models and does not answer for so long is replaced",
            "s",
            ge=0.5,
            le=3600,
        ),
    ] = 10.0
    models_max: Annotated[int, about("registered models", "models", ge=1, le=1 << 24)] = 1 << 20
    loaded_max: Annotated[
        int, about("models loaded in this node at once", "models", ge=1, le=60_000)
    ] = 10_000
    loading_max: Annotated[
        int, about("models loading in this node at once; 0: what its runtime says", ge=0, le=256)
    ] = 0
    queue_max: Annotated[int, about("loads waiting in this node", "loads", ge=1, le=1 << 20)] = (
        10_000
    )
    load_s: Annotated[float, about("time that one load may take", "s", ge=0.1, le=86_400)] = 30.0
    tries: Annotated[
        int,
        about("instances that try to load a model before it has failed", "instances", ge=1, le=16),
    ] = 3
    failure_s: Annotated[
        float, about("time after which a failed load is forgotten", "s", ge=0.1, le=86_400)
    ] = 600.0
    lease_s: Annotated[
        float, about("a node that says nothing for so long is dead", "s", ge=0.5, le=600)
    ] = 3.0
    enter_s: Annotated[
        float,
        about(
            "a node whose store is away at its start waits so long for it; 0: it ends",
            "s",
            ge=0,
            le=2_592_000,
        ),
    ] = 3600.0
    deadline_ms: Annotated[
        float,
        about(
            "of a query that states none; load_s longer while its model is not loaded",
            "ms",
            ge=1,
            le=86_400_000,
        ),
    ] = 1000.0
    rate_per_copy: Annotated[
        int,
        about("queries a minute of one copy, beyond which another is loaded", ge=10, le=1 << 30),
    ] = 2000
    rate_s: Annotated[float, about("between two looks at rates", "s", ge=0.05, le=3600)] = 10.0
    janitor_s: Annotated[
        float,
        about("between two comparisons of this node with the registry", "s", ge=0.05, le=86_400),
    ] = 360.0
    reaper_s: Annotated[
        float, about("between two rounds of the leader's", "s", ge=0.05, le=86_400)
    ] = 420.0
    publish_s: Annotated[
        float,
        about("least time between two publications of this node's record", "s", ge=0.05, le=60),
    ] = 2.0
    drain_s: Annotated[
        float, about("time to move models elsewhere before this node stops", "s", ge=0, le=3600)
    ] = 30.0
    constraints: Annotated[
        str,
        about(
            "JSON file: type -> {required, preferred} labels; read again when it changes; empty:"
            " none"
        ),
    ] = ""
    data_plane: Annotated[
        str,
        about(
            "JSON file: other gRPC methods that models answer, and where their ids stand; read"
            " again when it changes"
        ),
    ] = ""
    runtimes: Annotated[
        tuple[str, ...],
        about(
            "what else its hosts load models by, `module:Class`;"
            " `clipper_container.adapters.oip:Oip`, say"
        ),
    ] = ()
