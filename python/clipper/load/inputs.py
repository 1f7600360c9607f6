"""Inputs of a load test: generated from the application's input type, read from a file, or one
given value.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from clipper.errors import InvalidInput
from clipper.schema import FREE, TensorSpec
from clipper.types import InputType, UserValue

Row = UserValue  # a JSON value
BYTES_MAX = 64 << 20  # of generated inputs; with more queries they repeat
ROWS_MAX = 1_000_000
MADE_UP = 5000
_WORDS = ("to", "be", "or", "not", "that", "is", "the", "question")
_VARIABLE = 16  # length of generated rows whose length is free
_HINT = (
    "Give --input FILE (.npy, .json, .jsonl, .csv) or one input as JSON, as --input '[1, 2, 3]'."
)


def rows_of(text: str, type_: InputType, seed: int = 1) -> list[UserValue]:
    """Return inputs as JSON values: MADE_UP generated ones, all of a file, or the one in `text`.
    Raises: InvalidInput.
    """
    if text == "random":
        return _take(lambda rng: _made_up(type_, rng), seed)
    path = Path(text)
    if path.suffix in (".npy", ".json", ".jsonl", ".ndjson", ".csv", ".txt"):
        return _of_file(path)
    try:
        return [json.loads(text)]
    except json.JSONDecodeError:
        if type_.dtype in ("str", "any") and text[:1] not in "[{":
            return [text]
        raise InvalidInput(
            f"--input {text[:60]!r} is neither JSON nor a file that can be read as inputs.",
            hint=_HINT,
        ) from None


def _take(make: Callable[[np.random.Generator], UserValue], seed: int) -> list[object]:
    rng = np.random.default_rng(seed)
    first = make(rng)
    room = BYTES_MAX // (len(json.dumps(first)) + 64)
    return [first, *(make(rng) for _ in range(min(MADE_UP, room) - 1))]


def _made_up(type_: InputType, rng: np.random.Generator) -> Row:
    if type_.named is not None:
        return {spec.name: _made_up_tensor(spec, rng) for spec in type_.named.specs}
    if type_.dtype == "any":
        raise InvalidInput("the application takes any input, so none can be generated.", hint=_HINT)
    if type_.dtype == "str":
        return (
            " ".join(_WORDS[int(i)] for i in rng.integers(0, len(_WORDS), 8))
            + f" {int(rng.integers(0, 1 << 30))}"
        )
    if type_.dtype == "bytes":
        import base64

        return base64.b64encode(rng.bytes(64)).decode()
    shape = (_VARIABLE,) if type_.variable else type_.shape
    if type_.dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool).tolist()
    if type_.dtype[0] in "iu":
        most = {"u8": 255, "i8": 127}.get(type_.dtype, 1 << 15)
        return rng.integers(0, most, shape).tolist()
    return np.round(rng.random(shape), 5).tolist()


def _made_up_tensor(spec: TensorSpec, rng: np.random.Generator) -> Row:
    shape = tuple(_VARIABLE if size == FREE else size for size in spec.shape)
    if not spec.is_text:
        return _made_up(InputType(spec.dtype, shape), rng)  # type: ignore[arg-type]
    element = InputType.parse(spec.dtype)
    values = np.empty(shape, object)
    for place in np.ndindex(shape):
        values[place] = _made_up(element, rng)
    return values.tolist()


def _of_file(path: Path) -> list[object]:
    try:
        rows = list(_read(path))
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror or error}.", hint=_HINT) from None
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidInput(f"{path}: {error}.", hint=_HINT) from None
    if not rows:
        raise InvalidInput(f"{path} has no inputs.", hint=_HINT)
    return rows


def _read(path: Path) -> Iterator[object]:
    if path.suffix == ".npy":
        yield from np.load(path, allow_pickle=False)[:ROWS_MAX].tolist()
    elif path.suffix == ".json":
        rows = json.loads(path.read_text())
        if not isinstance(rows, list):
            raise ValueError("a .json file holds a list of inputs")
        yield from rows[:ROWS_MAX]
    else:
        for number, line in zip(range(ROWS_MAX), path.read_text().splitlines(), strict=False):
            if line.strip():
                try:
                    yield (
                        line
                        if path.suffix == ".txt"
                        else json.loads(f"[{line}]" if path.suffix == ".csv" else line)
                    )
                except ValueError as error:
                    raise ValueError(f"line {number + 1}: {error}") from None
