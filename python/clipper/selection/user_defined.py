"""User-defined policies and deciders, named as `package.module:Class(setting=value)`.

One instance serves all queries and threads. An exception, or an invalid result, is a PolicyFailed
error: the query gets its default answer (a failing decider: it waits for all models), and the log
has the traceback. A method that hangs blocks its caller: `select` and `combine` run on the caller's
thread, `decide` on a thread that nothing else waits for.
"""

import importlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from types import ModuleType

from clipper.errors import (
    ClipperError,
    InvalidInput,
    PolicyFailed,
    did_you_mean,
    fails_call_only,
)
from clipper.selection.policies.single_model import SingleModel
from clipper.selection.policy import Combined, Observation, Plan, Predictions, Query, State
from clipper.types import OWN_CLASS, InputType, UserValue, VersionedModel

_log = logging.getLogger(__name__)
LOGGED_EVERY = 1000  # failures of one class between two tracebacks in the log
_USER_CLASS = re.compile(OWN_CLASS, re.S)


def is_user_defined(text: str) -> bool:
    """Return True if `text` has the form `module:Class` or `module:Class(...)`."""
    return isinstance(text, str) and _USER_CLASS.fullmatch(text.strip()) is not None


def load_user_object(
    text: str, noun: str, settings: Callable[[str], dict[str, UserValue]], needs: Sequence[str]
) -> UserValue:
    """Import the class that `text` names and create an object of it.

    noun: "policy" or "decider", for messages.  settings: parses the part in parentheses.
    needs: required methods.  Raises InvalidInput that names the missing module, class or method.
    """
    found = _USER_CLASS.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(
            f"cannot read the {noun} {text[:100]!r}.",
            hint="Write package.module:Class(setting=value).",
        )
    module, name, inner = found.groups()
    cls = getattr(_imported(module, noun), name, None)
    if not isinstance(cls, type):
        names = [
            key
            for key, value in vars(importlib.import_module(module)).items()
            if isinstance(value, type)
        ]
        guess = did_you_mean(name, names) or "."
        raise InvalidInput(f"{noun} {text[:100]!r}: module {module!r} has no class {name!r}{guess}")
    if missing := [method for method in needs if not callable(getattr(cls, method, None))]:
        hint = f"A {noun} has {', '.join(needs)}: see clipper.selection.{noun.capitalize()}."
        raise InvalidInput(
            f"{noun} {text[:100]!r}: class {name!r} has no method {missing[0]!r}.", hint=hint
        )
    given = settings(f"{inner})") if inner is not None else {}
    try:
        return cls(**given)
    except ClipperError:
        raise
    except BaseException as error:
        if not fails_call_only(error):
            raise
        raise InvalidInput(
            f"{noun} {text[:100]!r}: its constructor raised {_described(error)}."
        ) from error


def _imported(module: str, noun: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = (
            "It must be importable where the server runs: install it there, or put its folder on"
            " PYTHONPATH."
        )
        what = f"no module {error.name!r}" if error.name else str(error)
        raise InvalidInput(f"{noun} of module {module!r}: {what}.", hint=hint) from None
    except BaseException as error:
        if not fails_call_only(error):
            raise
        hint = f"Try: python -c 'import {module}'."
        raise InvalidInput(
            f"{noun} of module {module!r}: importing it raised {_described(error)}.", hint=hint
        ) from error


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class UserCodeFailures:
    """Counts the failures of a user-defined class and logs some with a traceback. Threads: any."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self._count = itertools.count(1)
        self.count = 0

    def failed(self, method: str, error: BaseException) -> PolicyFailed:
        """Count and log `error`, and return the PolicyFailed to raise in its place."""
        self.count = next(self._count)
        if self.count % LOGGED_EVERY == 1:
            _log.error(
                "%s: %s failed (%d times so far)", self.owner, method, self.count, exc_info=error
            )
        return PolicyFailed(f"{self.owner}: {method} raised {_described(error)}")


class UserDefinedPolicy:
    """Wraps a user-defined policy: checks its results and converts its errors. Threads: any.

    A policy needs `select` and `combine`. One that has `observe` learns, and then needs all methods
    of clipper.selection.Policy.
    """

    def __init__(self, policy: object, text: str) -> None:
        self.policy = policy
        self.learns = callable(getattr(policy, "observe", None))
        self.name: str = getattr(policy, "name", text)
        self.schema: int = getattr(policy, "schema", 1)
        self.chance: bool = getattr(policy, "chance", True)
        self.failures = UserCodeFailures(f"policy {text!r}")
        self._defaults = SingleModel()  # methods that a policy without state may leave out
        self.decide: Callable[..., UserValue] | None = getattr(policy, "decide", None)
        if self.learns and (
            missing := [name for name in STATEFUL if not callable(getattr(policy, name, None))]
        ):
            hint = (
                "One that learns has all methods of clipper.selection.Policy; leave out observe if"
                " it does not."
            )
            raise InvalidInput(f"policy {text!r} has observe, and no {missing[0]!r}.", hint=hint)

    def _call(
        self, method: str, *args: object, check: Callable[..., None] | None = None
    ) -> UserValue:
        try:
            found = getattr(self.policy, method, None)
            result = (found if callable(found) else getattr(self._defaults, method))(*args)
            if check is not None:
                check(result, *args)
        except BaseException as error:
            if not fails_call_only(error):
                raise
            raise self.failures.failed(method, error) from error
        return result

    def _call_or(self, otherwise: object, method: str, *args: object) -> UserValue:
        try:
            return self._call(method, *args)
        except PolicyFailed:
            return otherwise

    def init(self, models: Sequence[VersionedModel], prior: State | None = None) -> State:
        """Call the user's `init`; without one, the state is the tuple of the models."""
        return self._call("init", models, prior)

    def select(self, state: State, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        """Call the user's `select` and check that it selects candidates only."""
        plan: Plan = self._call("select", state, query, candidates, check=_check_plan)
        return plan

    def combine(
        self, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        """Call the user's `combine` and check its confidence and models."""
        combined: Combined = self._call("combine", state, arrived, missing, check=_check_combined)
        return combined

    def observe(self, state: State, observation: Observation) -> State:
        """Return the learned state; `state` if the policy fails, so that the journal goes on."""
        return self._call_or(state, "observe", state, observation)

    def add_model(self, state: State, model: VersionedModel) -> State:
        """Call the user's `add_model`. Raises PolicyFailed if it fails."""
        return self._call("add_model", state, model)

    def remove_model(self, state: State, model: VersionedModel) -> State:
        """Call the user's `remove_model`. Raises PolicyFailed if it fails."""
        return self._call("remove_model", state, model)

    def update_model_version(self, state: State, old: VersionedModel, new: VersionedModel) -> State:
        """Call the user's `update_model_version`. Raises PolicyFailed if it fails."""
        return self._call("update_model_version", state, old, new)

    def merge(self, base: State, mine: State, theirs: State) -> State:
        """Call the user's `merge`; return `mine` if it fails."""
        return self._call_or(mine, "merge", base, mine, theirs)

    def encode(self, state: State) -> bytes:
        """Call the user's `encode`. Raises PolicyFailed if it fails or returns no bytes."""
        data: bytes = self._call("encode", state, check=_check_encoded)
        return data

    def decode(self, data: bytes) -> State:
        """Call the user's `decode`. Raises ValueError if it fails."""
        try:
            return self._call("decode", data)
        except PolicyFailed as error:
            raise ValueError(str(error)) from error

    def accepts_input_type(self, input: InputType) -> bool:
        """Call the user's `accepts_input_type`. Raises PolicyFailed if it fails."""
        return bool(self._call("accepts_input_type", input))

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        """Call the user's `rank_models_desc`; return () if it fails."""
        return tuple(self._call_or((), "rank_models_desc", state, user) or ())


NEEDED = ("select", "combine")
STATEFUL = (
    "init",
    "add_model",
    "remove_model",
    "update_model_version",
    "merge",
    "encode",
    "decode",
)


def _check_plan(
    plan: object, state: State, query: Query, candidates: Sequence[VersionedModel]
) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"select returned a {type(plan).__name__}, not a Plan")
    known = set(candidates)
    if candidates and not plan.models:
        raise ValueError("select returned no model")
    for model in (*plan.models, *plan.observers):
        if model not in known:
            raise ValueError(f"select returned {model!s}, which is not a candidate")
    if plan.probabilities and len(plan.probabilities) != len(plan.models):
        raise ValueError(
            f"select gave {len(plan.probabilities)} probabilities for {len(plan.models)} models"
        )


def _check_encoded(data: object, state: State) -> None:
    if not isinstance(data, bytes):
        raise TypeError(f"encode returned a {type(data).__name__}, not bytes")


def _check_combined(
    combined: object, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
) -> None:
    if not isinstance(combined, Combined):
        raise TypeError(f"combine returned a {type(combined).__name__}, not a Combined")
    if not 0 <= combined.confidence <= 1:
        raise ValueError(f"combine returned a confidence of {combined.confidence!r}")
    for model in combined.used:
        if model not in arrived:
            raise ValueError(f"combine used {model!s}, which has not arrived")
