"""Consequences of failed loads: where not to try again, until when, and what was at fault.

A failure blocks its instance for that model for `failure_s`, ten minutes, whether the artifact was
at fault or the load raised: what fails is retried regularly, and not often. Where the host lacked
something (memory, descriptors, a server behind it) the block is shorter, and longer each time. The
count outlives the block; a successful load resets it. A model has failed when enough instances have
tried, or all that could; two that blame the artifact are enough. A model that ended a process in
which it was alone has failed everywhere at once, for a time that doubles. Source: model-mesh's
slides, "Model Loading Resiliency".
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from clipper.mesh.records import Failure, Fault, MeshModel
from clipper.settings.mesh import MeshSettings

ARTIFACT_TRIES: Final = 2  # instances that blame the artifact before it is believed
FIRST_SHARE: Final = 1 / 60  # of failure_s: the first block after a fault of the host
SUSPECT_MODELS: Final = 3  # models that fail by an instance's own fault before it is quarantined
SUSPECT_MS: Final = 30_000  # the first quarantine; each further one is twice as long
WINDOW_MS: Final = 600_000


def blocked_until(failure: Failure, settings: MeshSettings) -> int:
    """Return the wall time in ms until which the instance does not try the model again."""
    longest = settings.failure_s * 1000
    if failure.fault != "host" and not failure.crashed:
        return failure.time_ms + int(longest)
    return failure.time_ms + _pause_ms(failure.count, settings)


def _pause_ms(count: int, settings: MeshSettings) -> int:
    longest = settings.failure_s * 1000
    return int(min(longest, longest * FIRST_SHARE * 2.0 ** min(count - 1, 30)))


def has_crashed(model: MeshModel) -> bool:
    """Return whether the model lately ended a process of its own; it gets such a process again."""
    return any(failure.crashed for failure in model.failures.values())


def forgotten_at(failure: Failure, settings: MeshSettings) -> int:
    """Return the wall time in ms at which the failure, with its count, is removed."""
    return failure.time_ms + int(settings.failure_s * 1000)


def is_over(until_ms: int, now_ms: int, settings: MeshSettings) -> bool:
    """Return whether a time that a failure has set is over, or is of a clock that was far ahead."""
    return not now_ms < until_ms <= now_ms + 2 * int(settings.failure_s * 1000)


def blocked(model: MeshModel, now_ms: int, settings: MeshSettings) -> frozenset[str]:
    """Return the instances that do not try the model now."""
    if not model.failures:
        return frozenset()
    return frozenset(
        i
        for i, failure in model.failures.items()
        if not is_over(blocked_until(failure, settings), now_ms, settings)
    )


@dataclass(frozen=True, slots=True)
class FailedModel:
    """The state of a model that no instance tries to load for now.

    retry_ms: wall time at which it may be tried again.
    """

    why: str
    retry_ms: int
    fault: Fault


def verdict(
    model: MeshModel, now_ms: int, settings: MeshSettings, places: int = 0
) -> FailedModel | None:
    """Return why the model has failed for now; None if it may be tried.

    places: the number of instances that could try it, if known; no more tries are required.
    """
    if not model.failures:
        return None
    crashes = [failure for failure in model.failures.values() if failure.crashed]
    if crashes:
        last = max(crashes, key=lambda failure: failure.time_ms)
        until_ms = last.time_ms + _pause_ms(sum(failure.count for failure in crashes), settings)
        if not is_over(until_ms, now_ms, settings):
            return FailedModel(last.why, until_ms, last.fault)
    now_blocked = blocked(model, now_ms, settings)
    standing = [failure for i, failure in model.failures.items() if i in now_blocked]
    artifact = [failure for failure in standing if failure.fault == "artifact"]
    tries = min(settings.tries, places or settings.tries)
    if len(artifact) < min(ARTIFACT_TRIES, tries) and len(standing) < tries:
        return None
    blamed = artifact if len(artifact) >= min(ARTIFACT_TRIES, tries) else standing
    last = max(blamed, key=lambda failure: failure.time_ms)
    return FailedModel(
        last.why, min(blocked_until(failure, settings) for failure in blamed), last.fault
    )


def noted(
    failures: Mapping[str, Failure],
    instance: str,
    now_ms: int,
    why: str,
    fault: Fault,
    crashed: bool = False,
) -> dict[str, Failure]:
    """Return the failures with one more, or with a higher count."""
    before = failures.get(instance)
    return {
        **failures,
        instance: Failure(now_ms, why[:500], fault, before.count + 1 if before else 1, crashed),
    }


@dataclass(slots=True)
class _Record:
    failed: deque[tuple[int, str]] = field(default_factory=deque)
    until_ms: int = 0
    times: int = 0


class Quarantine:
    """Instances where several models failed, and not by their files.

    Placement takes them last. A successful load clears an instance. Threads: one at a time.
    """

    def __init__(self) -> None:
        self._instances: dict[str, _Record] = {}

    def failed(self, instance: str, model: str, fault: Fault, now_ms: int) -> bool:
        """Note a failed load; return whether the instance is quarantined from now on."""
        if fault == "artifact":
            return False
        record = self._instances.setdefault(instance, _Record())
        if record.until_ms > now_ms:
            return False
        record.failed.append((now_ms, model))
        while record.failed[0][0] < now_ms - WINDOW_MS:
            record.failed.popleft()
        if len({model for _, model in record.failed}) < SUSPECT_MODELS:
            return False
        record.until_ms = now_ms + min(SUSPECT_MS << min(record.times, 10), WINDOW_MS)
        record.times += 1
        record.failed.clear()
        return True

    def loaded(self, instance: str) -> None:
        """Clear an instance: a load has succeeded there."""
        self._instances.pop(instance, None)

    def left_alone(self, now_ms: int) -> frozenset[str]:
        """Return the instances that are quarantined now."""
        return frozenset(i for i, record in self._instances.items() if record.until_ms > now_ms)
