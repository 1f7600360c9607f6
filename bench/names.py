"""Names of the benchmarks, as `python -m bench NAME` takes them, and the module of each."""

from pathlib import Path

from bench.results import ROOT

BENCHMARKS = {
    "application": "bench.system.application.calls",
    "async_models": "bench.system.containers.async_models",
    "attacks": "bench.system.frontends.attacks",
    "batch_cost": "bench.system.containers.batch_cost",
    "calls": "bench.system.containers.calls",
    "client": "bench.system.frontends.clients",
    "container_start": "bench.system.containers.start",
    "containers": "bench.system.containers.sdks",
    "coverage": "bench.learning.coverage",
    "deadlines": "bench.system.load.deadlines",
    "doors": "bench.system.frontends.doors",
    "durability": "bench.system.faults.durability",
    "engine": "bench.system.engine",
    "fair": "bench.system.frontends.fair",
    "feedback_kills": "bench.system.faults.feedback_kills",
    **{f"figure{number}": f"bench.paper.figure{number}" for number in range(3, 12)},
    "first_burst": "bench.system.load.first_burst",
    "gpu": "bench.system.containers.gpu",
    "grpc": "bench.system.frontends.grpc",
    "install": "bench.system.install",
    "learning": "bench.learning.policies",
    "many_models": "bench.system.mesh.many_models",
    "mesh": "bench.system.mesh.nodes",
    "mesh_sim": "bench.system.mesh.simulation",
    "mesh_story": "bench.system.mesh.story",
    "mlperf": "bench.system.load.mlperf",
    "overload": "bench.system.load.overload",
    "params": "bench.system.params.groups",
    "params_kills": "bench.system.faults.params_kills",
    "params_reshard": "bench.system.faults.params_reshard",
    "parts": "bench.system.frontends.parts",
    "reference": "bench.system.anchors.reference",
    "registry": "bench.system.mesh.registry",
    "regret": "bench.learning.regret",
    "rest": "bench.system.frontends.rest",
    "rest_peers": "bench.system.frontends.rest_peers",
    "selection": "bench.learning.selection",
    "several": "bench.system.several_servers.on_redis",
    "several_ray": "bench.system.several_servers.on_ray",
    "several_states": "bench.system.several_servers.states",
    "shared": "bench.system.containers.shared_memory",
    "stream_kills": "bench.system.faults.stream_kills",
    "streams": "bench.system.frontends.streams",
    "tensors": "bench.system.containers.tensors",
    "upgrade": "bench.system.load.upgrade",
}


def source_of(name: str) -> Path:
    """Return the file of a benchmark."""
    path = ROOT.joinpath(*BENCHMARKS[name].split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
