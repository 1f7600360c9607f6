"""Qualifiers that models return beside their outputs, decoded for deciders and answers. On the wire
they are msgpack (docs/wire.md).
"""

import msgspec

from clipper.selection import Prediction
from clipper.types import Qualifiers
from clipper_core.results.future import Future

_DECODER: "msgspec.msgpack.Decoder[Qualifiers]" = msgspec.msgpack.Decoder(Qualifiers)


def prediction_of(future: Future, i: int) -> Prediction:
    """Return the prediction of task `i`, which ended with OK."""
    prediction = future.prediction(i)
    return (
        Prediction(*prediction)
        if len(prediction) == 2
        else Prediction(prediction[0], prediction[1], opened(prediction[2]))
    )


def opened(text: bytes) -> Qualifiers:
    """Decode qualifiers; {} if they are no map of names to strings, numbers and flags, so that the
    output beside them is not lost."""
    try:
        return _DECODER.decode(text)
    except msgspec.MsgspecError:
        return {}
