"""Dense variables of one shard, by name, each with its optimizer's state. The first worker's values
win.

Threads: one at a time (the shard's holds its door, a copy's has a lock).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, UnknownVariable
from clipper_core.params.optimizer import Optimizer

F32 = npt.NDArray[np.float32]
NAME_MAX = 1024


class Variable:
    """changed: the version of the model that its value is of."""

    __slots__ = ("changed", "name", "state", "steps", "value")

    def __init__(self, name: str, value: F32, state: F32, steps: int = 0, changed: int = 0) -> None:
        self.name, self.value, self.state, self.steps, self.changed = (
            name,
            value,
            state,
            steps,
            changed,
        )


class Dense:
    """initialized: whether a worker has pushed a model. A variable's number is its place in
    `variables`."""

    def __init__(self) -> None:
        self.initialized = False
        self.optimizer = Optimizer("sgd")
        self.variables: list[Variable] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.variables)

    def initialize(
        self, values: Mapping[str, Any], optimizer: str, settings: Mapping[str, float], version: int
    ) -> bool:
        """False: they are there already, and stay. Raises InvalidInput; nothing has changed
        then."""
        if self.initialized:
            return False
        try:
            rule = Optimizer(optimizer, **settings)
        except (ValueError, TypeError) as error:
            raise InvalidInput(str(error)) from None
        sound = {name: _values(name, value) for name, value in values.items()}
        self.optimizer, self.initialized = rule, True
        for name, value in sound.items():
            self._add(Variable(name, value, rule.state(value.size), 0, version))
        return True

    def newer(self, version: int) -> dict[str, F32]:
        """Those that have changed since; -1: all."""
        return {one.name: one.value for one in self.variables if one.changed > version}

    def check(self, gradients: Mapping[str, Any]) -> dict[int, F32]:
        """By number. Raises UnknownVariable, InvalidInput for another shape, or for NaN."""
        found = {}
        for name, gradient in gradients.items():
            number = self._numbers.get(name)
            if number is None:
                raise UnknownVariable.named(str(name), self._numbers)
            value, shape = _values(name, gradient), self.variables[number].value.shape
            if value.shape != shape:
                raise InvalidInput(
                    f"variable {name!r}: its gradient is {list(value.shape)}, and it is"
                    f" {list(shape)}."
                )
            found[number] = value
        return found

    def apply(self, gradients: Mapping[int, F32], scale: float, version: int) -> None:
        """Of `check`: one step each."""
        for number, gradient in gradients.items():
            one = self.variables[number]
            one.steps += 1
            one.changed = version
            self.optimizer.step(
                one.value.reshape(-1), one.state, gradient.reshape(-1), one.steps, scale
            )

    # -- as a copy or a snapshot has them

    def read(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """As they are now: copies."""
        return [
            {
                "name": v.name,
                "value": v.value.copy(),
                "state": v.state.copy(),
                "steps": v.steps,
                "changed": v.changed,
            }
            for v in map(self.variables.__getitem__, numbers)
        ]

    def said(self) -> dict[str, Any]:
        return {
            "initialized": self.initialized,
            "optimizer": self.optimizer.name,
            "settings": dict(self.optimizer.settings),
        }

    def receive(self, said: Mapping[str, Any]) -> None:
        self.initialized = bool(said["initialized"])
        if (self.optimizer.name, self.optimizer.settings) != (said["optimizer"], said["settings"]):
            self.optimizer = Optimizer(said["optimizer"], **said["settings"])

    def write(self, variables: Iterable[Mapping[str, Any]]) -> None:
        for each in variables:
            value, state = np.array(each["value"], np.float32), np.array(each["state"], np.float32)
            self._add(
                Variable(str(each["name"]), value, state, int(each["steps"]), int(each["changed"]))
            )

    def _add(self, one: Variable) -> None:
        number = self._numbers.setdefault(one.name, len(self.variables))
        if number == len(self.variables):
            self.variables.append(one)
        else:
            self.variables[number] = one


def _values(name: object, value: Any) -> F32:
    """A copy of our own, C-ordered. Raises InvalidInput."""
    if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX:
        raise InvalidInput(f"a variable's name is a string of 1 to {NAME_MAX} characters.")
    try:
        found = np.array(value, np.float32, order="C")
    except (ValueError, TypeError) as error:
        raise InvalidInput(f"variable {name!r}: {error}.") from None
    if not np.isfinite(found).all():
        raise InvalidInput(
            f"variable {name!r}: it holds NaN or infinity.", hint="Nothing was changed."
        )
    return found
