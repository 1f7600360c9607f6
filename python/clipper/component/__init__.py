"""The parts that a server consists of: threads, event loops, pools and tasks that start, end, and
report their state.

A `Component` starts or raises, is asked to stop, and is joined within a limit; its state is known
at any time. `Components` is the stack of them that an owner closes. Everything here takes its
threads and times from `threads.Threads`, so that a simulation can run it in virtual time.
"""

from clipper.component.component import (
    TRANSITIONS,
    Component,
    Health,
    Lifecycle,
    State,
    cause_of,
)
from clipper.component.components import Components
from clipper.component.descriptors import require_descriptors
from clipper.component.event_loop import Loop, fast_event_loop
from clipper.component.pool import Pool
from clipper.component.stop import Stop, WakeFlag
from clipper.component.tasks import Tasks
from clipper.component.threads import SYSTEM_THREADS, Threads
from clipper.component.worker import START_S, Worker
from clipper_container.backoff import Backoff

__all__ = (
    "START_S",
    "SYSTEM_THREADS",
    "TRANSITIONS",
    "Backoff",
    "Component",
    "Components",
    "Health",
    "Lifecycle",
    "Loop",
    "Pool",
    "State",
    "Stop",
    "Tasks",
    "Threads",
    "WakeFlag",
    "Worker",
    "cause_of",
    "fast_event_loop",
    "require_descriptors",
)
