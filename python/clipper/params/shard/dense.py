"""Dense variables of one shard, by name, with their optimizers' states.

The values of the first worker are kept. Threads: one at a time (the shard's thread pauses pushes, a
copy has a lock).
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from clipper.errors import InvalidInput, UnknownVariable
from clipper_core.params.optimizer import Optimizer

F32 = npt.NDArray[np.float32]
Message = Mapping[str, Any]
NAME_MAX = 1024


class Variable:
    """A dense variable. Its arrays are shared with the core, which applies steps to them.

    marks: u64[2], its steps and the version of the model that last changed its value.
    """

    __slots__ = ("marks", "name", "state", "value")

    def __init__(self, name: str, value: F32, state: F32, steps: int = 0, changed: int = 0) -> None:
        self.name, self.value, self.state = name, value, state
        self.marks = np.array([steps, changed], np.uint64)

    @property
    def steps(self) -> int:
        """Number of steps so far."""
        return int(self.marks[0])

    @property
    def changed(self) -> int:
        """Version of the model that last changed the value."""
        return int(self.marks[1])


class Dense:
    """The dense variables of a shard.

    initialized: a worker has pushed a model. The number of a variable is its index in `variables`.
    """

    def __init__(self) -> None:
        self.initialized = False
        self.optimizer = Optimizer("sgd")
        self.variables: list[Variable] = []
        self._numbers: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.variables)

    def initialize(
        self,
        values: Mapping[str, object],
        optimizer: str,
        settings: Mapping[str, float],
        version: int,
    ) -> bool:
        """Set all variables. Returns False, and changes nothing, if they have been set. Raises
        InvalidInput."""
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

    def names(self) -> list[tuple[str, list[int]]]:
        """Return the name and shape of each variable, in the order of their numbers."""
        return [(one.name, list(one.value.shape)) for one in self.variables]

    def newer(self, version: int) -> dict[str, F32]:
        """Return copies of the variables that have changed since a version; -1: all."""
        return {one.name: one.value.copy() for one in self.variables if one.changed > version}

    def check(self, gradients: Mapping[str, object]) -> dict[int, F32]:
        """Return checked gradients by number.

        Raises UnknownVariable; InvalidInput for another shape, NaN or infinity.
        """
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
        """Apply one optimizer step per gradient, as returned by check()."""
        for number, gradient in gradients.items():
            one = self.variables[number]
            one.marks[:] = one.steps + 1, version
            self.optimizer.step(
                one.value.reshape(-1), one.state, gradient.reshape(-1), one.steps, scale
            )

    # -- as a copy or a snapshot has them

    def read(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return copies of variables with their states."""
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

    def summary(self) -> dict[str, object]:
        """Return the optimizer and its settings, as `receive` takes them."""
        return {
            "initialized": self.initialized,
            "optimizer": self.optimizer.name,
            "settings": dict(self.optimizer.settings),
        }

    def receive(self, message: Message) -> None:
        """Take over the optimizer of another copy."""
        self.initialized = bool(message["initialized"])
        if (self.optimizer.name, self.optimizer.settings) != (
            message["optimizer"],
            message["settings"],
        ):
            self.optimizer = Optimizer(message["optimizer"], **message["settings"])

    def write(self, variables: Iterable[Message]) -> None:
        """Write variables with their states; unknown ones are added."""
        for each in variables:
            value, state = np.array(each["value"], np.float32), np.array(each["state"], np.float32)
            self._add(
                Variable(str(each["name"]), value, state, int(each["steps"]), int(each["changed"]))
            )

    def overwrite(self, message: Message) -> int:
        """Write a variable that there is, in its place; return its number."""
        number = self._numbers[str(message["name"])]
        one = self.variables[number]
        one.value[...], one.state[...] = message["value"], message["state"]
        one.marks[:] = int(message["steps"]), int(message["changed"])
        return number

    def _add(self, one: Variable) -> None:
        number = self._numbers.setdefault(one.name, len(self.variables))
        if number == len(self.variables):
            self.variables.append(one)
        else:
            self.variables[number] = one


def _values(name: object, value: object) -> F32:
    """Return a C-ordered copy. Raises InvalidInput."""
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
