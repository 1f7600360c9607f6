"""Policies and deciders of the user's own: found by `package.module:Class(setting=value)`, and kept
from harming anybody else.

One instance serves all queries and threads. What its methods raise, or return that makes no sense,
is PolicyFailed: it costs the query its default answer (a decider's: the query waits for all, as if
there were no decider), with the traceback in the log. A method that hangs keeps whoever called it:
`select` and `combine` run on the caller's own thread, `decide` on one that nobody else waits for.
"""

import importlib
import itertools
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from clipper.errors import ClipperError, InvalidInput, PolicyFailed, did_you_mean
from clipper.selection.policy import Combined, Observation, Plan, Predictions, Query, State
from clipper.selection.stateless_policy import Unlearned
from clipper.types import OWN_CLASS, InputType, VersionedModel

_log = logging.getLogger(__name__)
# of the failures of one class: the first has its traceback in the log, and every so many'th after
# it
LOGGED_EVERY = 1000
_T = TypeVar("_T")
_OWN = re.compile(OWN_CLASS, re.S)


def is_user_defined(text: str) -> bool:
    return isinstance(text, str) and _OWN.fullmatch(text.strip()) is not None


def load_user_object(
    text: str, noun: str, settings: Callable[[str], dict[str, Any]], needs: Sequence[str]
) -> Any:
    """The object that `text` denotes, made anew. InvalidInput names the module, the class or the
    method that is missing."""
    found = _OWN.fullmatch(text.strip())
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
    except Exception as error:
        raise InvalidInput(f"{noun} {text[:100]!r}: making it raised {_said(error)}.") from error


def _imported(module: str, noun: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        hint = (
            "It must be importable where the server runs: install it there, or put its folder on"
            " PYTHONPATH."
        )
        what = f"no module {error.name!r}" if error.name else str(error)
        raise InvalidInput(f"{noun} of module {module!r}: {what}.", hint=hint) from None
    except Exception as error:
        hint = f"Try: python -c 'import {module}'."
        raise InvalidInput(
            f"{noun} of module {module!r}: importing it raised {_said(error)}.", hint=hint
        ) from error


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:300]}"


class FailureLog:
    """Threads: any. What a class of the user's own did wrong: counted, and now and then logged with
    its traceback."""

    def __init__(self, whose: str) -> None:
        self.whose = whose
        self._count = itertools.count(1)
        self.count = 0

    def failed(self, method: str, error: Exception) -> PolicyFailed:
        """Called in the handler of `error`; -> what to raise, or to say, in its place."""
        self.count = next(self._count)
        if self.count % LOGGED_EVERY == 1:
            _log.error(
                "%s: %s failed (%d times so far)", self.whose, method, self.count, exc_info=error
            )
        return PolicyFailed(f"{self.whose}: {method} raised {_said(error)}")


class UserDefinedPolicy:
    """Threads: any. A policy of the user's own behind a guard: what it raises is PolicyFailed, what
    it returns is checked. It needs `select` and `combine`; one that has `observe` learns, and then
    needs the whole of clipper.selection.Policy.
    """

    def __init__(self, policy: Any, text: str) -> None:
        self.policy = policy
        self.learns = callable(getattr(policy, "observe", None))
        self.name: str = getattr(policy, "name", text)
        self.schema: int = getattr(policy, "schema", 1)
        self.chance: bool = getattr(policy, "chance", True)
        self.faults = FailureLog(f"policy {text!r}")
        self._plain = Unlearned()
        self.decide: Callable[[State, Any], Any] | None = getattr(policy, "decide", None)
        if self.learns and (
            missing := [name for name in STATEFUL if not callable(getattr(policy, name, None))]
        ):
            hint = (
                "One that learns has all methods of clipper.selection.Policy; leave out observe if"
                " it does not."
            )
            raise InvalidInput(f"policy {text!r} has observe, and no {missing[0]!r}.", hint=hint)

    def _call(self, method: str, *args: Any, check: Callable[..., None] | None = None) -> Any:
        try:
            found = getattr(self.policy, method, None)
            result = (found if callable(found) else getattr(self._plain, method))(*args)
            if check is not None:
                check(result, *args)
        except Exception as error:
            raise self.faults.failed(method, error) from error
        return result

    def _call_or(self, otherwise: Any, method: str, *args: Any) -> Any:
        try:
            return self._call(method, *args)
        except PolicyFailed:
            return otherwise

    def init(self, models: Sequence[VersionedModel], prior: State | None = None) -> State:
        return self._call("init", models, prior)

    def select(self, state: State, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        plan: Plan = self._call("select", state, query, candidates, check=_check_plan)
        return plan

    def combine(
        self, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        combined: Combined = self._call("combine", state, arrived, missing, check=_check_combined)
        return combined

    def observe(self, state: State, observation: Observation) -> State:
        """What it cannot learn from, it has not learned: the journal goes on."""
        return self._call_or(state, "observe", state, observation)

    def add_model(self, state: State, model: VersionedModel) -> State:
        return self._call_or(state, "add_model", state, model)

    def remove_model(self, state: State, model: VersionedModel) -> State:
        return self._call_or(state, "remove_model", state, model)

    def update_model_version(self, state: State, old: VersionedModel, new: VersionedModel) -> State:
        return self._call_or(state, "update_model_version", state, old, new)

    def merge(self, base: State, mine: State, theirs: State) -> State:
        return self._call_or(mine, "merge", base, mine, theirs)

    def encode(self, state: State) -> bytes:
        """No bytes for a state that it cannot write: after a restart it begins anew, and the log
        says so."""
        data = self._call_or(b"", "encode", state)
        return data if isinstance(data, bytes) else b""

    def decode(self, data: bytes) -> State:
        try:
            return self._call("decode", data)
        except PolicyFailed as error:
            raise ValueError(str(error)) from error

    def accepts_input_type(self, input: InputType) -> bool:
        return bool(self._call("accepts_input_type", input))

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        ranked: tuple[VersionedModel, ...] = tuple(
            self._call_or((), "rank_models_desc", state, user) or ()
        )
        return ranked


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
    plan: Any, state: State, query: Query, candidates: Sequence[VersionedModel]
) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"select returned a {type(plan).__name__}, not a Plan")
    known = set(candidates)
    if candidates and not plan.models:
        raise ValueError("select asks no model")
    for model in (*plan.models, *plan.observers):
        if model not in known:
            raise ValueError(f"select asks {model!s}, which is no candidate")
    if plan.probabilities and len(plan.probabilities) != len(plan.models):
        raise ValueError(
            f"select gave {len(plan.probabilities)} probabilities for {len(plan.models)} models"
        )


def _check_combined(
    combined: Any, state: State, arrived: Predictions, missing: Sequence[VersionedModel]
) -> None:
    if not isinstance(combined, Combined):
        raise TypeError(f"combine returned a {type(combined).__name__}, not a Combined")
    if not 0 <= combined.confidence <= 1:
        raise ValueError(f"combine returned a confidence of {combined.confidence!r}")
    for model in combined.used:
        if model not in arrived:
            raise ValueError(f"combine used {model!s}, which has not arrived")
