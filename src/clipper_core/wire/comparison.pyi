from typing import final

import numpy as np
from numpy.typing import NDArray

_Output = int | float | str | bytes | np.generic | NDArray[np.generic]

@final
class OutputKey:
    """The key of an output; keys of equal outputs are equal."""

    def __init__(self, output: _Output) -> None: ...
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    @property
    def number(self) -> float: ...
    @property
    def is_usable(self) -> bool: ...
    def agrees(self, other: OutputKey) -> bool: ...
    def loss(self, label: OutputKey) -> float: ...
    def closeness(self, other: OutputKey) -> float: ...

def label_hash(label: object, kind: type) -> int:
    """Return the hash of a label, 0 to 63."""

def closeness(one: object, other: object) -> float | None:
    """Return how near two outputs are, 0 to 1; None if Python has to compare them."""
