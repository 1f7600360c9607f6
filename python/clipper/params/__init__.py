"""Parameter server: embedding tables and dense variables that are trained and served at once.

`Client` is what a worker, or a model that serves, connects with; docs/params.md explains the rest.
"""

from clipper import errors
from clipper.params.client.client import Client
from clipper.spec.table import TableSpec
from clipper_core.runtime.status import Status, bind_errors, bind_keywords

# A process that imports clipper.params alone, as a shard does, raises these errors too.
bind_keywords(errors.refuse_unknown)
bind_errors(
    {
        Status.BAD_INPUT: errors.InvalidInput,
        Status.BAD_FRAME: errors.FrameError,
        Status.TOO_LARGE: errors.TooLarge,
        Status.FULL: errors.Overloaded,
        Status.NO_MEMORY: errors.OutOfMemory,
    }
)

__all__ = ["Client", "TableSpec"]
