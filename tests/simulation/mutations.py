"""Decisions of the mesh, made wrong one at a time: what the simulator has to find.

A mutation is a name, the function that is replaced, and what replaces it, made from the function
that was there.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from clipper.mesh.decisions import claims
from clipper.mesh.decisions.maintenance import Forget
from clipper.mesh.decisions.scaling import Wanted
from clipper.mesh.decisions.vmodels import Switch, Wait
from clipper.mesh.records import MeshModel

DECISIONS = "clipper.mesh.decisions."


class Mutation(NamedTuple):
    """A wrong decision that the simulator must notice.

    name: shown by the test.  target: name of the function below DECISIONS.  make: returns the
    wrong function, given the right one.  seed: seed of a world that shows the difference.
    """

    name: str
    target: str
    make: Callable[[Any], Callable[..., Any]]
    seed: int


def _without(*kinds: type) -> Callable[[Any], Callable[..., Any]]:
    """The actions of a look, less those of these kinds."""
    return lambda was: (
        lambda *args, **named: [
            action for action in was(*args, **named) if not isinstance(action, kinds)
        ]
    )


def _any_number(was: Any) -> Callable[..., Any]:
    return lambda model, me, now_ms, **told: was(model, me, now_ms, **{**told, "copies": 99})


def _never_more(was: Any) -> Callable[..., Any]:
    def decide(model: MeshModel, usage: Any, instances: Any, *args: Any, **named: Any) -> Any:
        found = was(model, usage, instances, *args, **named)
        return Wanted(min(found.copies, max(len(model.copies), 1)), found.why)

    return decide


def _last_is_spare(was: Any) -> Callable[..., Any]:
    return lambda model, me, *, alive, keep, used_ms=0: claims.released(model, me, used_ms)


def _unpinned(was: Any) -> Callable[..., Any]:
    return lambda self, *args, pinned=False, **named: was(self, *args, **named)


def _hasty(was: Any) -> Callable[..., Any]:
    return lambda vmodel, *args, **named: (
        Wait("") if vmodel.active == vmodel.target else Switch("now")
    )


def _always(answer: Any) -> Callable[[Any], Callable[..., Any]]:
    """Whatever it is asked."""
    return lambda was: lambda *args, **named: answer


def _first(was: Any) -> Callable[..., Any]:
    """What it is given."""
    return lambda first, *args, **named: first


MUTATIONS = (
    Mutation("any number of copies is claimed", "claims.claimed", _any_number, 0),
    Mutation(
        "the last copy is given up as spare",
        "claims.released_if_spare",
        _last_is_spare,
        7,
    ),
    Mutation("failures never block", "failures.blocked_until", _always(0), 4),
    Mutation(
        "failures are never forgotten",
        "failures.forgotten_at",
        _always(1 << 62),
        13,
    ),
    Mutation("failures are never expired", "claims.without_failures", _first, 13),
    Mutation("a model never has failed", "failures.verdict", _always(None), 4),
    Mutation(
        "what the dead held stays",
        "maintenance.reaper",
        _without(Forget),
        15,
    ),
    Mutation("the janitor does nothing", "maintenance.janitor", _always([]), 5),
    Mutation("what is given up stays claimed", "claims.released", _first, 0),
    Mutation("never scales up", "scaling.decide", _never_more, 0),
    Mutation("a rate asks for nothing", "maintenance.rates", _always([]), 0),
    Mutation("a drain moves nothing", "maintenance.migration", _always([]), 9),
    Mutation(
        "a record is never published",
        "maintenance.worth_publishing",
        _always(False),
        0,
    ),
    Mutation("nothing is pinned", "model_cache.ModelCache.add", _unpinned, 0),
    Mutation("a name switches at once", "vmodels.step", _hasty, 0),
    Mutation("a name never switches", "vmodels.step", _always(Wait("never")), 0),
)
