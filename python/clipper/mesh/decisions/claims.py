"""Changes of a model's record that instances race for: each takes the record as read and gives the
one to write, or why not.

A claim is written, if the record is still as it was read, before its instance begins to load. Who
loses the race reads again, and finds that there are copies enough: so one decision makes one load,
however many requests asked for it. What a dead instance had claimed does not count, and goes with
the next change.
"""

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import msgspec

from clipper.mesh.decisions import failures
from clipper.mesh.records import Copy, Fault, MeshModel
from clipper.settings.mesh import MeshSettings


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """The record stays as it is. final: another read will not change it."""

    why: str
    final: bool = False


def alive_copies(model: MeshModel, alive: Container[object]) -> dict[str, Copy]:
    """Claims, loaded or loading, of instances that live."""
    return {instance: copy for instance, copy in model.copies.items() if instance in alive}


def loaded_copies(model: MeshModel, alive: Container[object]) -> tuple[str, ...]:
    """The instances that live and have it loaded, longest loaded first."""
    if len(model.copies) == 1:
        for instance, copy in model.copies.items():
            return (instance,) if copy.loaded_ms and instance in alive else ()
    return tuple(instance for instance in model.loaded if instance in alive)


def claimed(
    model: MeshModel,
    me: str,
    now_ms: int,
    *,
    alive: Container[object],
    copies: int,
    settings: MeshSettings,
    size_bytes: int = 0,
) -> MeshModel | ClaimRefused:
    """`me` will load it, as one of at most `copies`."""
    if me in model.copies:
        return ClaimRefused(f"{me} has claimed it already", final=True)
    held = alive_copies(model, alive)
    if len(held) >= copies:
        return ClaimRefused(f"it has {len(held)} of {copies} copies: {', '.join(sorted(held))}")
    failed = model.failures.get(me)
    if failed is not None and failures.blocked_until(failed, settings) > now_ms:
        return ClaimRefused(f"{me} failed to load it: {failed.why}")
    return changed(
        model, copies={**held, me: Copy(now_ms, 0, size_bytes)}, used_ms=max(model.used_ms, now_ms)
    )


def completed(
    model: MeshModel,
    me: str,
    now_ms: int,
    *,
    size_bytes: int,
    input: str = "",
    output: str = "",
    concurrency: int = 0,
) -> MeshModel | ClaimRefused:
    """`me` has loaded it. Refused: its claim is gone, and so must the copy."""
    copy = model.copies.get(me)
    if copy is None:
        return ClaimRefused(f"the claim of {me} was taken away while it loaded", final=True)
    told: dict[str, Any] = {}
    if model.input == "any" and input:
        told["input"] = input
    if model.output == "any" and output:
        told["output"] = output
    kept = {i: f for i, f in model.failures.items() if f.crashed or (i != me and f.fault == "host")}
    return changed(
        model,
        copies={**model.copies, me: Copy(copy.claimed_ms, max(now_ms, 1), size_bytes)},
        failures=kept,
        size_bytes=size_bytes,
        **told,
    )


def failed(
    model: MeshModel, me: str, now_ms: int, *, why: str, fault: Fault, crashed: bool = False
) -> MeshModel:
    """`me` could not load it: no claim, and a failure that keeps it from trying again soon.
    crashed: see Failure."""
    return changed(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != me},
        failures=failures.noted(model.failures, me, now_ms, why, fault, crashed),
    )


def released(model: MeshModel, me: str, used_ms: int = 0) -> MeshModel:
    """`me` gives its copy up, or its claim."""
    if me not in model.copies:
        return model
    return changed(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != me},
        used_ms=max(model.used_ms, used_ms),
    )


def released_if_spare(
    model: MeshModel, me: str, *, alive: Container[object], keep: int, used_ms: int = 0
) -> MeshModel | ClaimRefused:
    """The same, if `keep` others that live have it loaded; at least one."""
    others = [instance for instance in loaded_copies(model, alive) if instance != me]
    if len(others) < max(keep, 1):
        return ClaimRefused(f"only {len(others)} other copies are loaded")
    return released(model, me, used_ms)


def without(model: MeshModel, instance: str) -> MeshModel:
    """Nothing of this instance: it is gone."""
    if instance not in model.copies and instance not in model.failures:
        return model
    return changed(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != instance},
        failures={i: failure for i, failure in model.failures.items() if i != instance},
    )


def without_gone(
    model: MeshModel, instance: str, *, alive: Container[object]
) -> MeshModel | ClaimRefused:
    """The same, unless the instance lives after all."""
    return ClaimRefused(f"{instance} lives") if instance in alive else without(model, instance)


def without_failures(model: MeshModel, now_ms: int, settings: MeshSettings) -> MeshModel:
    """Only the failures that still count."""
    kept = {i: f for i, f in model.failures.items() if failures.forgotten_at(f, settings) > now_ms}
    return model if len(kept) == len(model.failures) else changed(model, failures=kept)


def changed(model: MeshModel, **fields: Any) -> MeshModel:
    return msgspec.structs.replace(model, **fields)
