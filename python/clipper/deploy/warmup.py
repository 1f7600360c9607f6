"""The warm-up setting of a model, as its record stores it."""

import json

from clipper.errors import InvalidInput

OFF = "off"
WARMUP_BYTES_MAX = 64 << 10  # rows as JSON, which are passed on the command line


def warmup_of(name: str, warmup: object) -> str:
    """Convert the `warmup` argument of model `name` to its stored form: "" for generated rows,
    "off", or rows as JSON.

    warmup: True, False, or rows as an array or list (bytes are stored as latin-1 text).

    Raises: InvalidInput.
    """
    if isinstance(warmup, bool):
        return "" if warmup else OFF
    rows = warmup.tolist() if hasattr(warmup, "tolist") else warmup
    hint = "Give a list of inputs, as predict takes them; or True, or False."
    if not isinstance(rows, list | tuple) or not rows:
        raise InvalidInput(f"warmup of model {name!r} is {warmup!r:.100}.", hint=hint)
    try:
        text = json.dumps([_plain(row) for row in rows], allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise InvalidInput(
            f"warmup of model {name!r} cannot be kept as JSON: {error}.", hint=hint
        ) from None
    if len(text) > WARMUP_BYTES_MAX:
        hint = (
            "Give fewer rows: they are repeated to fill a batch. Or leave it out, and rows are"
            " made up."
        )
        raise InvalidInput(
            f"warmup of model {name!r} is {len(text)} bytes as JSON; at most {WARMUP_BYTES_MAX}.",
            hint=hint,
        )
    return text


def _plain(row: object) -> object:
    if isinstance(row, bytes | bytearray | memoryview):
        return bytes(row).decode("latin-1")
    return row.tolist() if hasattr(row, "tolist") else row
