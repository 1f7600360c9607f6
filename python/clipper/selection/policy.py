"""What a selection policy is: which models to ask, and what to make of their predictions.

Policies are stateless and pure: state in, state out; no I/O, no clock, no randomness but what is given. One object
serves all applications and threads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import numpy as np

from clipper.types import InputType, VersionedModel

State = Any  # a policy's own; whoever keeps it never looks inside


class Prediction(msgspec.Struct, frozen=True, eq=False):
    """One model's output: int, float, bool, str, bytes or ndarray; `confidence` 0 to 1 when the model gives one."""

    output: Any
    confidence: float | None = None


class Combined(msgspec.Struct, frozen=True, eq=False):
    """confidence: 0 to 1.  used: the models whose predictions entered; empty when there is nothing to answer with, and
    then `output` means nothing and the application's default is due."""

    output: Any
    confidence: float
    used: tuple[VersionedModel, ...]


NOTHING = Combined(None, 0.0, ())


class Policy(Protocol):
    """Threads: any."""

    name: str

    def init(self, models: Sequence[VersionedModel]) -> State:
        """The state before any feedback, for an application that links `models`, in that order."""
        ...

    def select(
        self, state: State, user: str | None, candidates: Sequence[VersionedModel]
    ) -> tuple[VersionedModel, ...]:
        """The models to ask, best first; some of `candidates`, and empty only if they are."""
        ...

    def combine(
        self, state: State, arrived: Mapping[VersionedModel, Prediction], missing: Sequence[VersionedModel]
    ) -> Combined:
        """The answer from the predictions that arrived, when those of `missing` did not. Order never matters.
        An output that is NaN or infinite, or holds one, counts as missing."""
        ...

    def accepts_input_type(self, input: InputType) -> bool: ...

    def rank_models_desc(self, state: State, user: str | None) -> tuple[VersionedModel, ...]:
        """The state's models, best first."""
        ...


def is_usable(output: object) -> bool:
    """Whether an output may be answered with: something, and finite throughout."""
    if isinstance(output, float | np.floating):
        return math.isfinite(output)
    if isinstance(output, np.ndarray) and output.dtype.kind == "f":
        return bool(np.isfinite(output).all())
    return output is not None


def sound_confidence(confidence: float | None, unknown: float = 1.0) -> float:
    """A model's own confidence, brought into 0 to 1; `unknown` when it gives none, 0 when it gives NaN."""
    if confidence is None:
        return unknown
    return 0.0 if math.isnan(confidence) else min(max(float(confidence), 0.0), 1.0)
