"""Decisions of the mesh, made wrong one at a time: what the simulator has to find.

A mutation is a name, the function or number that is replaced, and what replaces it, made from what
was there.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
from msgspec import structs

from bench.node_simulator.plans import planned, rare
from bench.node_simulator.world import Plan
from clipper.mesh.decisions import claims
from clipper.mesh.decisions.maintenance import LoadCopy, RemoveClaim, UnloadCopy
from clipper.mesh.decisions.scaling import CopyTarget
from clipper.mesh.decisions.vmodels import NoStep, SwitchVModel
from clipper.mesh.records import Copy, MeshModel

DECISIONS = "clipper.mesh.decisions."


class Mutation(NamedTuple):
    """A wrong decision that the simulator must notice.

    name: shown by the test.  target: name of the function, or number, below DECISIONS.  make:
    returns the wrong one, given the right one.  seed: seed of a world that shows the difference.
    plan: the kind of that world.  share: its memory; 0: as the seed says.
    """

    name: str
    target: str
    make: Callable[[Any], Callable[..., Any]]
    seed: int
    plan: Callable[[int], Plan] = planned
    share: float = 0.0

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace the decision."""
        module, _, name = (DECISIONS + self.target).rpartition(".")
        try:
            owner: Any = importlib.import_module(module)
        except ModuleNotFoundError:  # of a class
            module, _, kind = module.rpartition(".")
            owner = getattr(importlib.import_module(module), kind)
        monkeypatch.setattr(owner, name, self.make(getattr(owner, name)))


def _without(*kinds: type) -> Callable[[Any], Callable[..., Any]]:
    """The actions of a look, less those of these kinds."""
    return lambda was: (
        lambda *args, **named: [
            action for action in was(*args, **named) if not isinstance(action, kinds)
        ]
    )


def _any_number(was: Any) -> Callable[..., Any]:
    return lambda model, me, now_ms, **more: was(model, me, now_ms, **{**more, "copies": 99})


def _never_more(was: Any) -> Callable[..., Any]:
    def decide(model: MeshModel, usage: Any, instances: Any, *args: Any, **named: Any) -> Any:
        found = was(model, usage, instances, *args, **named)
        return CopyTarget(min(found.copies, max(len(model.copies), 1)), found.why)

    return decide


def _last_is_spare(was: Any) -> Callable[..., Any]:
    return lambda model, me, *, alive, keep, used_ms=0: claims.released(model, me, used_ms)


def _unpinned(was: Any) -> Callable[..., Any]:
    return lambda self, id, pinned: was(self, id, False)


def _hasty(was: Any) -> Callable[..., Any]:
    return lambda vmodel, *args, **named: (
        NoStep("") if vmodel.active == vmodel.target else SwitchVModel("now")
    )


def _always(answer: Any) -> Callable[[Any], Callable[..., Any]]:
    """Return True for every argument."""
    return lambda was: lambda *args, **named: answer


def _one_more(was: int) -> Any:
    return was + 1


def _first(was: Any) -> Callable[..., Any]:
    """Return a function that returns its first argument."""
    return lambda first, *args, **named: first


def _unclaimed(was: Any) -> Callable[..., Any]:
    """Write the copy, claimed or not."""

    def complete(model: MeshModel, me: str, now_ms: int, *, size_bytes: int, **more: Any) -> Any:
        if me not in model.copies:
            claim = {**model.copies, me: Copy(now_ms, 0, size_bytes)}
            model = structs.replace(model, copies=claim)
        return was(model, me, now_ms, size_bytes=size_bytes, **more)

    return complete


def _not_kept(was: Any) -> Callable[..., Any]:
    """Give up a loaded copy that was cut off once another node has claimed the model."""

    def keep(model: MeshModel, me: str, now_ms: int, *, alive: Any, **more: Any) -> Any:
        others = claims.alive_copies(model, alive).keys() - {me}
        return claims.ClaimRefused("") if others else was(model, me, now_ms, alive=alive, **more)

    return keep


def _silent(was: Any) -> Callable[..., Any]:
    return lambda model, me, *args, **more: claims.released(model, me)


def _generous(was: Any) -> Callable[..., Any]:
    """Give up each copy that is not the only one."""

    def decide(view: Any, *args: Any) -> Any:
        mine = list(view.mine)
        several = [id for id, model in mine if model and len(model.copies) > 1]
        spare = [UnloadCopy(id, "", spare=True) for id in several if id in view.resident]
        return [*was(replace(view, mine=mine), *args), *spare]

    return decide


def _unlimited(was: Any) -> Callable[..., Any]:
    """Instances seem to have room."""
    return lambda self, instance: not self.why_not(instance)


# two holders that decide at once show it, which is rare in worlds by seed
LAST_IS_SPARE = Mutation(
    "the last copy is given up as spare", "claims.released_if_spare", _last_is_spare, 0
)
MUTATIONS = (
    Mutation("a load completes without a claim", "claims.completed", _unclaimed, 6),
    Mutation("a copy that was cut off is not kept", "claims.restored", _not_kept, 5481),
    Mutation("a failed load leaves no failure", "claims.failed", _silent, 10),
    Mutation("a copy in use is given up", "maintenance.janitor", _generous, 0),
    Mutation(
        "placement ignores that a node is full", "placement._Wish.fits", _unlimited, 9, share=1.0
    ),
    Mutation("copies of a policy are not kept", "maintenance._reaped", _without(LoadCopy), 4),
    Mutation("any number of copies is claimed", "claims.claimed", _any_number, 9),
    Mutation("failures never block", "failures.blocked_until", _always(0), 10),
    Mutation("failures are never forgotten", "failures.is_over", _always(False), 0),
    Mutation("failures are never expired", "claims.without_failures", _first, 6),
    Mutation("a model never has failed", "failures.verdict", _always(None), 10),
    Mutation("a third node tries a failed model", "failures.ARTIFACT_TRIES", _one_more, 10),
    Mutation(
        "what the dead held stays", "maintenance.reaper", _without(RemoveClaim), 14, plan=rare
    ),
    Mutation("the janitor does nothing", "maintenance.janitor", _always([]), 1, plan=rare),
    Mutation("what is given up stays claimed", "claims.released", _first, 0),
    Mutation("never scales up", "scaling.decide", _never_more, 31),
    Mutation("a rate asks for nothing", "maintenance.rates", _always([]), 31),
    Mutation("a drain moves nothing", "maintenance.migration", _always([]), 69),
    Mutation("a record is never published", "maintenance.worth_publishing", _always(False), 0),
    Mutation("nothing is pinned", "model_cache.ModelCache.pin", _unpinned, 0),
    Mutation("a name switches at once", "vmodels.step", _hasty, 2),
    Mutation("a name never switches", "vmodels.step", _always(NoStep("never")), 0),
)
