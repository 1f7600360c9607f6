"""Run a model, in any Python environment, as a replica of a clipper server.

    from clipper_container import Model

    class Doubler(Model):
        input = "f64[1]"

        def predict_batch(self, inputs):      # ndarray (n, 1), float64, read-only
            return inputs[:, 0] * 2           # one output for each row

    $ clipper-container serve doubler:Doubler --connect unix:/run/clipper.sock --name doubler

Importing this package does not import numpy, so a process can still set its thread limits.
"""

from clipper_container.calls import (
    CallCycle,
    CalledAnswer,
    CallFailed,
    CallLimit,
    CallNotAllowed,
    Calls,
    PendingCall,
)
from clipper_container.current import is_cancelled
from clipper_container.model import Model, RowPart, Scored, session_of

__version__ = "0.2.0.dev0"
__all__ = [
    "CallCycle",
    "CallFailed",
    "CallLimit",
    "CallNotAllowed",
    "CalledAnswer",
    "Calls",
    "Model",
    "PendingCall",
    "RowPart",
    "Scored",
    "__version__",
    "is_cancelled",
    "session_of",
]
