from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from clipper_core.wire.codec import OpenRows

def encode_feedback(
    inputs: NDArray[Any] | Sequence[Any],
    labels: NDArray[Any] | Sequence[Any],
    sessions: NDArray[Any] | Sequence[int],
) -> bytes: ...
def decode_feedback(payload: bytes, **limits: int) -> tuple[OpenRows, OpenRows]: ...
def feedback_frame(payload: bytes, **fields: Any) -> bytes: ...
def decode_accuracy(payload: bytes) -> tuple[int, int, float | None]: ...
def accuracy_frame(
    learned: int, failed: int, accuracy: float | None = None, **fields: Any
) -> bytes: ...
