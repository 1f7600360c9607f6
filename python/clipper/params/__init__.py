"""Tables of parameters that are trained and served at once: docs/params.md. `Client` is what a
worker or a model talks to."""

from clipper.params.client.client import Client
from clipper.params.tables import TableSpec

__all__ = ["Client", "TableSpec"]
