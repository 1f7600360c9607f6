"""The sets of models over which a policy of an application has learned. The states of a new set
begin from those of another one.

A record of the store lists them, so that a server finds the states of a set that it never served
itself: after a restart, on another server, and after versions without feedback. It is written
before the first state of a set, and servers that follow the states receive it.
"""

import functools
import hashlib
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from clipper.serving.feedback.stored_state import PREFIX
from clipper.store.store import VALUE_BYTES_MAX, Record, Store
from clipper.types import VersionedModel

if TYPE_CHECKING:
    from clipper.serving.feedback.states import Learner

_log = logging.getLogger(__name__)
SETS_MAX: Final = 16  # of an application and policy that are listed; the oldest go first

Models = tuple[VersionedModel, ...]


class ModelSets:
    """The sets of one application and one family of policies. Threads: under the lock of the
    states; `add` without it.

    family: the same for policies that differ only in their settings, and so can read each other's
    states.
    """

    def __init__(self, application: str, family: str) -> None:
        self.application, self.family = application, family
        self.key = f"{PREFIX}{application}/sets/{_digest(family)}"
        self.learners: dict[Models, Learner] = {}  # of each set, the one with the newest settings
        self.is_read = False  # whether the list of the store was read
        # as the store has them: that with the oldest feedback first
        self._listed: list[Models] = []
        self._prefixes: dict[Models, str] = {}
        self._earlier: set[Models] = set()

    def prefix_of(self, models: Models) -> str:
        """Return the prefix of the keys of all states of a set."""
        found = self._prefixes.get(models)
        if found is None:
            found = f"{PREFIX}{self.application}/{set_id(models, self.family)}/"
            self._prefixes[models] = found
        return found

    def has(self, prefix: str) -> bool:
        """Return whether a known set has keys with this prefix."""
        return prefix in self._prefixes.values()

    def earlier_keys(self, models: Models, name: str) -> list[str]:
        """Return the key at which servers of earlier versions wrote a state, for all policies
        together: of the shared state always, of others if one was found there."""
        if name != "shared" and models not in self._earlier:
            return []
        names = "\n".join(sorted({str(model) for model in models}))
        return [f"{PREFIX}{self.application}/{_digest(names)}/{name}"]

    def has_earlier(self, models: Models) -> None:
        """Note that a server of an earlier version wrote states of this set."""
        self._earlier.add(models)

    def is_listed(self, models: Models) -> bool:
        """Return whether the store lists a set."""
        return models in self._listed

    def nearest(self, models: Models) -> list[Models]:
        """Return the other sets with feedback that share names with this one: the one that shares
        most first; of several the one whose first feedback is the newest."""
        names = {model.name for model in models}
        fresh = [
            learner
            for learner in self.learners.values()
            if learner.models not in self._listed and learner.shared.applied
        ]
        fresh.sort(key=_first_observation)
        learned = [*self._listed, *(learner.models for learner in fresh)]
        ranked = [
            (len(names & {model.name for model in each}), at)
            for at, each in enumerate(learned)
            if each != models
        ]
        return [learned[at] for common, at in sorted(ranked, reverse=True) if common]

    def read(self, record: Record | None) -> None:
        """Take in the list as the store has it."""
        self.is_read = True
        self._listed = [] if record is None else _listed(record.value, record.key)
        for models in self._listed:
            self.prefix_of(models)

    def add(self, store: Store, models: Models) -> Record:
        """Write a set to the list of the store, and return the list. Raises StoreError."""
        return store.update(self.key, functools.partial(_with, self.key, models))


def set_id(models: Sequence[VersionedModel], family: str) -> str:
    """Return an id of a set of models, in any order, and of the policies that share its states."""
    names = "\n".join(sorted({str(model) for model in models}))
    return _digest(f"{names}\n\n{family}")


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=12).hexdigest()


def _first_observation(learner: "Learner") -> int:
    return learner.shared.since


def _listed(value: bytes, key: str) -> list[Models]:
    try:
        names = msgspec.msgpack.decode(value, type=list[tuple[str, ...]])
        return [tuple(VersionedModel.parse(name) for name in each) for each in names]
    except (msgspec.MsgspecError, ValueError) as error:
        _log.error("the list %s of sets of models cannot be read and starts empty: %s", key, error)
        return []


def _with(key: str, models: Models, value: bytes | None) -> bytes:
    """Return the list of the store with a set at its end, unless it contains the set."""
    listed = [] if value is None else _listed(value, key)
    if models not in listed:
        listed = [*listed, models][-SETS_MAX:]
    while len(data := _encoded(listed)) > VALUE_BYTES_MAX and len(listed) > 1:
        listed = listed[1:]
    return data


def _encoded(listed: list[Models]) -> bytes:
    return msgspec.msgpack.encode([tuple(map(str, each)) for each in listed])
