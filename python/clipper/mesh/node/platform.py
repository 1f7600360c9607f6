"""The machine of a node: what it takes from it, and a simulation gives it otherwise."""

from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from random import Random

from clipper.mesh.loading.model_host import NewHost
from clipper.mesh.node_loop import NodeLoop, ThreadedNodeLoop
from clipper.mesh.transport.network import SOCKETS, Network


@dataclass(frozen=True)
class NodePlatform:
    """The event loop, threads, network, model hosts and random numbers of one node.

    Times of the loop come from the loop; those of the store's clients from `Store.threads`; the
    wall clock is `clipper.clock.wall_time_us`. new_host: makes a model host. lookup_pool: runs
    look-ups of unknown names; None: a thread.
    """

    new_host: NewHost
    new_loop: Callable[[], NodeLoop] = ThreadedNodeLoop
    network: Network = SOCKETS
    lookup_pool: Executor | None = None
    rng: Random = field(default_factory=Random)
