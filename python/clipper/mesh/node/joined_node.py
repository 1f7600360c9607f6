"""The parts of a node that has joined the mesh, and how they are connected."""

import asyncio
import logging
from pathlib import Path

from clipper.mesh.decision_log import DecisionLog
from clipper.mesh.decisions.usage import UsageCounter
from clipper.mesh.loading.isolation import Isolation
from clipper.mesh.loading.loader import ModelLoader
from clipper.mesh.loading.model_host import START_S, SupervisedHost, started
from clipper.mesh.loading.recovery import Recovery
from clipper.mesh.management.events import EventFeed
from clipper.mesh.management.explain import Explainer
from clipper.mesh.management.models import ModelManagement
from clipper.mesh.management.vmodels import VModelManagement
from clipper.mesh.node.drain import Drain
from clipper.mesh.node.peer_requests import PeerRequests
from clipper.mesh.node.platform import NodePlatform
from clipper.mesh.node.registry_watcher import RegistryWatcher
from clipper.mesh.node.usage_reports import REPORT_S, UsageRecorder, UsageReporter
from clipper.mesh.node_host import NodeHost
from clipper.mesh.node_loop import NodeLoop
from clipper.mesh.records import Instance
from clipper.mesh.registry import Registry
from clipper.mesh.routing.copy_locator import CopyLocator
from clipper.mesh.routing.load_admission import LoadAdmission
from clipper.mesh.routing.replica_tracker import ReplicaTracker
from clipper.mesh.routing.router import ModelRouter
from clipper.mesh.tasks.actions import ActionExecutor
from clipper.mesh.tasks.constraints_file import ConstraintsFile
from clipper.mesh.tasks.election import Election
from clipper.mesh.tasks.leader_tasks import LeaderTasks
from clipper.mesh.tasks.node_tasks import NodeTasks
from clipper.mesh.tasks.periodic_tasks import PeriodicTasks
from clipper.mesh.tasks.registration import Registration
from clipper.mesh.tasks.state_view import StateView
from clipper.mesh.tasks.vmodel_switcher import VModelSwitcher
from clipper.mesh.transport.peers import Peers
from clipper.metrics.stats import MeshStats
from clipper.settings.mesh import MeshSettings

_log = logging.getLogger(__name__)


class JoinedNode:
    """Builds the parts of a node, each with the parts it needs.

    me, number: the id and the replica number of this node.  token: the secret that nodes of one
    mesh share.  folder: for sockets.  Threads: the event loop; `stats` any.
    """

    def __init__(
        self,
        me: str,
        number: int,
        started_ms: int,
        settings: MeshSettings,
        registry: Registry,
        token: str,
        router: ModelRouter,
        host: NodeHost,
        loop: NodeLoop,
        log: DecisionLog,
        folder: Path,
        platform: NodePlatform,
    ) -> None:
        self._settings, self._loop, self._folder = settings, loop, folder
        self._me, self._platform = me, platform
        self.registry = registry
        self.hosts = [self._new_host(f"host-{n}") for n in range(settings.hosts)]
        self.isolation = Isolation(self._start_isolated_host, self._on_acquitted)
        self.loader = ModelLoader(
            me,
            number,
            registry,
            settings,
            self.hosts,
            0,
            loop.run_blocking,
            loop.tasks,
            log.note,
            self.isolation,
            lambda record, used_ms: self.actions.load_elsewhere(record, used_ms),
        )
        self._recovery = Recovery(me, self.loader, self.isolation, loop.tasks)
        usage = UsageCounter()
        recorder = UsageRecorder(self.loader, usage)
        requests = PeerRequests(self.loader, recorder, log)
        self.peers = Peers(
            me,
            settings.peers,
            token,
            folder,
            requests.answer,
            requests.on_event,
            self._peer_address,
            platform.network,
        )
        self.election = Election(me, registry, loop, lambda: self.switcher.wake())
        self.registration = Registration(
            settings,
            registry,
            self.loader,
            usage,
            self.election,
            loop,
            lambda: (host.address, self.peers.address),
            started_ms,
            platform.network,
        )
        self.constraints = ConstraintsFile(settings.constraints)
        self.copies = CopyLocator(
            self.loader,
            self.peers,
            registry,
            settings,
            loop.run_blocking,
            loop.tasks,
            log,
            self.registration.record,
            host,
            router.get,
            lambda route, seconds: host.close(route.resolved, seconds),
            lambda: self.constraints.constraints,
            platform.rng,
        )
        self.admission = LoadAdmission(
            self.loader, registry, settings, lambda: self.constraints.constraints
        )
        self.view = StateView(
            self.registration, registry, self.loader, lambda: self.constraints.constraints
        )
        self.actions = ActionExecutor(
            settings,
            registry,
            self.loader,
            self.copies,
            self.registration,
            loop,
            log,
            lambda: self.switcher.wake(),
        )
        self.switcher = VModelSwitcher(
            settings,
            registry,
            self.election,
            self.view,
            self.actions,
            loop,
            log,
            platform.rng,
        )
        self.leader = LeaderTasks(settings, registry, self.election, self.view, self.actions)
        self.replicas = ReplicaTracker(host, router, self.copies, loop)
        self.watcher = RegistryWatcher(
            registry,
            router,
            self.loader,
            self.copies,
            self.peers,
            self.registration,
            self.switcher,
            host,
            loop,
        )
        self.periodic = self._periodic_tasks(router, usage, recorder)
        self.drain = Drain(settings, registry, self.loader, self.copies, self.registration)
        self.models = ModelManagement(
            settings, registry, router, self.loader, self.copies, host, loop, log
        )
        self.vmodels = VModelManagement(
            settings,
            registry,
            self.models,
            loop,
            self.switcher.wake,
            self.watcher.refresh_alias,
        )
        self.explainer = Explainer(
            settings,
            registry,
            self.loader,
            self.models,
            self.registration.instances,
            lambda: self.constraints.constraints,
            log,
        )
        self.events = EventFeed(registry, lambda: loop.stopping)
        self._router = router

    def _periodic_tasks(
        self, router: ModelRouter, usage: UsageCounter, recorder: UsageRecorder
    ) -> PeriodicTasks:
        settings = self._settings
        reporter = UsageReporter(
            router,
            self.loader,
            self.peers,
            self.registration,
            recorder,
            self.replicas.check_row_type,
        )
        tasks = NodeTasks(settings, self.registry, self.loader, usage, self.view, self.actions)

        async def refresh() -> None:
            self.constraints.refresh()
            await self.registration.refresh()

        return PeriodicTasks(
            self._loop,
            {
                "clipper-mesh-report": (min(REPORT_S, settings.rate_s), reporter.report),
                "clipper-mesh-refresh": (
                    min(0.25, settings.publish_s, settings.lease_s / 8),
                    refresh,
                ),
                "clipper-mesh-scale": (settings.rate_s, tasks.scale),
                "clipper-mesh-clean": (settings.janitor_s, tasks.clean),
                "clipper-mesh-reap": (settings.reaper_s, self.leader.reap),
            },
            self._platform.rng,
        )

    # -- life

    async def start_hosts(self, leaves: asyncio.Event) -> None:
        """Start the model hosts and listen for peers; return when all hosts are ready.

        Also returns when `leaves` is set, or when the hosts take too long: they then go on.
        """
        await self.peers.open()
        for host in self.hosts:
            await host.start()
        leaving = asyncio.ensure_future(leaves.wait())
        ready = asyncio.gather(*(host.is_ready.wait() for host in self.hosts))
        await asyncio.wait((leaving, ready), timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not ready.done() and not self._loop.stopping:
            _log.error(
                "no model host of %s is ready after %g s; it is still waited for",
                self.loader.me,
                START_S,
            )
        leaving.cancel()
        ready.cancel()
        self.loader.refresh_capacity()
        self.constraints.refresh()

    async def stop_hosts(self) -> None:
        """Stop the model hosts and close all connections to peers."""
        for host in reversed(self.hosts):
            await host.stop()
        self.peers.close()

    def watch_registry(self) -> None:
        """Follow the changes of the registry."""
        self.watcher.start()
        self.events.start(self._loop.call)

    async def leave(self) -> None:
        """Stop all work and leave the mesh."""
        self.periodic.stop()
        await self.loader.stop()
        await asyncio.gather(self.isolation.close(), *(host.stop() for host in self.hosts))
        self.peers.close()
        await self.registration.leave()

    # -- model hosts

    def _new_host(self, name: str) -> SupervisedHost:
        return self._platform.new_host(
            self._me,
            name,
            self._folder,
            self._settings,
            self._on_host_ready,
            self._on_host_lost,
            lambda model, address, why: self.loader.left(model, address),
        )

    def _on_host_ready(self, host: SupervisedHost) -> None:
        types = ", ".join(host.types)
        _log.info("the model host %s is ready (pid %d): %s", host.name, host.pid, types)

    def _on_host_lost(self, host: SupervisedHost) -> None:
        if not self._loop.stopping:
            self._recovery.host_lost(host)

    async def _start_isolated_host(self, name: str) -> SupervisedHost:
        return await started(self._new_host(name))

    def _on_acquitted(self, id: str, host: SupervisedHost) -> bool:
        return self._loop.stopping or self._recovery.acquit(id, host)

    def _peer_address(self, instance: str) -> str:
        found: Instance | None = self.registry.instances.get(instance)
        return found.peers if found else ""

    # -- statistics

    def stats(self) -> MeshStats:
        """Return counters and gauges."""
        loader, registry, record = self.loader, self.registry, self.registration.record()
        return {
            "instance": record.id,
            "awaits": "",
            "instances": len(registry.instances),
            "models_registered": len(registry.models),
            "vmodels": len(registry.vmodels),
            "models_loaded": record.models,
            "models_queried": len(self._router),
            "capacity_bytes": record.capacity_bytes,
            "used_bytes": record.used_bytes,
            "lru_ms": record.lru_ms,
            "loading": record.loading,
            "queued": record.queued,
            "misses": self.copies.misses,
            **loader.counts.stats(),
            "leader": self.election.is_leader,
            **self.leader.counts,
            "stale_s": registry.models.stale_s,
            "fenced": registry.is_fenced,
            "stopping": record.stopping,
            "other_history": registry.other_history,
        }
