"""Processes that this one starts and keeps running, under one supervisor."""

from clipper.processes.handle import (
    ChildListener,
    End,
    Handle,
    Notice,
    NoticeKind,
    ProcessLimits,
    Told,
    describe_exit,
)
from clipper.processes.once import Outcome, run_once
from clipper.processes.restarts import NEVER_HELD, RestartPolicy
from clipper.processes.spawned import Commands, Spawned, StartCommand
from clipper.processes.state import ChildState
from clipper.processes.supervisor import ChildStatus, Supervisor

__all__ = [
    "NEVER_HELD",
    "ChildListener",
    "ChildState",
    "ChildStatus",
    "Commands",
    "End",
    "Handle",
    "Notice",
    "NoticeKind",
    "Outcome",
    "ProcessLimits",
    "RestartPolicy",
    "Spawned",
    "StartCommand",
    "Supervisor",
    "Told",
    "describe_exit",
    "run_once",
]
