"""Policies and deciders as a user might write them, good and bad."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from clipper.selection import AnswerFrom, Combined, Ensemble, Plan, Predictions, Query, View, Wait
from clipper.selection.policy import NO_ANSWER, losses
from clipper.types import InputType, VersionedModel


class LastWord:
    """Asks all; the last by name has the say. Learns nothing."""

    def __init__(self, confidence: float = 0.5) -> None:
        self.confidence = confidence

    def select(self, state: Any, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(tuple(candidates))

    def combine(
        self, state: Any, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        if not arrived:
            return NO_ANSWER
        last = max(arrived)
        return Combined(arrived[last].output, self.confidence, (last,))

    def accepts_input_type(self, input: InputType) -> bool:
        return input.dtype != "str"


class Learns(Ensemble):
    """A policy whose state counts observations. Its methods named in `fails` raise."""

    def __init__(self, fails: str = "") -> None:
        self.fails = fails

    def _check(self, method: str) -> None:
        if method in self.fails.split():
            raise ZeroDivisionError(method)

    def init(self, models: Any, prior: Any = None) -> Any:
        self._check("user" if prior is not None else "init")
        return 0

    def select(self, state: Any, query: Query, candidates: Any) -> Plan:
        self._check("select")
        return Plan(tuple(candidates))

    def combine(self, state: Any, arrived: Any, missing: Any) -> Combined:
        self._check("combine")
        return super().combine((), arrived, missing)

    def observe(self, state: int, observation: Any) -> int:  # type: ignore[override]
        self._check("observe")
        return state + 1

    def encode(self, state: Any) -> bytes:
        self._check("encode")
        return str(state).encode()

    def decode(self, data: bytes) -> Any:
        self._check("decode")
        return int(data)

    def rank_models_desc(self, state: Any, user: Any) -> Any:
        self._check("rank_models_desc")
        return ()

    def merge(self, base: Any, mine: Any, theirs: Any) -> Any:
        self._check("merge")
        return mine + theirs - base


class Nonsense(LastWord):
    """A policy that returns an invalid selection. kind: which one."""

    def __init__(self, kind: str = "plan") -> None:
        super().__init__()
        self.kind = kind

    def select(self, state: Any, query: Query, candidates: Sequence[VersionedModel]) -> Any:
        kinds = {
            "plan": "all",
            "stranger": Plan((VersionedModel("stranger", 1),)),
            "nobody": Plan(()),
            "odds": Plan(tuple(candidates), (0.5,) * (len(candidates) + 1)),
        }
        return kinds.get(self.kind) or Plan(tuple(candidates))

    def combine(self, state: Any, arrived: Predictions, missing: Sequence[VersionedModel]) -> Any:
        model = max(arrived)
        return {
            "combined": 7,
            "nan": Combined(1, np.nan, (model,)),
            "absent": Combined(1, 0.5, (VersionedModel("stranger", 1),)),
        }[self.kind]


class HalfLearns(LastWord):
    def observe(self, state: Any, observation: Any) -> Any:
        return state


class Refuses:
    def __init__(self) -> None:
        raise OSError("no licence")


class RefusesToDecide(Refuses):
    def decide(self, view: View) -> Wait | AnswerFrom:
        return Wait()


class Two:
    """Answer as soon as two models have answered."""

    def __init__(self, need: int = 2) -> None:
        self.need = need

    def decide(self, view: View) -> Wait | AnswerFrom:
        return AnswerFrom(tuple(view.arrived)) if len(view.arrived) >= self.need else Wait()


class Patient:
    """A decider that answers with the first model that has arrived after `until_ms`."""

    def __init__(self, until_ms: float = 20.0) -> None:
        self.until_ms = until_ms

    def decide(self, view: View) -> Wait | AnswerFrom:
        if view.elapsed_ms >= self.until_ms and view.arrived:
            return AnswerFrom(tuple(view.arrived)[:1])
        return Wait(self.until_ms)


class Raises:
    def decide(self, view: View) -> Wait | AnswerFrom:
        raise KeyError("no such thing")


class SaysNonsense:
    def __init__(self, kind: str = "text") -> None:
        self.kind = kind

    def decide(self, view: View) -> Any:
        return {
            "text": "yes",
            "nobody": AnswerFrom(()),
            "absent": AnswerFrom((VersionedModel("stranger", 1),)),
            "nan": Wait(float("nan")),
            "truth": Wait(True),
        }[self.kind]


class Hangs:
    """A decider that hangs until `released` is set, if an output is `hang`."""

    released = threading.Event()
    hung = threading.Event()

    def decide(self, view: View) -> Wait | AnswerFrom:
        if any(prediction.output == "hang" for prediction in view.arrived.values()):
            self.hung.set()
            self.released.wait(60)
        return AnswerFrom(tuple(view.arrived)[:1]) if view.arrived else Wait()


class GoodEnough:
    """A decider that answers with the first output whose reported quality is at least `quality`."""

    def __init__(self, quality: float = 3) -> None:
        self.quality = quality

    def decide(self, view: View) -> Wait | AnswerFrom:
        for model, prediction in view.arrived.items():
            said = prediction.qualifiers.get("quality", 0)
            if isinstance(said, int | float) and said >= self.quality:
                return AnswerFrom((model,))
        return Wait()


class BestQuality:
    """A policy that queries all models and answers with the output of the best quality."""

    def select(self, state: Any, query: Query, candidates: Sequence[VersionedModel]) -> Plan:
        return Plan(tuple(candidates))

    def combine(
        self, state: Any, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        best = max(arrived, key=lambda model: arrived[model].qualifiers.get("quality", 0))
        return Combined(arrived[best].output, 1.0, (best,))


class Counts(LastWord):
    """A policy that learns: right answers and all answers of each model. The state is a tuple of
    (model, right, all), sorted. calls: of the methods that change the models of a state."""

    calls: list[str]

    def __init__(self) -> None:
        super().__init__()
        self.calls = []

    def init(self, models: Sequence[VersionedModel], prior: Any = None) -> Any:
        self.calls.append("init " + " ".join(map(str, sorted(models))))
        known = {} if prior is None else {name: right / count for name, right, count in prior}
        return tuple((str(model), known.get(str(model), 0.5), 1.0) for model in sorted(models))

    def combine(
        self, state: Any, arrived: Predictions, missing: Sequence[VersionedModel]
    ) -> Combined:
        shares = {name: right / count for name, right, count in state}
        best = max(sorted(arrived), key=lambda model: shares[str(model)])
        return Combined(arrived[best].output, min(shares[str(best)], 1.0), (best,))

    def observe(self, state: Any, observation: Any) -> Any:
        found = losses(observation)
        return tuple(
            (name, right + 1 - found[model], count + 1)
            if (model := VersionedModel.parse(name)) in found
            else (name, right, count)
            for name, right, count in state
        )

    def add_model(self, state: Any, model: VersionedModel) -> Any:
        self.calls.append(f"add {model}")
        known = [(name, right, count) for name, right, count in state if name != str(model)]
        return tuple(sorted([*known, (str(model), 0.5, 1.0)]))

    def remove_model(self, state: Any, model: VersionedModel) -> Any:
        self.calls.append(f"remove {model}")
        return tuple(row for row in state if row[0] != str(model))

    def update_model_version(self, state: Any, old: VersionedModel, new: VersionedModel) -> Any:
        self.calls.append(f"update {old} {new}")
        return tuple(
            sorted(
                (str(new), right / count, 1.0) if name == str(old) else (name, right, count)
                for name, right, count in state
            )
        )

    def merge(self, base: Any, mine: Any, theirs: Any) -> Any:
        rows = zip(base, mine, theirs, strict=True)
        return tuple((a[0], b[1] + c[1] - a[1], b[2] + c[2] - a[2]) for a, b, c in rows)

    def encode(self, state: Any) -> bytes:
        return json.dumps(state).encode()

    def decode(self, data: bytes) -> Any:
        return tuple((name, right, count) for name, right, count in json.loads(data))
