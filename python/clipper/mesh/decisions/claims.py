"""Changes of a model's record that several instances race for.

Each function takes the record as it was read, and returns the record to write or the reason why
there is nothing to write. An instance writes a claim, if the record is still as it was read, before
it begins to load. The loser of a race reads again and finds that there are enough copies, so one
decision makes one load, however many requests need it. Claims of dead instances do not count
and are removed by the next change.
"""

from collections.abc import Container
from dataclasses import dataclass

from msgspec.structs import replace

from clipper.mesh.decisions import failures
from clipper.mesh.records import Copy, Fault, MeshModel
from clipper.settings.mesh import MeshSettings


@dataclass(frozen=True, slots=True)
class ClaimRefused:
    """A change that is not made."""

    why: str


def alive_copies(model: MeshModel, alive: Container[object]) -> dict[str, Copy]:
    """Return the claims of live instances, whether loaded or loading."""
    return {instance: copy for instance, copy in model.copies.items() if instance in alive}


def loaded_copies(model: MeshModel, alive: Container[object]) -> tuple[str, ...]:
    """Return the live instances that have the model loaded, longest loaded first."""
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
    """Claim a copy for `me`, unless there are `copies` of live instances already, or enough
    instances have failed to load the model.
    """
    if me in model.copies:
        return ClaimRefused(f"{me} has claimed it already")
    held = alive_copies(model, alive)
    if len(held) >= copies:
        return ClaimRefused(f"it has {len(held)} of {copies} copies: {', '.join(sorted(held))}")
    failed = model.failures.get(me)
    if failed is not None and me in failures.blocked(model, now_ms, settings):
        return ClaimRefused(f"{me} failed to load it: {failed.why}")
    over = failures.verdict(model, now_ms, settings)
    if over is not None:
        return ClaimRefused(f"it could not be loaded: {over.why}")
    return replace(
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
    """Mark the claim of `me` as loaded. Refused if the claim is gone; then unload the copy."""
    copy = model.copies.get(me)
    if copy is None:
        return ClaimRefused(f"the claim of {me} was taken away while it loaded")
    reported: dict[str, object] = {}
    if model.input == "any" and input:
        reported["input"] = input
    if model.output == "any" and output:
        reported["output"] = output
    remaining = {
        i: f for i, f in model.failures.items() if f.crashed or (i != me and f.fault != "artifact")
    }
    return replace(
        model,
        copies={**model.copies, me: Copy(copy.claimed_ms, max(now_ms, 1), size_bytes)},
        failures=remaining,
        size_bytes=size_bytes,
        **reported,
    )


def restored(
    model: MeshModel,
    me: str,
    now_ms: int,
    *,
    alive: Container[object],
    copies: int,
    size_bytes: int,
) -> MeshModel | ClaimRefused:
    """Write a copy that `me` has loaded, unless `copies` of other live instances are loaded.

    Those that load do not count, since they may fail; nor do failures elsewhere.
    """
    if me not in model.copies:
        others = loaded_copies(model, alive)
        if len(others) >= copies:
            return ClaimRefused(
                f"{len(others)} of {copies} copies are loaded: {', '.join(sorted(others))}"
            )
        held = alive_copies(model, alive)
        model = replace(model, copies={**held, me: Copy(now_ms, 0, size_bytes)})
    return completed(model, me, now_ms, size_bytes=size_bytes)


def failed(
    model: MeshModel, me: str, now_ms: int, *, why: str, fault: Fault, crashed: bool = False
) -> MeshModel:
    """Replace the claim of `me` by a failure, which blocks it for a while.

    crashed: see Failure.
    """
    return replace(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != me},
        failures=failures.noted(model.failures, me, now_ms, why, fault, crashed),
    )


def released(model: MeshModel, me: str, used_ms: int = 0) -> MeshModel:
    """Remove the claim of `me`."""
    if me not in model.copies:
        return model
    return replace(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != me},
        used_ms=max(model.used_ms, used_ms),
    )


def released_if_spare(
    model: MeshModel, me: str, *, alive: Container[object], keep: int, used_ms: int = 0
) -> MeshModel | ClaimRefused:
    """Remove the claim of `me` if at least `keep`, and at least one, other copies are loaded."""
    others = [instance for instance in loaded_copies(model, alive) if instance != me]
    if len(others) < max(keep, 1):
        return ClaimRefused(f"only {len(others)} other copies are loaded")
    return released(model, me, used_ms)


def without(model: MeshModel, instance: str) -> MeshModel:
    """Remove all that a dead instance has left in the record."""
    if instance not in model.copies and instance not in model.failures:
        return model
    return replace(
        model,
        copies={i: copy for i, copy in model.copies.items() if i != instance},
        failures={i: failure for i, failure in model.failures.items() if i != instance},
    )


def without_gone(
    model: MeshModel, instance: str, *, alive: Container[object]
) -> MeshModel | ClaimRefused:
    """Remove all that an instance has left in the record, unless it is alive after all."""
    return ClaimRefused(f"{instance} lives") if instance in alive else without(model, instance)


def without_failures(model: MeshModel, now_ms: int, settings: MeshSettings) -> MeshModel:
    """Remove the failures that have expired."""
    remaining = {
        i: failure
        for i, failure in model.failures.items()
        if not failures.is_over(failures.forgotten_at(failure, settings), now_ms, settings)
    }
    return model if len(remaining) == len(model.failures) else replace(model, failures=remaining)
