"""Fields of stream entries to queries and feedback, and answers to fields. Pure. See
docs/streams.md.

Each error is an InvalidInput that names the field; it goes to the dead letters.
"""

import functools
from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Final

import msgspec
import numpy as np

from clipper.errors import InvalidInput, did_you_mean
from clipper.foreign_text import why_no_json
from clipper.frontend.inference.json_inputs import Read, tensors_reader
from clipper.schema import Tensors
from clipper.types import Answer, InputType, UserValue

Fields = Mapping[bytes, bytes]
Flat = list[str | bytes | int | float]  # name, value, name, value, ...

OWN: Final = "q."  # prefix of the producer's own fields, which are copied to the answer
_INPUT: Final = ("input", "text", "data", "dtype", "shape")
_RECORD: Final = (*_INPUT, "id", "user", "context", "slo_ms")
_FEEDBACK: Final = (
    *_INPUT,
    "id",
    "prediction",
    "user",
    "context",
    "label",
    "correct",
    "score",
    "weight",
)
_NAME_CHARS_MAX: Final = 512
_OWN_MAX: Final = 100


@functools.lru_cache(256)
def _reader(tensors: Tensors, finite: bool) -> Read:  # finite: equal tensors may differ in it
    return tensors_reader(tensors)


class StreamRecord(msgspec.Struct, frozen=True, eq=False):
    """A query from a stream.

    id: the record's own id, or "". binary: array outputs are returned as bytes, like the input.
    own: the fields that are copied to the answer.
    """

    input: UserValue
    id: str = ""
    user: str | None = None
    slo_ms: float | None = None
    binary: bool = False
    own: tuple[tuple[str, bytes], ...] = ()
    context: UserValue = None


class StreamFeedback(msgspec.Struct, frozen=True, eq=False):
    """Feedback from a stream: on the record `id`, the prediction `prediction`, or an `input`.

    It has one of label, correct and score.
    """

    id: str = ""
    prediction: str = ""
    input: UserValue = None
    user: str | None = None
    label: UserValue = None
    correct: bool | None = None
    score: float | None = None
    weight: float = 1.0
    context: UserValue = None


def record_of(fields: Fields, tensors: Tensors | None = None) -> StreamRecord:
    """Read a query. tensors: those of the application, if they have names. Raises InvalidInput."""
    texts = _known(fields, _RECORD)
    slo_ms = _number(texts, "slo_ms") if "slo_ms" in texts else None
    own = tuple((name, value) for name, value in texts.items() if name.startswith(OWN))
    if len(own) > _OWN_MAX:
        raise InvalidInput(
            f"{len(own)} fields begin with {OWN!r}; at most {_OWN_MAX} are possible."
        )
    return StreamRecord(
        _input_of(texts, tensors),
        _text(texts, "id"),
        _user_of(texts),
        slo_ms,
        "dtype" in texts,
        own,
        _context_of(texts),
    )


def feedback_of(fields: Fields, tensors: Tensors | None = None) -> StreamFeedback:
    """Read feedback. tensors: as of `record_of`. Raises InvalidInput."""
    texts = _known(fields, _FEEDBACK)
    label = _json(texts, "label") if "label" in texts else None
    correct = _json(texts, "correct") if "correct" in texts else None
    if isinstance(correct, int) and correct in (0, 1):
        correct = bool(correct)
    return StreamFeedback(
        _text(texts, "id"),
        _text(texts, "prediction"),
        _input_of(texts, tensors) if any(name in texts for name in _INPUT) else None,
        _user_of(texts),
        label,
        correct,
        _number(texts, "score") if "score" in texts else None,
        _number(texts, "weight") if "weight" in texts else 1.0,
        _context_of(texts),
    )


def answer_fields(answer: Answer, record: StreamRecord, entry: str) -> Flat:
    """Return the fields of an answer as names and values, as XADD takes them."""
    flat: Flat = [
        "id",
        record.id or entry,
        "entry",
        entry,
        *output_fields(answer.output, record.binary),
    ]
    flat += ["confidence", f"{answer.confidence:.6g}", "agreement", f"{answer.agreement:.6g}"]
    flat += ["default", int(answer.is_default)]
    if answer.reason:
        flat += ["reason", answer.reason]
    flat += [
        "models",
        ",".join(map(str, answer.models)),
        "missing",
        ",".join(map(str, answer.missing)),
    ]
    if answer.qualifiers:
        flat += [
            "qualifiers",
            msgspec.json.encode(
                {str(model): qualifier for model, qualifier in answer.qualifiers.items()}
            ),
        ]
    if answer.decided_by not in ("", "all"):
        flat += ["decided_by", answer.decided_by]
    if answer.set:
        flat += [
            "set",
            msgspec.json.encode(answer.set, enc_hook=_plain),
        ]
    flat += ["latency_us", answer.latency_us, "prediction", answer.id]
    for name, value in record.own:
        flat += [name, value]
    return flat


def output_fields(output: object, binary: bool = False) -> Flat:
    """Return an output as fields.

    It is JSON in `output`, and an object if outputs have names; bytes are in `data`, and so are
    arrays if `binary` is set, with `dtype` and `shape`.
    """
    if isinstance(output, bytes | bytearray | memoryview):
        return ["data", bytes(output), "dtype", "bytes"]
    if isinstance(output, np.ndarray) and binary:
        return [
            "data",
            output.tobytes(),
            "dtype",
            str(InputType(InputType.infer(output).dtype)),
            "shape",
            ",".join(map(str, output.shape)),
        ]
    return ["output", msgspec.json.encode(output, enc_hook=_plain)]


def _plain(value: object) -> object:
    """Return an array, or a number of numpy, as Python's."""
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} does not become JSON")


# -- single fields


def _known(fields: Fields, known: Collection[str]) -> dict[str, bytes]:
    """Return the fields by name. Raises InvalidInput for an unknown name, which could be a
    misspelling."""
    texts = {}
    for raw, value in fields.items():
        name = raw.decode("utf-8", "replace")
        if name not in known and not name.startswith(OWN):
            guess = did_you_mean(name[:64], known) or "."
            hint = f"Fields: {', '.join(known)}; names of your own begin with {OWN!r}."
            raise InvalidInput(f"unknown field {name[:64]!r}{guess}", hint=hint)
        texts[name] = value
    return texts


def _text(fields: Mapping[str, bytes], name: str) -> str:
    try:
        text = fields.get(name, b"").decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"field {name!r} is not UTF-8 text.") from None
    if len(text) > _NAME_CHARS_MAX:
        raise InvalidInput(
            f"field {name!r} has {len(text)} characters; at most {_NAME_CHARS_MAX} are possible."
        )
    return text


def _user_of(fields: Mapping[str, bytes]) -> str | None:
    return _text(fields, "user") if "user" in fields else None


def _context_of(fields: Mapping[str, bytes]) -> object:
    return _json(fields, "context") if "context" in fields else None


def _number(fields: Mapping[str, bytes], name: str) -> float:
    try:
        return float(fields[name])
    except ValueError:
        raise InvalidInput(
            f"field {name!r} is {_shown(fields[name])}: a number is needed."
        ) from None


def _json(fields: Mapping[str, bytes], name: str) -> UserValue:
    try:
        return msgspec.json.decode(fields[name])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "Strings have quotes in JSON, as in '\"yes\"'."
        why = why_no_json(error, fields[name])
        raise InvalidInput(
            f"field {name!r} is {_shown(fields[name])}, which is not JSON: {why}.", hint=hint
        ) from None


def _input_of(fields: Mapping[str, bytes], tensors: Tensors | None) -> object:
    given = [name for name in ("input", "text", "data") if name in fields]
    if len(given) != 1:
        found = " and ".join(given) or "none"
        raise InvalidInput(
            f"a record has one of the fields input (JSON), text and data (bytes); this has {found}."
        )
    if given[0] != "data" and (lost := [name for name in ("dtype", "shape") if name in fields]):
        raise InvalidInput(f"field {lost[0]!r} belongs to `data`, not to `{given[0]}`.")
    if given[0] == "text":
        try:
            return fields["text"].decode()
        except UnicodeDecodeError:
            raise InvalidInput(
                "field 'text' is not UTF-8 text.", hint="Bytes go into `data`."
            ) from None
    if given[0] == "data":
        return _array(fields)
    value = _json(fields, "input")
    if value is None or isinstance(value, bool):
        raise InvalidInput(
            f"field 'input' is {_shown(fields['input'])}: a number, a string, an array of numbers,"
            " or an object with a value for each named tensor is needed."
        )
    return value if tensors is None else _reader(tensors, tensors.finite)(fields["input"], "input")


def _array(fields: Mapping[str, bytes]) -> object:
    """Return `data` as an array of `dtype` and `shape`: C order, little-endian; as bytes without
    `dtype`."""
    data = fields["data"]
    if "dtype" not in fields:
        return data
    try:
        type_ = InputType.parse(_text(fields, "dtype"))
    except ValueError as error:
        raise InvalidInput(f"field 'dtype': {error}") from None
    if type_.dtype == "bytes":
        return data
    if type_.dtype in ("str", "any") or type_.shape or type_.variable:
        raise InvalidInput(
            f"field 'dtype' is {str(type_)!r}: an element type such as f32 is needed; dimensions go"
            " into `shape`."
        )
    dtype = (
        np.dtype("?")
        if type_.dtype == "bool"
        else np.dtype(f"<{type_.dtype[0]}{int(type_.dtype[1:]) // 8}")
    )
    shape = _shape(fields) if "shape" in fields else (len(data) // dtype.itemsize,)
    if len(data) != prod(shape) * dtype.itemsize:
        raise InvalidInput(
            f"`data` has {len(data)} bytes; {type_.dtype} of shape {shape} has"
            f" {prod(shape) * dtype.itemsize}."
        )
    return np.frombuffer(data, dtype).reshape(shape)


def _shape(fields: Mapping[str, bytes]) -> tuple[int, ...]:
    text = _text(fields, "shape").strip("[]() ")
    parts: Sequence[str] = [part.strip() for part in text.split(",") if part.strip()]
    if len(parts) > 8 or not all(part.isdecimal() and len(part) < 11 for part in parts):
        raise InvalidInput(f"field 'shape' is {_shown(fields['shape'])}: write it as 28,28.")
    return tuple(map(int, parts))


def _shown(raw: bytes) -> str:
    text = repr(raw[:40].decode("utf-8", "replace"))
    return text if len(raw) <= 40 else text + "..."
